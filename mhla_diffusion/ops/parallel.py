"""MHLA over tokens that are spread over processes: context parallelism by summing the blocks' summaries.

Each process summarises the keys and values that it holds, the summaries are summed over all processes, and each mixes
them and reads them out with its own queries. What is sent does not grow with the number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ..blocks import effective_block_grid
from .backends import choose_backend
from .eager import (
    epilogue,
    features,
    from_blocks,
    mask_padding,
    mix_states,
    normalise,
    read_out,
    rotate,
    row_sums,
    summarise,
    to_blocks,
)
from .rotation import GridRope
from .share import LocalBlocks, local_angles, local_blocks

__all__ = ["parallel_mhla_attention"]


def parallel_mhla_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mixing: torch.Tensor,
    *,
    grid: Sequence[int],
    block_grid: Sequence[int],
    start: int,
    reduce: Callable[[torch.Tensor], torch.Tensor],
    feature_eps: float = 1e-6,
    normalizer: str = "paper",
    denominator_eps: float | None = None,
    rope: GridRope | tuple[torch.Tensor, torch.Tensor] | None = None,
    query_norm: tuple[torch.Tensor, float] | None = None,
    key_norm: tuple[torch.Tensor, float] | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    gate: torch.Tensor | None = None,
    gate_bias: float | None = None,
    local: torch.Tensor | None = None,
    summary_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """`mhla_attention` of the tokens `start .. start + n - 1` of a grid whose other tokens other processes hold.

    Together the processes compute what one would with all tokens (MHLA, arXiv 2601.07832, Sec. 3), and its gradients:
    those of q, k and v are whole, those of `mixing` and of the norms' weights are each process's part of a sum.

    Args:
        q, k: `(B, n, H, D)`, v: `(B, n, H, Dv)`: a contiguous run of the raster order. gate, local: `(B, n, H, Dv)`.
        mixing: `(M, M)` or `(H, M, M)`, the same in all processes.
        grid, block_grid: tokens and blocks on each axis, of all processes together.
        start: the first token's id.
        reduce: sums a tensor over all processes, and its gradient as well (`Share.sum`). It is called once in every
            process, on block states `(B, H, M, D * Dv)`, with D more of them under normalizer="paper".
        normalizer: "paper" or "none".
        rope: a `GridRope` over the grid, or (cos, sin) of these n tokens, float32 `(n, D / 2)` each.
        summary_dtype: of the states, as they are sent; bfloat16 for bfloat16 inputs in the kernels, else float32.
        The others: as in `mhla_attention`.

    Returns:
        `(B, n, H, Dv)` in q's dtype.

    Raises:
        ValueError: tokens outside the grid, a mixing of another size, the normalizer "official" (it sums over queries
            that other processes hold) or the backend "reference".
    """
    blocks = effective_block_grid(grid, block_grid)
    stop, count = start + q.shape[1], math.prod(blocks)
    if not 0 <= start < stop <= math.prod(grid):
        raise ValueError(
            f"tokens {start}..{stop - 1} of a grid {tuple(grid)}, which holds {math.prod(grid)}: give each process at "
            "least one token, and start= as the id of its first"
        )
    if normalizer not in ("paper", "none"):
        raise ValueError(
            f"normalizer={normalizer!r} over several processes: choose 'paper' or 'none', the sums of 'official' are "
            "over single queries of other blocks"
        )
    if tuple(mixing.shape[-2:]) != (count, count):
        raise ValueError(
            f"mixing has shape {tuple(mixing.shape)}: this grid has {count} blocks, so give {(count, count)} or "
            f"{(q.shape[2], count, count)}"
        )
    name, _ = choose_backend(backend, q.device, q.dtype, max(q.shape[-1], v.shape[-1]))
    if name == "reference":
        raise ValueError(
            "backend='reference' needs all tokens in one process: use 'auto', 'triton' or 'eager'"
        )
    options = {
        "feature_eps": float(feature_eps),
        "denominator_eps": float(denominator_eps or 0.0),
        "divide": normalizer == "paper",
    }
    after = {
        "norm_weight": norm_weight, "norm_eps": norm_eps, "gate": gate, "gate_bias": gate_bias, "local": local,
    }  # fmt: skip
    dtype = torch.promote_types(q.dtype, torch.float32)
    if isinstance(rope, GridRope):
        rope = local_angles(rope.frequencies, grid, start, stop, dtype)
    parts = local_blocks(grid, blocks, start, stop, q.device)
    with torch.autocast(device_type=q.device.type, enabled=False):
        q, k = normalise(q, query_norm), normalise(k, key_norm)
        out = eager_part(q, k, v, mixing.to(dtype), parts, reduce, rope, dtype=dtype, **options)
        return epilogue(out, **after).to(v.dtype)


def eager_part(
    q, k, v, mixing, parts: LocalBlocks, reduce, rope, *, feature_eps: float, denominator_eps: float, divide: bool,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """What this process's queries read, in plain torch: `(B, n, H, Dv)` in `dtype`."""
    query, rows, key = parts
    phi_k = mask_padding(features(k, key, feature_eps, dtype), key)
    state = summarise(rotate(phi_k, rope, key), to_blocks(v, key).to(dtype))
    if divide:
        state = torch.cat((state, phi_k.sum(dim=-2)), dim=-1)
    state = reduce(state)
    mixed = mix_states(mixing if rows is None else mixing.index_select(-2, rows), state)
    phi_q = features(q, query, feature_eps, dtype)
    summary, mass = mixed.tensor_split([q.shape[-1] * v.shape[-1]], dim=-1)
    out = read_out(rotate(phi_q, rope, query), summary)
    if divide:
        out = out * (row_sums(phi_q, mass) + denominator_eps).reciprocal()
    return from_blocks(out, query)
