"""Launches prepared once: a call like an earlier one repeats that one's launches on other tensors.

Preparing a launch (configuration, strides, Triton's own look at every argument) takes a host longer than small kernels
take the GPU. `replayed` calls write down what they launch: compiled kernel, grid, numbers, and where each tensor comes
from. The next call whose tensors have the same shapes, strides, dtypes and alignment, and whose other arguments are
equal, starts the same kernels on its own tensors' addresses. Buffers that nothing but these kernels sees are cut from
one allocation. For this a replayed function decides nothing by a tensor's values, gets buffers from `empty`, and hands
to `computed` what torch has to compute in between.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .triton_configs import overriding

__all__ = [
    "computed",
    "empty",
    "forget",
    "kept",
    "on_its_device",
    "recording",
    "replayed",
    "spoil",
    "started",
]

KEPT = 2048  # plans of a function; past them it starts over, for sizes that never come again
ALIGNMENT = 16  # bytes that Triton compiles loads and stores for
APART = 512  # bytes between buffers that are cut from one allocation, as torch's own are aligned


class _Recording:
    """What a call does, step by step. Tensors are known by number: the call's, then each as it is made."""

    def __init__(self, tensors: list[Tensor]):
        self.known = {id(x): number for number, x in enumerate(tensors)}
        self.kept = list(tensors)  # an id is good as long as its tensor lives
        self.given = len(tensors)
        self.steps: list[tuple] = []
        self.buffers: dict[int, Tensor] = {}  # by number, those of which only launches know
        self.stream_of: Callable | None = None
        self.good = True

    def number(self, x: Tensor) -> int:
        """-1 for a tensor that came from elsewhere: such a call is not repeated."""
        number = self.known.get(id(x), -1)
        self.good &= number >= 0
        return number

    def seen(self, x: Tensor) -> int:
        """The number of a tensor that has to be one: torch reads it, or the caller gets it."""
        number = self.number(x)
        self.buffers.pop(number, None)
        return number

    def made(self, x: Tensor, make: Callable[[list[Tensor]], Tensor], buffer: bool) -> None:
        number = len(self.kept)
        if id(x) not in self.known:  # `computed` may give back what it was given
            self.known[id(x)] = number
        if buffer:
            self.buffers[number] = x
        self.kept.append(x)
        self.steps.append((make, None, number))

    def launch(self, start: Callable, arguments: tuple) -> None:
        places = [(place, self.number(x)) for place, x in enumerate(arguments) if isinstance(x, Tensor)]
        # A plan keeps no tensor alive.
        self.steps.append((start, [None if isinstance(x, Tensor) else x for x in arguments], places))


class _Plan:
    """What a call did, to be done on other tensors: by their addresses where a stream is known, else by themselves."""

    def __init__(self, recording: _Recording, results: Tensor | tuple[Tensor, ...]):
        self.one = isinstance(results, Tensor)
        self.results = [recording.seen(x) for x in ((results,) if self.one else results)]
        self.device, self.stream_of = recording.kept[0].device, recording.stream_of
        self.blank = [None] * (len(recording.kept) - recording.given)
        self.cuts, self.bytes = [], 0  # (number, first byte, shape, dtype) of the buffers in one allocation
        for number, x in recording.buffers.items():
            self.cuts.append((number, self.bytes, x.shape, x.dtype))
            self.bytes += -(-x.numel() * x.element_size() // APART) * APART
        self.steps = [
            step for step in recording.steps if step[1] is not None or step[2] not in recording.buffers
        ]
        self.good = recording.good and any(template is not None for _, template, _ in self.steps)

    def __call__(self, tensors: list[Tensor], addresses: list[int]) -> Tensor | tuple[Tensor, ...]:
        values = tensors + self.blank
        together = None
        if self.bytes or self.stream_of is None:
            together = torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
        if self.stream_of is None:
            taken, options = values, {}
            for number, first, shape, dtype in self.cuts:
                last = first + shape.numel() * dtype.itemsize
                values[number] = together[first:last].view(dtype).view(shape)
        else:
            taken, options = addresses + self.blank, {"stream": self.stream_of(self.device.index)}
            base = 0 if together is None else together.data_ptr()
            for number, first, _, _ in self.cuts:
                taken[number] = base + first
        for step, template, places in self.steps:
            if template is None:
                values[places] = x = step(values)
                if taken is not values:
                    taken[places] = x.data_ptr()
                continue
            arguments = template.copy()
            for place, number in places:
                arguments[place] = taken[number]
            step(*arguments, **options)
        if self.one:
            return values[self.results[0]]
        return tuple([values[number] for number in self.results])


_here = threading.local()
_ALL: list[dict[tuple, _Plan]] = []  # of each replayed function


def recording() -> _Recording | None:
    """What the call under way is written down in, if it is one that may be repeated."""
    return getattr(_here, "recording", None)


def _signature(values: Sequence[object]) -> tuple[tuple, list[Tensor], list[int]]:
    """(what a plan is good for, the tensors, each once, their addresses)."""
    key, tensors, addresses, seen = [], [], [], {}
    for x in values:
        if not isinstance(x, Tensor):
            key.append(tuple(x) if isinstance(x, list) else x)
        elif (number := seen.get(id(x))) is not None:
            key.append(number)  # the same tensor again, as in self-attention's rotation
        else:
            seen[id(x)] = len(tensors)
            address = x.data_ptr()
            tensors.append(x)
            addresses.append(address)
            key += (x.dtype, x.shape, x.stride(), address % ALIGNMENT)
    key.append(tensors[0].device)
    return tuple(key), tensors, addresses


def kept() -> int:
    """How many calls are ready to be repeated."""
    return sum([len(plans) for plans in _ALL])


def forget() -> None:
    """Every call is made anew."""
    for plans in _ALL:
        plans.clear()


def replayed(call: Callable) -> Callable:
    """Decorator of a function of tensors, numbers, lists of numbers and None to one or several tensors: see the module.

    Within `triton_configs.override` every call is made as if it were the first.
    """
    plans: dict[tuple, _Plan] = {}
    _ALL.append(plans)

    @functools.wraps(call)
    def wrapped(*args, **kwargs):
        if overriding():
            return call(*args, **kwargs)
        key, tensors, addresses = _signature((*args, *kwargs.values()))
        key += tuple(kwargs)
        plan = plans.get(key)
        if plan is not None:
            return plan(tensors, addresses)
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

    return wrapped


def on_its_device(call):
    """Triton launches on the current device, the tensors may live on another.

    torch reads the annotations of an operator that this wraps with the names of this module, `Sequence` among them.
    """

    @functools.wraps(call)
    def wrapped(*args, **kwargs):
        device = args[0].device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return call(*args, **kwargs)
        with torch.cuda.device(device):
            return call(*args, **kwargs)

    return wrapped


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, zero: bool = False) -> Tensor:
    """A buffer, made again when the call is repeated."""

    def make(known: list[Tensor] | None = None) -> Tensor:
        return (torch.zeros if zero else torch.empty)(shape, dtype=dtype, device=device)

    x = make()
    if notes := recording():
        notes.made(x, make, buffer=not zero)
    return x


def computed(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`function(*tensors)`, computed again when the call is repeated; it must depend on nothing that may change."""
    result = function(*tensors)
    if notes := recording():
        numbers = [notes.seen(x) for x in tensors]
        notes.made(result, lambda known: function(*[known[number] for number in numbers]), buffer=False)
    return result


def started(start: Callable, arguments: tuple, stream_of: Callable[[int], int] | None = None) -> None:
    """Notes a launch: `start(*arguments)` repeats it with other tensors in place of those in `arguments`.

    stream_of: `start` takes addresses in place of tensors, and `stream=`, which this gives for a device's number.
    """
    if notes := recording():
        notes.stream_of = stream_of
        notes.launch(start, arguments)


def spoil() -> None:
    """The present call is not one to repeat: something failed, or torch took the kernels' place."""
    if notes := recording():
        notes.good = False
