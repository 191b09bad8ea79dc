"""Triton kernels of the states form, forward: block summaries from keys and values, and their read-out by queries.

One program owns a block of tokens of one head, so nothing is accumulated by atomics and results are deterministic.
A state row holds S (D x Dv), then z (D) when there is a denominator: `(B, H, rows, D * Dv [+ D])`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import (
    SIZES,
    box,
    dot,
    features,
    locate,
    matrix_mask,
    norm_weight_of,
    operand,
    rotate,
    tile_mask,
    tokens_at,
)

__all__ = ["read_out_kernel", "rstd_kernel", "summarise_kernel"]


@triton.jit(do_not_specialize=SIZES)
def summarise_kernel(
    x_ptr, y_ptr, table_ptr, rope_ptr, rstd_ptr, weight_ptr, scale_ptr, mass_weight_ptr, state_ptr,
    x_stride_b, x_stride_n, x_stride_h, y_stride_b, y_stride_n, y_stride_h,
    num_tokens, num_blocks, block_size, chunks, chunk_size, heads, head_group, G0, G1, G2, B0, B1, B2,
    feature_eps, norm_eps,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    TABLE: tl.constexpr, WIDE: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, MASS: tl.constexpr,
    ROWS: tl.constexpr, REVERSE: tl.constexpr, STEP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """S = sum phi(x) y^T, z = sum phi(x). Program (batch, head, block, chunk of the block's tokens; value tile).

    x (B, N, H, D), y (B, N, H, Dv). ROWS: y is scaled and phi weighted (in z) by float32 `(B, N, H)` row weights.
    """
    x_stride_b, x_stride_n, x_stride_h = x_stride_b * STEP, x_stride_n * STEP, x_stride_h * STEP
    y_stride_b, y_stride_n, y_stride_h = y_stride_b * STEP, y_stride_n * STEP, y_stride_h * STEP
    batch, head, row = locate(num_blocks * chunks, heads, head_group, REVERSE)
    block = row // chunks
    first, size1, size2, count = box(block, block_size, G0, G1, G2, B0, B1, B2, TABLE)
    low = row % chunks * chunk_size
    end = tl.minimum(count, low + chunk_size)
    d = tl.arange(0, BD)
    e = tl.program_id(1) * BV + tl.arange(0, BV)
    x_ptr += batch * x_stride_b + head * x_stride_h
    y_ptr += batch * y_stride_b + head * y_stride_h
    rstd_ptr += batch * num_tokens
    weight = norm_weight_of(weight_ptr, head, d, D, NORM)

    summary = tl.zeros((BD, BV), dtype=tl.float32)
    mass = tl.zeros((BD,), dtype=tl.float32)
    for start in range(low, end, BN):
        token, real = tokens_at(
            start + tl.arange(0, BN), end, table_ptr, block, first, size1, size2, block_size, num_tokens, G1, G2,
            TABLE, WIDE,
        )  # fmt: skip
        inside = tile_mask(real, d, D, BD)
        x = tl.load(x_ptr + token[:, None] * x_stride_n + d[None, :], mask=inside, other=0.0)
        y = tl.load(
            y_ptr + token[:, None] * y_stride_n + e[None, :], mask=real[:, None] & (e < DV)[None, :], other=0.0
        )
        phi = features(x, token, real, rstd_ptr, weight, norm_eps, feature_eps, D, NORM)
        turned = phi
        if ROPE:
            angle = tl.load(rope_ptr + token[:, None] * D + d[None, :], mask=inside, other=0.0)
            turned = rotate(phi, angle, False, BN, BD)
        turned = operand(turned, DOT)
        if not ROPE:
            # Numerator and denominator from the same rounded features: equal values then cancel exactly.
            phi = turned.to(tl.float32)
        if ROWS:
            offset = (batch * num_tokens + token) * heads + head
            y = y.to(tl.float32) * tl.load(scale_ptr + offset, mask=real, other=0.0)[:, None]
            if MASS:
                phi = phi * tl.load(mass_weight_ptr + offset, mask=real, other=0.0)[:, None]
        if MASS:
            mass += tl.sum(tl.where(real[:, None], phi, 0.0), axis=0)
        # Padding rows of phi are not zero, but those of y are.
        summary = dot(tl.trans(turned), y, summary, DOT)

    state_ptr += ((batch * heads + head) * (num_blocks * chunks) + row) * (D * DV + (D if MASS else 0))
    tl.store(
        state_ptr + d[:, None] * DV + e[None, :],
        summary.to(state_ptr.dtype.element_ty),
        mask=matrix_mask(d, e, D, DV),
    )
    if MASS:
        if tl.program_id(1) == 0:
            tl.store(state_ptr + D * DV + d, mass.to(state_ptr.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=SIZES)
def read_out_kernel(
    x_ptr, table_ptr, rope_ptr, rstd_ptr, weight_ptr, state_ptr, out_weight_ptr, gate_ptr, local_ptr, out_ptr,
    x_stride_b, x_stride_n, x_stride_h, gate_stride_b, gate_stride_n, gate_stride_h,
    local_stride_b, local_stride_n, local_stride_h,
    num_tokens, num_blocks, block_size, chunks, chunk_size, heads, head_group, G0, G1, G2, B0, B1, B2,
    feature_eps, norm_eps, denominator_eps, out_norm_eps, gate_bias,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    TABLE: tl.constexpr, WIDE: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, DIVIDE: tl.constexpr,
    MASS: tl.constexpr, OUT_NORM: tl.constexpr, GATE: tl.constexpr, LOCAL: tl.constexpr, REVERSE: tl.constexpr,
    STEP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """out = phi(x) S [/ (phi(x) . z + eps)], [RMSNorm], [x gate], [+ local]; out (B, N, H, Dv), contiguous.

    Program (batch, head, block, chunk of the block's tokens; value tile). MASS: the state rows end in z.
    GATE: 0 none, 1 multiply, 2 multiply by SiLU(gate + gate_bias). OUT_NORM needs all value channels in one tile.
    """
    x_stride_b, x_stride_n, x_stride_h = x_stride_b * STEP, x_stride_n * STEP, x_stride_h * STEP
    gate_stride_b, gate_stride_n, gate_stride_h = gate_stride_b * STEP, gate_stride_n * STEP, gate_stride_h * STEP
    local_stride_b, local_stride_n, local_stride_h = local_stride_b * STEP, local_stride_n * STEP, local_stride_h * STEP
    batch, head, row = locate(num_blocks * chunks, heads, head_group, REVERSE)
    block = row // chunks
    first, size1, size2, count = box(block, block_size, G0, G1, G2, B0, B1, B2, TABLE)
    low = row % chunks * chunk_size
    end = tl.minimum(count, low + chunk_size)
    d = tl.arange(0, BD)
    e = tl.program_id(1) * BV + tl.arange(0, BV)
    x_ptr += batch * x_stride_b + head * x_stride_h
    gate_ptr += batch * gate_stride_b + head * gate_stride_h
    local_ptr += batch * local_stride_b + head * local_stride_h
    out_ptr += batch * num_tokens * heads * DV + head * DV
    rstd_ptr += batch * num_tokens
    weight = norm_weight_of(weight_ptr, head, d, D, NORM)
    state_ptr += ((batch * heads + head) * num_blocks + block) * (D * DV + (D if MASS else 0))
    state = tl.load(state_ptr + d[:, None] * DV + e[None, :], mask=matrix_mask(d, e, D, DV), other=0.0)
    if DIVIDE:
        mass = tl.load(state_ptr + D * DV + d, mask=d < D, other=0.0).to(tl.float32)
    if OUT_NORM:
        out_weight = tl.load(out_weight_ptr + e, mask=e < DV, other=0.0).to(tl.float32)

    for start in range(low, end, BN):
        token, real = tokens_at(
            start + tl.arange(0, BN), end, table_ptr, block, first, size1, size2, block_size, num_tokens, G1, G2,
            TABLE, WIDE,
        )  # fmt: skip
        inside = tile_mask(real, d, D, BD)
        x = tl.load(x_ptr + token[:, None] * x_stride_n + d[None, :], mask=inside, other=0.0)
        phi = features(x, token, real, rstd_ptr, weight, norm_eps, feature_eps, D, NORM)
        turned = phi
        if ROPE:
            angle = tl.load(rope_ptr + token[:, None] * D + d[None, :], mask=inside, other=0.0)
            turned = rotate(phi, angle, False, BN, BD)
        turned = operand(turned, DOT)
        # Channels beyond D meet zero rows of the state.
        out = dot(turned, state, tl.zeros((BN, BV), dtype=tl.float32), DOT)
        if DIVIDE:
            if not ROPE:
                phi = turned.to(tl.float32)
            out = out / (tl.sum(phi * mass[None, :], axis=1) + denominator_eps)[:, None]
        if OUT_NORM:
            out = out * tl.rsqrt(tl.sum(out * out, axis=1) / DV + out_norm_eps)[:, None] * out_weight[None, :]
        within = tile_mask(real, e, DV, BV) if DV <= BV else real[:, None] & (e < DV)[None, :]
        if GATE:
            gate = tl.load(gate_ptr + token[:, None] * gate_stride_n + e[None, :], mask=within, other=0.0)
            gate = gate.to(tl.float32)
            if GATE == 2:
                gate += gate_bias
                gate = gate * tl.sigmoid(gate)
            out = out * gate
        if LOCAL:
            local = tl.load(local_ptr + token[:, None] * local_stride_n + e[None, :], mask=within, other=0.0)
            out = out + local.to(tl.float32)
        offset = token[:, None] * (heads * DV) + e[None, :]
        tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=within)


@triton.jit(do_not_specialize=["num_tokens", "width"])
def rstd_kernel(
    x_ptr, rstd_ptr, stride_b, stride_n, num_tokens, width, norm_eps, BN: tl.constexpr, BW: tl.constexpr
):
    """1 / sqrt(mean(x^2) + eps) over all heads of a token. Program (tokens, batch); x (B, N, H * D) by rows."""
    token = tl.program_id(0) * BN + tl.arange(0, BN)
    batch = tl.program_id(1).to(tl.int64)
    real = token < num_tokens
    x_ptr += batch * stride_b
    total = tl.zeros((BN, BW), dtype=tl.float32)
    for start in range(0, width, BW):
        channel = start + tl.arange(0, BW)
        x = tl.load(
            x_ptr + token.to(tl.int64)[:, None] * stride_n + channel[None, :],
            mask=real[:, None] & (channel < width)[None, :],
            other=0.0,
        ).to(tl.float32)
        total += x * x
    rstd = tl.rsqrt(tl.sum(total, axis=1) / width + norm_eps)
    tl.store(rstd_ptr + batch * num_tokens + token, rstd, mask=real)
