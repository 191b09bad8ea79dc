"""The three steps of the Triton kernels in plain torch, for a GPU that can launch no configuration of a kernel.

Same arguments and results as in `triton_launch`; not differentiable through autograd, the backward pass is spelled out.
"""

from __future__ import annotations

import torch

from .eager import eager_core, features, from_blocks, mask_padding, rotate, to_blocks
from .partition import Partition

__all__ = ["dual", "mix", "pull_back", "read_out", "summarise"]


def summarise(x, y, part: Partition, rope, feature_eps: float, *, mass: bool, rows=None) -> torch.Tensor:
    phi = mask_padding(features(x, part, feature_eps, torch.float32), part)
    values = to_blocks(y, part).float()
    turned = rotate(phi, rope, part)
    if rows is not None:
        scale, weight = (to_blocks(row[..., None], part) for row in rows)
        values, phi = values * scale, phi * weight
    summary = (turned.transpose(-1, -2) @ values).flatten(-2)
    return torch.cat((summary, phi.sum(dim=-2)), dim=-1) if mass else summary


def mix(matrix: torch.Tensor, states: torch.Tensor, chunks: int) -> torch.Tensor:
    if chunks > 1:
        matrix = matrix.repeat_interleave(chunks, dim=-1)
    return torch.matmul(matrix, states.float()).to(states.dtype)


def _split(state: torch.Tensor, dim: int, value_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    summary = state[..., : dim * value_dim].unflatten(-1, (dim, value_dim))
    return summary, state[..., dim * value_dim :, None].transpose(-1, -2)  # (B, H, M, D, Dv), (B, H, M, 1, D)


def read_out(
    x, state, value_dim: int, part: Partition, rope, feature_eps: float, *, divide: bool, denominator_eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    phi = features(x, part, feature_eps, torch.float32)
    summary, mass = _split(state, x.shape[-1], value_dim)
    out = rotate(phi, rope, part) @ summary
    if divide:
        out = out / ((phi * mass).sum(dim=-1, keepdim=True) + denominator_eps)
    return from_blocks(out, part).to(out_dtype)


def pull_back(
    x, grad, state, part: Partition, rope, feature_eps: float, *, role: str, denominator_eps: float = 0.0
):
    summary, mass = _split(state, x.shape[-1], grad.shape[-1])
    dphi = to_blocks(grad, part).float() @ summary.transpose(-1, -2)
    inverse = dden = None
    if role == "divide":
        phi = features(x, part, feature_eps, torch.float32)
        inverse = 1.0 / ((phi * mass).sum(dim=-1, keepdim=True) + denominator_eps)
        dden = -(rotate(phi, rope, part) * dphi).sum(dim=-1, keepdim=True) * inverse * inverse
        dphi = dphi * inverse
    if rope is not None:
        dphi = rotate(dphi, (rope[0], -rope[1]), part)
    if role == "divide":
        dphi = dphi + dden * mass
    elif role == "add_mass":
        dphi = dphi + mass
    dx = from_blocks(torch.where(to_blocks(x, part) > 0, dphi, 0.0), part).to(x.dtype)
    rows = None if inverse is None else tuple(from_blocks(row, part)[..., 0] for row in (inverse, dden))
    return dx, rows


def dual(
    q, k, v, mixing, query: Partition, key: Partition, rope, key_rope, feature_eps: float, denominator_eps: float,
    divide: bool, out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out and the denominators, as the dual form's forward kernel returns them."""
    out = eager_core(
        q, k, v, mixing, query, key, rope=rope, key_rope=key_rope, feature_eps=feature_eps,
        normalizer="paper" if divide else "none", denominator_eps=denominator_eps, out_dtype=out_dtype,
    )  # fmt: skip
    if not divide:
        return out, q.new_empty(q.shape[0], q.shape[2], 0, dtype=torch.float32)
    mass = mixing @ mask_padding(features(k, key, feature_eps, torch.float32), key).sum(
        dim=-2
    )  # (B, H, M, D)
    den = (features(q, query, feature_eps, torch.float32) * mass[..., None, :]).sum(dim=-1)
    return out, den.flatten(2) + denominator_eps
