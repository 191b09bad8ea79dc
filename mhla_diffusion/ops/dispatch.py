"""Which of the two exact forms computes a call: a cost rule, with constants fitted to measurements on one GPU.

    states   traffic of q, k, v, out and of four passes over the block states, plus the products at their rate
    dual     traffic of q, k, v, out, plus 4 N Nk D multiply-adds at the rate that its loop reaches
Each plus the time its launches take when the work is small.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .partition import Partition

__all__ = ["choose_form", "dual_obstacle", "form_costs"]


class Constants(NamedTuple):
    """bandwidth in bytes, states_rate and dual_rate in FLOP, per microsecond; launches in microseconds."""

    bandwidth: float
    states_rate: float
    dual_rate: float
    states_launch: float
    dual_launch: float


GATHER = 2.5  # a tile's products take so much longer where coefficients are read for every pair of tokens

# First guesses for an H200; to be replaced by the fit.
_HALF = Constants(3.4e6, 3.5e8, 3.0e8, 9.0, 3.0)
_FULL = Constants(3.0e6, 2.0e7, 2.0e7, 9.0, 3.0)


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
    q: torch.Tensor, v: torch.Tensor, query: Partition, key: Partition, summary_bytes: int
) -> dict[str, float]:
    """Expected microseconds of a forward pass in each form."""
    constants = _FULL if q.dtype == torch.float32 else _HALF
    batch, tokens, heads, dim = q.shape
    key_tokens, value_dim = v.shape[1], v.shape[-1]
    lines = batch * heads
    moved = lines * (tokens + key_tokens) * (dim + value_dim) * q.element_size()
    states = 2 * lines * (query.num_blocks + key.num_blocks) * dim * value_dim * summary_bytes
    products = 2 * lines * dim * value_dim * (tokens + key_tokens + 2 * query.num_blocks * key.num_blocks)
    pairs = (
        2 * lines * query.num_blocks * query.block_size * key.num_blocks * key.block_size * (dim + value_dim)
    )
    if not all(
        [part.equal and part.layout is not None and part.block_size % 8 == 0 for part in (query, key)]
    ):
        pairs *= GATHER
    return {
        "states": constants.states_launch
        + max((moved + states) / constants.bandwidth, products / constants.states_rate),
        "dual": constants.dual_launch + max(moved / constants.bandwidth, pairs / constants.dual_rate),
    }


def choose_form(
    form: str, q, v, rope, normalizer: str, query: Partition, key: Partition, summary_bytes: int
) -> str:
    """`states` or `dual`. Raises ValueError when the dual form is asked for and cannot take the call."""
    if form == "states":
        return form
    obstacle = dual_obstacle(q, v, rope, normalizer, query, key)
    if form == "dual":
        if obstacle:
            raise ValueError(f"form='dual' cannot take this call: {obstacle}; use form='auto' or 'states'")
        return form
    if obstacle:
        return "states"
    costs = form_costs(q, v, query, key, summary_bytes)
    return "dual" if costs["dual"] < costs["states"] else "states"
