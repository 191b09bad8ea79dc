"""The Triton path as `torch.library` custom operators, so that compile, export and autograd see opaque ops.

`mhla_diffusion::mhla_forward` returns the output and the block states, which the backward op reuses. The "official"
denominator is computed in plain torch around the kernels: it serves weights trained with it, not speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .eager import features, from_blocks, mask_padding
from .partition import Partition, layout_partition

__all__ = ["mhla_backward", "mhla_forward", "part_of", "triton_core"]


def part_of(table: Tensor | None, layout: Sequence[int] | None, tokens: int, trusted: bool) -> Partition:
    if layout is not None:
        return layout_partition(tuple(layout), tokens)
    blocks, size = table.shape
    return Partition(table, blocks, size, tokens, None, None, table.numel() == tokens, trusted)


def _pair(first, second):
    return None if first is None else (first, second)


@torch.library.custom_op("mhla_diffusion::mhla_forward", mutates_args=())
def mhla_forward(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, query_table: Tensor | None, key_table: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, key_cos: Tensor | None, key_sin: Tensor | None,
    feature_eps: float, denominator_eps: float, divide: bool, trusted: bool, out_dtype: torch.dtype,
    query_layout: Sequence[int] | None = None, key_layout: Sequence[int] | None = None,
    state_dtype: torch.dtype = torch.float32,
    query_norm: Tensor | None = None, query_norm_eps: float = 1e-6,
    key_norm: Tensor | None = None, key_norm_eps: float = 1e-6,
    norm_weight: Tensor | None = None, norm_eps: float = 1e-6, gate: Tensor | None = None,
    gate_bias: float | None = None, local: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (B, N, H, Dv) in out_dtype, states (B, H, rows, D * Dv [+ D]) in state_dtype. mixing is float32.

    The arguments from query_norm on are fused steps around the operator; they have no gradient here.
    """
    from .triton_launch import Epilogue, mix, read_out, summarise

    query = part_of(query_table, query_layout, q.shape[1], trusted)
    key = part_of(key_table, key_layout, k.shape[1], trusted)
    state = summarise(
        k, v, key, _pair(key_cos, key_sin), feature_eps,
        mass=divide, norm=_pair(key_norm, key_norm_eps), state_dtype=state_dtype,
    )  # fmt: skip
    out = read_out(
        q, mix(mixing, state, q, v.shape[-1]), v.shape[-1], query, _pair(cos, sin), feature_eps,
        divide=divide, mass=divide, denominator_eps=denominator_eps, out_dtype=out_dtype,
        norm=_pair(query_norm, query_norm_eps), after=Epilogue(norm_weight, norm_eps, gate, gate_bias, local),
    )  # fmt: skip
    return out, state


@mhla_forward.register_fake
def _(
    q, k, v, mixing, query_table, key_table, cos, sin, key_cos, key_sin,
    feature_eps, denominator_eps, divide, trusted, out_dtype, query_layout=None, key_layout=None,
    state_dtype=torch.float32, *fused, **named,
):  # fmt: skip
    from .triton_configs import chunk_count

    batch, tokens, heads, dim = q.shape
    key = part_of(key_table, key_layout, k.shape[1], trusted)
    rows = key.num_blocks * chunk_count(batch * heads * key.num_blocks, key.block_size)
    size = dim * v.shape[-1] + (dim if divide else 0)
    out = q.new_empty(batch, tokens, heads, v.shape[-1], dtype=out_dtype)
    return out, q.new_empty(batch, heads, rows, size, dtype=state_dtype)


@torch.library.custom_op("mhla_diffusion::mhla_backward", mutates_args=())
def mhla_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, state: Tensor,
    query_table: Tensor | None, key_table: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, key_cos: Tensor | None, key_sin: Tensor | None,
    feature_eps: float, denominator_eps: float, divide: bool, trusted: bool,
    query_layout: Sequence[int] | None = None, key_layout: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and mixing."""
    from .triton_launch import key_gradients, mix, mix_gradient, query_gradients

    query = part_of(query_table, query_layout, q.shape[1], trusted)
    key = part_of(key_table, key_layout, k.shape[1], trusted)
    value_dim = v.shape[-1]
    dq, dmixed = query_gradients(
        q, grad, mix(mixing, state, q, value_dim), query, _pair(cos, sin), feature_eps,
        mass=divide, denominator_eps=denominator_eps, state_dtype=state.dtype,
    )  # fmt: skip
    dmixing = mix_gradient(dmixed, state, mixing, q, value_dim)
    dstate = mix(mixing.transpose(-1, -2), dmixed, q, value_dim)
    dk, dv = key_gradients(k, v, dstate, key, _pair(key_cos, key_sin), feature_eps, mass=divide)
    return dq, dk, dv, dmixing


@mhla_backward.register_fake
def _(
    grad, q, k, v, mixing, state, query_table, key_table, cos, sin, key_cos, key_sin,
    feature_eps, denominator_eps, divide, trusted, query_layout=None, key_layout=None,
):  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), mixing.new_empty(mixing.shape)


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, mixing, *rest = inputs
    ctx.save_for_backward(q, k, v, mixing, output[1], *rest[:6])
    ctx.options = (*rest[6:10], *rest[11:13])
    ctx.inputs = len(inputs)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, grad_state):
    nothing = (None,) * (ctx.inputs - 4)
    if grad is None:
        return (None,) * ctx.inputs
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
    summary_dtype: torch.dtype | None = None,
    form: str = "auto",
    **fused,
) -> Tensor:
    """`eager_core` on the Triton kernels: same arguments, same result, same gradients.

    summary_dtype: of the kept block states; bfloat16 for bfloat16 inputs, else float32. form: see `dispatch`.
    fused: query_norm, key_norm, norm_weight, norm_eps, gate, gate_bias, local, where no gradient is wanted.
    """
    mixing = mixing.float()
    out_dtype = q.dtype if out_dtype is None else out_dtype
    if summary_dtype is None:
        summary_dtype = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    cos, sin = rope or (None, None)
    key_cos, key_sin = key_rope or (None, None)
    official = normalizer == "official"
    out, _ = mhla_forward(
        q, k, v, mixing, *_tables(query, key), cos, sin, key_cos, key_sin,
        feature_eps, denominator_eps, normalizer == "paper", query.trusted and key.trusted,
        torch.float32 if official else out_dtype, query.layout, key.layout, summary_dtype, **fused,
    )  # fmt: skip
    if not official:
        return out
    with torch.autocast(device_type=q.device.type, enabled=False):
        phi_q = features(q, query, feature_eps, torch.float32)
        masses = mask_padding(features(k, key, feature_eps, torch.float32), key).sum(dim=-2)  # (B, H, M, D)
        products = (phi_q @ masses[..., None])[..., 0]  # (B, H, M, n)
        denominator = from_blocks((mixing @ products)[..., None], query) + denominator_eps
    return (out / denominator).to(out_dtype)


def _tables(query: Partition, key: Partition) -> tuple[Tensor | None, Tensor | None]:
    return tuple(None if part.layout is not None else part.with_table(part.table.device) for part in (query, key))
