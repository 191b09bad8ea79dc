"""One forward pass or training step of a whole model as a call; its time, its memory, several calls in turns."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from ..mixing import clip_mixings, learnable_mixings

__all__ = ["How", "Step", "held_bytes", "in_turns", "released", "step_milliseconds", "time_and_peak", "wait"]

TURN_SECONDS = 0.4


class How(NamedTuple):
    """What holds for all rows of a run.

    seconds: how long each model is timed. end: time by the monotonic clock after which nothing is begun.
    graph: compiled rows of image models, forward passes and training steps, are captured as CUDA graphs, where there
        is CUDA.
    """

    device: torch.device
    dtype: torch.dtype
    compile_mode: str = "default"
    fuse_qkv: bool = False
    seconds: float = 2.0
    end: float = math.inf
    graph: bool = True

    @property
    def tiny(self) -> bool:
        """On a CPU models that are small in every way only try the program out."""
        return self.device.type == "cpu"


def compile_layers(model: torch.nn.Module, mode: str) -> None:
    """As `compile_repeated_blocks`, also for stock DiT, which does not name its layers: one compilation for all."""
    for layer in model.blocks if hasattr(model, "blocks") else model.transformer_blocks:
        layer.compile(mode=mode, dynamic=False, fullgraph=True)


class Step:
    """One forward pass, or one training step (AdamW, float32 weights under autocast), of a model.

    Args:
        inputs: arguments of its forward pass.
        dtype: what autocast computes in; of no effect on a forward pass.
        compiled: None for eager; "whole" for `torch.compile` of the model; "layers" for each of its layers.
        mode: of `torch.compile`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inputs: dict,
        dtype: torch.dtype,
        *,
        training: bool = False,
        compiled: str | None = None,
        mode: str = "default",
    ):
        self.inputs, self.dtype, self.training = inputs, dtype, training
        model.train(training).requires_grad_(training)
        self.mixings = learnable_mixings(model)
        self.model = model
        if compiled == "whole":
            self.model = torch.compile(model, mode=mode, dynamic=False)
        elif compiled == "layers":
            compile_layers(model, mode)
        if training:
            on_gpu = next(model.parameters()).is_cuda
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=on_gpu, capturable=on_gpu)

    def __call__(self) -> torch.Tensor | None:
        """The model's sample; None from a training step."""
        if not self.training:
            with torch.no_grad():
                return self.model(**self.inputs).sample
        kind = self.inputs["hidden_states"].device.type
        # Weights are cast once either way; what a cache keeps would belong to a graph's memory.
        with torch.autocast(kind, self.dtype, enabled=self.dtype != torch.float32, cache_enabled=False):
            sample = self.model(**self.inputs).sample
        sample.float().square().mean().backward()
        self.optimizer.step()
        clip_mixings(self.mixings)
        self.optimizer.zero_grad(set_to_none=True)
        return None


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def released(device: torch.device, *, keep_compiled: bool = False) -> None:
    """Free what nothing holds any more, compiled code included unless it is to be kept."""
    gc.collect()
    if not keep_compiled:
        torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def step_milliseconds(call: Callable[[], object], device: torch.device, seconds: float = 2.0) -> float:
    """Median over groups of calls, one behind another as in a sampling loop: the host's time counts, too."""
    for _ in range(3):
        call()
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    group = max(1, min(10, math.ceil(seconds / 10 / (time.perf_counter() - start))))
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        times.append(group_milliseconds(call, device, group))
    return statistics.median(times)


def group_milliseconds(call: Callable[[], object], device: torch.device, group: int) -> float:
    start = time.perf_counter()
    for _ in range(group):
        call()
    wait(device)
    return 1e3 * (time.perf_counter() - start) / group


def in_turns(
    calls: Mapping[str, Callable[[], object]],
    once: Mapping[str, float],
    device: torch.device,
    seconds: float = 2.0,
) -> dict[str, list[float]]:
    """Milliseconds of each call, round after round: what warms or slows the device meets all of them alike.

    A turn is as many calls as take some 0.4 s; each round begins with another one; there are at least three rounds,
    and more until `seconds` for each call are over.

    Args:
        calls: by name; warm.
        once: milliseconds that one of each took before.
    """
    names = list(calls)
    groups = {
        name: max(1, min(10, math.ceil(1e3 * min(TURN_SECONDS, seconds) / once[name]))) for name in names
    }
    times: dict[str, list[float]] = {name: [] for name in names}
    rounds, end = 0, time.perf_counter() + seconds * len(names)
    while names and (rounds < 3 or time.perf_counter() < end):
        first = rounds % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(group_milliseconds(calls[name], device, groups[name]))
        rounds += 1
    return times


def held_bytes(device: torch.device) -> int:
    """Memory that tensors hold now; 0 where the device keeps no count."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def time_and_peak(call: Callable[[], object], device: torch.device) -> tuple[float, float | None]:
    """Milliseconds of one call, and the most gigabytes held at once during it, weights included.

    The second is None where the device keeps no count.
    """
    if device.type != "cuda":
        return group_milliseconds(call, device, 1), None
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    once = group_milliseconds(call, device, 1)
    return once, torch.cuda.max_memory_allocated(device) / 1e9
