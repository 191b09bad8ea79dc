"""Triton kernels of the states form that mix block states, and their gradient for the coefficients.

The float32 coefficients are never rounded to half precision: against bfloat16 states they enter as a high and a low
bfloat16 part ("split"), against float32 states as tf32 or in full ("ieee").
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import begin

__all__ = ["mix_gradient_kernel", "mix_kernel", "spread_kernel"]

_SIZES = ["heads", "rows", "columns", "left_rows", "right_rows", "parts", "padded_rows", "chunks"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def spread_kernel(
    m_ptr, out_ptr, stride_h, stride_row, stride_column, rows, columns, chunks, padded_rows, matrices,
    WIDTH: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Coefficients as `mix_kernel` wants them: zero-padded, each column once for every chunk of its block.

    Program (row, matrix). out `(matrices, padded_rows, WIDTH)`; SPLIT: the high bfloat16 parts, then the low ones.
    """
    row = tl.program_id(0)
    matrix = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    begin(PDL)
    m = tl.load(
        m_ptr + matrix * stride_h + row * stride_row + (column // chunks) * stride_column,
        mask=(row < rows) & (column < columns),
        other=0.0,
    )
    out_ptr += (matrix * padded_rows + row) * WIDTH + column
    if SPLIT:
        high = m.to(tl.bfloat16)
        tl.store(out_ptr, high)
        tl.store(out_ptr + matrices * padded_rows * WIDTH, (m - high.to(tl.float32)).to(tl.bfloat16))
    else:
        tl.store(out_ptr, m)


@triton.jit
def weighted_sum(high, low, state, total, DOT: tl.constexpr):
    if DOT == "split":
        return tl.dot(low, state, tl.dot(high, state, total))
    else:
        return tl.dot(high, state.to(tl.float32), total, input_precision=DOT)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def mix_kernel(
    m_ptr, state_ptr, out_ptr, stride_h, low_part, heads, rows, columns,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, TM: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    REVERSE: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out (B, H, rows, SIZE) = m (rows, columns) states (B, H, columns, SIZE), m as `spread_kernel` leaves it.

    Program (batch and head, tile of the state, row tile fastest). low_part: where m's low parts begin. TM: rows that a
    program has beyond BM, 0 or enough for all rows: every state is then read once.
    """
    tiles = 1 if TM else tl.cdiv(rows, BM)
    line = tl.program_id(0) // (tiles * tl.cdiv(SIZE, BP))
    tile = tl.program_id(0) % (tiles * tl.cdiv(SIZE, BP))
    if REVERSE:
        line = tl.num_programs(0) // (tiles * tl.cdiv(SIZE, BP)) - 1 - line
    row = tile % tiles * BM + tl.arange(0, BM)
    place = tile // tiles * BP + tl.arange(0, BP)
    m_ptr += line % heads * stride_h
    state_ptr += line.to(tl.int64) * columns * SIZE
    out_ptr += line.to(tl.int64) * rows * SIZE
    mixed = tl.zeros((BM, BP), dtype=tl.float32)
    if TM:
        rest = BM + tl.arange(0, TM)
        more = tl.zeros((TM, BP), dtype=tl.float32)
    begin(PDL)
    for start in range(0, columns, BN):
        column = start + tl.arange(0, BN)
        state = tl.load(
            state_ptr + column[:, None] * SIZE + place[None, :],
            mask=(column < columns)[:, None] & (place < SIZE)[None, :],
            other=0.0,
        )
        high, low = coefficients_of(m_ptr, low_part, row, column, WIDTH, DOT)
        mixed = weighted_sum(high, low, state, mixed, DOT)
        if TM:
            high, low = coefficients_of(m_ptr, low_part, rest, column, WIDTH, DOT)
            more = weighted_sum(high, low, state, more, DOT)
    store_mixed(mixed, out_ptr, row, rows, place, SIZE)
    if TM:
        store_mixed(more, out_ptr, rest, rows, place, SIZE)


@triton.jit
def coefficients_of(m_ptr, low_part, row, column, WIDTH: tl.constexpr, DOT: tl.constexpr):
    """(high, low) parts of a tile of m; both the same where it is not split."""
    offset = row[:, None] * WIDTH + column[None, :]
    high = tl.load(m_ptr + offset)
    low = tl.load(m_ptr + low_part + offset) if DOT == "split" else high
    return high, low


@triton.jit
def store_mixed(mixed, out_ptr, row, rows, place, SIZE: tl.constexpr):
    tl.store(
        out_ptr + row[:, None] * SIZE + place[None, :],
        mixed.to(out_ptr.dtype.element_ty),
        mask=(row < rows)[:, None] & (place < SIZE)[None, :],
    )


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def mix_gradient_kernel(
    left_ptr, right_ptr, out_ptr, left_rows, right_rows, parts,
    SIZE: tl.constexpr, RUN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """out (B * H, parts, left_rows, right_rows) float32: left (.., left_rows, SIZE) right^T, summed over runs of RUN.

    Program (batch, head and part; left tile; right tile fastest). The parts are added up afterwards, in a fixed order.
    """
    tiles = tl.cdiv(right_rows, BP)
    piece = tl.program_id(0) // (tiles * tl.cdiv(left_rows, BM))
    tile = tl.program_id(0) % (tiles * tl.cdiv(left_rows, BM))
    line = (piece // parts).to(tl.int64)
    low = piece % parts * RUN
    row = tile // tiles * BM + tl.arange(0, BM)
    column = tile % tiles * BP + tl.arange(0, BP)
    left_ptr += line * left_rows * SIZE
    right_ptr += line * right_rows * SIZE
    total = tl.zeros((BM, BP), dtype=tl.float32)
    for start in range(0, RUN, BN):
        place = low + start + tl.arange(0, BN)
        left = tl.load(
            left_ptr + row[:, None] * SIZE + place[None, :],
            mask=(row < left_rows)[:, None] & (place < SIZE)[None, :],
            other=0.0,
        )
        right = tl.load(
            right_ptr + column[:, None] * SIZE + place[None, :],
            mask=(column < right_rows)[:, None] & (place < SIZE)[None, :],
            other=0.0,
        )
        if DOT == "split":
            total = tl.dot(left, tl.trans(right), total)
        else:
            total = tl.dot(left.to(tl.float32), tl.trans(right.to(tl.float32)), total, input_precision=DOT)
    out_ptr += piece.to(tl.int64) * left_rows * right_rows
    tl.store(
        out_ptr + row[:, None] * right_rows + column[None, :],
        total,
        mask=(row < left_rows)[:, None] & (column < right_rows)[None, :],
    )
