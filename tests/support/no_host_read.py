"""Finds operations that make the host wait for the device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def no_waiting_for_the_gpu() -> Iterator[None]:
    """Fails on whatever CUDA's own debug mode takes for a synchronisation."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class NoHostRead(TorchDispatchMode):
    """Fails on every operation that makes the host wait for a value of the device."""

    waiting = {
        "aten::_local_scalar_dense",
        "aten::nonzero",
        "aten::masked_select",
        "aten::equal",
        "aten::unique_dim",
    }

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split(".")[0]
        assert name not in self.waiting, f"{name} waits for the device"
        return function(*args, **(kwargs or {}))
