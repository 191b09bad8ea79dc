"""Triton kernel of a gated depthwise convolution, and its launch.

SANA's feed-forward (arXiv 2410.10629, Sec. 2.2) convolves 2C channels with 3 x 3 taps each and multiplies the first C
by SiLU of the others. A kernel of one pass reads every value some twice, and writes C channels; the convolution alone
would write all 2C, which the gate reads again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import replay, triton_launch
from .triton_configs import overridden
from .triton_launch import ceil_div

__all__ = ["FAR", "Tile", "by_taps", "gated_depthwise_kernel", "start_gated_depthwise"]

FAR = 2**31  # offsets within an image or a video from here on take 64 bits


class Tile(NamedTuple):
    """ROWS x COLUMNS tokens and BC channels of a program."""

    ROWS: int
    COLUMNS: int
    BC: int
    num_warps: int
    num_stages: int = 1


# The fastest of twelve at 32, 64 and 128 tokens a side and 2 x 2880 channels on an H200.
TILE = Tile(4, 16, 64, 4)


@triton.jit
def gated_depthwise_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, columns, channels,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BC: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """x (B, rows, columns, 2C), weight (9, 2C), bias (2C,), out (B, rows, columns, C): all contiguous."""
    across, down = tl.cdiv(columns, COLUMNS), tl.cdiv(rows, ROWS)
    tile = tl.program_id(0)
    image = (tile // (across * down)).to(tl.int64) * rows * columns
    place = tl.arange(0, ROWS * COLUMNS)
    row = tile // across % down * ROWS + place // COLUMNS
    column = tile % across * COLUMNS + place % COLUMNS
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    known = channel < channels
    x_ptr += image * (2 * channels)
    value = tl.zeros((ROWS * COLUMNS, BC), dtype=tl.float32)
    gate = tl.zeros((ROWS * COLUMNS, BC), dtype=tl.float32)
    for up in range(3):  # not unrolled: the assembler would load everything before it adds anything
        y = row + up - 1
        for left in tl.static_range(3):
            x = column + left - 1
            inside = (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
            token = y * columns + x
            if WIDE:
                token = token.to(tl.int64)
            there = x_ptr + (token * (2 * channels))[:, None] + channel[None, :]
            mask = inside[:, None] & known[None, :]
            weights = weight_ptr + (up * 3 + left) * (2 * channels) + channel
            weight = tl.load(weights, mask=known, other=0.0).to(tl.float32)
            gate_weight = tl.load(weights + channels, mask=known, other=0.0).to(tl.float32)
            value += tl.load(there, mask=mask, other=0.0).to(tl.float32) * weight[None, :]
            gate += tl.load(there + channels, mask=mask, other=0.0).to(tl.float32) * gate_weight[None, :]
    if BIAS:
        value += tl.load(bias_ptr + channel, mask=known, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(bias_ptr + channels + channel, mask=known, other=0.0).to(tl.float32)[None, :]
    out = value * gate / (1.0 + tl.exp(-gate))
    token = row * columns + column
    if WIDE:
        token = token.to(tl.int64)
    tl.store(
        out_ptr + image * channels + (token * channels)[:, None] + channel[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=((row < rows) & (column < columns))[:, None] & known[None, :],
    )


def by_taps(weight: torch.Tensor) -> torch.Tensor:
    return weight.flatten(1).t().contiguous()


def start_gated_depthwise(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """`(B, rows, columns, C)` of x `(B, rows, columns, 2C)`, weight `(2C, 1, 3, 3)` and bias `(2C,)` or None.

    None where the kernel does not compile, with one warning.
    """
    x = triton_launch.contiguous(x)
    # Channels side by side, as they are in x. Not kept: weights change unnoticed.
    taps = replay.computed(by_taps, weight)
    bias = None if bias is None else triton_launch.contiguous(bias)
    batch, rows, columns, width = x.shape
    out = replay.empty((batch, rows, columns, width // 2), x.dtype, x.device)
    options = {"BIAS": bias is not None, "WIDE": rows * columns * width >= FAR}

    def start(tile: Tile) -> None:
        tiles = ceil_div(rows, tile.ROWS) * ceil_div(columns, tile.COLUMNS)
        grid = (tiles * batch, ceil_div(width // 2, tile.BC))
        triton_launch.launch(
            gated_depthwise_kernel, grid, tile, x, taps, x if bias is None else bias, out, rows, columns, width // 2,
            **options,
        )  # fmt: skip

    fits = triton_launch.start_first_fitting(
        "gated_depthwise", x, width // 2, (overridden("gated_depthwise", TILE),), tuple(options.values()), start,
        what=f"kernels of a gated depthwise convolution of {width} channels",
    )  # fmt: skip
    return out if fits else None
