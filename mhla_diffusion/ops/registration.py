"""The Triton path as `torch.library` custom operators, so that compile, export and autograd see opaque ops.

`mhla_diffusion::mhla_forward` (states form) returns the output and the block states, `mhla_diffusion::mhla_dual`
(dual form) the output and the denominators; the backward ops reuse them. `mhla_forward_output` and `mhla_dual_output`
return the output alone and have no gradients. Eager calls take the operators of `plain_operators`.
The "official" denominator is computed in plain torch around the kernels: it serves weights trained with it, not speed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import choose_form
from .eager import epilogue, features, from_blocks, mask_padding, normalise
from .partition import Partition, layout_partition
from .plain_operators import differentiable, plain_operator
from .replay import computed, on_its_device, replayed
from .rotation import angle_tables
from .triton_configs import overridden

__all__ = [
    "mhla_backward",
    "mhla_dual",
    "mhla_dual_backward",
    "mhla_dual_output",
    "mhla_forward",
    "mhla_forward_output",
    "triton_core",
]


def _part_of(table: Tensor | None, layout: Sequence[int] | None, tokens: int, trusted: bool) -> Partition:
    if layout is not None:
        return layout_partition(tuple(layout))
    blocks, size = table.shape
    return Partition(table, blocks, size, tokens, None, None, table.numel() == tokens, trusted)


def _sizes_of(table: Tensor | None, layout: Sequence[int] | None) -> tuple[int, int]:
    """Number of blocks and tokens of the longest one, for fake kernels: there they may be symbolic."""
    if layout is None:
        return table.shape
    sizes = [-(-length // count) for length, count in zip(layout[:3], layout[3:], strict=True)]
    return math.prod(layout[3:]), math.prod(sizes)


def _pair(first, second):
    return None if first is None else (first, second)


def _forward(
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

    cos, sin: a rotation, or in cos alone the frequencies of three axes (`rotation.GridRope`).
    The arguments from query_norm on are fused steps around the operator; they have no gradient here.
    """
    return _by_states(**locals())


def _by_states(
    q, k, v, mixing, query_table, key_table, cos, sin, key_cos, key_sin,
    feature_eps, denominator_eps, divide, trusted, out_dtype, query_layout=None, key_layout=None,
    state_dtype=torch.float32, query_norm=None, query_norm_eps=1e-6, key_norm=None, key_norm_eps=1e-6,
    norm_weight=None, norm_eps=1e-6, gate=None, gate_bias=None, local=None, overwrite=False,
):  # fmt: skip
    """`_forward`. overwrite: mixed states may take the memory of the states, which the caller does not look at."""
    from .states_launch import Epilogue, mix, read_out, summarise

    query = _part_of(query_table, query_layout, q.shape[1], trusted)
    key = _part_of(key_table, key_layout, k.shape[1], trusted)
    state = summarise(
        k, v, key, _pair(key_cos, key_sin), feature_eps,
        mass=divide, norm=_pair(key_norm, key_norm_eps), state_dtype=state_dtype,
    )  # fmt: skip
    mixed = mix(mixing, state, q, v.shape[-1], overwrite=overwrite)
    out = read_out(
        q, mixed, v.shape[-1], query, _pair(cos, sin), feature_eps,
        divide=divide, mass=divide, denominator_eps=denominator_eps, out_dtype=out_dtype,
        norm=_pair(query_norm, query_norm_eps), after=Epilogue(norm_weight, norm_eps, gate, gate_bias, local),
    )  # fmt: skip
    return out, state


def _fake_forward(
    q, k, v, mixing, query_table, key_table, cos, sin, key_cos, key_sin,
    feature_eps, denominator_eps, divide, trusted, out_dtype, query_layout=None, key_layout=None,
    state_dtype=torch.float32, *fused, **named,
):  # fmt: skip
    from .triton_configs import chunk_count

    batch, tokens, heads, dim = q.shape
    blocks, block_size = _sizes_of(key_table, key_layout)
    rows = blocks * chunk_count(batch * heads * blocks, block_size)
    size = dim * v.shape[-1] + (dim if divide else 0)
    out = q.new_empty(batch, tokens, heads, v.shape[-1], dtype=out_dtype)
    return out, q.new_empty(batch, heads, rows, size, dtype=state_dtype)


mhla_forward = torch.library.custom_op(
    "mhla_diffusion::mhla_forward", on_its_device(replayed(_forward)), mutates_args=()
)
mhla_forward.register_fake(_fake_forward)
mhla_forward_output = plain_operator(
    "mhla_forward_output",
    _forward,
    _fake_forward,
    run=functools.partial(_by_states, overwrite=True),
    first=True,
)


def _transposed(matrix: Tensor) -> Tensor:
    return matrix.transpose(-1, -2)


def _states_backward(
    grad, q, k, v, mixing, state, query: Partition, key: Partition, rope, key_rope,
    feature_eps: float, denominator_eps: float, divide: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from .states_launch import key_gradients, mix, mix_gradient, query_gradients

    value_dim = v.shape[-1]
    dq, dmixed = query_gradients(
        q, grad, mix(mixing, state, q, value_dim), query, rope, feature_eps,
        mass=divide, denominator_eps=denominator_eps, state_dtype=state.dtype,
    )  # fmt: skip
    dmixing = mix_gradient(dmixed, state, mixing, q, value_dim)
    dstate = mix(computed(_transposed, mixing), dmixed, q, value_dim, overwrite=True)
    dk, dv = key_gradients(k, v, dstate, key, key_rope, feature_eps, mass=divide)
    return dq, dk, dv, dmixing


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, state: Tensor | None,
    query_table: Tensor | None, key_table: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, key_cos: Tensor | None, key_sin: Tensor | None,
    feature_eps: float, denominator_eps: float, divide: bool, trusted: bool,
    query_layout: Sequence[int] | None = None, key_layout: Sequence[int] | None = None,
    state_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and mixing. Without states they are computed again, in state_dtype."""
    from .states_launch import summarise

    query = _part_of(query_table, query_layout, q.shape[1], trusted)
    key = _part_of(key_table, key_layout, k.shape[1], trusted)
    rope, key_rope = _pair(cos, sin), _pair(key_cos, key_sin)
    if state is None:
        state = summarise(k, v, key, key_rope, feature_eps, mass=divide, state_dtype=state_dtype)
    return _states_backward(
        grad, q, k, v, mixing, state, query, key, rope, key_rope, feature_eps, denominator_eps, divide
    )


def _fake_gradients(
    grad, q, k, v, mixing, state, query_table, key_table, cos, sin, key_cos, key_sin,
    feature_eps, denominator_eps, divide, trusted, query_layout=None, key_layout=None, state_dtype=torch.float32,
):  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), mixing.new_empty(mixing.shape)


mhla_backward = torch.library.custom_op(
    "mhla_diffusion::mhla_backward", on_its_device(replayed(_gradients)), mutates_args=()
)
mhla_backward.register_fake(_fake_gradients)


def _no_second_gradients(ctx, *grads):
    raise ValueError(
        "the Triton kernels have no second gradients (a backward pass through one made with create_graph=True): pass "
        "backend='eager'"
    )


mhla_backward.register_autograd(_no_second_gradients)
_plain_backward = plain_operator("mhla_backward_plain", _gradients, _fake_gradients)


def _states_are_small(q: Tensor, k: Tensor, v: Tensor, out: Tensor, state: Tensor) -> bool:
    """Whether keeping the states for the backward pass adds little to what is kept anyway: at most a fifth of it.

    With few tokens in a block they would be as large as the queries (64 tokens of 72 channels), and summing them up
    again is a tenth of the operator's step.
    """
    moved = (q.numel() + k.numel() + v.numel() + out.numel()) * q.element_size()
    return overridden("keep_states", 5 * state.numel() * state.element_size() <= moved)


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, mixing, *rest = inputs
    state = output[1] if _states_are_small(q, k, v, *output) else None
    ctx.save_for_backward(q, k, v, mixing, state, *rest[:6])
    ctx.options = (*rest[6:10], *rest[11:14])
    ctx.inputs = len(inputs)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, grad_state=None):
    nothing = (None,) * (ctx.inputs - 4)
    if grad is None:
        return (None,) * ctx.inputs
    gradients = mhla_backward if torch.is_grad_enabled() else _plain_backward
    return *gradients(grad, *ctx.saved_tensors, *ctx.options), *nothing


mhla_forward.register_autograd(_backward, setup_context=_setup_context)
_learning_forward = differentiable(
    mhla_forward, plain_operator("mhla_forward_plain", _forward, _fake_forward), _setup_context, _backward
)


def _dual(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, query_table: Tensor | None, key_table: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, key_cos: Tensor | None, key_sin: Tensor | None,
    feature_eps: float, denominator_eps: float, divide: bool, trusted: bool, out_dtype: torch.dtype,
    query_layout: Sequence[int] | None, key_layout: Sequence[int] | None, state_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (B, N, H, Dv) in out_dtype, denominators in block order (B, H, slots) float32, none without `divide`."""
    from .dual_launch import dual_forward

    query = _part_of(query_table, query_layout, q.shape[1], trusted)
    key = _part_of(key_table, key_layout, k.shape[1], trusted)
    return dual_forward(
        q, k, v, mixing, query, key, _pair(cos, sin), _pair(key_cos, key_sin), feature_eps, denominator_eps, divide,
        out_dtype,
    )  # fmt: skip


def _fake_dual(
    q, k, v, mixing, query_table, key_table, cos, sin, key_cos, key_sin, feature_eps, denominator_eps, divide, trusted,
    out_dtype, query_layout, key_layout, state_dtype,
):  # fmt: skip
    batch, tokens, heads, _ = q.shape
    out = q.new_empty(batch, tokens, heads, v.shape[-1], dtype=out_dtype)
    blocks, block_size = _sizes_of(query_table, query_layout)
    slots = blocks * block_size if divide else 0
    return out, q.new_empty(batch, heads, slots, dtype=torch.float32)


mhla_dual = torch.library.custom_op(
    "mhla_diffusion::mhla_dual", on_its_device(replayed(_dual)), mutates_args=()
)
mhla_dual.register_fake(_fake_dual)
mhla_dual_output = plain_operator("mhla_dual_output", _dual, _fake_dual, first=True)


def _dual_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, out: Tensor, den: Tensor,
    query_table: Tensor | None, key_table: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, key_cos: Tensor | None, key_sin: Tensor | None,
    feature_eps: float, denominator_eps: float, divide: bool, trusted: bool,
    query_layout: Sequence[int] | None, key_layout: Sequence[int] | None, state_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and mixing; through the states form where the dual form has no backward kernels."""
    from .dual_launch import dual_backward, has_dual_backward
    from .states_launch import summarise

    query = _part_of(query_table, query_layout, q.shape[1], trusted)
    key = _part_of(key_table, key_layout, k.shape[1], trusted)
    rope, key_rope = _pair(cos, sin), _pair(key_cos, key_sin)
    if has_dual_backward(query, key):
        grads = dual_backward(
            grad, q, k, v, mixing, out, den, query, key, rope, key_rope, feature_eps, divide
        )
        if grads is not None:
            return grads
    state = summarise(k, v, key, key_rope, feature_eps, mass=divide, state_dtype=state_dtype)
    return _states_backward(
        grad, q, k, v, mixing, state, query, key, rope, key_rope, feature_eps, denominator_eps, divide
    )


def _fake_dual_gradients(grad, q, k, v, mixing, *rest):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), mixing.new_empty(mixing.shape)


mhla_dual_backward = torch.library.custom_op(
    "mhla_diffusion::mhla_dual_backward", on_its_device(replayed(_dual_gradients)), mutates_args=()
)
mhla_dual_backward.register_fake(_fake_dual_gradients)
mhla_dual_backward.register_autograd(_no_second_gradients)
_plain_dual_backward = plain_operator("mhla_dual_backward_plain", _dual_gradients, _fake_dual_gradients)


def _setup_dual(ctx, inputs, output) -> None:
    q, k, v, mixing, *rest = inputs
    ctx.save_for_backward(q, k, v, mixing, *output, *rest[:6])
    ctx.options = (*rest[6:10], *rest[11:])
    ctx.set_materialize_grads(False)


def _dual_backward(ctx, grad, grad_den=None):
    if grad is None:
        return (None,) * 18
    gradients = mhla_dual_backward if torch.is_grad_enabled() else _plain_dual_backward
    return *gradients(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 14


mhla_dual.register_autograd(_dual_backward, setup_context=_setup_dual)
_learning_dual = differentiable(
    mhla_dual, plain_operator("mhla_dual_plain", _dual, _fake_dual), _setup_dual, _dual_backward
)


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
    form: str = "states",
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
    official = normalizer == "official"
    learning = not fused and torch.is_grad_enabled() and any([x.requires_grad for x in (q, k, v, mixing)])
    form = choose_form(form, q, v, rope, normalizer, query, key, summary_dtype.itemsize, learning)
    if form == "dual":
        rope, key_rope = angle_tables(rope, query), angle_tables(key_rope, key)
    if form == "dual" and fused:
        q = normalise(q, _pair(fused.get("query_norm"), fused.get("query_norm_eps"))).to(v.dtype)
        k = normalise(k, _pair(fused.get("key_norm"), fused.get("key_norm_eps"))).to(v.dtype)
    arguments = (
        q, k, v, mixing, *(None if part.layout is not None else part.with_table(q.device) for part in (query, key)),
        *(rope or (None, None)), *(key_rope or (None, None)), feature_eps, denominator_eps, normalizer == "paper",
        query.trusted and key.trusted, torch.float32 if official or (form == "dual" and fused) else out_dtype,
        query.layout, key.layout, summary_dtype,
    )  # fmt: skip
    if form == "dual":
        out = _learning_dual(*arguments) if learning else mhla_dual_output(*arguments)
        if not fused:
            return out
        after = {name: fused.get(name) for name in ("norm_weight", "gate", "gate_bias", "local")}
        return epilogue(out, norm_eps=fused.get("norm_eps"), **after).to(out_dtype)
    out = _learning_forward(*arguments) if learning else mhla_forward_output(*arguments, **fused)
    if not official:
        return out
    with torch.autocast(device_type=q.device.type, enabled=False):
        phi_q = features(q, query, feature_eps, torch.float32)
        masses = mask_padding(features(k, key, feature_eps, torch.float32), key).sum(dim=-2)  # (B, H, M, D)
        products = (phi_q @ masses[..., None])[..., 0]  # (B, H, M, n)
        denominator = from_blocks((mixing @ products)[..., None], query) + denominator_eps
    return (out / denominator).to(out_dtype)
