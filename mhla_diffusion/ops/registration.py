"""The Triton path as `torch.library` custom operators, so that compile, export and autograd see opaque ops.

`mhla_diffusion::mhla_forward` returns the output and the block states, which the backward op reuses. The "official"
denominator is computed in plain torch around the kernels: it serves weights trained with it, not speed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .eager import features, from_blocks, mask_padding
from .partition import Partition

__all__ = ["mhla_backward", "mhla_forward", "triton_core"]


def _part(table: Tensor, tokens: int, trusted: bool) -> Partition:
    blocks, size = table.shape
    return Partition(table, blocks, size, tokens, None, None, table.numel() == tokens, trusted)


def _pair(cos: Tensor | None, sin: Tensor | None):
    return None if cos is None else (cos, sin)


def _mix(matrix: Tensor, states: Tensor) -> Tensor:
    """(Mq, Mk), (H, Mq, Mk) or (B, H, Mq, Mk) times (B, H, Mk, K), contiguous.

    Spelled as bmm: matmul may fold the states into a matrix, by a transposed copy, when `matrix` needs a gradient.
    """
    batch, heads, blocks, size = states.shape
    matrix = matrix.expand(batch, heads, *matrix.shape[-2:]).reshape(batch * heads, -1, blocks)
    # Autocast would round the coefficients to half precision.
    with torch.autocast(device_type=states.device.type, enabled=False):
        return torch.bmm(matrix, states.reshape(batch * heads, blocks, size)).view(batch, heads, -1, size)


@torch.library.custom_op("mhla_diffusion::mhla_forward", mutates_args=())
def mhla_forward(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, query_table: Tensor, key_table: Tensor,
    cos: Tensor | None, sin: Tensor | None, key_cos: Tensor | None, key_sin: Tensor | None,
    feature_eps: float, denominator_eps: float, divide: bool, trusted: bool, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (B, N, H, Dv) in out_dtype, states (B, H, Mk, D * Dv [+ D]) float32. mixing is float32."""
    from .triton_launch import read_out, summarise

    query, key = _part(query_table, q.shape[1], trusted), _part(key_table, k.shape[1], trusted)
    state = summarise(k, v, key, _pair(key_cos, key_sin), feature_eps, mass=divide)
    out = read_out(
        q, _mix(mixing, state), v.shape[-1], query, _pair(cos, sin), feature_eps,
        divide=divide, denominator_eps=denominator_eps, out_dtype=out_dtype,
    )  # fmt: skip
    return out, state


@mhla_forward.register_fake
def _(
    q, k, v, mixing, query_table, key_table, cos, sin, key_cos, key_sin,
    feature_eps, denominator_eps, divide, trusted, out_dtype,
):  # fmt: skip
    batch, tokens, heads, dim = q.shape
    size = dim * v.shape[-1] + (dim if divide else 0)
    out = q.new_empty(batch, tokens, heads, v.shape[-1], dtype=out_dtype)
    return out, q.new_empty(batch, heads, key_table.shape[0], size, dtype=torch.float32)


@torch.library.custom_op("mhla_diffusion::mhla_backward", mutates_args=())
def mhla_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, state: Tensor,
    query_table: Tensor, key_table: Tensor,
    cos: Tensor | None, sin: Tensor | None, key_cos: Tensor | None, key_sin: Tensor | None,
    feature_eps: float, denominator_eps: float, divide: bool, trusted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and mixing."""
    from .triton_launch import pull_back, read_out, summarise

    query, key = _part(query_table, q.shape[1], trusted), _part(key_table, k.shape[1], trusted)
    rope, key_rope = _pair(cos, sin), _pair(key_cos, key_sin)
    role, key_role = ("divide", "add_mass") if divide else ("plain", "plain")
    mixed = _mix(mixing, state)
    dq, rows = pull_back(q, grad, mixed, query, rope, feature_eps, role=role, denominator_eps=denominator_eps)
    dmixed = summarise(q, grad, query, rope, feature_eps, mass=divide, rows=rows)  # d S~, d z~
    dmixing = _mix(dmixed, state.transpose(-1, -2)).sum(dim=0)  # d m_ij = <d S~_i, S_j> + <d z~_i, z_j>
    if mixing.ndim == 2:
        dmixing = dmixing.sum(dim=0)
    dstate = _mix(mixing.transpose(-1, -2), dmixed)
    dk, _ = pull_back(k, v, dstate, key, key_rope, feature_eps, role=key_role)
    dv = read_out(
        k,
        dstate,
        v.shape[-1],
        key,
        key_rope,
        feature_eps,
        divide=False,
        denominator_eps=0.0,
        out_dtype=v.dtype,
    )
    return dq, dk, dv, dmixing


@mhla_backward.register_fake
def _(
    grad, q, k, v, mixing, state, query_table, key_table, cos, sin, key_cos, key_sin,
    feature_eps, denominator_eps, divide, trusted,
):  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), mixing.new_empty(mixing.shape)


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, mixing, *rest = inputs
    tensors, options = rest[:6], rest[6:10]
    ctx.save_for_backward(q, k, v, mixing, output[1], *tensors)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, grad_state):
    nothing = (None,) * 11
    if grad is None:
        return (None,) * 4 + nothing
    return *mhla_backward(grad, *ctx.saved_tensors, *ctx.options), *nothing


mhla_forward.register_autograd(_backward, setup_context=_setup_context)


def triton_core(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    query: Partition,
    key: Partition,
    *,
    rope=None,
    key_rope=None,
    feature_eps: float = 1e-6,
    normalizer: str = "paper",
    denominator_eps: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`eager_core` on the Triton kernels: same arguments, same result, same gradients."""
    mixing = mixing.float()
    out_dtype = q.dtype if out_dtype is None else out_dtype
    cos, sin = rope or (None, None)
    key_cos, key_sin = key_rope or (None, None)
    official = normalizer == "official"
    out, _ = mhla_forward(
        q, k, v, mixing, query.with_table(q.device), key.with_table(q.device), cos, sin, key_cos, key_sin,
        feature_eps, denominator_eps, normalizer == "paper", query.trusted and key.trusted,
        torch.float32 if official else out_dtype,
    )  # fmt: skip
    if not official:
        return out
    with torch.autocast(device_type=q.device.type, enabled=False):
        phi_q = features(q, query, feature_eps, torch.float32)
        masses = mask_padding(features(k, key, feature_eps, torch.float32), key).sum(dim=-2)  # (B, H, M, D)
        products = (phi_q @ masses[..., None])[..., 0]  # (B, H, M, n)
        denominator = from_blocks((mixing @ products)[..., None], query) + denominator_eps
    return (out / denominator).to(out_dtype)
