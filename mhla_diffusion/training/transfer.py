"""Tensors to a GPU and back, without waiting there for what was asked of it before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

Note = TypeVar("Note")


def upload(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`tensor.to(device)` of a tensor on the CPU.

    To a GPU it goes through pinned memory: from any other, the host waits until all earlier work there is done.
    """
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def fetched(batches: Iterable[tuple[torch.Tensor, Note]]) -> Iterator[tuple[torch.Tensor, Note]]:
    """Tensors that are computed one by one, contiguous and on the CPU, each with what came beside it.

    One on a GPU is handed out after the next has been asked for, so that the GPU has work while the host waits.
    """
    coming = None
    for tensor, note in batches:
        following = _Arrival(tensor), note
        if coming is not None:
            yield coming[0].wait(), coming[1]
        coming = following
    if coming is not None:
        yield coming[0].wait(), coming[1]


class _Arrival:
    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.event = tensor.contiguous(), None
        if tensor.device.type == "cuda":
            here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            here.copy_(self.tensor, non_blocking=True)
            self.tensor, self.event = here, torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> torch.Tensor:
        if self.event is not None:
            self.event.synchronize()
        return self.tensor
