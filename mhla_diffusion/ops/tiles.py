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


# Added to a float32 below 2^22 in magnitude it rounds to the nearest integer, which the low bits then hold: on the
# ordinary units, where conversions take four times as long.
ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def rounded(x):
    return x + ROUNDER - ROUNDER


@triton.jit
def as_integer(x):
    """The integer that a float32 below 2^22 holds."""
    return (x + ROUNDER).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def quotient(number, divisor):
    """number // divisor of whole float32 numbers below 2^20: a division costs some 25 instructions per token."""
    inverse = 1.0 / divisor
    return rounded(number * inverse + (0.5 * inverse - 0.5))


@triton.jit
def begin(PDL: tl.constexpr):
    """Where a kernel first reads memory. PDL (programmatic dependent launch): its programs may have started while the
    launch before still runs, and let those of the next start likewise; nothing is read before that launch is done."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


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
def tiles_of(low, end, BN: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr):
    """(first slot, number of tiles) of the tiles of BN slots (PART 0), or of the one of BN / 2 that may follow them."""
    whole = tl.cdiv(end - low, BN) if PARTS == 1 else tl.cdiv(tl.maximum(end - low - BN // 2, 0), BN)
    if PART == 0:
        return low, whole
    else:
        low += whole * BN
        return low, tl.where(low < end, 1, 0)


@triton.jit
def box(block, block_size, G0, G1, G2, B0, B1, B2, TABLE: tl.constexpr):
    """First token of a block on each axis, its tokens on the last two axes, and its number of tokens."""
    if TABLE:
        return 0, 0, 0, block * 0 + 1, block * 0 + 1, block * 0 + block_size
    else:
        last = block % B2
        middle = block // B2 % B1
        first = block // B2 // B1
        low0, low1, low2 = first * G0 // B0, middle * G1 // B1, last * G2 // B2
        size0 = (first + 1) * G0 // B0 - low0
        size1 = (middle + 1) * G1 // B1 - low1
        size2 = (last + 1) * G2 // B2 - low2
        return low0, low1, low2, size1, size2, size0 * size1 * size2


@triton.jit
def tokens_at(
    slot, end, table_ptr, block, low0, low1, low2, size1, size2, block_size, num_tokens, G1, G2,
    TABLE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Of the slots of a block: token ids, whether each is a real token, and its place on the three axes.

    Places are whole float32 numbers; a table tells none. WIDE: offsets need 64 bits.
    """
    if TABLE:
        token = tl.load(table_ptr + block.to(tl.int64) * block_size + slot, mask=slot < end, other=-1)
        real = (token >= 0) & (token < num_tokens)
        token = tl.where(real, token, 0)
        plane = slot.to(tl.float32)
        row = plane
        column = plane
    else:
        real = slot < end
        slot = slot.to(tl.float32)
        size1, size2 = size1.to(tl.float32), size2.to(tl.float32)
        line = quotient(slot, size2)
        sheet = quotient(line, size1)
        plane = low0.to(tl.float32) + sheet
        row = low1.to(tl.float32) + (line - sheet * size1)
        column = low2.to(tl.float32) + (slot - line * size2)
        token = as_integer((plane * G1.to(tl.float32) + row) * G2.to(tl.float32) + column)
    if WIDE:
        return token.to(tl.int64), real, plane, row, column
    else:
        return token.to(tl.int32), real, plane, row, column


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
def spare_channel(DV: tl.constexpr, BV: tl.constexpr, TV: tl.constexpr):
    return BV + tl.arange(0, TV) == DV


@triton.jit
def spare(part, DV: tl.constexpr, BV: tl.constexpr, TV: tl.constexpr):
    return tl.sum(tl.where(spare_channel(DV, BV, TV)[None, :], part, 0.0), axis=1)


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
    x = widened(x)
    return tl.sum(x * x, axis=1)


@triton.jit
def features(
    x, rstd, weight, feature_eps, LOW: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, ZERO: tl.constexpr
):
    """phi of a tile, of x * rstd * weight with NORM. ZERO: channels beyond D become 0, not feature_eps.

    In float32, but bfloat16 without NORM stays bfloat16: only the sum with feature_eps rounds there, as it would
    before the dot product. NaN stays NaN: a non-finite activation has to surface, not turn into 0. rstd is positive, so
    it may follow the relu. Padding rows become feature_eps: whoever sums them has to mask.
    """
    if NORM == 0 and x.dtype == tl.bfloat16:
        phi = features_of_pairs(x, feature_eps)
    else:
        x = widened(x)
        if NORM:
            x = x * weight[None, :]
        phi = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        phi = phi * rstd[:, None] + feature_eps if NORM else phi + feature_eps
    if ZERO and LOW + x.shape[1] > D:
        phi = tl.where((LOW + tl.arange(0, x.shape[1]) < D)[None, :], phi, 0.0)
    return phi


@triton.jit
def features_of_pairs(x, feature_eps):
    """relu(x) + feature_eps on pairs of bfloat16: two instructions where float32 takes six."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 zero, one, positive;
        mov.b32 zero, 0;
        mov.b32 one, 0x3F803F80;
        max.NaN.bf16x2 positive, $1, zero;
        fma.rn.bf16x2 $0, positive, one, $2;
        }""",
        "=r,r,r",
        [x, feature_eps.to(tl.bfloat16)],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def widened(x):
    """float32 of a tile. bfloat16 in pairs, by one instruction for each number."""
    if x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(tl.float32)


@triton.jit
def frequencies_of(rope_ptr, LOW: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, ROPE: tl.constexpr):
    """ROPE 2: radians per token on each of three axes, `(PART / 2,)`, of the pairs of channels LOW .. LOW + PART."""
    if ROPE == 2 and PART > 0:
        pair = LOW // 2 + tl.arange(0, PART // 2)
        inside = pair < D // 2
        return (
            tl.load(rope_ptr + pair, mask=inside, other=0.0),
            tl.load(rope_ptr + D // 2 + pair, mask=inside, other=0.0),
            tl.load(rope_ptr + D // 2 * 2 + pair, mask=inside, other=0.0),
        )
    else:
        return 0.0, 0.0, 0.0


@triton.jit
def rotation(
    rope_ptr, token, real, plane, row, column, turn0, turn1, turn2,
    LOW: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, ROPE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """cos and sin of the tokens' angles, `(BN, PART / 2)` float32.

    ROPE 1: from a row of (cos, sin) pairs for each token. ROPE 2: from the token's place and `frequencies_of`, which
    takes no memory traffic; next to bfloat16 products by the approximate instructions, 2e-5 off.
    """
    if ROPE == 1:
        pairs = load_part(rope_ptr, D, token, real, LOW, D, PART).to(tl.float32)
        cos, sin = tl.split(tl.reshape(pairs, (token.shape[0], PART // 2, 2)))
    else:
        angle = (
            plane[:, None] * turn0[None, :] + row[:, None] * turn1[None, :] + column[:, None] * turn2[None, :]
        )
        if DOT == "bf16":
            cos = approximate(angle, "cos.approx.f32 $0, $1;")
            sin = approximate(angle, "sin.approx.f32 $0, $1;")
        else:
            cos, sin = tl.cos(angle), tl.sin(angle)
    return cos, sin


@triton.jit
def approximate(angle, INSTRUCTION: tl.constexpr):
    return tl.inline_asm_elementwise(INSTRUCTION, "=f,f", [angle], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def rotate(x, cos, sin, INVERSE: tl.constexpr):
    """Turn the channel pairs (0, 1), (2, 3), ... of a tile (BN, BD) by cos and sin (BN, BD / 2), or back; float32."""
    even, odd = tl.split(tl.reshape(widened(x), (x.shape[0], x.shape[1] // 2, 2)))
    if INVERSE:
        return tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), x.shape)
    else:
        return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), x.shape)


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
