"""What the Triton kernels share: which tokens a program owns, the feature map, the rotation, the dot products.

Tokens of a block come from index arithmetic (a grid of up to three axes, balanced edges, even or ragged) or from a table.
DOT says how dot products are taken, always with float32 accumulation: "bf16" for bfloat16 inputs, "tf32" for float16
(its range never overflows), "ieee" for float32. Strides are passed in units of STEP: Triton takes 16-byte loads only where
it sees the alignment, which it looks for in arguments divisible by 16, and a head of 72 channels is not.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["SIZES"]

# Sizes that change from call to call: specialising on them would compile again for each token grid.
SIZES = [
    "num_tokens", "num_blocks", "block_size", "chunks", "chunk_size", "heads", "head_group", "rows",
    "G0", "G1", "G2", "B0", "B1", "B2",
]  # fmt: skip


@triton.jit
def quotient(number, divisor):
    """number // divisor, exact below 2^20, by one product: an integer division costs some 25 instructions per token."""
    return ((number.to(tl.float32) + 0.5) * (1.0 / divisor.to(tl.float32))).to(tl.int32)


@triton.jit
def locate(rows, heads, head_group, REVERSE: tl.constexpr):
    """(batch, head, row) of a program. `head_group` heads run fastest, so that they share the rotation's rows in L2.

    REVERSE starts with what the launch before wrote last and L2 still holds.
    """
    index = tl.program_id(0)
    if REVERSE:
        index = tl.num_programs(0) - 1 - index
    inner = index % head_group
    index = index // head_group
    row = index % rows
    index = index // rows
    groups = heads // head_group
    return (index // groups).to(tl.int64), (index % groups * head_group + inner).to(tl.int64), row


@triton.jit
def box(block, block_size, G0, G1, G2, B0, B1, B2, TABLE: tl.constexpr):
    """First token, tokens on the last two axes, and number of tokens of a block of the grid."""
    if TABLE:
        return block * 0, block * 0 + 1, block * 0 + 1, block * 0 + block_size
    else:
        last = block % B2
        middle = block // B2 % B1
        first = block // B2 // B1
        low0, low1, low2 = first * G0 // B0, middle * G1 // B1, last * G2 // B2
        size0 = (first + 1) * G0 // B0 - low0
        size1 = (middle + 1) * G1 // B1 - low1
        size2 = (last + 1) * G2 // B2 - low2
        return (low0 * G1 + low1) * G2 + low2, size1, size2, size0 * size1 * size2


@triton.jit
def tokens_at(
    slot, end, table_ptr, block, first, size1, size2, block_size, num_tokens, G1, G2,
    TABLE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Token ids of the slots of a block and whether each is a real token. WIDE: offsets need 64 bits."""
    if TABLE:
        token = tl.load(table_ptr + block.to(tl.int64) * block_size + slot, mask=slot < end, other=-1)
        real = (token >= 0) & (token < num_tokens)
        token = tl.where(real, token, 0)
    else:
        line = quotient(slot, size2)
        plane = quotient(line, size1)
        token = first + (plane * G1 + (line - plane * size1)) * G2 + (slot - line * size2)
        real = slot < end
    if WIDE:
        return token.to(tl.int64), real
    else:
        return token.to(tl.int32), real


@triton.jit
def tile_mask(real, channel, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    if WIDTH == PADDED:
        return real[:, None]
    else:
        return real[:, None] & (channel < WIDTH)[None, :]


@triton.jit
def matrix_mask(row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return (row < ROWS)[:, None] & (column < COLUMNS)[None, :]


@triton.jit
def norm_weight_of(weight_ptr, head, channel, D: tl.constexpr, NORM: tl.constexpr):
    if NORM == 0:
        return 0.0
    elif NORM == 1:
        return tl.load(weight_ptr + head * D + channel, mask=channel < D, other=0.0).to(tl.float32)
    else:
        return tl.load(weight_ptr + channel, mask=channel < D, other=0.0).to(tl.float32)


@triton.jit
def features(
    x, token, real, rstd_ptr, weight, norm_eps, feature_eps, D: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """phi of a tile in float32. NORM: 0 none, 1 RMSNorm across heads with the row's rstd, 2 RMSNorm per head.

    Padding rows become feature_eps, not 0: whoever sums them has to mask.
    """
    x = x.to(tl.float32)
    if NORM == 1:
        x = x * tl.load(rstd_ptr + token, mask=real, other=0.0)[:, None] * weight[None, :]
    if NORM == 2:
        x = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + norm_eps)[:, None] * weight[None, :]
    # Written so that NaN stays NaN: a non-finite activation has to surface, not turn into 0.
    return tl.where(x < 0.0, 0.0, x) + feature_eps


@triton.jit
def rotate(x, angle, INVERSE: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    """Turn the channel pairs (0, 1), (2, 3), ... by the tile of (cos, sin) pairs, or back."""
    cos, sin = tl.split(tl.reshape(angle.to(tl.float32), (BN, BD // 2, 2)))
    even, odd = tl.split(tl.reshape(x, (BN, BD // 2, 2)))
    if INVERSE:
        return tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), (BN, BD))
    else:
        return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BN, BD))


@triton.jit
def operand(x, DOT: tl.constexpr):
    if DOT == "bf16":
        return x.to(tl.bfloat16)
    else:
        return x.to(tl.float32)


@triton.jit
def dot(a, b, accumulator, DOT: tl.constexpr):
    if DOT == "bf16":
        return tl.dot(operand(a, DOT), operand(b, DOT), accumulator)
    else:
        return tl.dot(operand(a, DOT), operand(b, DOT), accumulator, input_precision=DOT)
