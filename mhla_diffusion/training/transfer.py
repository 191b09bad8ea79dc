"""Tensors to a GPU and back, without waiting there for what was asked of it before."""

from __future__ import annotations

import torch


def upload(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`tensor.to(device)` of a tensor on the CPU.

    To a GPU it goes through pinned memory: from any other, the host waits until all earlier work there is done.
    """
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Gathered:
    """Rows that come batch by batch, in one tensor on the CPU that is filled as they come.

    Rows on a GPU are fetched while it works on the next batch: `add` waits for the batch before, not for its own.
    """

    def __init__(self, capacity: int):
        """`capacity`: the most rows there can be."""
        self.capacity, self.count = capacity, 0
        self._rows: torch.Tensor | None = None
        self._coming: tuple[torch.Tensor, torch.Tensor, torch.cuda.Event] | None = None

    def add(self, rows: torch.Tensor) -> None:
        """`(n, ...)`, in shape and type as those before."""
        if self._rows is None:
            self._rows = torch.empty(self.capacity, *rows.shape[1:], dtype=rows.dtype)
        place = self._rows[self.count : self.count + len(rows)]
        self.count += len(rows)
        if rows.device.type != "cuda":
            place.copy_(rows)
            return
        pinned = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        pinned.copy_(rows.contiguous(), non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(rows.device))
        self._store()
        self._coming = place, pinned, arrived

    def whole(self) -> torch.Tensor | None:
        """`(rows, ...)`, contiguous; None when none came."""
        self._store()
        return None if self._rows is None else self._rows[: self.count]

    def _store(self) -> None:
        if self._coming is not None:
            place, pinned, arrived = self._coming
            arrived.synchronize()
            place.copy_(pinned)
            self._coming = None
