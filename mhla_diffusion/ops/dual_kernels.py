"""Triton kernels of the dual form, O = ((phi(Q) phi(K)^T) * m[block of query, block of key]) V: no block states.

Its cost is quadratic in the tokens, without a softmax, and it wins where a block holds few tokens for its head dim. The
denominator is the row sum of the weighted scores, so it needs features without rotation or no denominator at all.
Backward, with p = (phi(q) phi(k)^T) * m, g = dO / den and delta = g . O (0 without a denominator):
    dp = g V^T - delta      ds = dp * m      dphi(Q) = ds phi(K)      dphi(K) = ds^T phi(Q)      dV = p^T g
    dm[a, b] = sum of dp * (phi(q) phi(k)^T) over the queries of block a and the keys of block b
Every program owns its rows: no atomics, results are deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dual_tiles import (
    coefficients,
    feature_gradient,
    row_dots,
    row_parts,
    run_sums,
    slot_tokens,
    turned_features,
    weigh,
)
from .tiles import dot, load_part, operand, store_part

__all__ = ["dual_forward_kernel", "dual_key_kernel", "dual_query_kernel"]

_SIZES = ["heads", "query_tokens", "key_tokens"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def dual_forward_kernel(
    q_ptr, k_ptr, v_ptr, m_ptr, query_table_ptr, key_table_ptr, rope_ptr, key_rope_ptr, out_ptr, den_ptr,
    q_stride_b, q_stride_n, q_stride_h, k_stride_b, k_stride_n, k_stride_h, v_stride_b, v_stride_n, v_stride_h,
    m_stride_h, m_stride_row, m_stride_column, heads, query_tokens, key_tokens, feature_eps, denominator_eps,
    QM: tl.constexpr, QN: tl.constexpr, QG0: tl.constexpr, QG1: tl.constexpr, QG2: tl.constexpr,
    QB0: tl.constexpr, QB1: tl.constexpr, QB2: tl.constexpr,
    KM: tl.constexpr, KN: tl.constexpr, KG0: tl.constexpr, KG1: tl.constexpr, KG2: tl.constexpr,
    KB0: tl.constexpr, KB1: tl.constexpr, KB2: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, TD: tl.constexpr, BV: tl.constexpr, TV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, RUN: tl.constexpr, TABLE: tl.constexpr, KEY_TABLE: tl.constexpr,
    ROPE: tl.constexpr, DIVIDE: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """out (B, N, H, Dv), den (B, H, slots), contiguous. Program (batch and head, tile of queries fastest)."""
    q_stride_b, q_stride_n, q_stride_h = q_stride_b * STEP, q_stride_n * STEP, q_stride_h * STEP
    k_stride_b, k_stride_n, k_stride_h = k_stride_b * STEP, k_stride_n * STEP, k_stride_h * STEP
    v_stride_b, v_stride_n, v_stride_h = v_stride_b * STEP, v_stride_n * STEP, v_stride_h * STEP
    line = tl.program_id(0) // tl.cdiv(QM * QN, BM)
    tile = tl.program_id(0) % tl.cdiv(QM * QN, BM)
    batch = (line // heads).to(tl.int64)
    head = (line % heads).to(tl.int64)
    q_ptr += batch * q_stride_b + head * q_stride_h
    k_ptr += batch * k_stride_b + head * k_stride_h
    v_ptr += batch * v_stride_b + head * v_stride_h
    m_ptr += head * m_stride_h
    slot = tile * BM + tl.arange(0, BM)
    token, real, block = slot_tokens(
        slot, query_table_ptr, query_tokens, QM, QN,
        QG0, QG1, QG2, QB0, QB1, QB2, TABLE, BM, WIDE,
    )  # fmt: skip
    q0 = load_part(q_ptr, q_stride_n, token, real, 0, D, BD)
    q0 = turned_features(q0, rope_ptr, token, real, feature_eps, 0, D, BD, ROPE, DOT)
    out0 = tl.zeros((BM, BV), dtype=tl.float32)
    if TD:
        q1 = load_part(q_ptr, q_stride_n, token, real, BD, D, TD)
        q1 = turned_features(q1, rope_ptr, token, real, feature_eps, BD, D, TD, ROPE, DOT)
    if TV:
        out1 = tl.zeros((BM, TV), dtype=tl.float32)
    den = tl.zeros((BM, 4), dtype=tl.float32)
    for start in range(0, KM * KN, BN):
        key, key_real, _ = slot_tokens(
            start + tl.arange(0, BN), key_table_ptr, key_tokens, KM, KN,
            KG0, KG1, KG2, KB0, KB1, KB2, KEY_TABLE, BN, WIDE,
        )  # fmt: skip
        k0 = load_part(k_ptr, k_stride_n, key, key_real, 0, D, BD)
        if TD:
            k1 = load_part(k_ptr, k_stride_n, key, key_real, BD, D, TD)
        v0 = load_part(v_ptr, v_stride_n, key, key_real, 0, DV, BV)
        if TV:
            v1 = load_part(v_ptr, v_stride_n, key, key_real, BV, DV, TV)
        weight = coefficients(
            m_ptr, block, real, m_stride_row, start, m_stride_column, key_real, KM, KN, BN, RUN
        )
        # Both parts are ready before the first product: one barrier for them, and the products follow one another.
        k0 = turned_features(k0, key_rope_ptr, key, key_real, feature_eps, 0, D, BD, ROPE, DOT)
        if TD:
            k1 = turned_features(k1, key_rope_ptr, key, key_real, feature_eps, BD, D, TD, ROPE, DOT)
        score = dot(q0, tl.trans(k0), tl.zeros((BM, BN), dtype=tl.float32), DOT)
        if TD:
            score = dot(q1, tl.trans(k1), score, DOT)
        score = weigh(score, weight, BM, BN, RUN)
        if DIVIDE:
            den += row_parts(score, DOT)
        score = operand(score, DOT)
        out0 = dot(score, v0, out0, DOT)
        if TV:
            out1 = dot(score, v1, out1, DOT)
    if DIVIDE:
        den = tl.where(real, tl.sum(den, axis=1) + denominator_eps, 1.0)
        tl.store(den_ptr + line.to(tl.int64) * (QM * QN) + slot, den, mask=slot < QM * QN)
        inverse = 1.0 / den
        out0 = out0 * inverse[:, None]
        if TV:
            out1 = out1 * inverse[:, None]
    out_ptr += (batch * query_tokens * heads + head) * DV
    store_part(out0, out_ptr, heads * DV, token, real, 0, DV, BV)
    if TV:
        store_part(out1, out_ptr, heads * DV, token, real, BV, DV, TV)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def dual_query_kernel(
    q_ptr, k_ptr, v_ptr, m_ptr, rope_ptr, key_rope_ptr, grad_ptr, out_ptr, den_ptr, delta_ptr, inverse_ptr,
    phi_ptr, dq_ptr, dm_ptr,
    q_stride_b, q_stride_n, q_stride_h, k_stride_b, k_stride_n, k_stride_h, v_stride_b, v_stride_n, v_stride_h,
    grad_stride_b, grad_stride_n, grad_stride_h, m_stride_h, m_stride_row, m_stride_column,
    heads, query_tokens, key_tokens, feature_eps,
    QM: tl.constexpr, QN: tl.constexpr, QG0: tl.constexpr, QG1: tl.constexpr, QG2: tl.constexpr,
    QB0: tl.constexpr, QB1: tl.constexpr, QB2: tl.constexpr,
    KM: tl.constexpr, KN: tl.constexpr, KG0: tl.constexpr, KG1: tl.constexpr, KG2: tl.constexpr,
    KB0: tl.constexpr, KB1: tl.constexpr, KB2: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, TD: tl.constexpr, BV: tl.constexpr, TV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, RUN: tl.constexpr, QUERY_RUN: tl.constexpr,
    ROPE: tl.constexpr, DIVIDE: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """dq, and dm summed over runs: dm (B * H, N / QUERY_RUN, Nk / RUN). Even grids only.

    Leaves phi(q) (B, H, slots, D), delta and 1 / den (B, H, slots) for the other kernel, which would compute them for
    every tile of keys again.
    """
    q_stride_b, q_stride_n, q_stride_h = q_stride_b * STEP, q_stride_n * STEP, q_stride_h * STEP
    k_stride_b, k_stride_n, k_stride_h = k_stride_b * STEP, k_stride_n * STEP, k_stride_h * STEP
    v_stride_b, v_stride_n, v_stride_h = v_stride_b * STEP, v_stride_n * STEP, v_stride_h * STEP
    grad_stride_b, grad_stride_n, grad_stride_h = (
        grad_stride_b * STEP,
        grad_stride_n * STEP,
        grad_stride_h * STEP,
    )
    line = tl.program_id(0) // tl.cdiv(QM * QN, BM)
    tile = tl.program_id(0) % tl.cdiv(QM * QN, BM)
    batch = (line // heads).to(tl.int64)
    head = (line % heads).to(tl.int64)
    q_ptr += batch * q_stride_b + head * q_stride_h
    k_ptr += batch * k_stride_b + head * k_stride_h
    v_ptr += batch * v_stride_b + head * v_stride_h
    grad_ptr += batch * grad_stride_b + head * grad_stride_h
    m_ptr += head * m_stride_h
    first = tile * BM
    slot = first + tl.arange(0, BM)
    token, real, block = slot_tokens(
        slot, m_ptr, query_tokens, QM, QN,
        QG0, QG1, QG2, QB0, QB1, QB2, False, BM, WIDE,
    )  # fmt: skip
    q0 = load_part(q_ptr, q_stride_n, token, real, 0, D, BD)
    q0 = turned_features(q0, rope_ptr, token, real, feature_eps, 0, D, BD, ROPE, DOT)
    g0 = load_part(grad_ptr, grad_stride_n, token, real, 0, DV, BV)
    dphi0 = tl.zeros((BM, BD), dtype=tl.float32)
    phi_ptr += line.to(tl.int64) * (QM * QN * D)
    store_part(q0, phi_ptr, D, slot, real, 0, D, BD)
    if TD:
        q1 = load_part(q_ptr, q_stride_n, token, real, BD, D, TD)
        q1 = turned_features(q1, rope_ptr, token, real, feature_eps, BD, D, TD, ROPE, DOT)
        store_part(q1, phi_ptr, D, slot, real, BD, D, TD)
        dphi1 = tl.zeros((BM, TD), dtype=tl.float32)
    if TV:
        g1 = load_part(grad_ptr, grad_stride_n, token, real, BV, DV, TV)
    if DIVIDE:
        rows = line.to(tl.int64) * (QM * QN) + slot
        inverse = 1.0 / tl.load(den_ptr + rows, mask=real, other=1.0)
        out_ptr += (batch * query_tokens * heads + head) * DV
        delta = row_dots(g0, load_part(out_ptr, heads * DV, token, real, 0, DV, BV))
        if TV:
            delta += row_dots(g1, load_part(out_ptr, heads * DV, token, real, BV, DV, TV))
        delta = delta * inverse
        tl.store(delta_ptr + rows, delta, mask=real)
        tl.store(inverse_ptr + rows, inverse, mask=real)
    runs = KM * KN // RUN
    query_runs = QM * QN // QUERY_RUN
    run = first // QUERY_RUN + tl.arange(0, BM // QUERY_RUN)
    dm_ptr += line.to(tl.int64) * query_runs * runs
    for start in range(0, KM * KN, BN):
        key, key_real, _ = slot_tokens(
            start + tl.arange(0, BN), m_ptr, key_tokens, KM, KN,
            KG0, KG1, KG2, KB0, KB1, KB2, False, BN, WIDE,
        )  # fmt: skip
        k0 = load_part(k_ptr, k_stride_n, key, key_real, 0, D, BD)
        if TD:
            k1 = load_part(k_ptr, k_stride_n, key, key_real, BD, D, TD)
        v0 = load_part(v_ptr, v_stride_n, key, key_real, 0, DV, BV)
        if TV:
            v1 = load_part(v_ptr, v_stride_n, key, key_real, BV, DV, TV)
        weight = coefficients(
            m_ptr, block, real, m_stride_row, start, m_stride_column, key_real, KM, KN, BN, RUN
        )
        k0 = turned_features(k0, key_rope_ptr, key, key_real, feature_eps, 0, D, BD, ROPE, DOT)
        if TD:
            k1 = turned_features(k1, key_rope_ptr, key, key_real, feature_eps, BD, D, TD, ROPE, DOT)
        dp = dot(g0, tl.trans(v0), tl.zeros((BM, BN), dtype=tl.float32), DOT)
        if TV:
            dp = dot(g1, tl.trans(v1), dp, DOT)
        score = dot(q0, tl.trans(k0), tl.zeros((BM, BN), dtype=tl.float32), DOT)
        if TD:
            score = dot(q1, tl.trans(k1), score, DOT)
        if DIVIDE:  # after the product, so that the gradient goes into it as it lies in memory
            dp = dp * inverse[:, None] - delta[:, None]
        ds = operand(weigh(dp, weight, BM, BN, RUN), DOT)
        dphi0 = dot(ds, k0, dphi0, DOT)
        if TD:
            dphi1 = dot(ds, k1, dphi1, DOT)
        # Rows and columns beyond the end fall into runs of their own, which are not stored.
        dm = run_sums(dp * score, QUERY_RUN, RUN, DOT)
        column = start // RUN + tl.arange(0, BN // RUN)
        tl.store(
            dm_ptr + run[:, None] * runs + column[None, :],
            dm,
            mask=(run < query_runs)[:, None] & (column < runs)[None, :],
        )
    dq_ptr += (batch * query_tokens * heads + head) * D
    dq = feature_gradient(dphi0, q_ptr, q_stride_n, rope_ptr, token, real, 0, D, BD, ROPE)
    store_part(dq, dq_ptr, heads * D, token, real, 0, D, BD)
    if TD:
        dq = feature_gradient(dphi1, q_ptr, q_stride_n, rope_ptr, token, real, BD, D, TD, ROPE)
        store_part(dq, dq_ptr, heads * D, token, real, BD, D, TD)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def dual_key_kernel(
    phi_ptr, k_ptr, v_ptr, m_ptr, key_rope_ptr, grad_ptr, delta_ptr, inverse_ptr, dk_ptr, dv_ptr,
    k_stride_b, k_stride_n, k_stride_h, v_stride_b, v_stride_n, v_stride_h,
    grad_stride_b, grad_stride_n, grad_stride_h, m_stride_h, m_stride_row, m_stride_column,
    heads, query_tokens, key_tokens, feature_eps,
    QM: tl.constexpr, QN: tl.constexpr, QG0: tl.constexpr, QG1: tl.constexpr, QG2: tl.constexpr,
    QB0: tl.constexpr, QB1: tl.constexpr, QB2: tl.constexpr,
    KM: tl.constexpr, KN: tl.constexpr, KG0: tl.constexpr, KG1: tl.constexpr, KG2: tl.constexpr,
    KB0: tl.constexpr, KB1: tl.constexpr, KB2: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, TD: tl.constexpr, BV: tl.constexpr, TV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, QUERY_RUN: tl.constexpr,
    ROPE: tl.constexpr, DIVIDE: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """dk (B, Nk, H, D), dv (B, Nk, H, Dv). Program (batch and head, tile of BM keys fastest), BN queries at a time."""
    k_stride_b, k_stride_n, k_stride_h = k_stride_b * STEP, k_stride_n * STEP, k_stride_h * STEP
    v_stride_b, v_stride_n, v_stride_h = v_stride_b * STEP, v_stride_n * STEP, v_stride_h * STEP
    grad_stride_b, grad_stride_n, grad_stride_h = (
        grad_stride_b * STEP,
        grad_stride_n * STEP,
        grad_stride_h * STEP,
    )
    line = tl.program_id(0) // tl.cdiv(KM * KN, BM)
    tile = tl.program_id(0) % tl.cdiv(KM * KN, BM)
    batch = (line // heads).to(tl.int64)
    head = (line % heads).to(tl.int64)
    phi_ptr += line.to(tl.int64) * (QM * QN * D)
    k_ptr += batch * k_stride_b + head * k_stride_h
    v_ptr += batch * v_stride_b + head * v_stride_h
    grad_ptr += batch * grad_stride_b + head * grad_stride_h
    m_ptr += head * m_stride_h
    key, key_real, block = slot_tokens(
        tile * BM + tl.arange(0, BM), m_ptr, key_tokens, KM, KN,
        KG0, KG1, KG2, KB0, KB1, KB2, False, BM, WIDE,
    )  # fmt: skip
    k0 = load_part(k_ptr, k_stride_n, key, key_real, 0, D, BD)
    k0 = turned_features(k0, key_rope_ptr, key, key_real, feature_eps, 0, D, BD, ROPE, DOT)
    v0 = load_part(v_ptr, v_stride_n, key, key_real, 0, DV, BV)
    dphi0 = tl.zeros((BM, BD), dtype=tl.float32)
    dv0 = tl.zeros((BM, BV), dtype=tl.float32)
    if TD:
        k1 = load_part(k_ptr, k_stride_n, key, key_real, BD, D, TD)
        k1 = turned_features(k1, key_rope_ptr, key, key_real, feature_eps, BD, D, TD, ROPE, DOT)
        dphi1 = tl.zeros((BM, TD), dtype=tl.float32)
    if TV:
        v1 = load_part(v_ptr, v_stride_n, key, key_real, BV, DV, TV)
        dv1 = tl.zeros((BM, TV), dtype=tl.float32)
    for start in range(0, QM * QN, BN):
        slot = start + tl.arange(0, BN)
        token, real, _ = slot_tokens(
            slot, m_ptr, query_tokens, QM, QN,
            QG0, QG1, QG2, QB0, QB1, QB2, False, BN, WIDE,
        )  # fmt: skip
        q0 = load_part(phi_ptr, D, slot, real, 0, D, BD)
        g0 = load_part(grad_ptr, grad_stride_n, token, real, 0, DV, BV)
        if TV:
            g1 = load_part(grad_ptr, grad_stride_n, token, real, BV, DV, TV)
        weight = coefficients(
            m_ptr, block, key_real, m_stride_column, start, m_stride_row, real, QM, QN, BN, QUERY_RUN
        )
        if TD:
            q1 = load_part(phi_ptr, D, slot, real, BD, D, TD)
        if DIVIDE:
            rows = line.to(tl.int64) * (QM * QN) + slot
            delta = tl.load(delta_ptr + rows, mask=real, other=0.0)
            inverse = tl.load(inverse_ptr + rows, mask=real, other=0.0)
        dp = dot(v0, tl.trans(g0), tl.zeros((BM, BN), dtype=tl.float32), DOT)
        if TV:
            dp = dot(v1, tl.trans(g1), dp, DOT)
        score = dot(k0, tl.trans(q0), tl.zeros((BM, BN), dtype=tl.float32), DOT)
        if TD:
            score = dot(k1, tl.trans(q1), score, DOT)
        if DIVIDE:  # after the products, so that the gradient goes into them as it lies in memory
            dp = dp * inverse[None, :] - delta[None, :]
            score = score * inverse[None, :]
        p = operand(weigh(score, weight, BM, BN, QUERY_RUN), DOT)
        ds = operand(weigh(dp, weight, BM, BN, QUERY_RUN), DOT)
        dv0 = dot(p, g0, dv0, DOT)
        dphi0 = dot(ds, q0, dphi0, DOT)
        # A last product that is subtracted, not accumulated, is waited for, and the others with it. With products of
        # two widths under way into the next step, ptxas 12.8 waits for every single instruction (its note C7514).
        if TV:
            if TD:
                dv1 = dot(p, g1, dv1, DOT)
            else:
                dv1 -= dot(p, g1, tl.zeros((BM, TV), dtype=tl.float32), DOT)
        if TD:
            dphi1 -= dot(ds, q1, tl.zeros((BM, TD), dtype=tl.float32), DOT)
    dk_ptr += (batch * key_tokens * heads + head) * D
    dv_ptr += (batch * key_tokens * heads + head) * DV
    dk = feature_gradient(dphi0, k_ptr, k_stride_n, key_rope_ptr, key, key_real, 0, D, BD, ROPE)
    store_part(dk, dk_ptr, heads * D, key, key_real, 0, D, BD)
    store_part(dv0, dv_ptr, heads * DV, key, key_real, 0, DV, BV)
    if TD:
        dk = feature_gradient(-dphi1, k_ptr, k_stride_n, key_rope_ptr, key, key_real, BD, D, TD, ROPE)
        store_part(dk, dk_ptr, heads * D, key, key_real, BD, D, TD)
    if TV:
        store_part(dv1 if TD else -dv1, dv_ptr, heads * DV, key, key_real, BV, DV, TV)
