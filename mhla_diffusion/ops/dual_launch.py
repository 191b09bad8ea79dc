"""Launches the dual form's kernels."""

from __future__ import annotations

import torch

from . import fallback, replay, triton_launch
from .dual_kernels import dual_forward_kernel, dual_key_kernel, dual_query_kernel
from .partition import Partition
from .triton_configs import DualConfig, dual_configs, head_parts
from .triton_launch import (
    DOT,
    ceil_div,
    dot_bits,
    new_rows,
    start_first_fitting,
    strides_of,
    turning_angles,
    unit_stride,
)

__all__ = ["dual_backward", "dual_forward", "has_dual_backward"]

FAR = 2**31  # offsets from here on take 64 bits
SHORTEST_RUN = 8  # slots that share a coefficient; below, one coefficient is read for each pair of tokens


def _run(part: Partition, tile: int) -> int:
    """The longest power of two that divides the blocks of an even partition, at most a tile; 1 if it is short."""
    if part.layout is None or not part.equal:
        return 1
    run = min(part.block_size & -part.block_size, tile)
    return run if run >= SHORTEST_RUN else 1


def has_dual_backward(query: Partition, key: Partition) -> bool:
    """Whether both sides have runs, and few enough pairs of them for the 32 bits in which the kernel counts."""
    if _run(query, SHORTEST_RUN) == 1 or _run(key, SHORTEST_RUN) == 1:
        return False
    return query.num_tokens * key.num_tokens // SHORTEST_RUN**2 < 2**31


def _grid(letter: str, part: Partition) -> dict[str, int]:
    names = ("M", "N", "G0", "G1", "G2", "B0", "B1", "B2")
    values = (part.num_blocks, part.block_size, *(part.layout or (1,) * 6))
    return {letter + name: value for name, value in zip(names, values, strict=True)}


def _m_strides(mixing: torch.Tensor) -> tuple[int, ...]:
    return (mixing.stride(0) if mixing.ndim == 3 else 0, *mixing.stride()[-2:])


def _angles(rope, x: torch.Tensor) -> torch.Tensor:
    return x if rope is None else turning_angles(rope, x.dtype)


def _constants(
    inputs: tuple[torch.Tensor, ...], query: Partition, key: Partition, rope, divide: bool
) -> dict:
    """inputs: q, k, v, and the output's gradient if it is read."""
    q, _, v, *_ = inputs
    (bd, td), (bv, tv) = head_parts(q.shape[-1]), head_parts(v.shape[-1])
    tokens = max([x.shape[1] for x in inputs])
    row = max([max(x.stride(1), x.shape[2] * x.shape[3]) for x in inputs])  # results are contiguous
    return {
        "D": q.shape[-1], "DV": v.shape[-1], "BD": bd, "TD": td, "BV": bv, "TV": tv,
        "ROPE": rope is not None, "DIVIDE": divide, "DOT": DOT[q.dtype], "WIDE": tokens * row >= FAR,
        **_grid("Q", query), **_grid("K", key),
    }  # fmt: skip


def _start(name: str, q: torch.Tensor, value_dim: int, options: tuple, start) -> bool:
    widest = max(sum(head_parts(q.shape[-1])), sum(head_parts(value_dim)))
    configs = dual_configs(name, triton_launch._generation(q), dot_bits(q), widest)
    return start_first_fitting(name, q, value_dim, configs, options, start)


def dual_forward(
    q, k, v, mixing, query: Partition, key: Partition, rope, key_rope, feature_eps: float,
    denominator_eps: float, divide: bool, out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out (B, N, H, Dv) in out_dtype; the denominators in block order, float32 (B, H, slots), none without `divide`."""
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    batch, tokens, heads, _ = q.shape
    out = new_rows(query, (batch, tokens, heads, v.shape[-1]), out_dtype, q.device)
    slots = query.num_blocks * query.block_size
    den = replay.empty((batch, heads, slots if divide else 0), torch.float32, q.device)
    tables = tuple(q if part.layout is not None else part.table for part in (query, key))
    angles = _angles(rope, q), _angles(key_rope, k)
    strides, step = strides_of(q, k, v)

    def start(config: DualConfig) -> None:
        if key.layout is None and config.num_stages > 1:
            config = config._replace(num_stages=3)  # the loop's other loads wait for the table's
        triton_launch.launch(
            dual_forward_kernel, (ceil_div(slots, config.BM) * batch * heads,), config,
            q, k, v, mixing, *tables, *angles, out, den, *strides,
            *_m_strides(mixing), heads, tokens, k.shape[1], feature_eps, denominator_eps,
            RUN=_run(key, config.BN), TABLE=query.layout is None, KEY_TABLE=key.layout is None,
            STEP=step, **_constants((q, k, v), query, key, rope, divide),
        )  # fmt: skip

    if not _start(
        "dual_forward", q, v.shape[-1], (out_dtype, rope is None, divide, query.layout, key.layout), start
    ):
        return fallback.dual(
            q, k, v, mixing, query, key, rope, key_rope, feature_eps, denominator_eps, divide, out_dtype
        )
    return out, den


def dual_backward(
    grad,
    q,
    k,
    v,
    mixing,
    out,
    den,
    query: Partition,
    key: Partition,
    rope,
    key_rope,
    feature_eps: float,
    divide: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Gradients of q, k, v and mixing, for partitions that `has_dual_backward` accepts. None: no configuration fits."""
    grad, q, k, v = unit_stride(grad), unit_stride(q), unit_stride(k), unit_stride(v)
    batch, tokens, heads, _ = q.shape
    dq, dk, dv = (replay.empty(x.shape, x.dtype, x.device) for x in (q, k, v))
    delta, inverse = (replay.empty(den.shape, torch.float32, q.device) for _ in range(2))
    operands = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    phi = replay.empty((batch, heads, tokens, q.shape[-1]), operands, q.device)  # in block order
    strides, step = strides_of(q, k, v, grad)
    strides = (*strides, *_m_strides(mixing))
    sides = (heads, tokens, k.shape[1], feature_eps)
    angles = _angles(rope, q), _angles(key_rope, k)
    constants = {"STEP": step, **_constants((q, k, v, grad), query, key, rope, divide)}
    pieces: list[torch.Tensor] = []

    def start_queries(config: DualConfig) -> None:
        run, query_run = _run(key, config.BN), _run(query, config.BM)
        shape = (batch, heads, tokens // query_run, k.shape[1] // run)
        pieces[:] = [replay.empty(shape, torch.float32, q.device)]
        triton_launch.launch(
            dual_query_kernel, (ceil_div(tokens, config.BM) * batch * heads,), config,
            q, k, v, mixing, *angles, grad, out, den, delta, inverse, phi, dq, pieces[0], *strides, *sides,
            RUN=run, QUERY_RUN=query_run, **constants,
        )  # fmt: skip

    def start_keys(config: DualConfig) -> None:
        triton_launch.launch(
            dual_key_kernel, (ceil_div(k.shape[1], config.BM) * batch * heads,), config,
            phi, k, v, mixing, angles[1], grad, delta, inverse, dk, dv, *strides[3:], *sides,
            QUERY_RUN=_run(query, config.BN), **constants,
        )  # fmt: skip

    options = (rope is None, divide, query.layout, key.layout)
    for name, start in (("dual_query", start_queries), ("dual_key", start_keys)):
        if not _start(name, q, v.shape[-1], options, start):
            return None
    shape = (batch, heads, query.num_blocks, -1, key.num_blocks, pieces[0].shape[-1] // key.num_blocks)
    summed = (0, 3, 5) if mixing.ndim == 3 else (0, 1, 3, 5)
    return dq, dk, dv, replay.computed(lambda x: x.view(shape).sum(dim=summed), pieces[0])
