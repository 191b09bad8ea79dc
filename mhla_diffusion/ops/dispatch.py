"""Which of the two exact forms computes a call: a cost rule, fitted to measurements on one H200.

Microseconds of a forward pass, of the head dims padded to a multiple of 16:

    states   launches + (q, k, v, out, four passes over the block states) / bandwidth + mixing / rate
    dual     launch + (q, k, v, out) / bandwidth + 4 N Nk D / rate + coefficients read

The states' mixing works on tiles of blocks, which few blocks do not fill: a line (one head of one item) has PADDING
blocks more than it has. The dual form reads a coefficient for every query and run of keys in one block; blocks of a
multiple of 8 tokens have long runs, in others each key is a run. Its gradients are dearer than the states form's, by
BACKWARD.

tests/ops/test_dispatch.py holds the rule against eval/results/op_h200.json: wherever both forms were timed, in both
directions, the chosen one may take at most 10 % longer than the better one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .partition import Partition

__all__ = ["choose_form", "dual_obstacle", "form_costs"]


class Constants(NamedTuple):
    """Per microsecond: bandwidth in bytes, rate in FLOP, reads of coefficients. Launches in microseconds."""

    bandwidth: float
    rate: float
    reads: float
    states_launch: float = 11.0
    dual_launch: float = 5.0


# Fitted in bfloat16; with float32 products only the rate differs, and it is a guess.
_HALF = Constants(4e6, 4.2e8, 1.4e5)
_FULL = _HALF._replace(rate=2e7)
PADDING = 4  # blocks, on either side
RUN = 24  # keys that share a coefficient, where blocks hold a multiple of 8 tokens: 16 to 64 in what was measured
BACKWARD = 1.3


def dual_obstacle(
    q: torch.Tensor, v: torch.Tensor, rope, normalizer: str, query: Partition, key: Partition
) -> str:
    """Why the dual form cannot take a call, or an empty string."""
    if max(q.shape[-1], v.shape[-1]) > 128:
        return f"its kernels take head dims up to 128, not {max(q.shape[-1], v.shape[-1])}"
    if rope is not None and normalizer == "paper":
        return "its row sums are of rotated features, normalizer='paper' with rope divides by those without rotation"
    if normalizer == "official":
        return "normalizer='official' needs the blocks' masses"
    if max(part.num_blocks * part.block_size for part in (query, key)) >= 1 << 20:
        return "it takes fewer than 2^20 tokens"
    return ""


def form_costs(
    q: torch.Tensor,
    v: torch.Tensor,
    query: Partition,
    key: Partition,
    summary_bytes: int,
    backward: bool = False,
) -> dict[str, float]:
    """Expected microseconds of a forward pass in each form.

    backward: gradients will be asked for. The times are then no more than comparable with each other: the states form's
    is that of its forward pass, which its backward pass is a fixed multiple of.
    """
    constants = _FULL if q.dtype == torch.float32 else _HALF
    batch, tokens, heads, dim = q.shape
    key_tokens, value_dim = v.shape[1], v.shape[-1]
    lines = batch * heads
    moved = lines * (tokens + key_tokens) * (dim + value_dim) * q.element_size()
    dim, value_dim = -(-dim // 16) * 16, -(-value_dim // 16) * 16
    blocks = query.num_blocks + key.num_blocks + 2 * PADDING
    states = 2 * lines * blocks * dim * value_dim * summary_bytes
    mixing = 2 * lines * query.num_blocks * key.num_blocks * dim * value_dim
    pairs = lines * query.num_blocks * query.block_size * key.num_blocks * key.block_size
    runs = all([part.equal and part.layout is not None and part.block_size % 8 == 0 for part in (query, key)])
    dual = (
        constants.dual_launch
        + moved / constants.bandwidth
        + 2 * pairs * (dim + value_dim) / constants.rate
        + pairs / (constants.reads * (RUN if runs else 1))
    )
    return {
        "states": constants.states_launch + (moved + states) / constants.bandwidth + mixing / constants.rate,
        "dual": dual * BACKWARD if backward and runs else dual,
    }


def choose_form(
    form: str,
    q,
    v,
    rope,
    normalizer: str,
    query: Partition,
    key: Partition,
    summary_bytes: int,
    backward: bool,
) -> str:
    """`states` or `dual`. Raises ValueError when the dual form is asked for and cannot take the call.

    backward: gradients will be asked for.
    """
    if form == "states":
        return form
    obstacle = dual_obstacle(q, v, rope, normalizer, query, key)
    if form == "dual":
        if obstacle:
            raise ValueError(f"form='dual' cannot take this call: {obstacle}; use form='auto' or 'states'")
        return form
    if obstacle:
        return "states"
    costs = form_costs(q, v, query, key, summary_bytes, backward)
    return "dual" if costs["dual"] < costs["states"] else "states"
