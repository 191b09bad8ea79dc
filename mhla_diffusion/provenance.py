"""Versions of what took part, for results and pictures that store where they come from. Imports no torch."""

import importlib.metadata
import platform
from collections.abc import Sequence

DISTRIBUTIONS = (
    "mhla_diffusion",
    "torch",
    "triton",
    "diffusers",
    "transformers",
    "accelerate",
    "safetensors",
    "peft",
    "numpy",
    "pillow",
)


def versions(distributions: Sequence[str] = DISTRIBUTIONS) -> dict[str, str | None]:
    """Version of Python and of each distribution; None where it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in distributions:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
