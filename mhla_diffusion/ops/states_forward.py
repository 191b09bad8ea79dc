"""Triton kernels of the states form, forward: block summaries from keys and values, and their read-out by queries.

One program owns a block of tokens of one head, so nothing is accumulated by atomics and results are deterministic.
A state row holds S (D x Dv), then z (D) when there is a denominator: `(B, H, rows, D * Dv [+ D])`. A head dim that is
no power of two is held in two parts, 72 = 64 + 8 (padded to 16): channels 0 .. BD in x0, s00, s01, z0, BD .. BD + TD in
x1, s10, s11, z1; values likewise by BV and TV. Without TV, programs may share the value channels, BV each. TV may hold
no value channel at all, only a spare one, which carries the denominator.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import (
    SIZES,
    approximate,
    begin,
    box,
    dot,
    features,
    frequencies_of,
    load_mass,
    load_part,
    load_state,
    load_values,
    locate,
    norm_weight_of,
    operand,
    rotate,
    rotation,
    spare,
    spare_channel,
    square_sum,
    store_mass,
    store_part,
    store_state,
    store_values,
    tiles_of,
    tokens_at,
    widened,
)

__all__ = ["read_out_kernel", "rstd_kernel", "summarise_kernel"]


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SIZES)
def summarise_kernel(
    x_ptr, y_ptr, table_ptr, rope_ptr, rstd_ptr, weight_ptr, scale_ptr, mass_weight_ptr, state_ptr,
    x_stride_b, x_stride_n, x_stride_h, y_stride_b, y_stride_n, y_stride_h,
    num_tokens, num_blocks, block_size, chunks, chunk_size, heads, head_group, G0, G1, G2, B0, B1, B2,
    feature_eps, norm_eps,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, TD: tl.constexpr, BV: tl.constexpr, TV: tl.constexpr,
    BN: tl.constexpr, ONE_TILE: tl.constexpr,
    TABLE: tl.constexpr, WIDE: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, MASS: tl.constexpr,
    ROWS: tl.constexpr, REVERSE: tl.constexpr, STEP: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """S = sum phi(x) y^T, z = sum phi(x). Program (batch, head, block, chunk of the block's tokens; value tile).

    x (B, N, H, D), y (B, N, H, Dv). ROWS: y is scaled and phi weighted (in z) by float32 `(B, N, H)` row weights.
    """
    x_stride_b, x_stride_n, x_stride_h = x_stride_b * STEP, x_stride_n * STEP, x_stride_h * STEP
    y_stride_b, y_stride_n, y_stride_h = y_stride_b * STEP, y_stride_n * STEP, y_stride_h * STEP
    batch, head, row = locate(num_blocks * chunks, heads, head_group, REVERSE)
    block = row // chunks
    low0, low1, low2, size1, size2, count = box(block, block_size, G0, G1, G2, B0, B1, B2, TABLE)
    low = row % chunks * chunk_size
    end = tl.minimum(count, low + chunk_size)
    value_low = tl.program_id(1) * BV
    x_ptr += batch * x_stride_b + head * x_stride_h
    y_ptr += batch * y_stride_b + head * y_stride_h + value_low
    rstd_ptr += batch * num_tokens
    begin(PDL)
    weight0 = norm_weight_of(weight_ptr, head, 0, D, BD, NORM)
    weight1 = norm_weight_of(weight_ptr, head, BD, D, TD, NORM)
    turn00, turn01, turn02 = frequencies_of(rope_ptr, 0, D, BD, ROPE)
    turn10, turn11, turn12 = frequencies_of(rope_ptr, BD, D, TD, ROPE)

    # A spare value channel takes z for nothing: its "value" is every token's weight. Else z is summed beside.
    COUNT: tl.constexpr = MASS and TV > 0 and not ROPE and BV + TV > DV
    BESIDE: tl.constexpr = MASS and not COUNT
    s00 = tl.zeros((BD, BV), dtype=tl.float32)
    if BESIDE:
        z0 = tl.zeros((BN, BD), dtype=tl.float32)  # summed over its rows at the end, once
        rest0 = tl.zeros((BD,), dtype=tl.float32)
    if TV:
        s01 = tl.zeros((BD, TV), dtype=tl.float32)
    if TD:
        s10 = tl.zeros((TD, BV), dtype=tl.float32)
        if BESIDE:
            z1 = tl.zeros((BN, TD), dtype=tl.float32)
            rest1 = tl.zeros((TD,), dtype=tl.float32)
        if TV:
            s11 = tl.zeros((TD, TV), dtype=tl.float32)
    # Tiles of BN tokens, and one of half as many where that is enough for the rest of the block.
    PARTS: tl.constexpr = 1 if ONE_TILE or BN < 32 else 2
    for PART in tl.static_range(0, PARTS):
        start, tiles = tiles_of(low, end, BN, PART, PARTS)
        for tile in tl.range(0, 1 if ONE_TILE else tiles, num_stages=None if PART == 0 else 1):
            slot = start + tile * BN + tl.arange(0, BN // (PART + 1))
            token, real, plane, line, column = tokens_at(
                slot, end, table_ptr, block, low0, low1, low2, size1, size2, block_size, num_tokens, G1, G2,
                TABLE, WIDE,
            )  # fmt: skip
            x0 = load_part(x_ptr, x_stride_n, token, real, 0, D, BD)
            y0 = load_values(y_ptr, y_stride_n, token, real, value_low, 0, DV, BV, TV)
            if ROPE:
                cos0, sin0 = rotation(
                    rope_ptr, token, real, plane, line, column, turn00, turn01, turn02, 0, D, BD, ROPE, DOT
                )
            if TD:
                x1 = load_part(x_ptr, x_stride_n, token, real, BD, D, TD)
            if TV and BV < DV:
                y1 = load_part(y_ptr, y_stride_n, token, real, BV, DV, TV)
            if ROWS:
                rows = (batch * num_tokens + token) * heads + head
                scale = tl.load(scale_ptr + rows, mask=real, other=0.0)
                y0 = y0.to(tl.float32) * scale[:, None]
                if TV and BV < DV:
                    y1 = y1.to(tl.float32) * scale[:, None]
            row_weight = tl.where(real, 1.0, 0.0)
            if ROWS and MASS:
                row_weight = tl.load(mass_weight_ptr + rows, mask=real, other=0.0)
            if COUNT:
                others = y1.to(tl.float32) if BV < DV else 0.0
                y1 = tl.where(spare_channel(DV, BV, TV)[None, :], row_weight[:, None], others)
            rstd = tl.load(rstd_ptr + token, mask=real, other=0.0) if NORM == 1 else 1.0
            if NORM == 2:
                rstd = square_sum(x0)
                if TD:
                    rstd += square_sum(x1)
                rstd = tl.rsqrt(rstd / D + norm_eps)
            # Padding rows of phi are not zero, but those of y are.
            phi0 = features(x0, rstd, weight0, feature_eps, 0, D, NORM, False)
            if ROPE:
                phi0 = widened(phi0)
            turned0 = operand(rotate(phi0, cos0, sin0, False) if ROPE else phi0, DOT)
            s00 = dot(tl.trans(turned0), y0, s00, DOT)
            if TV:
                s01 = dot(tl.trans(turned0), y1, s01, DOT)
            if BESIDE:
                # Numerator and denominator from the same rounded features: equal values then cancel exactly.
                phi0 = phi0 if ROPE else turned0.to(tl.float32)
                if PART == 0:
                    z0 += phi0 * row_weight[:, None]
                else:
                    rest0 += tl.sum(phi0 * row_weight[:, None], axis=0)
            if TD:
                phi1 = features(x1, rstd, weight1, feature_eps, BD, D, NORM, False)
                turned1 = phi1
                if ROPE:
                    cos1, sin1 = rotation(
                        rope_ptr, token, real, plane, line, column, turn10, turn11, turn12, BD, D, TD, ROPE, DOT,
                    )  # fmt: skip
                    turned1 = rotate(phi1, cos1, sin1, False)
                turned1 = operand(turned1, DOT)
                s10 = dot(tl.trans(turned1), y0, s10, DOT)
                if TV:
                    s11 = dot(tl.trans(turned1), y1, s11, DOT)
                if BESIDE:
                    phi1 = phi1 if ROPE else turned1.to(tl.float32)
                    if PART == 0:
                        z1 += phi1 * row_weight[:, None]
                    else:
                        rest1 += tl.sum(phi1 * row_weight[:, None], axis=0)

    state_ptr += ((batch * heads + head) * (num_blocks * chunks) + row) * (D * DV + (D if MASS else 0))
    store_state(state_ptr, s00, 0, value_low, D, DV, BD, BV)
    if TV:
        store_state(state_ptr, s01, 0, BV, D, DV, BD, TV)
    if TD:
        store_state(state_ptr, s10, BD, value_low, D, DV, TD, BV)
        if TV:
            store_state(state_ptr, s11, BD, BV, D, DV, TD, TV)
    if MASS:
        if tl.program_id(1) == 0:
            store_mass(
                state_ptr, tl.sum(z0, axis=0) + rest0 if BESIDE else spare(s01, DV, BV, TV), 0, D, DV, BD
            )
            if TD:
                store_mass(
                    state_ptr, tl.sum(z1, axis=0) + rest1 if BESIDE else spare(s11, DV, BV, TV), BD, D, DV, TD
                )


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SIZES)
def read_out_kernel(
    x_ptr, table_ptr, rope_ptr, rstd_ptr, weight_ptr, state_ptr, out_weight_ptr, gate_ptr, local_ptr, out_ptr,
    x_stride_b, x_stride_n, x_stride_h, gate_stride_b, gate_stride_n, gate_stride_h,
    local_stride_b, local_stride_n, local_stride_h,
    num_tokens, num_blocks, block_size, chunks, chunk_size, heads, head_group, G0, G1, G2, B0, B1, B2,
    feature_eps, norm_eps, denominator_eps, out_norm_eps, gate_bias,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, TD: tl.constexpr, BV: tl.constexpr, TV: tl.constexpr,
    BN: tl.constexpr, ONE_TILE: tl.constexpr,
    TABLE: tl.constexpr, WIDE: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, DIVIDE: tl.constexpr,
    MASS: tl.constexpr, OUT_NORM: tl.constexpr, GATE: tl.constexpr, LOCAL: tl.constexpr, REVERSE: tl.constexpr,
    STEP: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = phi(x) S [/ (phi(x) . z + eps)], [RMSNorm], [x gate], [+ local]; out (B, N, H, Dv), contiguous.

    Program (batch, head, block, chunk of the block's tokens; value tile). MASS: the state rows end in z.
    GATE: 0 none, 1 multiply, 2 multiply by SiLU(gate + gate_bias). OUT_NORM needs all value channels in one tile.
    """
    x_stride_b, x_stride_n, x_stride_h = x_stride_b * STEP, x_stride_n * STEP, x_stride_h * STEP
    gate_stride_b, gate_stride_n, gate_stride_h = (
        gate_stride_b * STEP,
        gate_stride_n * STEP,
        gate_stride_h * STEP,
    )
    local_stride_b, local_stride_n, local_stride_h = (
        local_stride_b * STEP,
        local_stride_n * STEP,
        local_stride_h * STEP,
    )
    batch, head, row = locate(num_blocks * chunks, heads, head_group, REVERSE)
    block = row // chunks
    low0, low1, low2, size1, size2, count = box(block, block_size, G0, G1, G2, B0, B1, B2, TABLE)
    low = row % chunks * chunk_size
    end = tl.minimum(count, low + chunk_size)
    value_low = tl.program_id(1) * BV
    x_ptr += batch * x_stride_b + head * x_stride_h
    gate_ptr += batch * gate_stride_b + head * gate_stride_h + value_low
    local_ptr += batch * local_stride_b + head * local_stride_h + value_low
    out_ptr += (batch * num_tokens * heads + head) * DV + value_low
    rstd_ptr += batch * num_tokens
    begin(PDL)
    weight0 = norm_weight_of(weight_ptr, head, 0, D, BD, NORM)
    weight1 = norm_weight_of(weight_ptr, head, BD, D, TD, NORM)
    turn00, turn01, turn02 = frequencies_of(rope_ptr, 0, D, BD, ROPE)
    turn10, turn11, turn12 = frequencies_of(rope_ptr, BD, D, TD, ROPE)
    state_ptr += ((batch * heads + head) * num_blocks + block) * (D * DV + (D if MASS else 0))
    s00 = load_state(state_ptr, 0, value_low, D, DV, BD, BV)
    if TV:
        s01 = load_state(state_ptr, 0, BV, D, DV, BD, TV)
    if TD:
        s10 = load_state(state_ptr, BD, value_low, D, DV, TD, BV)
        if TV:
            s11 = load_state(state_ptr, BD, BV, D, DV, TD, TV)
    COUNT: tl.constexpr = DIVIDE and TV > 0 and not ROPE and BV + TV > DV
    if DIVIDE:
        z0 = load_mass(state_ptr, 0, D, DV, BD)
        if TD:
            z1 = load_mass(state_ptr, BD, D, DV, TD)
    if COUNT:  # the spare value channel's output is then the denominator
        kind = state_ptr.dtype.element_ty
        s01 = tl.where(spare_channel(DV, BV, TV)[None, :], z0.to(kind)[:, None], s01)
        if TD:
            s11 = tl.where(spare_channel(DV, BV, TV)[None, :], z1.to(kind)[:, None], s11)

    for tile in range(0, 1 if ONE_TILE else tl.cdiv(end - low, BN)):
        slot = low + tile * BN + tl.arange(0, BN)
        token, real, plane, line, column = tokens_at(
            slot, end, table_ptr, block, low0, low1, low2, size1, size2, block_size, num_tokens, G1, G2,
            TABLE, WIDE,
        )  # fmt: skip
        x0 = load_part(x_ptr, x_stride_n, token, real, 0, D, BD)
        if ROPE:
            cos0, sin0 = rotation(
                rope_ptr, token, real, plane, line, column, turn00, turn01, turn02, 0, D, BD, ROPE, DOT
            )
        if TD:
            x1 = load_part(x_ptr, x_stride_n, token, real, BD, D, TD)
        rstd = tl.load(rstd_ptr + token, mask=real, other=0.0) if NORM == 1 else 1.0
        if NORM == 2:
            rstd = square_sum(x0)
            if TD:
                rstd += square_sum(x1)
            rstd = tl.rsqrt(rstd / D + norm_eps)
        phi0 = features(x0, rstd, weight0, feature_eps, 0, D, NORM, False)
        if ROPE:
            phi0 = widened(phi0)
        turned0 = operand(rotate(phi0, cos0, sin0, False) if ROPE else phi0, DOT)
        # Channels beyond D meet zero rows of the state.
        out0 = dot(turned0, s00, tl.zeros((token.shape[0], BV), dtype=tl.float32), DOT)
        if TV:
            out1 = dot(turned0, s01, tl.zeros((token.shape[0], TV), dtype=tl.float32), DOT)
        if DIVIDE and not COUNT:
            phi0 = phi0 if ROPE else turned0.to(tl.float32)
            den = tl.sum(phi0 * z0[None, :], axis=1) + denominator_eps
        if TD:
            phi1 = features(x1, rstd, weight1, feature_eps, BD, D, NORM, False)
            turned1 = phi1
            if ROPE:
                cos1, sin1 = rotation(
                    rope_ptr, token, real, plane, line, column, turn10, turn11, turn12, BD, D, TD, ROPE, DOT,
                )  # fmt: skip
                turned1 = rotate(phi1, cos1, sin1, False)
            turned1 = operand(turned1, DOT)
            out0 = dot(turned1, s10, out0, DOT)
            if TV:
                out1 = dot(turned1, s11, out1, DOT)
            if DIVIDE and not COUNT:
                phi1 = phi1 if ROPE else turned1.to(tl.float32)
                den += tl.sum(phi1 * z1[None, :], axis=1)
        if DIVIDE:
            if COUNT:
                den = spare(out1, DV, BV, TV) + denominator_eps
            inverse = 1.0 / den
            out0 = out0 * inverse[:, None]
            if TV:
                out1 = out1 * inverse[:, None]
        if OUT_NORM:
            scale = square_sum(out0)
            if TV and BV < DV:
                scale += square_sum(
                    tl.where(spare_channel(DV, BV, TV)[None, :], 0.0, out1) if COUNT else out1
                )
            scale = tl.rsqrt(scale / DV + out_norm_eps)
            out0 = out0 * scale[:, None] * channel_weight(out_weight_ptr, 0, DV, BV)[None, :]
            if TV and BV < DV:
                out1 = out1 * scale[:, None] * channel_weight(out_weight_ptr, BV, DV, TV)[None, :]
        if GATE:
            gate = load_values(gate_ptr, gate_stride_n, token, real, value_low, 0, DV, BV, TV)
            out0 = out0 * activated(gate, gate_bias, GATE, DOT)
            if TV and BV < DV:
                out1 = out1 * activated(
                    load_part(gate_ptr, gate_stride_n, token, real, BV, DV, TV), gate_bias, GATE, DOT
                )
        if LOCAL:
            out0 += load_values(local_ptr, local_stride_n, token, real, value_low, 0, DV, BV, TV).to(
                tl.float32
            )
            if TV and BV < DV:
                out1 += load_part(local_ptr, local_stride_n, token, real, BV, DV, TV).to(tl.float32)
        store_values(out0, out_ptr, heads * DV, token, real, value_low, 0, DV, BV, TV)
        if TV and BV < DV:
            store_part(out1, out_ptr, heads * DV, token, real, BV, DV, TV)


@triton.jit
def activated(gate, gate_bias, GATE: tl.constexpr, DOT: tl.constexpr):
    """float32 of a gate, as it is (GATE 1) or through SiLU (GATE 2), next to bfloat16 by approximate instructions."""
    gate = widened(gate)
    if GATE == 2:
        gate += gate_bias
        if DOT == "bf16":
            growth = approximate(gate * -1.4426950408889634, "ex2.approx.ftz.f32 $0, $1;")
            gate = gate * approximate(1.0 + growth, "rcp.approx.ftz.f32 $0, $1;")
        else:
            gate = gate * tl.sigmoid(gate)
    return gate


@triton.jit
def channel_weight(weight_ptr, LOW: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr):
    channel = LOW + tl.arange(0, PART)
    return tl.load(weight_ptr + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens"])
def rstd_kernel(
    x_ptr, rstd_ptr, stride_b, stride_n, num_tokens, norm_eps, WIDTH: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr
):  # fmt: skip
    """1 / sqrt(mean(x^2) + eps) over all heads of a token. Program (tokens, batch); x (B, N, WIDTH) by rows.

    WIDTH is no argument: only where the mask is seen to cover whole vectors, rows are read by vectors.
    """
    token = tl.program_id(0) * BN + tl.arange(0, BN)
    batch = tl.program_id(1).to(tl.int64)
    real = token < num_tokens
    x_ptr += batch * stride_b
    total = tl.zeros((BN, BW), dtype=tl.float32)
    for start in tl.static_range(0, WIDTH, BW):
        channel = start + tl.arange(0, BW)
        x = tl.load(
            x_ptr + token.to(tl.int64)[:, None] * stride_n + channel[None, :],
            mask=real[:, None] & (channel < WIDTH)[None, :],
            other=0.0,
        )
        x = widened(x)
        total += x * x
    rstd = tl.rsqrt(tl.sum(total, axis=1) / WIDTH + norm_eps)
    tl.store(rstd_ptr + batch * num_tokens + token, rstd, mask=real)
