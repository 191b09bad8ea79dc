"""What the dual form's kernels share: tokens in block order, feature tiles, coefficients of a tile of token pairs.

Tokens are visited block by block (`slot` = block * block size + place in the block), so the coefficient is the same
over runs of slots. A head dim that is no power of two is held in two parts, 72 = 64 + 8 (padded to 16): BD, then TD
channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import features, load_part, operand, rotate, rotation


@triton.jit
def slot_tokens(
    slot, table_ptr, num_tokens, BLOCKS: tl.constexpr, SIZE: tl.constexpr,
    G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr,
    TABLE: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """(token id, whether it is one, its block) of TILE slots that start at a multiple of TILE.

    The grid is compiled in: its divisions become shifts. WIDE: offsets of tokens need 64 bits.
    """
    number = slot.to(tl.uint32)
    block = number // SIZE
    place = number % SIZE
    real = block < BLOCKS
    if TABLE:
        token = tl.load(table_ptr + slot, mask=real, other=-1)
        real = (token >= 0) & (token < num_tokens)
        token = tl.where(real, token, 0)
        return token.to(tl.int64) if WIDE else token.to(tl.int32), real, block.to(tl.int32)
    else:
        last = block % B2
        middle = block // B2 % B1
        first = block // (B2 * B1)
        if G0 % B0 == 0 and G1 % B1 == 0 and G2 % B2 == 0:
            plane = first * (G0 // B0) + place // ((G1 // B1) * (G2 // B2))
            row = middle * (G1 // B1) + place // (G2 // B2) % (G1 // B1)
            column = last * (G2 // B2) + place % (G2 // B2)
            if BLOCKS * SIZE % TILE == 0:  # tiles are whole: nothing is masked
                real = tl.full((TILE,), True, tl.int1)
        else:
            low0, low1, low2 = first * G0 // B0, middle * G1 // B1, last * G2 // B2
            size0 = (first + 1) * G0 // B0 - low0
            size1 = (middle + 1) * G1 // B1 - low1
            size2 = (last + 1) * G2 // B2 - low2
            real = real & (place < size0 * size1 * size2)
            plane = low0 + place // (size2 * size1)
            row = low1 + place // size2 % size1
            column = low2 + place % size2
        token = ((plane * G1 + row) * G2 + column).to(tl.int32)
        token = tl.where(real, token, 0)
        return token.to(tl.int64) if WIDE else token.to(tl.int32), real, block.to(tl.int32)


@triton.jit
def turned_features(
    x, rope_ptr, token, real, feature_eps, LOW: tl.constexpr, D: tl.constexpr, PART: tl.constexpr,
    ROPE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """phi of loaded channels, turned, ready for a dot product over channels: zero in channels beyond D."""
    phi = features(x, 1.0, 1.0, feature_eps, LOW, D, 0, True)
    if ROPE:
        cos, sin = rotation(rope_ptr, token, real, token, token, token, 0.0, 0.0, 0.0, LOW, D, PART, 1, DOT)
        phi = rotate(phi, cos, sin, False)
    return operand(phi, DOT)


@triton.jit
def feature_gradient(
    dphi, x_ptr, stride_n, rope_ptr, token, real, LOW: tl.constexpr, D: tl.constexpr, PART: tl.constexpr,
    ROPE: tl.constexpr,
):  # fmt: skip
    if ROPE:
        cos, sin = rotation(
            rope_ptr, token, real, token, token, token, 0.0, 0.0, 0.0, LOW, D, PART, 1, "bf16"
        )
        dphi = rotate(dphi, cos, sin, True)
    x = load_part(x_ptr, stride_n, token, real, LOW, D, PART).to(tl.float32)
    return tl.where(x > 0.0, dphi, 0.0)


@triton.jit
def coefficients(
    m_ptr, row_block, row_real, row_stride, column_low, column_stride, column_real,
    BLOCKS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """m of each row's block and each run of columns, `(rows, COLUMNS / RUN)` float32, zero where either is padding."""
    block = ((column_low + tl.arange(0, COLUMNS // RUN) * RUN).to(tl.uint32) // SIZE).to(tl.int32)
    real = block < BLOCKS
    if RUN == 1:
        real = real & column_real
    return tl.load(
        m_ptr + row_block[:, None] * row_stride + block[None, :] * column_stride,
        mask=row_real[:, None] & real[None, :],
        other=0.0,
    )


@triton.jit
def row_parts(scores, DOT: tl.constexpr):
    """Sums over each row in 4 parts, on tensor cores each of what one thread holds: a loop exchanges nothing."""
    rows: tl.constexpr = scores.shape[0]
    columns: tl.constexpr = scores.shape[1]
    if DOT == "ieee":  # see `run_sums`
        parts = scores
    else:
        parts = tl.permute(tl.reshape(scores, (rows, columns // 8, 4, 2)), (0, 2, 1, 3))
    return tl.sum(tl.reshape(parts, (rows, 4, columns // 4)), axis=2)


@triton.jit
def row_dots(a, b):
    return tl.sum(a.to(tl.float32) * b.to(tl.float32), axis=1)


@triton.jit
def weigh(scores, weight, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr):
    """Scores (ROWS, COLUMNS) times a weight for each row and run of columns."""
    if RUN == 1:
        return scores * weight
    else:
        runs = tl.reshape(scores, (ROWS, COLUMNS // RUN, RUN))
        return tl.reshape(runs * weight[:, :, None], (ROWS, COLUMNS))


@triton.jit
def run_sums(pairs, ROW_RUN: tl.constexpr, RUN: tl.constexpr, DOT: tl.constexpr):
    """Sums over tiles of ROW_RUN rows and RUN columns, `(rows / ROW_RUN, columns / RUN)`."""
    rows: tl.constexpr = pairs.shape[0] // ROW_RUN
    columns: tl.constexpr = pairs.shape[1] // RUN
    runs = tl.reshape(pairs, (rows, ROW_RUN, columns, RUN))
    if DOT == "ieee":
        # Off the tensor cores the lanes that hold a tile are not neighbours, and Triton 3.6 adds up neighbours: wrong
        # sums if both axes are reduced at once.
        return tl.sum(tl.sum(runs, axis=3), axis=1)
    else:
        return tl.sum(tl.reshape(tl.permute(runs, (0, 2, 1, 3)), (rows, columns, ROW_RUN * RUN)), axis=2)
