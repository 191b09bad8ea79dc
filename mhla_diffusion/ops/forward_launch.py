"""Launches the whole forward pass of the states form at once."""

from __future__ import annotations

import torch

from . import triton_launch
from .mixing_launch import mix_dot, spread
from .partition import Partition
from .states_kernels import forward_kernel
from .states_launch import Blocks, Epilogue, channels, norm_arguments, rope_arguments, state_dot, value_tiles
from .triton_configs import ForwardConfig, forward_configs, head_parts, overridden
from .triton_launch import DOT, ceil_div, dot_bits, new_rows, start_first_fitting, strides_of, unit_stride

__all__ = ["forward"]

ROUND = (
    400  # programs of a round at least, about what an H200 holds at once: those it waits for are then done
)


def lines_per_round(lines: int, programs: int) -> int:
    """Heads (of batch elements) in a round, with so many programs each; a divisor of `lines` if one is near."""
    least = overridden("lines_per_round", min(lines, ceil_div(ROUND, programs)))
    return next((group for group in range(least, min(2 * least, lines) + 1) if lines % group == 0), least)


def forward(
    q, k, v, mixing, query: Partition, key: Partition, rope, key_rope, feature_eps: float, *,
    divide: bool, denominator_eps: float, out_dtype: torch.dtype, state_dtype: torch.dtype,
    query_norm=None, key_norm=None, after: Epilogue | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:  # fmt: skip
    """(out, states) as `summarise`, `mix` and `read_out` give them; None where one launch does not serve."""
    dim, value_dim = q.shape[-1], v.shape[-1]
    widest = max(sum(head_parts(dim)), sum(head_parts(value_dim)))
    configs = forward_configs(triton_launch._generation(q), dot_bits(q), widest)
    if (
        not configs
        or value_tiles(value_dim, configs[0]) > 1
        or state_dtype != q.dtype
        or 0 in (*q.shape, *k.shape)
    ):
        return None
    after = Epilogue() if after is None else after
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    gate, local = (q if y is None else unit_stride(y) for y in (after.gate, after.local))
    batch, tokens, heads, _ = q.shape
    lines = batch * heads
    size = dim * value_dim + (dim if divide else 0)
    queries = Blocks(query, q, heads * value_dim, gate.stride(1), local.stride(1), whole_state=size)
    keys = Blocks(key, k, v.stride(1), whole_state=size)
    state = torch.empty(batch, heads, keys.rows, size, dtype=state_dtype, device=q.device)
    mixed = torch.empty(batch, heads, query.num_blocks, size, dtype=state_dtype, device=q.device)
    out = new_rows(query, (batch, tokens, heads, value_dim), out_dtype, q.device)
    counters = torch.empty(1 + 2 * lines, dtype=torch.int32, device=q.device)
    query_rstd, query_weight, query_eps, query_kind = norm_arguments(query_norm, q)
    key_rstd, key_weight, key_eps, key_kind = norm_arguments(key_norm, k)
    angles, turned = rope_arguments(rope, q)
    key_angles, key_turned = rope_arguments(key_rope, k)
    strides, step = strides_of(q, k, v, gate, local)
    rows, columns, kind = query.num_blocks, keys.rows, mix_dot(q, state)
    out_weight = q if after.norm_weight is None else after.norm_weight.contiguous()

    def start(config: ForwardConfig) -> None:
        config, parts = channels(dim, value_dim, config.fitted(query, key))
        if divide and not turned and config.BV == value_dim <= 32:
            parts["TV"] = 16
        mixes = ceil_div(rows, config.BM) * ceil_div(size, config.BP)
        group = lines_per_round(lines, keys.rows + mixes + queries.rows)
        coefficients = spread(mixing, columns, config.BM, config.BN, kind == "split", counters)
        part = coefficients.numel() // (2 if kind == "split" else 1)
        triton_launch.launch(
            forward_kernel, (ceil_div(lines, group) * group * (keys.rows + mixes + queries.rows),), config,
            q, k, v, queries.table, keys.table, angles, key_angles, query_rstd, key_rstd, query_weight, key_weight,
            coefficients, state, mixed, out_weight, gate, local, out, counters, *strides,
            lines, group, heads, part // heads if mixing.ndim == 3 else 0, part, rows, columns,
            *queries.own_numbers, *keys.own_numbers,
            feature_eps, query_eps, key_eps, denominator_eps, after.norm_eps, after.gate_bias or 0.0,
            **parts, SIZE=size, WIDTH=coefficients.shape[-1],
            KEY_TILE=keys.numbers[4] <= config.KEY_BN, QUERY_TILE=queries.numbers[4] <= config.QUERY_BN,
            TABLE=query.layout is None, KEY_TABLE=key.layout is None,
            WIDE=queries.constants["WIDE"] or keys.constants["WIDE"], ROPE=turned, KEY_ROPE=key_turned,
            QUERY_NORM=query_kind, KEY_NORM=key_kind, DIVIDE=divide, OUT_NORM=after.norm_weight is not None,
            GATE=after.gate_kind, LOCAL=after.local is not None, STEP=step, DOT=DOT[q.dtype], MIX_DOT=kind,
            STATE_DOT=state_dot(q, state),
        )  # fmt: skip

    options = (
        out_dtype,
        state_dtype,
        turned,
        key_turned,
        query_kind,
        key_kind,
        divide,
        after.key,
        queries.key,
        keys.key,
    )
    started = start_first_fitting(
        "forward", q, value_dim, configs, options, start, otherwise="its steps one by one"
    )
    return (out, state) if started else None
