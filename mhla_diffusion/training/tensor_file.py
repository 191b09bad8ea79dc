"""Tensors that come in pieces of rows: a safetensors file that is written meanwhile, or memory."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from ..models.tensor_files import DTYPE_NAMES

_ROOM = 1 << 16  # bytes for the header; a tensor takes about a hundred


class GrowingTensorFile:
    """A safetensors file whose tensors come one after the other; how many rows each has shows at the end.

    The header goes first in the file and is known last, so room is left for it and filled up with spaces, which the
    format allows. To be used in a `with` statement: the file is whole when that ends without an error.
    """

    def __init__(self, path: Path):
        self.entries: dict[str, dict] = {}
        self.end = 0
        self.file = path.open("wb", buffering=0)
        self.file.seek(8 + _ROOM)

    def append(self, name: str, rows: torch.Tensor) -> None:
        """Rows `(n, ...)` on the CPU of the newest tensor or of a new one, contiguous, all of one type and shape."""
        data = memoryview(rows.numpy()).cast("B")
        entry = self.entries.setdefault(
            name,
            {
                "dtype": DTYPE_NAMES[rows.dtype],
                "shape": [0, *rows.shape[1:]],
                "data_offsets": [self.end, self.end],
            },
        )
        self.end += len(data)
        entry["shape"][0] += len(rows)
        entry["data_offsets"][1] = self.end
        while data:
            data = data[self.file.write(data) :]  # a system may take a part only

    def __enter__(self) -> GrowingTensorFile:
        return self

    def __exit__(self, kind, *_) -> None:
        with self.file:
            if kind is not None:
                return
            header = json.dumps(self.entries).encode().ljust(_ROOM)
            if len(header) > _ROOM:
                raise ValueError(f"{len(self.entries)} tensors are too many for one file; write fewer sizes")
            self.file.seek(0)
            self.file.write(_ROOM.to_bytes(8, "little") + header)


class TensorsInMemory:
    """The same without a file."""

    def __init__(self):
        self.parts: dict[str, list[torch.Tensor]] = {}

    def append(self, name: str, rows: torch.Tensor) -> None:
        self.parts.setdefault(name, []).append(rows.clone())  # out of pinned memory

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: torch.cat(parts) for name, parts in self.parts.items()}
