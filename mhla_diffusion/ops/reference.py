"""The definition of multi-head linear attention over token blocks, written to be read.

Loops over blocks, any floating dtype. In float64 this is the truth every fast path is tested against.
MHLA, arXiv 2601.07832, Sec. 3: with phi(x) = relu(x) + eps, query block i and key blocks j,

    S_j = sum_{t in j} phi(k_t) v_t^T        z_j = sum_{t in j} phi(k_t)
    S~_i = sum_j m_ij S_j                    z~_i = sum_j m_ij z_j
    o_t = phi(q_t) S~_i / (phi(q_t) . z~_i)  for every token t of block i
"""

from __future__ import annotations

import torch

__all__ = ["reference_attention", "reference_core"]


def feature(x: torch.Tensor, feature_eps: float) -> torch.Tensor:
    return torch.relu(x) + feature_eps


def rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """Rotate the pairs (0, 1), (2, 3), ... of the last axis of `x` (B, N, H, D) by the angles of each token."""
    if rope is None:
        return x
    cos, sin = (part.to(x.dtype)[None, :, None, :] for part in rope)  # (1, N, 1, D/2)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def rms_norm(x: torch.Tensor, norm: tuple[torch.Tensor, float] | None) -> torch.Tensor:
    """Over each head for a weight (D,), over all heads together for (H, D)."""
    if norm is None:
        return x
    weight, eps = norm
    axes = (3,) if weight.ndim == 1 else (2, 3)
    return x / torch.sqrt((x * x).mean(dim=axes, keepdim=True) + eps) * weight.to(x.dtype)


def block_tokens(table: torch.Tensor) -> list[torch.Tensor]:
    return [row[row >= 0] for row in table.long()]


def reference_core(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mixing: torch.Tensor,
    query_table: torch.Tensor,
    key_table: torch.Tensor,
    *,
    rope=None,
    key_rope=None,
    feature_eps: float = 1e-6,
    normalizer: str = "paper",
    denominator_eps: float = 0.0,
) -> torch.Tensor:
    """`(B, N, H, Dv)` in the dtype of q, k and v, which is also the dtype of every sum.

    Shapes: q (B, N, H, D) · k (B, Nk, H, D) · v (B, Nk, H, Dv) · mixing (Mq, Mk) or (H, Mq, Mk) · tables (M, n_max).
    """
    features_q, features_k = feature(q, feature_eps), feature(k, feature_eps)
    # Positions turn the features, hence the numerator only: the mass of the keys must stay positive.
    turned_q, turned_k = rotate(features_q, rope), rotate(features_k, key_rope)
    heads = q.shape[2]
    coefficients = mixing.to(q.dtype).expand(heads, *mixing.shape[-2:])  # (H, Mq, Mk)
    query_blocks, key_blocks = block_tokens(query_table), block_tokens(key_table)

    summaries, masses = [], []
    for tokens in key_blocks:
        summaries.append(torch.einsum("bthd,bthe->bhde", turned_k[:, tokens], v[:, tokens]))  # S_j
        masses.append(features_k[:, tokens].sum(dim=1))  # z_j
    summaries, masses = torch.stack(summaries), torch.stack(masses)  # (Mk, B, H, D, Dv), (Mk, B, H, D)

    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    for i, tokens in enumerate(query_blocks):
        weights = coefficients[:, i]  # (H, Mk)
        summary = torch.einsum("hj,jbhde->bhde", weights, summaries)  # S~_i
        read = torch.einsum("bthd,bhde->bthe", turned_q[:, tokens], summary)
        if normalizer == "paper":
            mass = torch.einsum("hj,jbhd->bhd", weights, masses)  # z~_i
            denominator = torch.einsum("bthd,bhd->bth", features_q[:, tokens], mass)
            read = read / (denominator + denominator_eps)[..., None]
        elif normalizer == "official":
            # The released DiT code weighs the other blocks' queries at the same slot, not this token's query.
            same_slot = torch.stack([features_q[:, other] for other in query_blocks])  # (M, B, n, H, D)
            denominator = torch.einsum("hj,jbthd,jbhd->bth", weights, same_slot, masses)
            read = read / (denominator + denominator_eps)[..., None]
        out = out.index_copy(1, tokens, read)
    return out


def reference_attention(
    q, k, v, mixing, query_table, key_table, *, query_norm=None, key_norm=None, norm_weight=None, norm_eps=1e-6,
    gate=None, gate_bias=None, local=None, **core,
) -> torch.Tensor:  # fmt: skip
    """RMSNorm of q and k (weight, eps), `reference_core`, then per-head RMSNorm (norm_weight (Dv,)), * gate or
    * SiLU(gate + gate_bias), + local (both (B, N, H, Dv))."""
    q, k = rms_norm(q, query_norm), rms_norm(k, key_norm)
    out = reference_core(q, k, v, mixing, query_table, key_table, **core)
    if norm_weight is not None:
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + norm_eps) * norm_weight
    if gate is not None:
        out = out * (gate if gate_bias is None else (gate + gate_bias) * torch.sigmoid(gate + gate_bias))
    if local is not None:
        out = out + local
    return out
