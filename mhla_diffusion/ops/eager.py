"""MHLA in plain torch: batched matmuls over blocks, no N x N matrix, no Python loop over blocks, no host sync.

Everything is computed in float32 (float64 for float64 inputs), so half precision neither overflows nor loses the
denominator. Inside, blocks are laid out as `(B, H, M, n, D)`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .partition import Partition

__all__ = [
    "eager_core",
    "epilogue",
    "from_blocks",
    "mix_states",
    "normalise",
    "read_out",
    "summarise",
    "to_blocks",
]


def slot_ids(part: Partition, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token id of every slot `(M, n)` and whether it is a real token; anything outside [0, N) counts as padding."""
    table = part.with_table(device).long()
    valid = (table >= 0) & (table < part.num_tokens)
    return table, valid


def to_blocks(x: torch.Tensor, part: Partition) -> torch.Tensor:
    """`(B, N, H, D)` -> contiguous `(B, H, M, n, D)`. Padding slots repeat token 0 and must be masked."""
    batch, _, heads, dim = x.shape
    if part.even:
        axes = len(part.grid)
        split = [s for g, b in zip(part.grid, part.block_grid, strict=True) for s in (b, g // b)]
        x = x.reshape(batch, *split, heads, dim)
        blocks, slots = [1 + 2 * a for a in range(axes)], [2 + 2 * a for a in range(axes)]
        x = x.permute(0, 2 * axes + 1, *blocks, *slots, 2 * axes + 2)
    else:
        ids, valid = slot_ids(part, x.device)
        if part.padded:
            ids = torch.where(valid, ids, 0)
        x = x.index_select(1, ids.flatten()).transpose(1, 2)
    return x.contiguous().view(batch, heads, part.num_blocks, part.block_size, dim)


def from_blocks(y: torch.Tensor, part: Partition) -> torch.Tensor:
    """`(B, H, M, n, D)` -> contiguous `(B, N, H, D)`; padding slots are dropped."""
    batch, heads, _, _, dim = y.shape
    if part.even:
        axes = len(part.grid)
        sizes = [g // b for g, b in zip(part.grid, part.block_grid, strict=True)]
        y = y.view(batch, heads, *part.block_grid, *sizes, dim)
        order = [a for axis in range(axes) for a in (2 + axis, 2 + axes + axis)]
        y = y.permute(0, *order, 1, 2 * axes + 2).contiguous()
        return y.view(batch, part.num_tokens, heads, dim)
    rows = y.permute(0, 2, 3, 1, 4).reshape(batch, part.num_blocks * part.block_size, heads, dim)
    ids, valid = slot_ids(part, y.device)
    if not part.padded:
        return torch.empty_like(rows).index_copy(1, ids.flatten(), rows)
    # One spare row takes what the padding slots computed.
    ids = torch.where(valid, ids, part.num_tokens).flatten()
    full = rows.new_zeros(batch, part.num_tokens + 1, heads, dim).index_copy(1, ids, rows)
    return full[:, : part.num_tokens].contiguous()


def features(x: torch.Tensor, part: Partition, feature_eps: float, dtype: torch.dtype) -> torch.Tensor:
    """phi of the blocked tokens."""
    # The same values and gradient as relu, but relu keeps its result for backward, so eps could not be added in place.
    phi = F.threshold(to_blocks(x, part).to(dtype), 0.0, 0.0)
    return phi.add_(feature_eps) if feature_eps else phi


def mask_padding(phi: torch.Tensor, part: Partition) -> torch.Tensor:
    """Zero at padding, for keys: masked after the feature map, because phi(0) = eps. Queries need no mask: their
    padding slots are dropped at the end, and a zero there would be 0/0 with a NaN gradient."""
    return phi * slot_ids(part, phi.device)[1][..., None] if part.padded else phi


def rotate(phi: torch.Tensor, rope, part: Partition) -> torch.Tensor:
    """Turn the interleaved pairs of `phi` (B, H, M, n, D) by each token's angles."""
    if rope is None:
        return phi
    cos, sin = (to_blocks(angle.to(phi.dtype)[None, :, None, :], part) for angle in rope)  # (1, 1, M, n, D/2)
    even, odd = phi[..., 0::2], phi[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def summarise(turned: torch.Tensor, phi: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    """States `(B, H, M, D * Dv [+ D])`: each block's summary S = sum phi v^T, then its mass z = sum phi."""
    summary = (turned.transpose(-1, -2) @ value).flatten(-2)
    return summary if phi is None else torch.cat((summary, phi.sum(dim=-2)), dim=-1)


def mix_states(mixing: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """One GEMM over summaries and masses together: (Mq, Mk) or (H, Mq, Mk) times (B, H, Mk, K)."""
    return torch.matmul(mixing, state)


def read_out(turned: torch.Tensor, mixed: torch.Tensor, value_dim: int) -> torch.Tensor:
    """`(B, H, M, n, Dv)`: the queries' features times their block's mixed summary."""
    dim = turned.shape[-1]
    return turned @ mixed[..., : dim * value_dim].unflatten(-1, (dim, value_dim))


def normalise(x: torch.Tensor, norm: tuple[torch.Tensor, float] | None) -> torch.Tensor:
    """RMSNorm of x (B, N, H, D) in float32 at least: over a head for a weight (D,), over all heads for (H, D)."""
    if norm is None:
        return x
    weight, eps = norm
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    over = -1 if weight.ndim == 1 else (-2, -1)
    return y * torch.rsqrt(y.square().mean(dim=over, keepdim=True) + eps) * weight.to(y.dtype)


def epilogue(out: torch.Tensor, norm_weight, norm_eps: float, gate, gate_bias, local) -> torch.Tensor:
    """Per-head RMSNorm, gate, local branch: in float32, before the one rounding to the model's dtype."""
    if norm_weight is not None:
        out = (
            out * torch.rsqrt(out.square().mean(dim=-1, keepdim=True) + norm_eps) * norm_weight.to(out.dtype)
        )
    if gate is not None:
        gate = gate.to(out.dtype)
        out = out * (gate if gate_bias is None else F.silu(gate + gate_bias))
    if local is not None:
        out = out + local.to(out.dtype)
    return out


def eager_core(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mixing: torch.Tensor,
    query: Partition,
    key: Partition,
    *,
    rope=None,
    key_rope=None,
    feature_eps: float = 1e-6,
    normalizer: str = "paper",
    denominator_eps: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same function as `reference_core`; differentiable in q, k, v and mixing. Returns `out_dtype` (q's dtype)."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    value_dim = v.shape[-1]
    with torch.autocast(device_type=q.device.type, enabled=False):
        phi_q = features(q, query, feature_eps, dtype)
        phi_k = mask_padding(features(k, key, feature_eps, dtype), key)
        value = to_blocks(v, key).to(dtype)
        state = summarise(rotate(phi_k, key_rope, key), None if normalizer == "none" else phi_k, value)
        mixing = mixing.to(dtype)
        mixed = mix_states(mixing, state)
        out = read_out(rotate(phi_q, rope, query), mixed, value_dim)
        if normalizer != "none":
            masses = (mixed if normalizer == "paper" else state)[..., q.shape[-1] * value_dim :]
            # A product and a sum: a matrix-vector product per block is several times slower on CPUs.
            denominator = (phi_q * masses[..., None, :]).sum(dim=-1, keepdim=True)  # (B, H, M, n, 1)
            if normalizer == "official":
                denominator = torch.matmul(mixing, denominator[..., 0])[..., None]
            out = out / (denominator + denominator_eps)
        return from_blocks(out, query).to(q.dtype if out_dtype is None else out_dtype)
