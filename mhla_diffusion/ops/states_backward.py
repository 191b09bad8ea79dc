"""Triton kernels of the states form, backward. Features are recomputed; each block owns its rows, so no atomics.

With g = grad S^T, the gradient of the turned features of a row:
    without a denominator   d phi = turn_back(g)
    queries, with one       den = phi . z + eps, d den = -(turned . g) / den^2, d phi = turn_back(g / den) + d den z
    keys, with one          d phi = turn_back(g) + d z
"""

from __future__ import annotations

import triton
import triton.language as tl

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
    operand,
    rotate,
    rotation,
    store_mass,
    store_part,
    store_state,
    tiles_of,
    tokens_at,
)

__all__ = ["pull_back_kernel"]


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SIZES)
def pull_back_kernel(
    x_ptr, y_ptr, table_ptr, rope_ptr, state_ptr, dx_ptr, own_ptr, scale_ptr, mass_weight_ptr,
    x_stride_b, x_stride_n, x_stride_h, y_stride_b, y_stride_n, y_stride_h,
    num_tokens, num_blocks, block_size, chunks, chunk_size, heads, head_group, G0, G1, G2, B0, B1, B2,
    feature_eps, denominator_eps,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, TD: tl.constexpr, BV: tl.constexpr, TV: tl.constexpr,
    BN: tl.constexpr, ONE_TILE: tl.constexpr,
    TABLE: tl.constexpr, WIDE: tl.constexpr, ROPE: tl.constexpr, MASS: tl.constexpr, KEYS: tl.constexpr,
    WHOLE: tl.constexpr, FUSED: tl.constexpr, REVERSE: tl.constexpr, STEP: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """dx (B, N, H, D), contiguous. Program (batch, head, block, chunk of the block's tokens).

    Queries: x = q, y = the output's gradient, state = the block's mixed state. FUSED also writes to `own_ptr` the
    gradient of that state, a row for each chunk; otherwise 1 / den and d den of every token, for `summarise_kernel`.
    KEYS: x = k, y = v, state = the gradient of the block's state. FUSED also writes dv (B, N, H, Dv) to `own_ptr`.
    MASS: there is a denominator, so state rows end in z or its gradient. FUSED needs WHOLE, all value channels in
    one tile. Head dims in two parts: see `states_forward`.
    """
    x_stride_b, x_stride_n, x_stride_h = x_stride_b * STEP, x_stride_n * STEP, x_stride_h * STEP
    y_stride_b, y_stride_n, y_stride_h = y_stride_b * STEP, y_stride_n * STEP, y_stride_h * STEP
    batch, head, row = locate(num_blocks * chunks, heads, head_group, REVERSE)
    block = row // chunks
    low0, low1, low2, size1, size2, count = box(block, block_size, G0, G1, G2, B0, B1, B2, TABLE)
    low = row % chunks * chunk_size
    end = tl.minimum(count, low + chunk_size)
    x_ptr += batch * x_stride_b + head * x_stride_h
    y_ptr += batch * y_stride_b + head * y_stride_h
    dx_ptr += (batch * num_tokens * heads + head) * D
    state_ptr += ((batch * heads + head) * num_blocks + block) * (D * DV + (D if MASS else 0))
    turn00, turn01, turn02 = frequencies_of(rope_ptr, 0, D, BD, ROPE)
    turn10, turn11, turn12 = frequencies_of(rope_ptr, BD, D, TD, ROPE)
    if WHOLE:
        s00 = load_state(state_ptr, 0, 0, D, DV, BD, BV)
        if TV:
            s01 = load_state(state_ptr, 0, BV, D, DV, BD, TV)
        if TD:
            s10 = load_state(state_ptr, BD, 0, D, DV, TD, BV)
            if TV:
                s11 = load_state(state_ptr, BD, BV, D, DV, TD, TV)
    if FUSED:
        if KEYS:
            own_ptr += (batch * num_tokens * heads + head) * DV
        else:
            own_ptr += ((batch * heads + head) * (num_blocks * chunks) + row) * (D * DV + (D if MASS else 0))
            ds00 = tl.zeros((BD, BV), dtype=tl.float32)
            dz0 = tl.zeros((BD,), dtype=tl.float32)
            if TV:
                ds01 = tl.zeros((BD, TV), dtype=tl.float32)
            if TD:
                ds10 = tl.zeros((TD, BV), dtype=tl.float32)
                dz1 = tl.zeros((TD,), dtype=tl.float32)
                if TV:
                    ds11 = tl.zeros((TD, TV), dtype=tl.float32)
    if MASS:
        z0 = load_mass(state_ptr, 0, D, DV, BD)
        if TD:
            z1 = load_mass(state_ptr, BD, D, DV, TD)

    # Tiles of BN tokens, and one of half as many where that is enough for the rest of the block. Not where only the
    # shorter one is too short for Hopper's matrix instructions: the state would then be kept in two layouts.
    PARTS: tl.constexpr = 1 if ONE_TILE or BN < 32 or BN == 64 else 2
    for PART in tl.static_range(0, PARTS):
        start, tiles = tiles_of(low, end, BN, PART, PARTS)
        for tile in tl.range(0, 1 if ONE_TILE else tiles, num_stages=None if PART == 0 else 1):
            slot = start + tile * BN + tl.arange(0, BN // (PART + 1))
            token, real, plane, line, column = tokens_at(
                slot, end, table_ptr, block, low0, low1, low2, size1, size2, block_size, num_tokens, G1, G2,
                TABLE, WIDE,
            )  # fmt: skip
            x0 = load_part(x_ptr, x_stride_n, token, real, 0, D, BD)
            phi0 = features(x0, 1.0, 1.0, feature_eps, 0, D, 0, True)
            turned0 = phi0
            if ROPE:
                cos0, sin0 = rotation(
                    rope_ptr, token, real, plane, line, column, turn00, turn01, turn02, 0, D, BD, ROPE, DOT
                )
                turned0 = rotate(phi0, cos0, sin0, False)
            turned0 = operand(turned0, DOT)
            if TD:
                x1 = load_part(x_ptr, x_stride_n, token, real, BD, D, TD)
                phi1 = features(x1, 1.0, 1.0, feature_eps, BD, D, 0, True)
                turned1 = phi1
                if ROPE:
                    cos1, sin1 = rotation(
                        rope_ptr,
                        token,
                        real,
                        plane,
                        line,
                        column,
                        turn10,
                        turn11,
                        turn12,
                        BD,
                        D,
                        TD,
                        ROPE,
                        DOT,
                    )
                    turned1 = rotate(phi1, cos1, sin1, False)
                turned1 = operand(turned1, DOT)
            if not ROPE:
                phi0 = turned0.to(tl.float32)
                if TD:
                    phi1 = turned1.to(tl.float32)

            dphi0 = tl.zeros((token.shape[0], BD), dtype=tl.float32)
            if TD:
                dphi1 = tl.zeros((token.shape[0], TD), dtype=tl.float32)
            if WHOLE:
                y0 = load_part(y_ptr, y_stride_n, token, real, 0, DV, BV)
                dphi0 = dot(y0, tl.trans(s00), dphi0, DOT)
                if TD:
                    dphi1 = dot(y0, tl.trans(s10), dphi1, DOT)
                if TV:
                    y1 = load_part(y_ptr, y_stride_n, token, real, BV, DV, TV)
                    dphi0 = dot(y1, tl.trans(s01), dphi0, DOT)
                    if TD:
                        dphi1 = dot(y1, tl.trans(s11), dphi1, DOT)
            else:
                for channel in range(0, DV, BV):
                    value = channel + tl.arange(0, BV)
                    y0 = tl.load(
                        y_ptr + token[:, None] * y_stride_n + value[None, :],
                        mask=real[:, None] & (value < DV)[None, :],
                        other=0.0,
                    )
                    dphi0 = dot(y0, tl.trans(load_state(state_ptr, 0, channel, D, DV, BD, BV)), dphi0, DOT)
                    if TD:
                        dphi1 = dot(
                            y0, tl.trans(load_state(state_ptr, BD, channel, D, DV, TD, BV)), dphi1, DOT
                        )

            if MASS and not KEYS:
                den = tl.sum(phi0 * z0[None, :], axis=1) + denominator_eps
                read = tl.sum(turned0.to(tl.float32) * dphi0, axis=1)
                if TD:
                    den += tl.sum(phi1 * z1[None, :], axis=1)
                    read += tl.sum(turned1.to(tl.float32) * dphi1, axis=1)
                inverse = 1.0 / tl.where(real, den, 1.0)
                dden = -read * inverse * inverse
                dphi0 = dphi0 * inverse[:, None]
                if TD:
                    dphi1 = dphi1 * inverse[:, None]
                if FUSED:
                    y0 = y0.to(tl.float32) * inverse[:, None]
                    if TV:
                        y1 = y1.to(tl.float32) * inverse[:, None]
                    dz0 += tl.sum(phi0 * dden[:, None], axis=0)  # dden is 0 in padding rows
                    if TD:
                        dz1 += tl.sum(phi1 * dden[:, None], axis=0)
                else:
                    offset = (batch * num_tokens + token) * heads + head
                    tl.store(scale_ptr + offset, inverse, mask=real)
                    tl.store(mass_weight_ptr + offset, dden, mask=real)

            if FUSED:
                if KEYS:
                    dv = dot(turned0, s00, tl.zeros((token.shape[0], BV), dtype=tl.float32), DOT)
                    if TD:
                        dv = dot(turned1, s10, dv, DOT)
                    store_part(dv, own_ptr, heads * DV, token, real, 0, DV, BV)
                    if TV:
                        dv = dot(turned0, s01, tl.zeros((token.shape[0], TV), dtype=tl.float32), DOT)
                        if TD:
                            dv = dot(turned1, s11, dv, DOT)
                        store_part(dv, own_ptr, heads * DV, token, real, BV, DV, TV)
                else:
                    ds00 = dot(tl.trans(turned0), y0, ds00, DOT)
                    if TV:
                        ds01 = dot(tl.trans(turned0), y1, ds01, DOT)
                    if TD:
                        ds10 = dot(tl.trans(turned1), y0, ds10, DOT)
                        if TV:
                            ds11 = dot(tl.trans(turned1), y1, ds11, DOT)

            if ROPE:
                dphi0 = rotate(dphi0, cos0, sin0, True)
                if TD:
                    dphi1 = rotate(dphi1, cos1, sin1, True)
            if MASS:
                if KEYS:
                    dphi0 += z0[None, :]
                    if TD:
                        dphi1 += z1[None, :]
                else:
                    dphi0 += dden[:, None] * z0[None, :]
                    if TD:
                        dphi1 += dden[:, None] * z1[None, :]
            dx = tl.where(x0.to(tl.float32) > 0.0, dphi0, 0.0)
            store_part(dx, dx_ptr, heads * D, token, real, 0, D, BD)
            if TD:
                dx = tl.where(x1.to(tl.float32) > 0.0, dphi1, 0.0)
                store_part(dx, dx_ptr, heads * D, token, real, BD, D, TD)

    if FUSED:
        if not KEYS:
            store_state(own_ptr, ds00, 0, 0, D, DV, BD, BV)
            if TV:
                store_state(own_ptr, ds01, 0, BV, D, DV, BD, TV)
            if TD:
                store_state(own_ptr, ds10, BD, 0, D, DV, TD, BV)
                if TV:
                    store_state(own_ptr, ds11, BD, BV, D, DV, TD, TV)
            if MASS:
                store_mass(own_ptr, dz0, 0, D, DV, BD)
                if TD:
                    store_mass(own_ptr, dz1, BD, D, DV, TD)
