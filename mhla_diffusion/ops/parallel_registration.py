"""The Triton kernels of a process's share of the tokens, as `torch.library` custom operators.

`mhla_diffusion::block_states` sums the keys and values of a run of tokens by blocks; what comes of it is summed over
processes outside, by a collective that a compiler can see; `mhla_diffusion::read_states` mixes the sums and reads them
out with the run's queries. `learning_*` have gradients, the others are the operators of `plain_operators`.
`space` is (frames, rows, columns, blocks on each axis, first token), for the whole grid.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .plain_operators import differentiable, plain_operator
from .registration import _pair
from .replay import on_its_device
from .share import LocalBlocks, local_blocks

__all__ = ["block_states", "learning_block_states", "learning_read_states", "read_states"]


def _blocks_of(x: Tensor, space: Sequence[int]) -> LocalBlocks:
    axes = len(space) // 2
    start = space[-1]
    return local_blocks(space[:axes], space[axes:-1], start, start + x.shape[1], x.device)


def _count(space: Sequence[int]) -> int:
    return math.prod(space[len(space) // 2 : -1])


def _custom(name: str, call, fake):
    """`call` as a custom operator, which gradients can be registered for."""
    operator = torch.library.custom_op(f"mhla_diffusion::{name}", on_its_device(call), mutates_args=())
    operator.register_fake(fake)
    return operator


# Blocks of a run are found anew in each call, by what torch computes: no launches to repeat.
_plain = functools.partial(plain_operator, repeat=False)


def _states(
    k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, space: Sequence[int], feature_eps: float,
    mass: bool, state_dtype: torch.dtype, norm: Tensor | None = None, norm_eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """`(B, H, M, D * Dv [+ D])` in state_dtype, of all blocks; those without a token of this run are 0.

    cos, sin: of these tokens. norm: weight of an RMSNorm of k, which has no gradient here.
    """
    from .states_launch import summarise

    key = _blocks_of(k, space).key
    state = summarise(
        k,
        v,
        key,
        _pair(cos, sin),
        feature_eps,
        mass=mass,
        norm=_pair(norm, norm_eps),
        state_dtype=state_dtype,
    )
    chunks = state.shape[2] // key.num_blocks
    if chunks == 1:
        return state
    # Processes cut the same block into different numbers of pieces.
    return state.unflatten(2, (key.num_blocks, chunks)).sum(dim=3, dtype=torch.float32).to(state_dtype)


def _fake_states(k, v, cos, sin, space, feature_eps, mass, state_dtype, norm=None, norm_eps=1e-6):
    batch, _, heads, dim = k.shape
    size = dim * v.shape[-1] + (dim if mass else 0)
    return k.new_empty(batch, heads, _count(space), size, dtype=state_dtype)


def _states_gradients(
    grad: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, space: Sequence[int],
    feature_eps: float, mass: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of k and v."""
    from .states_launch import key_gradients

    return key_gradients(
        k, v, grad.contiguous(), _blocks_of(k, space).key, _pair(cos, sin), feature_eps, mass=mass
    )[:2]


def _fake_states_gradients(grad, k, v, *rest):
    return k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_states(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:7]


def _states_backward(ctx, grad):
    gradients = _states_gradients_op if torch.is_grad_enabled() else _plain_states_gradients
    return *gradients(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 8


_block_states = _custom("block_states", _states, _fake_states)
_block_states.register_autograd(_states_backward, setup_context=_setup_states)
_states_gradients_op = _custom("block_states_backward", _states_gradients, _fake_states_gradients)
_plain_states_gradients = _plain("block_states_backward_plain", _states_gradients, _fake_states_gradients)
block_states = _plain("block_states_plain", _states, _fake_states)
learning_block_states = differentiable(_block_states, block_states, _setup_states, _states_backward)


def _rows_of(mixing: Tensor, blocks: LocalBlocks) -> Tensor:
    return mixing if blocks.rows is None else mixing.index_select(-2, blocks.rows)


def _read(
    q: Tensor, mixing: Tensor, state: Tensor, cos: Tensor | None, sin: Tensor | None, space: Sequence[int],
    value_dim: int, feature_eps: float, denominator_eps: float, divide: bool, out_dtype: torch.dtype,
    query_norm: Tensor | None = None, query_norm_eps: float = 1e-6, norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6, gate: Tensor | None = None, gate_bias: float | None = None, local: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`(B, n, H, Dv)` in out_dtype, from the states of all processes together. mixing is float32.

    The arguments from query_norm on are fused steps around the operator; they have no gradient here.
    """
    from .states_launch import Epilogue, mix, read_out

    blocks = _blocks_of(q, space)
    mixed = mix(_rows_of(mixing, blocks), state, q, value_dim)
    return read_out(
        q, mixed, value_dim, blocks.query, _pair(cos, sin), feature_eps, divide=divide, mass=divide,
        denominator_eps=denominator_eps, out_dtype=out_dtype, norm=_pair(query_norm, query_norm_eps),
        after=Epilogue(norm_weight, norm_eps, gate, gate_bias, local),
    )  # fmt: skip


def _fake_read(
    q,
    mixing,
    state,
    cos,
    sin,
    space,
    value_dim,
    feature_eps,
    denominator_eps,
    divide,
    out_dtype,
    *fused,
    **named,
):
    return q.new_empty(*q.shape[:3], value_dim, dtype=out_dtype)


def _read_gradients(
    grad: Tensor, q: Tensor, mixing: Tensor, state: Tensor, cos: Tensor | None, sin: Tensor | None,
    space: Sequence[int], value_dim: int, feature_eps: float, denominator_eps: float, divide: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, of mixing (this process's part) and of the states (likewise)."""
    from .states_launch import mix, mix_gradient, query_gradients

    blocks = _blocks_of(q, space)
    rows = _rows_of(mixing, blocks)
    dq, dmixed = query_gradients(
        q, grad, mix(rows, state, q, value_dim), blocks.query, _pair(cos, sin), feature_eps,
        mass=divide, denominator_eps=denominator_eps, state_dtype=state.dtype,
    )  # fmt: skip
    dmixing = mix_gradient(dmixed, state, rows, q, value_dim)
    if blocks.rows is not None:
        dmixing = torch.zeros_like(mixing).index_copy(-2, blocks.rows, dmixing)
    return dq, dmixing, mix(rows.transpose(-1, -2), dmixed, q, value_dim, overwrite=True)


def _fake_read_gradients(grad, q, mixing, state, *rest):
    return q.new_empty(q.shape), mixing.new_empty(mixing.shape), state.new_empty(state.shape)


def _setup_read(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:10]
    ctx.inputs = len(inputs)


def _read_backward(ctx, grad):
    gradients = _read_gradients_op if torch.is_grad_enabled() else _plain_read_gradients
    return *gradients(grad, *ctx.saved_tensors, *ctx.options), *(None,) * (ctx.inputs - 3)


_read_states = _custom("read_states", _read, _fake_read)
_read_states.register_autograd(_read_backward, setup_context=_setup_read)
_read_gradients_op = _custom("read_states_backward", _read_gradients, _fake_read_gradients)
_plain_read_gradients = _plain("read_states_backward_plain", _read_gradients, _fake_read_gradients)
read_states = _plain("read_states_plain", _read, _fake_read)
learning_read_states = differentiable(_read_states, read_states, _setup_read, _read_backward)
