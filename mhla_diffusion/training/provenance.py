"""When this process began, and what its numbers depend on."""

from __future__ import annotations

import functools
import platform

import psutil
import torch

from mhla_diffusion.provenance import versions


@functools.cache
def process_started() -> float:
    """Unix time at which this process began, imports and data preparation included."""
    return psutil.Process().create_time()


def environment(device: torch.device) -> dict[str, str | None]:
    """Versions of the packages that decide numbers, and the name of the device."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine()
    return {**versions(), "device": f"{device.type}: {name}"}
