"""Loss and gradients of a training step as a CUDA graph: one start from the host in place of a thousand and more.

A small model's kernels end before a host in Python has started the next ones. A graph is recorded once for each shape
of a batch, and repeated with other numbers in the same memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["RecordedGradients"]

Batches = Sequence[tuple[Tensor | None, ...]]
# Steps of a shape that are taken as they are: what a first call compiles or chooses is in no graph.
BEFORE = 3


class _Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    gradients: list[Tensor | None]  # of the parameters, in their order
    loss: Tensor


class RecordedGradients:
    """`compute` of batches like those it has seen before, repeated from a CUDA graph.

    Args:
        compute: takes the micro-batches of a step, gives its loss, a scalar on the device, and leaves gradients in the
            parameters. It never waits for the device.
        parameters: those that have gradients afterwards. They stay where they are in memory.
    """

    def __init__(self, compute: Callable[[Batches], Tensor], parameters: Sequence[nn.Parameter]):
        self.compute, self.parameters = compute, list(parameters)
        self.seen: Counter[tuple] = Counter()
        self.recordings: dict[tuple, _Recording] = {}
        self.stream = torch.cuda.Stream()  # what is recorded, and what comes before, runs on the same one
        self.pool = torch.cuda.graph_pool_handle()  # no two graphs run at once: they share their memory

    def __call__(self, batches: Batches) -> Tensor:
        """The loss, good until the next call. Gradients are to be None, and are to be used before the next call.

        Raises ValueError where the step cannot be recorded.
        """
        key = tuple((None if x is None else (x.shape, x.dtype)) for batch in batches for x in batch)
        recording = self.recordings.get(key)
        if recording is None:
            if self.seen[key] < BEFORE:
                self.seen[key] += 1
                return self._aside(lambda: self.compute(batches))
            recording = self.recordings[key] = self._record(batches)
        torch._foreach_copy_(recording.inputs, tensors_of(batches))
        recording.graph.replay()
        for parameter, gradient in zip(self.parameters, recording.gradients, strict=True):
            parameter.grad = gradient
        return recording.loss

    def _aside(self, call: Callable[[], Tensor]) -> Tensor:
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            result = call()
        here.wait_stream(self.stream)
        return result

    def _record(self, batches: Batches) -> _Recording:
        held = [tuple(None if x is None else x.clone() for x in batch) for batch in batches]
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        fault = None
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                try:
                    loss = self.compute(held)
                except Exception as error:
                    fault = error  # the end of the recording then raises one that says no more than that it failed
                    raise
        except Exception as error:
            fault = error if fault is None else fault
            # An aborted capture leaves its own stream, and the random generator as if it still went on.
            torch.cuda.set_stream(here)
            generator = torch.cuda.default_generators[here.device_index]
            fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
            generator.graphsafe_set_state(fresh)
            reason = " ".join(str(fault).split())[:200]
            raise ValueError(
                f"recipe: run.cuda_graph = true, and this step cannot be recorded ({type(fault).__name__}: {reason}); "
                "write run.compile = true, without which a text encoder waits for the device, or run.cuda_graph = false"
            ) from error
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return _Recording(graph, tensors_of(held), gradients, loss)


def tensors_of(batches: Batches) -> list[Tensor]:
    return [x for batch in batches for x in batch if x is not None]
