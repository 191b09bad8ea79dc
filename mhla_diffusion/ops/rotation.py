"""Rotary angles that follow from a token's place on the grid."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from .backends import has_tangent
from .derived import derived
from .partition import Partition

__all__ = ["GridRope", "angle_tables", "exact_dtype", "kept_angles", "three_axes"]


class GridRope(NamedTuple):
    """Rotation of the channel pairs (0, 1), (2, 3), ... by angles that are linear in a token's place on the grid.

    The angle of pair c at place (t, y, x) is t f[0, c] + y f[1, c] + x f[2, c]: the axial rotations of video and image
    models, where each pair follows one axis, and mixed ones alike (RoFormer, arXiv 2104.09864; RoPE-Mixed, arXiv
    2403.13298). The kernels then compute the angles and read none, which a table of `(N, D / 2)` cosines and sines
    costs them for every head.

    frequencies: float32 `(axes, D / 2)`, radians per token. Plain torch has their gradient, the kernels have none.
    """

    frequencies: torch.Tensor


def kept_angles(
    frequencies: torch.Tensor, key: Hashable, build: Callable[[torch.Tensor], torch.Tensor | tuple]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`build(frequencies)`, kept for the next call unless a compiler looks on or the frequencies are learned.

    Those are not kept without gradients, either: averages of weights are written to `.data`, which leaves no trace.
    """
    if torch.compiler.is_compiling() or frequencies.requires_grad or has_tangent(frequencies):
        return build(frequencies)
    return derived(frequencies, key, lambda: build(frequencies.detach()))


def three_axes(frequencies: torch.Tensor) -> torch.Tensor:
    """float32 `(3, D / 2)` contiguous, with leading axes that turn nothing."""
    if frequencies.shape[0] == 3 and frequencies.dtype == torch.float32 and frequencies.is_contiguous():
        return frequencies

    def build(given: torch.Tensor) -> torch.Tensor:
        padding = given.new_zeros(3 - given.shape[0], given.shape[1], dtype=torch.float32)
        return torch.cat((padding, given.float()))

    return kept_angles(frequencies, "three axes", build)


def exact_dtype(device: torch.device) -> torch.dtype:
    """In which angles are computed: float64, or float32 where the device has nothing wider."""
    return torch.float32 if device.type in ("mps", "npu") else torch.float64


def angle_tables(rope, part: Partition, dtype: torch.dtype = torch.float32):
    """A rotation as `(cos, sin)`, `(N, D / 2)` each: given so, or as `(frequencies of three axes, None)`.

    The angles are computed in float64 where there is one: far from the origin float32 would lose the last digits of
    their products.
    """
    if rope is None or rope[1] is not None:
        return rope
    frequencies, layout = rope[0], part.layout
    exact = exact_dtype(frequencies.device)

    def build(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        axes = [torch.arange(size, device=given.device, dtype=exact) for size in layout[:3]]
        places = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)  # (N, 3)
        angle = (places[:, :, None] * given.to(exact)).sum(dim=1)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    return kept_angles(frequencies, (layout[:3], dtype), build)
