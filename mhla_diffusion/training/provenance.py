"""What a result was made with: versions, device, process start."""

from __future__ import annotations

import importlib.metadata
import platform

import psutil
import torch

_PACKAGES = ("mhla_diffusion", "torch", "triton", "diffusers", "transformers", "accelerate", "safetensors")


def process_started() -> float:
    """Unix time at which this process began, imports and data preparation included."""
    return psutil.Process().create_time()


def environment(device: torch.device) -> dict[str, str]:
    """Versions of the packages that decide numbers, Python, and the name of the device."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {**versions, "python": platform.python_version(), "device": f"{device.type}: {name}"}
