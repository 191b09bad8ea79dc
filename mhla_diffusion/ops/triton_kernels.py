"""Three Triton kernels that serve the forward and the backward pass of MHLA.

    summarise   S_b = sum_t phi(x_t) y_t^T, z_b = sum_t phi(x_t)       forward of keys; gradient of the mixed states
    read_out    y_t = phi(x_t) S_b [/ phi(x_t) . z_b]                  forward of queries; gradient of the values
    pull_back   gradient of x_t through phi, rotation and denominator  gradients of the queries and of the keys

One program owns a block of tokens of one head (and a tile of the value channels), so nothing is accumulated by atomics
and results are deterministic. Tokens come from the block table; ids outside [0, N) are padding, masked *after* the
feature map because phi(0) = eps. A state row holds S (D x Dv), then z (D): `(B, H, M, D * Dv [+ D])`, float32.

DOT says how dot products are taken: "ieee" full float32, "tf32" for float16 inputs (its range never overflows),
"bf16" with float32 accumulation. States keep more than bf16's 8 bits: they enter as a high and a low bf16 part.

A program takes a run of token tiles. Where a block is one tile the trip count is a constant 1: no loop, no pipeline.
Longer runs are pipelined (num_stages), the table's ids and the rows they point at. Rows of padding are computed as they
come, a division by zero among them, and never stored: patching them by `real` after the dot product as well makes
Triton 3.6 place a copy of that mask behind its first use in the pipelined loop, and the kernel does not compile (3.8
compiles it). `tests/ops/compile_kernels.py` checks such things without a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["pull_back_kernel", "read_out_kernel", "summarise_kernel"]


# Sizes that change from call to call: specialising on them would compile again for each token grid. No access is wider
# for knowing their alignment, channels alone are contiguous.
_SIZES = ["num_tokens", "num_blocks", "block_size", "heads"]


@triton.jit
def _slots(table_ptr, block, start, block_size, num_tokens, BN: tl.constexpr):
    """Token ids (int64) of BN slots of a block and whether each is a real token."""
    slot = start + tl.arange(0, BN)
    token = tl.load(table_ptr + block.to(tl.int64) * block_size + slot, mask=slot < block_size, other=-1)
    token = token.to(tl.int64)
    real = (token >= 0) & (token < num_tokens)
    return tl.where(real, token, 0), real


@triton.jit
def _features(x, inside, feature_eps):
    # Written so that NaN stays NaN: a non-finite activation has to surface, not turn into 0.
    return tl.where(inside, tl.where(x < 0.0, 0.0, x) + feature_eps, 0.0)


@triton.jit
def _angles(cos_ptr, sin_ptr, token, real, D: tl.constexpr, BD: tl.constexpr):
    pair = tl.arange(0, BD // 2)
    inside = real[:, None] & (pair < D // 2)[None, :]
    offset = token[:, None] * (D // 2) + pair[None, :]
    return tl.load(cos_ptr + offset, mask=inside, other=0.0), tl.load(
        sin_ptr + offset, mask=inside, other=0.0
    )


@triton.jit
def _rotate(x, cos, sin, BN: tl.constexpr, BD: tl.constexpr):
    """Turn the channel pairs (0, 1), (2, 3), ...; the inverse turns by -sin."""
    even, odd = tl.split(tl.reshape(x, (BN, BD // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BN, BD))


@triton.jit
def _dot(a, b, DOT: tl.constexpr):
    if DOT == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    else:
        return tl.dot(a, b, input_precision=DOT)


@triton.jit
def _dot_state(a, state, DOT: tl.constexpr):
    if DOT == "bf16":
        a = a.to(tl.bfloat16)
        high = state.to(tl.bfloat16)
        low = (state - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(a, high, acc=tl.dot(a, low))
    else:
        return tl.dot(a, state, input_precision=DOT)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def summarise_kernel(
    x_ptr, y_ptr, table_ptr, cos_ptr, sin_ptr, y_scale_ptr, mass_weight_ptr, state_ptr,
    x_stride_b, x_stride_n, x_stride_h, y_stride_b, y_stride_n, y_stride_h,
    num_tokens, num_blocks, block_size, state_size, heads, feature_eps,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    ONE_TILE: tl.constexpr, HAS_ROPE: tl.constexpr, HAS_MASS: tl.constexpr, HAS_ROWS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (batch * head * block, value tile). x (B, N, H, D), y (B, N, H, Dv), row weights (B, N, H)."""
    row = tl.program_id(0)
    block = row % num_blocks
    batch = (row // num_blocks // heads).to(tl.int64)
    head = (row // num_blocks % heads).to(tl.int64)
    d = tl.arange(0, BD)
    e = tl.program_id(1) * BV + tl.arange(0, BV)
    x_ptr += batch * x_stride_b + head * x_stride_h
    y_ptr += batch * y_stride_b + head * y_stride_h

    summary = tl.zeros((BD, BV), dtype=tl.float32)
    mass = tl.zeros((BD,), dtype=tl.float32)
    for start in range(0, BN if ONE_TILE else block_size, BN):
        token, real = _slots(table_ptr, block, start, block_size, num_tokens, BN)
        inside = real[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + token[:, None] * x_stride_n + d[None, :], mask=inside, other=0.0).to(tl.float32)
        phi = _features(x, inside, feature_eps)
        within = real[:, None] & (e < DV)[None, :]
        y = tl.load(y_ptr + token[:, None] * y_stride_n + e[None, :], mask=within, other=0.0).to(tl.float32)
        if HAS_ROWS:
            rows = (batch * num_tokens + token) * heads + head
            y = y * tl.load(y_scale_ptr + rows, mask=real, other=0.0)[:, None]
            if HAS_MASS:
                weight = tl.load(mass_weight_ptr + rows, mask=real, other=0.0)
                mass += tl.sum(phi * weight[:, None], axis=0)
        elif HAS_MASS:
            mass += tl.sum(phi, axis=0)
        if HAS_ROPE:
            cos, sin = _angles(cos_ptr, sin_ptr, token, real, D, BD)
            phi = _rotate(phi, cos, sin, BN, BD)
        summary += _dot(tl.trans(phi), y, DOT)

    state_ptr += row.to(tl.int64) * state_size
    tl.store(state_ptr + d[:, None] * DV + e[None, :], summary, mask=(d < D)[:, None] & (e < DV)[None, :])
    if HAS_MASS:
        if tl.program_id(1) == 0:
            tl.store(state_ptr + D * DV + d, mass, mask=d < D)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def read_out_kernel(
    x_ptr, table_ptr, cos_ptr, sin_ptr, state_ptr, out_ptr,
    x_stride_b, x_stride_n, x_stride_h,
    num_tokens, num_blocks, block_size, state_size, heads, feature_eps, denominator_eps,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr,
    HAS_ROPE: tl.constexpr, DIVIDE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (batch * head * block, value tile, run of TILES token tiles). out (B, N, H, Dv), contiguous."""
    row = tl.program_id(0)
    block = row % num_blocks
    batch = (row // num_blocks // heads).to(tl.int64)
    head = (row // num_blocks % heads).to(tl.int64)
    d = tl.arange(0, BD)
    e = tl.program_id(1) * BV + tl.arange(0, BV)
    x_ptr += batch * x_stride_b + head * x_stride_h
    state_ptr += row.to(tl.int64) * state_size
    state = tl.load(
        state_ptr + d[:, None] * DV + e[None, :], mask=(d < D)[:, None] & (e < DV)[None, :], other=0.0
    )
    if DIVIDE:
        mass = tl.load(state_ptr + D * DV + d, mask=d < D, other=0.0)

    first = tl.program_id(2) * (TILES * BN)
    for tile in range(0, 1 if TILES == 1 else tl.minimum(TILES, tl.cdiv(block_size - first, BN))):
        token, real = _slots(table_ptr, block, first + tile * BN, block_size, num_tokens, BN)
        inside = real[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + token[:, None] * x_stride_n + d[None, :], mask=inside, other=0.0).to(tl.float32)
        phi = _features(x, inside, feature_eps)
        turned = phi
        if HAS_ROPE:
            cos, sin = _angles(cos_ptr, sin_ptr, token, real, D, BD)
            turned = _rotate(phi, cos, sin, BN, BD)
        out = _dot_state(turned, state, DOT)
        if DIVIDE:
            denominator = tl.sum(phi * mass[None, :], axis=1) + denominator_eps
            out = out / denominator[:, None]
        offset = ((batch * num_tokens + token) * heads + head)[:, None] * DV + e[None, :]
        tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=real[:, None] & (e < DV)[None, :])


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def pull_back_kernel(
    x_ptr, grad_ptr, table_ptr, cos_ptr, sin_ptr, state_ptr, dx_ptr, y_scale_ptr, mass_weight_ptr,
    x_stride_b, x_stride_n, x_stride_h, grad_stride_b, grad_stride_n, grad_stride_h,
    num_tokens, num_blocks, block_size, state_size, heads, feature_eps, denominator_eps,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr,
    HAS_ROPE: tl.constexpr, DIVIDE: tl.constexpr, ADD_MASS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (batch * head * block, run of TILES token tiles): dx (B, N, H, D), contiguous, from grad (B, N, H, Dv).

    With g = grad S^T, the gradient of the turned features: without a denominator d phi = turn_back(g).
    DIVIDE (queries): den = phi . z + eps, d den = -(turned . g) / den^2, d phi = turn_back(g / den) + d den z;
    1 / den and d den are stored per token, they are the row weights with which `summarise` takes the gradients of
    S and z. ADD_MASS (keys): z's own gradient is added to every key of the block.
    """
    row = tl.program_id(0)
    block = row % num_blocks
    batch = (row // num_blocks // heads).to(tl.int64)
    head = (row // num_blocks % heads).to(tl.int64)
    d = tl.arange(0, BD)
    x_ptr += batch * x_stride_b + head * x_stride_h
    grad_ptr += batch * grad_stride_b + head * grad_stride_h
    state_ptr += row.to(tl.int64) * state_size
    ONE_STATE: tl.constexpr = DV <= BV
    e = tl.arange(0, BV)
    if ONE_STATE:
        state = tl.load(
            state_ptr + d[:, None] * DV + e[None, :], mask=(d < D)[:, None] & (e < DV)[None, :], other=0.0
        )
    if DIVIDE or ADD_MASS:
        mass = tl.load(state_ptr + D * DV + d, mask=d < D, other=0.0)

    first = tl.program_id(1) * (TILES * BN)
    for tile in range(0, 1 if TILES == 1 else tl.minimum(TILES, tl.cdiv(block_size - first, BN))):
        token, real = _slots(table_ptr, block, first + tile * BN, block_size, num_tokens, BN)
        inside = real[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + token[:, None] * x_stride_n + d[None, :], mask=inside, other=0.0).to(tl.float32)
        if HAS_ROPE:
            cos, sin = _angles(cos_ptr, sin_ptr, token, real, D, BD)
        dphi = tl.zeros((BN, BD), dtype=tl.float32)
        for channel in range(0, DV, BV):
            within = real[:, None] & (channel + e < DV)[None, :]
            offset = token[:, None] * grad_stride_n + (channel + e)[None, :]
            grad = tl.load(grad_ptr + offset, mask=within, other=0.0).to(tl.float32)
            if not ONE_STATE:
                state = tl.load(
                    state_ptr + d[:, None] * DV + (channel + e)[None, :],
                    mask=(d < D)[:, None] & (channel + e < DV)[None, :],
                    other=0.0,
                )
            dphi += _dot_state(grad, tl.trans(state), DOT)
        if DIVIDE:
            phi = _features(x, inside, feature_eps)
            turned = phi
            if HAS_ROPE:
                turned = _rotate(phi, cos, sin, BN, BD)
            inverse = 1.0 / (tl.sum(phi * mass[None, :], axis=1) + denominator_eps)
            dden = -tl.sum(turned * dphi, axis=1) * inverse * inverse
            rows = (batch * num_tokens + token) * heads + head
            tl.store(y_scale_ptr + rows, inverse, mask=real)
            tl.store(mass_weight_ptr + rows, dden, mask=real)
            dphi = dphi * inverse[:, None]
        if HAS_ROPE:
            dphi = _rotate(dphi, cos, -sin, BN, BD)
        if DIVIDE:
            dphi += dden[:, None] * mass[None, :]
        if ADD_MASS:
            dphi += mass[None, :]
        dx = tl.where(x > 0.0, dphi, 0.0)
        offset = ((batch * num_tokens + token) * heads + head)[:, None] * D + d[None, :]
        tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=inside)
