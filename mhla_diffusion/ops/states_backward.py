"""Triton kernels of the states form, backward. Features are recomputed; each block owns its rows, so no atomics.

With g = grad S^T, the gradient of the turned features of a row:
    without a denominator   d phi = turn_back(g)
    queries, with one       den = phi . z + eps, d den = -(turned . g) / den^2, d phi = turn_back(g / den) + d den z
    keys, with one          d phi = turn_back(g) + d z
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import SIZES, box, dot, features, locate, matrix_mask, operand, rotate, tile_mask, tokens_at

__all__ = ["pull_back_kernel"]


@triton.jit(do_not_specialize=SIZES)
def pull_back_kernel(
    x_ptr, y_ptr, table_ptr, rope_ptr, state_ptr, dx_ptr, own_ptr, scale_ptr, mass_weight_ptr,
    x_stride_b, x_stride_n, x_stride_h, y_stride_b, y_stride_n, y_stride_h,
    num_tokens, num_blocks, block_size, chunks, chunk_size, heads, head_group, G0, G1, G2, B0, B1, B2,
    feature_eps, denominator_eps,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    TABLE: tl.constexpr, WIDE: tl.constexpr, ROPE: tl.constexpr, MASS: tl.constexpr, KEYS: tl.constexpr,
    FUSED: tl.constexpr, REVERSE: tl.constexpr, STEP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """dx (B, N, H, D), contiguous. Program (batch, head, block, chunk of the block's tokens).

    Queries: x = q, y = the output's gradient, state = the block's mixed state. FUSED also writes to `own_ptr` the
    gradient of that state, a row for each chunk; otherwise 1 / den and d den of every token, for `summarise_kernel`.
    KEYS: x = k, y = v, state = the gradient of the block's state. FUSED also writes dv (B, N, H, Dv) to `own_ptr`.
    MASS: there is a denominator, so state rows end in z or its gradient. FUSED needs DV <= BV.
    """
    x_stride_b, x_stride_n, x_stride_h = x_stride_b * STEP, x_stride_n * STEP, x_stride_h * STEP
    y_stride_b, y_stride_n, y_stride_h = y_stride_b * STEP, y_stride_n * STEP, y_stride_h * STEP
    batch, head, row = locate(num_blocks * chunks, heads, head_group, REVERSE)
    block = row // chunks
    first, size1, size2, count = box(block, block_size, G0, G1, G2, B0, B1, B2, TABLE)
    low = row % chunks * chunk_size
    end = tl.minimum(count, low + chunk_size)
    d = tl.arange(0, BD)
    e = tl.arange(0, BV)
    x_ptr += batch * x_stride_b + head * x_stride_h
    y_ptr += batch * y_stride_b + head * y_stride_h
    dx_ptr += batch * num_tokens * heads * D + head * D
    state_ptr += ((batch * heads + head) * num_blocks + block) * (D * DV + (D if MASS else 0))
    if FUSED:
        state = tl.load(state_ptr + d[:, None] * DV + e[None, :], mask=matrix_mask(d, e, D, DV), other=0.0)
        if KEYS:
            own_ptr += batch * num_tokens * heads * DV + head * DV
        else:
            own_ptr += ((batch * heads + head) * (num_blocks * chunks) + row) * (D * DV + (D if MASS else 0))
            own = tl.zeros((BD, BV), dtype=tl.float32)
            own_mass = tl.zeros((BD,), dtype=tl.float32)
    if MASS:
        mass = tl.load(state_ptr + D * DV + d, mask=d < D, other=0.0).to(tl.float32)

    for start in range(low, end, BN):
        token, real = tokens_at(
            start + tl.arange(0, BN), end, table_ptr, block, first, size1, size2, block_size, num_tokens, G1, G2,
            TABLE, WIDE,
        )  # fmt: skip
        inside = tile_mask(real, d, D, BD)
        x = tl.load(x_ptr + token[:, None] * x_stride_n + d[None, :], mask=inside, other=0.0)
        phi = features(x, token, real, x_ptr, 0.0, 0.0, feature_eps, D, 0)
        turned = phi
        if ROPE:
            angle = tl.load(rope_ptr + token[:, None] * D + d[None, :], mask=inside, other=0.0)
            turned = rotate(phi, angle, False, BN, BD)
        turned = operand(turned, DOT)
        if not ROPE:
            phi = turned.to(tl.float32)
        if FUSED:
            within = tile_mask(real, e, DV, BV)
            y = tl.load(y_ptr + token[:, None] * y_stride_n + e[None, :], mask=within, other=0.0)
            dphi = dot(y, tl.trans(state), tl.zeros((BN, BD), dtype=tl.float32), DOT)
        else:
            dphi = tl.zeros((BN, BD), dtype=tl.float32)
            for tile in range(0, DV, BV):
                column = tile + e
                within = real[:, None] & (column < DV)[None, :]
                y = tl.load(y_ptr + token[:, None] * y_stride_n + column[None, :], mask=within, other=0.0)
                part = tl.load(
                    state_ptr + d[:, None] * DV + column[None, :], mask=matrix_mask(d, column, D, DV), other=0.0
                )
                dphi = dot(y, tl.trans(part), dphi, DOT)
        if MASS and not KEYS:
            inverse = 1.0 / tl.where(real, tl.sum(phi * mass[None, :], axis=1) + denominator_eps, 1.0)
            dden = -tl.sum(turned.to(tl.float32) * dphi, axis=1) * inverse * inverse
            dphi = dphi * inverse[:, None]
            if FUSED:
                y = y.to(tl.float32) * inverse[:, None]
                own_mass += tl.sum(tl.where(real[:, None], phi, 0.0) * dden[:, None], axis=0)
            else:
                offset = (batch * num_tokens + token) * heads + head
                tl.store(scale_ptr + offset, inverse, mask=real)
                tl.store(mass_weight_ptr + offset, dden, mask=real)
        if FUSED:
            if KEYS:
                dv = dot(turned, state, tl.zeros((BN, BV), dtype=tl.float32), DOT)
                offset = token[:, None] * (heads * DV) + e[None, :]
                tl.store(own_ptr + offset, dv.to(own_ptr.dtype.element_ty), mask=within)
            else:
                own = dot(tl.trans(turned), y, own, DOT)
        if ROPE:
            dphi = rotate(dphi, angle, True, BN, BD)
        if MASS:
            if KEYS:
                dphi += mass[None, :]
            else:
                dphi += dden[:, None] * mass[None, :]
        dx = tl.where(x.to(tl.float32) > 0.0, dphi, 0.0)
        tl.store(dx_ptr + token[:, None] * (heads * D) + d[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)

    if FUSED:
        if not KEYS:
            kind = own_ptr.dtype.element_ty
            tl.store(own_ptr + d[:, None] * DV + e[None, :], own.to(kind), mask=matrix_mask(d, e, D, DV))
            if MASS:
                tl.store(own_ptr + D * DV + d, own_mass.to(kind), mask=d < D)
