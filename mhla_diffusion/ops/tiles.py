"""What the Triton kernels share: which tokens a program owns, the feature map, the rotation, the dot products.

Tokens of a block come from index arithmetic (a grid of up to three axes, balanced edges, even or ragged) or from a
table. DOT says how dot products are taken, always with float32 accumulation: "bf16" for bfloat16 inputs, "tf32" for
float16 (its range never overflows), "ieee" for float32. Strides are passed in units of STEP: Triton takes 16-byte loads
only where it sees the alignment, which it looks for in arguments divisible by 16, and a head of 72 channels is not.
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
def store_part(x, out_ptr, stride_n, token, real, LOW: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr):
    offset = token[:, None] * stride_n + (LOW + tl.arange(0, PART))[None, :]
    tl.store(out_ptr + offset, x.to(out_ptr.dtype.element_ty), mask=part_mask(real, LOW, WIDTH, PART))


@triton.jit
def value_mask(real, low, LOW: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, TV: tl.constexpr):
    if TV or BV == DV:
        return part_mask(real, LOW, DV, BV)
    else:
        return real[:, None] & (low + tl.arange(0, BV) < DV)[None, :]


@triton.jit
def load_values(
    y_ptr, stride_n, token, real, low, LOW: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, TV: tl.constexpr
):
    """A program's tile of the value channels, which starts at `low`; y_ptr points there already."""
    offset = token[:, None] * stride_n + tl.arange(0, BV)[None, :]
    return tl.load(y_ptr + offset, mask=value_mask(real, low, LOW, DV, BV, TV), other=0.0)


@triton.jit
def store_values(
    y,
    y_ptr,
    stride_n,
    token,
    real,
    low,
    LOW: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    TV: tl.constexpr,
):
    offset = token[:, None] * stride_n + tl.arange(0, BV)[None, :]
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=value_mask(real, low, LOW, DV, BV, TV))


@triton.jit
def state_mask(
    LOW: tl.constexpr, value_low, D: tl.constexpr, DV: tl.constexpr, PD: tl.constexpr, PV: tl.constexpr
):
    return (LOW + tl.arange(0, PD) < D)[:, None] & (value_low + tl.arange(0, PV) < DV)[None, :]


@triton.jit
def load_state(
    state_ptr,
    LOW: tl.constexpr,
    value_low,
    D: tl.constexpr,
    DV: tl.constexpr,
    PD: tl.constexpr,
    PV: tl.constexpr,
):
    """Part of S: rows LOW .., columns value_low ..; zero outside."""
    offset = (LOW + tl.arange(0, PD))[:, None] * DV + (value_low + tl.arange(0, PV))[None, :]
    return tl.load(state_ptr + offset, mask=state_mask(LOW, value_low, D, DV, PD, PV), other=0.0)


@triton.jit
def store_state(
    state_ptr, part, LOW: tl.constexpr, value_low, D: tl.constexpr, DV: tl.constexpr, PD: tl.constexpr,
    PV: tl.constexpr,
):  # fmt: skip
    offset = (LOW + tl.arange(0, PD))[:, None] * DV + (value_low + tl.arange(0, PV))[None, :]
    part = part.to(state_ptr.dtype.element_ty)
    tl.store(state_ptr + offset, part, mask=state_mask(LOW, value_low, D, DV, PD, PV))


@triton.jit
def load_mass(state_ptr, LOW: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PART: tl.constexpr):
    d = LOW + tl.arange(0, PART)
    return tl.load(state_ptr + D * DV + d, mask=d < D, other=0.0).to(tl.float32)


@triton.jit
def store_mass(state_ptr, part, LOW: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PART: tl.constexpr):
    d = LOW + tl.arange(0, PART)
    tl.store(state_ptr + D * DV + d, part.to(state_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def norm_weight_of(
    weight_ptr, head, LOW: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, NORM: tl.constexpr
):
    if NORM == 0 or PART == 0:
        return 0.0
    else:
        channel = LOW + tl.arange(0, PART)
        if NORM == 1:
            weight_ptr += head * D
        return tl.load(weight_ptr + channel, mask=channel < D, other=0.0).to(tl.float32)


@triton.jit
def square_sum(x):
    x = x.to(tl.float32)
    return tl.sum(x * x, axis=1)


@triton.jit
def features(
    x, rstd, weight, feature_eps, LOW: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, ZERO: tl.constexpr
):
    """phi of a tile in float32, of x * rstd * weight with NORM. ZERO: channels beyond D become 0, not feature_eps.

    Padding rows become feature_eps: whoever sums them has to mask.
    """
    x = x.to(tl.float32)
    if NORM:
        x = x * rstd[:, None] * weight[None, :]
    # Written so that NaN stays NaN: a non-finite activation has to surface, not turn into 0.
    phi = tl.where(x < 0.0, 0.0, x) + feature_eps
    if ZERO and LOW + x.shape[1] > D:
        phi = tl.where((LOW + tl.arange(0, x.shape[1]) < D)[None, :], phi, 0.0)
    return phi


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
