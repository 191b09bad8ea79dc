"""The forward kernels of the states form for two neighbouring heads in one program.

Both heads' tokens, places and angles are the same: with a rotation, finding them is almost half of what a program does.
For head dims that are a power of two, with all value channels in one tile. Arguments as in `states_forward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .states_forward import activated, channel_weight
from .tiles import (
    SIZES,
    box,
    dot,
    features,
    frequencies_of,
    load_mass,
    load_part,
    load_state,
    locate,
    norm_weight_of,
    operand,
    rotate,
    rotation,
    square_sum,
    store_mass,
    store_part,
    store_state,
    tiles_of,
    tokens_at,
)

__all__ = ["read_out_pair_kernel", "summarise_pair_kernel"]


@triton.jit
def turned_pair(
    x, rstd, weight, cos, sin, feature_eps, norm_eps, D: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """(phi, phi turned and ready for a product) of one head's tile."""
    if NORM == 2:
        rstd = tl.rsqrt(square_sum(x) / D + norm_eps)
    phi = features(x, rstd, weight, feature_eps, 0, D, NORM, False)
    if ROPE:
        return phi, operand(rotate(phi, cos, sin, False), DOT)
    else:
        turned = operand(phi, DOT)
        return turned.to(tl.float32), turned


@triton.jit
def angles_of(
    rope_ptr, token, real, plane, row, column, turn0, turn1, turn2, D: tl.constexpr, BD: tl.constexpr,
    ROPE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    if ROPE:
        return rotation(rope_ptr, token, real, plane, row, column, turn0, turn1, turn2, 0, D, BD, ROPE, DOT)
    else:
        return 0.0, 0.0


@triton.jit
def pair_of(rows, heads, head_group, REVERSE: tl.constexpr):
    """(batch, first head of the pair, row) of a program."""
    group = tl.where(head_group % 2 == 0, head_group // 2, 1)
    batch, pair, row = locate(rows, heads // 2, group, REVERSE)
    return batch, pair * 2, row


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SIZES)
def summarise_pair_kernel(
    x_ptr, y_ptr, table_ptr, rope_ptr, rstd_ptr, weight_ptr, scale_ptr, mass_weight_ptr, state_ptr,
    x_stride_b, x_stride_n, x_stride_h, y_stride_b, y_stride_n, y_stride_h,
    num_tokens, num_blocks, block_size, chunks, chunk_size, heads, head_group, G0, G1, G2, B0, B1, B2,
    feature_eps, norm_eps,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, TD: tl.constexpr, BV: tl.constexpr, TV: tl.constexpr,
    BN: tl.constexpr, ONE_TILE: tl.constexpr,
    TABLE: tl.constexpr, WIDE: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, MASS: tl.constexpr,
    ROWS: tl.constexpr, REVERSE: tl.constexpr, STEP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    tl.static_assert(D == BD and DV == BV and not ROWS)
    x_stride_b, x_stride_n, x_stride_h = x_stride_b * STEP, x_stride_n * STEP, x_stride_h * STEP
    y_stride_b, y_stride_n, y_stride_h = y_stride_b * STEP, y_stride_n * STEP, y_stride_h * STEP
    batch, head, row = pair_of(num_blocks * chunks, heads, head_group, REVERSE)
    block = row // chunks
    low0, low1, low2, size1, size2, count = box(block, block_size, G0, G1, G2, B0, B1, B2, TABLE)
    low = row % chunks * chunk_size
    end = tl.minimum(count, low + chunk_size)
    x_ptr += batch * x_stride_b + head * x_stride_h
    y_ptr += batch * y_stride_b + head * y_stride_h
    rstd_ptr += batch * num_tokens
    weight_a = norm_weight_of(weight_ptr, head, 0, D, BD, NORM)
    weight_b = norm_weight_of(weight_ptr, head + 1, 0, D, BD, NORM)
    turn0, turn1, turn2 = frequencies_of(rope_ptr, 0, D, BD, ROPE)
    s_a = tl.zeros((BD, BV), dtype=tl.float32)
    s_b = tl.zeros((BD, BV), dtype=tl.float32)
    z_a = tl.zeros((BD,), dtype=tl.float32)
    z_b = tl.zeros((BD,), dtype=tl.float32)
    PARTS: tl.constexpr = 1 if ONE_TILE or BN < 32 else 2
    for PART in tl.static_range(0, PARTS):
        start, tiles = tiles_of(low, end, BN, PART, PARTS)
        for tile in tl.range(0, 1 if ONE_TILE else tiles, num_stages=None if PART == 0 else 1):
            slot = start + tile * BN + tl.arange(0, BN // (PART + 1))
            token, real, plane, line, column = tokens_at(
                slot, end, table_ptr, block, low0, low1, low2, size1, size2, block_size, num_tokens, G1, G2,
                TABLE, WIDE,
            )  # fmt: skip
            x_a = load_part(x_ptr, x_stride_n, token, real, 0, D, BD)
            x_b = load_part(x_ptr + x_stride_h, x_stride_n, token, real, 0, D, BD)
            y_a = load_part(y_ptr, y_stride_n, token, real, 0, DV, BV)
            y_b = load_part(y_ptr + y_stride_h, y_stride_n, token, real, 0, DV, BV)
            cos, sin = angles_of(
                rope_ptr, token, real, plane, line, column, turn0, turn1, turn2, D, BD, ROPE, DOT
            )
            rstd = tl.load(rstd_ptr + token, mask=real, other=0.0) if NORM == 1 else 1.0
            # Padding rows of phi are not zero, but those of y are.
            phi_a, turned_a = turned_pair(
                x_a, rstd, weight_a, cos, sin, feature_eps, norm_eps, D, ROPE, NORM, DOT
            )
            s_a = dot(tl.trans(turned_a), y_a, s_a, DOT)
            phi_b, turned_b = turned_pair(
                x_b, rstd, weight_b, cos, sin, feature_eps, norm_eps, D, ROPE, NORM, DOT
            )
            s_b = dot(tl.trans(turned_b), y_b, s_b, DOT)
            if MASS:
                z_a += tl.sum(tl.where(real[:, None], phi_a, 0.0).to(tl.float32), axis=0)
                z_b += tl.sum(tl.where(real[:, None], phi_b, 0.0).to(tl.float32), axis=0)

    size = D * DV + (D if MASS else 0)
    state_ptr += ((batch * heads + head) * (num_blocks * chunks) + row) * size
    other_ptr = state_ptr + (num_blocks * chunks).to(tl.int64) * size
    store_state(state_ptr, s_a, 0, 0, D, DV, BD, BV)
    store_state(other_ptr, s_b, 0, 0, D, DV, BD, BV)
    if MASS:
        store_mass(state_ptr, z_a, 0, D, DV, BD)
        store_mass(other_ptr, z_b, 0, D, DV, BD)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SIZES)
def read_out_pair_kernel(
    x_ptr, table_ptr, rope_ptr, rstd_ptr, weight_ptr, state_ptr, out_weight_ptr, gate_ptr, local_ptr, out_ptr,
    x_stride_b, x_stride_n, x_stride_h, gate_stride_b, gate_stride_n, gate_stride_h,
    local_stride_b, local_stride_n, local_stride_h,
    num_tokens, num_blocks, block_size, chunks, chunk_size, heads, head_group, G0, G1, G2, B0, B1, B2,
    feature_eps, norm_eps, denominator_eps, out_norm_eps, gate_bias,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, TD: tl.constexpr, BV: tl.constexpr, TV: tl.constexpr,
    BN: tl.constexpr, ONE_TILE: tl.constexpr,
    TABLE: tl.constexpr, WIDE: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, DIVIDE: tl.constexpr,
    MASS: tl.constexpr, OUT_NORM: tl.constexpr, GATE: tl.constexpr, LOCAL: tl.constexpr, REVERSE: tl.constexpr,
    STEP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    tl.static_assert(D == BD and DV == BV)
    x_stride_b, x_stride_n, x_stride_h = x_stride_b * STEP, x_stride_n * STEP, x_stride_h * STEP
    gate_stride_n, gate_stride_h = gate_stride_n * STEP, gate_stride_h * STEP
    local_stride_n, local_stride_h = local_stride_n * STEP, local_stride_h * STEP
    batch, head, row = pair_of(num_blocks * chunks, heads, head_group, REVERSE)
    block = row // chunks
    low0, low1, low2, size1, size2, count = box(block, block_size, G0, G1, G2, B0, B1, B2, TABLE)
    low = row % chunks * chunk_size
    end = tl.minimum(count, low + chunk_size)
    x_ptr += batch * x_stride_b + head * x_stride_h
    gate_ptr += batch * (gate_stride_b * STEP) + head * gate_stride_h
    local_ptr += batch * (local_stride_b * STEP) + head * local_stride_h
    out_ptr += (batch * num_tokens * heads + head) * DV
    rstd_ptr += batch * num_tokens
    weight_a = norm_weight_of(weight_ptr, head, 0, D, BD, NORM)
    weight_b = norm_weight_of(weight_ptr, head + 1, 0, D, BD, NORM)
    turn0, turn1, turn2 = frequencies_of(rope_ptr, 0, D, BD, ROPE)
    size = D * DV + (D if MASS else 0)
    state_ptr += ((batch * heads + head) * num_blocks + block) * size
    other_ptr = state_ptr + num_blocks.to(tl.int64) * size
    s_a = load_state(state_ptr, 0, 0, D, DV, BD, BV)
    s_b = load_state(other_ptr, 0, 0, D, DV, BD, BV)
    z_a, z_b = 0.0, 0.0
    if DIVIDE:
        z_a = load_mass(state_ptr, 0, D, DV, BD)
        z_b = load_mass(other_ptr, 0, D, DV, BD)
    PARTS: tl.constexpr = 1 if ONE_TILE or BN < 32 else 2
    for PART in tl.static_range(0, PARTS):
        start, tiles = tiles_of(low, end, BN, PART, PARTS)
        for tile in tl.range(0, 1 if ONE_TILE else tiles, num_stages=None if PART == 0 else 1):
            slot = start + tile * BN + tl.arange(0, BN // (PART + 1))
            token, real, plane, line, column = tokens_at(
                slot, end, table_ptr, block, low0, low1, low2, size1, size2, block_size, num_tokens, G1, G2,
                TABLE, WIDE,
            )  # fmt: skip
            x_a = load_part(x_ptr, x_stride_n, token, real, 0, D, BD)
            x_b = load_part(x_ptr + x_stride_h, x_stride_n, token, real, 0, D, BD)
            cos, sin = angles_of(
                rope_ptr, token, real, plane, line, column, turn0, turn1, turn2, D, BD, ROPE, DOT
            )
            rstd = tl.load(rstd_ptr + token, mask=real, other=0.0) if NORM == 1 else 1.0
            phi_a, turned_a = turned_pair(
                x_a, rstd, weight_a, cos, sin, feature_eps, norm_eps, D, ROPE, NORM, DOT
            )
            finish_head(
                phi_a, turned_a, s_a, z_a, out_weight_ptr, gate_ptr, gate_stride_n, local_ptr, local_stride_n,
                out_ptr, heads * DV, token, real, denominator_eps, out_norm_eps, gate_bias, DV, BV, DIVIDE, OUT_NORM,
                GATE, LOCAL, DOT,
            )  # fmt: skip
            phi_b, turned_b = turned_pair(
                x_b, rstd, weight_b, cos, sin, feature_eps, norm_eps, D, ROPE, NORM, DOT
            )
            finish_head(
                phi_b, turned_b, s_b, z_b, out_weight_ptr, gate_ptr + gate_stride_h, gate_stride_n,
                local_ptr + local_stride_h, local_stride_n, out_ptr + DV, heads * DV, token, real, denominator_eps,
                out_norm_eps, gate_bias, DV, BV, DIVIDE, OUT_NORM, GATE, LOCAL, DOT,
            )  # fmt: skip


@triton.jit
def finish_head(
    phi, turned, state, mass, out_weight_ptr, gate_ptr, gate_stride_n, local_ptr, local_stride_n, out_ptr,
    out_stride_n, token, real, denominator_eps, out_norm_eps, gate_bias, DV: tl.constexpr, BV: tl.constexpr,
    DIVIDE: tl.constexpr, OUT_NORM: tl.constexpr, GATE: tl.constexpr, LOCAL: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Read-out of one head's tile, and what follows it, into the output."""
    out = dot(turned, state, tl.zeros((token.shape[0], BV), dtype=tl.float32), DOT)
    if DIVIDE:
        out = out / (tl.sum(phi * mass[None, :], axis=1) + denominator_eps)[:, None]
    if OUT_NORM:
        scale = tl.rsqrt(square_sum(out) / DV + out_norm_eps)
        out = out * scale[:, None] * channel_weight(out_weight_ptr, 0, DV, BV)[None, :]
    if GATE:
        out = out * activated(load_part(gate_ptr, gate_stride_n, token, real, 0, DV, BV), gate_bias, GATE)
    if LOCAL:
        out += load_part(local_ptr, local_stride_n, token, real, 0, DV, BV).to(tl.float32)
    store_part(out, out_ptr, out_stride_n, token, real, 0, DV, BV)
