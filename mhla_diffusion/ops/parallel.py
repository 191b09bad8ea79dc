"""MHLA over tokens that are spread over processes: context parallelism by summing the blocks' summaries.

Each process summarises the keys and values that it holds, the summaries are summed over all processes, and each mixes
them and reads them out with its own queries. What is sent does not grow with the number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ..blocks import effective_block_grid
from .backends import choose_backend, refuse_rotation_gradients, refuse_tangents
from .eager import (
    divided,
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
    norms = {"query_norm": query_norm, "key_norm": key_norm}
    after = {
        "norm_weight": norm_weight, "norm_eps": norm_eps, "gate": gate, "gate_bias": gate_bias, "local": local,
    }  # fmt: skip
    dtype = torch.promote_types(q.dtype, torch.float32)
    if isinstance(rope, GridRope):
        rope = local_angles(rope.frequencies, grid, start, stop, dtype)
    with torch.autocast(device_type=q.device.type, enabled=False):
        mixing = mixing.to(dtype)
        if name == "triton" and q.shape[0]:
            space = (*grid, *blocks, start)
            return triton_part(
                q, k, v, mixing, space, reduce, rope, norms, after, summary_dtype=summary_dtype, **options
            )
        parts = local_blocks(grid, blocks, start, stop, q.device)
        q, k = normalise(q, query_norm), normalise(k, key_norm)
        out = eager_part(q, k, v, mixing, parts, reduce, rope, dtype=dtype, **options)
        return epilogue(out, **after).to(v.dtype)


def triton_part(
    q, k, v, mixing, space: Sequence[int], reduce, rope, norms, after, *, feature_eps: float, denominator_eps: float,
    divide: bool, summary_dtype: torch.dtype | None,
) -> torch.Tensor:  # fmt: skip
    """The same in the Triton kernels. The steps around them are part of them when nothing needs a gradient."""
    from .parallel_registration import block_states, learning_block_states, learning_read_states, read_states

    if summary_dtype is None:
        summary_dtype = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    weights = [norm[0] for norm in norms.values() if norm is not None]
    extras = [x for x in (after["norm_weight"], after["gate"], after["local"]) if x is not None]
    refuse_tangents((q, k, v, mixing, *(rope or ()), *weights, *extras), "take reverse mode (backward)")
    refuse_rotation_gradients(rope, "run it where plain torch computes, on a CPU")
    learning = torch.is_grad_enabled() and any(
        [x.requires_grad for x in (q, k, v, mixing, *weights, *extras)]
    )
    key_steps, query_steps, out_dtype = {}, {}, v.dtype
    if learning:
        q, k = (normalise(x, norm).to(v.dtype) for x, norm in zip((q, k), norms.values(), strict=True))
        out_dtype = torch.float32 if extras else v.dtype
    else:
        query_steps = {name: x for name, x in after.items() if x is not None}
        for norm, steps, name in (
            (norms["query_norm"], query_steps, "query_norm"),
            (norms["key_norm"], key_steps, "norm"),
        ):
            if norm is not None:
                steps[name], steps[f"{name}_eps"] = norm
    angles = rope or (None, None)
    states_of, read = (
        (learning_block_states, learning_read_states) if learning else (block_states, read_states)
    )
    state = reduce(states_of(k, v, *angles, space, feature_eps, divide, summary_dtype, **key_steps))
    out = read(
        q,
        mixing,
        state,
        *angles,
        space,
        v.shape[-1],
        feature_eps,
        denominator_eps,
        divide,
        out_dtype,
        **query_steps,
    )
    return epilogue(out, **after).to(v.dtype) if learning and extras else out


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
        out = divided(out, row_sums(phi_q, mass) + denominator_eps)
    return from_blocks(out, query)
