"""Triton kernels of a depthwise convolution over a token grid and of its gradients, and their launches.

torch's depthwise convolution over three axes works value by value. Here a tile of tokens and channels is read once for
each tap, side by side in memory, and sums stay in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import replay, triton_launch
from .depthwise_kernel import FAR, Tile, by_taps
from .triton_configs import overridden
from .triton_launch import ceil_div

__all__ = ["local_kernel", "start_local", "start_weight_gradient", "weight_gradient_kernel"]

# Of a weight's gradient, at most about so many: each writes sums that are added up afterwards.
PROGRAMS = 4096

# By the number of taps over frames, the fastest of thirteen on an H200: pictures, videos.
TILES = {1: Tile(2, 16, 128, 4), 3: Tile(8, 8, 64, 4)}
GRADIENT_TILE = Tile(1, 8, 64, 2)  # of nine; it goes along a row, so ROWS is 1


@triton.jit
def local_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, video_stride, token_stride, frames, rows, columns, channels,
    DEPTH: tl.constexpr, FLIPPED: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """x (B, frames, rows, columns, C) of evenly spaced tokens, weight (DEPTH * 9, C), out as x but contiguous."""
    across, down = tl.cdiv(columns, COLUMNS), tl.cdiv(rows, ROWS)
    tile = tl.program_id(0)
    frame = tile // (across * down) % frames
    video = (tile // (across * down * frames)).to(tl.int64)
    place = tl.arange(0, ROWS * COLUMNS)
    row = tile // across % down * ROWS + place // COLUMNS
    column = tile % across * COLUMNS + place % COLUMNS
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    known = channel < channels
    x_ptr += video * video_stride
    total = tl.zeros((ROWS * COLUMNS, BC), dtype=tl.float32)
    # Not unrolled: the assembler would load everything before it adds anything.
    for plane in range(DEPTH * 3):
        depth = frame + plane // 3 - DEPTH // 2
        if (depth >= 0) & (depth < frames):
            y = row + plane % 3 - 1
            for left in tl.static_range(3):
                x = column + left - 1
                inside = (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
                token = (depth * rows + y) * columns + x
                if WIDE:
                    token = token.to(tl.int64)
                values = tl.load(
                    x_ptr + (token * token_stride)[:, None] + channel[None, :],
                    mask=inside[:, None] & known[None, :],
                    other=0.0,
                )
                tap = plane * 3 + left
                if FLIPPED:
                    tap = DEPTH * 9 - 1 - tap
                weight = tl.load(weight_ptr + tap * channels + channel, mask=known, other=0.0)
                total += values.to(tl.float32) * weight.to(tl.float32)[None, :]
    if BIAS:
        total += tl.load(bias_ptr + channel, mask=known, other=0.0).to(tl.float32)[None, :]
    token = (frame * rows + row) * columns + column
    if WIDE:
        token = token.to(tl.int64)
    out_ptr += video * frames * rows * columns * channels
    tl.store(
        out_ptr + (token * channels)[:, None] + channel[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=((row < rows) & (column < columns))[:, None] & known[None, :],
    )


@triton.jit
def _times(x_ptr, grad, x, columns, token_stride, channel, known):
    """grad times the values one row of x has at columns x."""
    inside = (x >= 0) & (x < columns)
    there = x_ptr + (x * token_stride)[:, None] + channel[None, :]
    return grad * tl.load(there, mask=inside[:, None] & known[None, :], other=0.0).to(tl.float32)


@triton.jit
def weight_gradient_kernel(
    x_ptr, grad_ptr, out_ptr, x_video_stride, x_token_stride, grad_video_stride, grad_token_stride,
    lines, length, frames, rows, columns, channels,
    DEPTH: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sums over the tokens n of `grad[n] * x[n + tap]`: of three taps, over `length` of the B * frames * rows lines.

    out (chunks, DEPTH * 9, C) float32.
    """
    plane, chunk = tl.program_id(0), tl.program_id(2)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    known = channel < channels
    left = tl.zeros((COLUMNS, BC), dtype=tl.float32)
    middle = tl.zeros((COLUMNS, BC), dtype=tl.float32)
    right = tl.zeros((COLUMNS, BC), dtype=tl.float32)
    for line in range(chunk * length, tl.minimum(chunk * length + length, lines)):
        video, frame, row = (line // (rows * frames)).to(tl.int64), line // rows % frames, line % rows
        depth, y = frame + plane // 3 - DEPTH // 2, row + plane % 3 - 1
        if (depth >= 0) & (depth < frames) & (y >= 0) & (y < rows):
            first = ((depth * rows + y) * columns).to(tl.int64)
            there = x_ptr + video * x_video_stride + first * x_token_stride
            here = ((frame * rows + row) * columns).to(tl.int64)
            row_ptr = grad_ptr + video * grad_video_stride + here * grad_token_stride
            for start in range(0, columns, COLUMNS):
                column = start + tl.arange(0, COLUMNS)
                if WIDE:
                    column = column.to(tl.int64)
                grad = tl.load(
                    row_ptr + (column * grad_token_stride)[:, None] + channel[None, :],
                    mask=(column < columns)[:, None] & known[None, :],
                    other=0.0,
                ).to(tl.float32)
                left += _times(there, grad, column - 1, columns, x_token_stride, channel, known)
                middle += _times(there, grad, column, columns, x_token_stride, channel, known)
                right += _times(there, grad, column + 1, columns, x_token_stride, channel, known)
    out_ptr += (chunk * DEPTH * 9 + plane * 3) * channels + channel
    tl.store(out_ptr, tl.sum(left, 0), mask=known)
    tl.store(out_ptr + channels, tl.sum(middle, 0), mask=known)
    tl.store(out_ptr + 2 * channels, tl.sum(right, 0), mask=known)


def _evenly_spaced(x: torch.Tensor) -> torch.Tensor:
    """x `(B, frames, rows, columns, C)` where one stride leads from token to token and channels lie side by side."""
    _, frames, rows, columns, _ = x.shape
    _, frame, row, column, channel = x.stride()
    even = (rows == 1 or row == columns * column) and (frames == 1 or frame == rows * columns * column)
    return x if even and channel == 1 and column > 0 else triton_launch.contiguous(x)


def _token_stride(x: torch.Tensor) -> int:
    """Of an evenly spaced x; torch may write any stride beside an axis of one."""
    _, frames, rows, columns, channels = x.shape
    for length, axis, tokens in ((columns, 3, 1), (rows, 2, columns), (frames, 1, rows * columns)):
        if length > 1:
            return x.stride(axis) // tokens
    return channels


def start_local(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, flipped: bool
) -> torch.Tensor | None:
    """As x `(B, frames, rows, columns, C)`, contiguous; weight `(C, 1, 1 or 3, 3, 3)`, bias `(C,)` or None.

    flipped: with the taps in the opposite order. None where the kernel does not compile, with one warning.
    """
    x = _evenly_spaced(x)
    # Channels side by side, as they are in x. Not kept: weights change unnoticed.
    taps = replay.computed(by_taps, weight)
    bias = None if bias is None else triton_launch.contiguous(bias)
    batch, frames, rows, columns, channels = x.shape
    stride = _token_stride(x)
    out = replay.empty(tuple(x.shape), x.dtype, x.device)
    options = {
        "DEPTH": weight.shape[2], "FLIPPED": flipped, "BIAS": bias is not None,
        "WIDE": frames * rows * columns * max(stride, channels) >= FAR,
    }  # fmt: skip

    def start(tile: Tile) -> None:
        tiles = ceil_div(rows, tile.ROWS) * ceil_div(columns, tile.COLUMNS)
        grid = (tiles * frames * batch, ceil_div(channels, tile.BC))
        triton_launch.launch(
            local_kernel, grid, tile, x, taps, x if bias is None else bias, out, x.stride(0), stride,
            frames, rows, columns, channels, **options,
        )  # fmt: skip

    fits = triton_launch.start_first_fitting(
        "local", x, channels, (overridden("local", TILES[weight.shape[2]]),), tuple(options.values()), start,
        what=f"kernels of a local convolution of {channels} channels",
    )  # fmt: skip
    return out if fits else None


def start_weight_gradient(x: torch.Tensor, grad: torch.Tensor, depth: int) -> torch.Tensor | None:
    """Sums over tokens of `grad[n] * x[n + tap]`, float32 `(chunks, depth * 9, C)`, to be added up over the chunks.

    x, grad: `(B, frames, rows, columns, C)`. None where the kernel does not compile, with one warning.
    """
    x, grad = _evenly_spaced(x), _evenly_spaced(grad)
    batch, frames, rows, columns, channels = x.shape
    tile = overridden("local_gradient", GRADIENT_TILE)
    lines, blocks = batch * frames * rows, ceil_div(channels, tile.BC)
    length = ceil_div(lines, max(1, min(lines, PROGRAMS // (depth * 3 * blocks))))
    chunks = ceil_div(lines, length)
    out = replay.empty((chunks, depth * 9, channels), torch.float32, x.device)
    strides = x.stride(0), _token_stride(x), grad.stride(0), _token_stride(grad)
    options = {"DEPTH": depth, "WIDE": columns * max(strides[1], strides[3], channels) >= FAR}

    def start(tile: Tile) -> None:
        triton_launch.launch(
            weight_gradient_kernel, (depth * 3, blocks, chunks), tile, x, grad, out, *strides,
            lines, length, frames, rows, columns, channels, **options,
        )  # fmt: skip

    fits = triton_launch.start_first_fitting(
        "local_gradient", x, channels, (tile,), tuple(options.values()), start,
        what=f"kernels of the gradient of a local convolution of {channels} channels",
    )  # fmt: skip
    return out if fits else None
