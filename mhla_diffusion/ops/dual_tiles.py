"""What the dual form's kernels share: tokens in block order, feature tiles, coefficients of a tile of token pairs.

Tokens are visited block by block (`slot` = block * block size + place in the block), so the coefficient is the same over
runs of slots. A head dim that is no power of two is held in two parts, 72 = 64 + 8 (padded to 16): BD, then TD channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import operand, quotient, rotate

__all__ = ["DUAL_SIZES"]

DUAL_SIZES = [
    "heads", "query_tokens", "query_blocks", "query_size", "key_tokens", "key_blocks", "key_size",
    "QG0", "QG1", "QG2", "QB0", "QB1", "QB2", "KG0", "KG1", "KG2", "KB0", "KB1", "KB2",
]  # fmt: skip


@triton.jit
def slot_tokens(
    slot, table_ptr, num_blocks, block_size, num_tokens, G0, G1, G2, B0, B1, B2,
    TABLE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """(token id, whether it is one, its block) of slots."""
    block = quotient(slot, block_size)
    place = slot - block * block_size
    real = block < num_blocks
    if TABLE:
        token = tl.load(table_ptr + slot, mask=real, other=-1)
        real = (token >= 0) & (token < num_tokens)
        return tl.where(real, token, 0).to(tl.int64), real, block
    else:
        line = quotient(block, B2)
        last = block - line * B2
        first = quotient(line, B1)
        middle = line - first * B1
        if EVEN:
            size1, size2 = G1 // B1, G2 // B2
            low0, low1, low2 = first * (G0 // B0), middle * size1, last * size2
        else:
            low0, low1, low2 = quotient(first * G0, B0), quotient(middle * G1, B1), quotient(last * G2, B2)
            size0 = quotient((first + 1) * G0, B0) - low0
            size1 = quotient((middle + 1) * G1, B1) - low1
            size2 = quotient((last + 1) * G2, B2) - low2
            real = real & (place < size0 * size1 * size2)
        row = quotient(place, size2)
        plane = quotient(row, size1)
        token = ((low0 + plane) * G1 + low1 + row - plane * size1) * G2 + low2 + place - row * size2
        return tl.where(real, token, 0).to(tl.int64), real, block


@triton.jit
def part_mask(real, LOW: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr):
    if LOW + PART <= WIDTH:
        return real[:, None]
    else:
        return real[:, None] & (LOW + tl.arange(0, PART) < WIDTH)[None, :]


@triton.jit
def load_part(x_ptr, stride_n, token, real, LOW: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr):
    """Channels LOW .. LOW + PART of the tokens' rows, zero beyond WIDTH."""
    offset = token[:, None] * stride_n + (LOW + tl.arange(0, PART))[None, :]
    return tl.load(x_ptr + offset, mask=part_mask(real, LOW, WIDTH, PART), other=0.0)


@triton.jit
def turned_features(
    x, rope_ptr, token, real, feature_eps, LOW: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    PART: tl.constexpr, ROPE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """phi of loaded channels, turned, ready for a dot product over channels: zero in channels beyond D."""
    x = x.to(tl.float32)
    phi = tl.where(x < 0.0, 0.0, x) + feature_eps
    if LOW + PART > D:
        phi = tl.where((LOW + tl.arange(0, PART) < D)[None, :], phi, 0.0)
    if ROPE:
        angle = load_part(rope_ptr, D, token, real, LOW, D, PART)
        phi = rotate(phi, angle, False, ROWS, PART)
    return operand(phi, DOT)


@triton.jit
def feature_gradient(
    dphi, x_ptr, stride_n, rope_ptr, token, real, LOW: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    PART: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    if ROPE:
        dphi = rotate(dphi, load_part(rope_ptr, D, token, real, LOW, D, PART), True, ROWS, PART)
    x = load_part(x_ptr, stride_n, token, real, LOW, D, PART).to(tl.float32)
    return tl.where(x > 0.0, dphi, 0.0)


@triton.jit
def store_part(x, out_ptr, stride_n, token, real, LOW: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr):
    offset = token[:, None] * stride_n + (LOW + tl.arange(0, PART))[None, :]
    tl.store(out_ptr + offset, x.to(out_ptr.dtype.element_ty), mask=part_mask(real, LOW, WIDTH, PART))


@triton.jit
def coefficients(
    m_ptr, row_block, row_real, row_stride, column_low, column_stride, column_size, column_blocks, column_real,
    COLUMNS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """m of each row's block and each run of columns, `(rows, COLUMNS / RUN)` float32, zero where either is padding."""
    block = quotient(column_low + tl.arange(0, COLUMNS // RUN) * RUN, column_size)
    real = block < column_blocks
    if RUN == 1:
        real = real & column_real
    return tl.load(
        m_ptr + row_block[:, None] * row_stride + block[None, :] * column_stride,
        mask=row_real[:, None] & real[None, :],
        other=0.0,
    )


@triton.jit
def weigh(scores, weight, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr):
    """Scores (ROWS, COLUMNS) times a weight for each row and run of columns."""
    if RUN == 1:
        return scores * weight
    else:
        runs = tl.reshape(scores, (ROWS, COLUMNS // RUN, RUN))
        return tl.reshape(runs * weight[:, :, None], (ROWS, COLUMNS))
