"""Triton kernels of the states form that mix block states, and their gradient for the coefficients.

The float32 coefficients are never rounded to half precision: against bfloat16 states they enter as a high and a low
bfloat16 part ("split"), against float32 states as tf32 or in full ("ieee").
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["mix_gradient_kernel", "mix_kernel"]

_SIZES = ["heads", "rows", "columns", "size", "run", "left_rows", "right_rows", "parts"]


@triton.jit(do_not_specialize=_SIZES)
def mix_kernel(
    m_ptr, state_ptr, out_ptr, m_stride_h, m_stride_row, m_stride_column, heads, rows, columns, size,
    CHUNKS: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, REVERSE: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """out (B, H, rows, size) = m (rows, columns / CHUNKS) states (B, H, columns, size).

    Program (row tile fastest, size tile; batch and head). CHUNKS consecutive states belong to one column of m.
    """
    tiles = tl.cdiv(rows, BM)
    line = tl.program_id(1)
    if REVERSE:
        line = tl.num_programs(1) - 1 - line
    row = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    place = tl.program_id(0) // tiles * BP + tl.arange(0, BP)
    m_ptr += line % heads * m_stride_h
    state_ptr += line.to(tl.int64) * columns * size
    out_ptr += line.to(tl.int64) * rows * size
    mixed = tl.zeros((BM, BP), dtype=tl.float32)
    for start in range(0, columns, BN):
        column = start + tl.arange(0, BN)
        m = tl.load(
            m_ptr + row[:, None] * m_stride_row + (column // CHUNKS)[None, :] * m_stride_column,
            mask=(row < rows)[:, None] & (column < columns)[None, :],
            other=0.0,
        )
        state = tl.load(
            state_ptr + column[:, None] * size + place[None, :],
            mask=(column < columns)[:, None] & (place < size)[None, :],
            other=0.0,
        )
        if DOT == "split":
            high = m.to(tl.bfloat16)
            mixed = tl.dot(high, state, mixed)
            mixed = tl.dot((m - high.to(tl.float32)).to(tl.bfloat16), state, mixed)
        else:
            mixed = tl.dot(m, state.to(tl.float32), mixed, input_precision=DOT)
    tl.store(
        out_ptr + row[:, None] * size + place[None, :],
        mixed.to(out_ptr.dtype.element_ty),
        mask=(row < rows)[:, None] & (place < size)[None, :],
    )


@triton.jit(do_not_specialize=_SIZES)
def mix_gradient_kernel(
    left_ptr, right_ptr, out_ptr, left_rows, right_rows, size, run, parts,
    BM: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """out (B * H, parts, left_rows, right_rows) float32: sums of left (.., left_rows, size) right^T over runs of `size`.

    Program (right tile, left tile; batch, head and part). The parts are added up afterwards, in a fixed order.
    """
    tiles = tl.cdiv(right_rows, BP)
    line = (tl.program_id(1) // parts).to(tl.int64)
    low = tl.program_id(1) % parts * run
    row = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    column = tl.program_id(0) % tiles * BP + tl.arange(0, BP)
    left_ptr += line * left_rows * size
    right_ptr += line * right_rows * size
    total = tl.zeros((BM, BP), dtype=tl.float32)
    end = tl.minimum(size, low + run)
    for start in range(low, end, BN):
        place = start + tl.arange(0, BN)
        left = tl.load(
            left_ptr + row[:, None] * size + place[None, :],
            mask=(row < left_rows)[:, None] & (place < end)[None, :],
            other=0.0,
        )
        right = tl.load(
            right_ptr + column[:, None] * size + place[None, :],
            mask=(column < right_rows)[:, None] & (place < end)[None, :],
            other=0.0,
        )
        if DOT == "split":
            total = tl.dot(left, tl.trans(right), total)
        else:
            total = tl.dot(left.to(tl.float32), tl.trans(right.to(tl.float32)), total, input_precision=DOT)
    out_ptr += tl.program_id(1).to(tl.int64) * left_rows * right_rows
    tl.store(
        out_ptr + row[:, None] * right_rows + column[None, :],
        total,
        mask=(row < left_rows)[:, None] & (column < right_rows)[None, :],
    )
