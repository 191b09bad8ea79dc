"""Launches prepared once: a call like an earlier one repeats that one's launches on other tensors.

Preparing a launch (configuration, strides, Triton's own look at every argument) takes a host longer than small kernels
take the GPU. `replayed` calls write down what they launch: compiled kernel, grid, numbers, and where each tensor comes
from. The next call whose tensors have the same shapes, strides, dtypes and alignment, and whose other arguments are
equal, allocates the same buffers and starts the same kernels. For this a replayed function decides nothing by a
tensor's values, gets buffers from `empty`, and hands to `computed` what torch has to compute in between.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from .triton_configs import overriding

__all__ = ["computed", "empty", "recording", "replayed", "spoil", "started"]

KEPT = 2048  # plans of a function; past them it starts over, for sizes that never come again
ALIGNMENT = 16  # bytes that Triton compiles loads and stores for


class _Recording:
    """What a call does, step by step. Tensors are known by number: the call's, then each as it is made."""

    def __init__(self, tensors: list[Tensor]):
        self.known = {id(x): number for number, x in enumerate(tensors)}
        self.kept = list(tensors)  # an id is good as long as its tensor lives
        self.steps: list[tuple] = []
        self.good = True

    def number(self, x: Tensor) -> int:
        """-1 for a tensor that came from elsewhere: such a call is not repeated."""
        number = self.known.get(id(x), -1)
        self.good &= number >= 0
        return number

    def made(self, x: Tensor, make: Callable[[list[Tensor]], Tensor]) -> None:
        if id(x) not in self.known:  # `computed` may give back what it was given
            self.known[id(x)] = len(self.kept)
        self.kept.append(x)
        self.steps.append((make, None, None))

    def launch(self, start: Callable, arguments: tuple) -> None:
        places = [(place, self.number(x)) for place, x in enumerate(arguments) if isinstance(x, Tensor)]
        # A plan keeps no tensor alive.
        self.steps.append((start, [None if isinstance(x, Tensor) else x for x in arguments], places))


class _Plan:
    def __init__(self, recording: _Recording, results: tuple[Tensor, ...]):
        self.results = [recording.number(x) for x in results]
        self.steps = recording.steps
        self.good = recording.good and any(template is not None for _, template, _ in self.steps)

    def __call__(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        known = tensors
        for step, template, places in self.steps:
            if template is None:
                known.append(step(known))
                continue
            arguments = template.copy()
            for place, number in places:
                arguments[place] = known[number]
            step(*arguments)
        return tuple([known[number] for number in self.results])


_here = threading.local()


def recording() -> _Recording | None:
    """What the call under way is written down in, if it is one that may be repeated."""
    return getattr(_here, "recording", None)


def _signature(values: tuple) -> tuple[tuple, list[Tensor]]:
    """(what a plan is good for, the tensors, each once)."""
    key, tensors, seen = [], [], {}
    for x in values:
        if not isinstance(x, Tensor):
            key.append(tuple(x) if isinstance(x, list) else x)
        elif (number := seen.get(id(x))) is not None:
            key.append(number)  # the same tensor again, as in self-attention's rotation
        else:
            seen[id(x)] = len(tensors)
            tensors.append(x)
            key += (x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNMENT)
    key.append(tensors[0].device)
    return tuple(key), tensors


def replayed(call: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Decorator of a function of tensors, numbers, lists of numbers and None to a tuple of tensors: see the module.

    Within `triton_configs.override` every call is made as if it were the first.
    """
    plans: dict[tuple, _Plan] = {}

    @functools.wraps(call)
    def wrapped(*args, **kwargs):
        if overriding():
            return call(*args, **kwargs)
        key, tensors = _signature((*args, *kwargs.values()))
        key += tuple(kwargs)
        plan = plans.get(key)
        if plan is not None:
            return plan(tensors)
        before, _here.recording = recording(), _Recording(tensors)
        try:
            results = call(*args, **kwargs)
            plan = _Plan(_here.recording, results)
        finally:
            _here.recording = before
        if plan.good:
            if len(plans) >= KEPT:
                plans.clear()
            plans[key] = plan
        return results

    wrapped.plans = plans
    return wrapped


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, zero: bool = False) -> Tensor:
    """A buffer, made again when the call is repeated."""

    def make(known: list[Tensor] | None = None) -> Tensor:
        return (torch.zeros if zero else torch.empty)(shape, dtype=dtype, device=device)

    x = make()
    if notes := recording():
        notes.made(x, make)
    return x


def computed(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`function(*tensors)`, computed again when the call is repeated; it must depend on nothing that may change."""
    result = function(*tensors)
    if notes := recording():
        numbers = [notes.number(x) for x in tensors]
        notes.made(result, lambda known: function(*[known[number] for number in numbers]))
    return result


def started(start: Callable, arguments: tuple) -> None:
    """Notes a launch: `start(*arguments)` repeats it with other tensors in place of those in `arguments`."""
    if notes := recording():
        notes.launch(start, arguments)


def spoil() -> None:
    """The present call is not one to repeat: something failed, or torch took the kernels' place."""
    if notes := recording():
        notes.good = False
