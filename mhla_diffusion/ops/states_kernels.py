"""Triton kernels of the states form, forward: each step alone, and all three in one launch.

`forward_kernel` holds every program of the three steps. Programs take tickets; the order of tickets lets a few heads'
states pass through the steps while the L2 cache still holds them, and there is one tail instead of three. A program
waits until the programs before it that it needs have counted themselves done: these have smaller tickets, so they have
begun, and none waits for a later one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .states_forward import read_out, summarise
from .states_mixing import mix_tile
from .tiles import SIZES, locate

__all__ = ["forward_kernel", "read_out_kernel", "rstd_kernel", "summarise_kernel"]

_FORWARD_SIZES = [
    "lines", "group", "heads", "query_tokens", "key_tokens", "rows", "columns",
    "QM", "QN", "query_chunks", "query_chunk", "QG0", "QG1", "QG2", "QB0", "QB1", "QB2",
    "KM", "KN", "key_chunks", "key_chunk", "KG0", "KG1", "KG2", "KB0", "KB1", "KB2",
]  # fmt: skip


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SIZES)
def summarise_kernel(
    x_ptr, y_ptr, table_ptr, rope_ptr, rstd_ptr, weight_ptr, scale_ptr, mass_weight_ptr, state_ptr,
    x_stride_b, x_stride_n, x_stride_h, y_stride_b, y_stride_n, y_stride_h,
    num_tokens, num_blocks, block_size, chunks, chunk_size, heads, head_group, G0, G1, G2, B0, B1, B2,
    feature_eps, norm_eps,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, TD: tl.constexpr, BV: tl.constexpr, TV: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, ONE_TILE: tl.constexpr,
    TABLE: tl.constexpr, WIDE: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, MASS: tl.constexpr,
    ROWS: tl.constexpr, REVERSE: tl.constexpr, STEP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """`summarise`. Program (batch, head, block, chunk of the block's tokens; value tile)."""
    batch, head, row = locate(num_blocks * chunks, heads, head_group, REVERSE)
    summarise(
        x_ptr, y_ptr, table_ptr, rope_ptr, rstd_ptr, weight_ptr, scale_ptr, mass_weight_ptr, state_ptr,
        x_stride_b, x_stride_n, x_stride_h, y_stride_b, y_stride_n, y_stride_h,
        num_tokens, num_blocks, block_size, chunks, chunk_size, heads, G0, G1, G2, B0, B1, B2,
        feature_eps, norm_eps, batch, head, row, tl.program_id(1),
        D, DV, BD, TD, BV, TV, BN, STAGES, ONE_TILE, TABLE, WIDE, ROPE, NORM, MASS, ROWS, STEP, DOT,
    )  # fmt: skip


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SIZES)
def read_out_kernel(
    x_ptr, table_ptr, rope_ptr, rstd_ptr, weight_ptr, state_ptr, out_weight_ptr, gate_ptr, local_ptr, out_ptr,
    x_stride_b, x_stride_n, x_stride_h, gate_stride_b, gate_stride_n, gate_stride_h,
    local_stride_b, local_stride_n, local_stride_h,
    num_tokens, num_blocks, block_size, chunks, chunk_size, heads, head_group, G0, G1, G2, B0, B1, B2,
    feature_eps, norm_eps, denominator_eps, out_norm_eps, gate_bias,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, TD: tl.constexpr, BV: tl.constexpr, TV: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, ONE_TILE: tl.constexpr,
    TABLE: tl.constexpr, WIDE: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, DIVIDE: tl.constexpr,
    MASS: tl.constexpr, OUT_NORM: tl.constexpr, GATE: tl.constexpr, LOCAL: tl.constexpr, REVERSE: tl.constexpr,
    STEP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """`read_out`. Program (batch, head, block, chunk of the block's tokens; value tile)."""
    batch, head, row = locate(num_blocks * chunks, heads, head_group, REVERSE)
    read_out(
        x_ptr, table_ptr, rope_ptr, rstd_ptr, weight_ptr, state_ptr, out_weight_ptr, gate_ptr, local_ptr, out_ptr,
        x_stride_b, x_stride_n, x_stride_h, gate_stride_b, gate_stride_n, gate_stride_h,
        local_stride_b, local_stride_n, local_stride_h,
        num_tokens, num_blocks, block_size, chunks, chunk_size, heads, G0, G1, G2, B0, B1, B2,
        feature_eps, norm_eps, denominator_eps, out_norm_eps, gate_bias, batch, head, row, tl.program_id(1),
        D, DV, BD, TD, BV, TV, BN, STAGES, ONE_TILE, TABLE, WIDE, ROPE, NORM, DIVIDE, MASS, OUT_NORM, GATE, LOCAL,
        STEP, DOT,
    )  # fmt: skip


@triton.jit
def place_of(ticket, lines, group, summaries, mixes, reads):
    """(step of a line of work, line, program of the step) that a ticket stands for; line may be beyond the last one.

    A line is a head of a batch element. Round r of the order summarises the r-th group of lines, mixes the one before
    and reads out the one before that; what the first and last rounds lack is skipped.
    """
    rounds = tl.cdiv(lines, group)
    first, second, third = group * summaries, group * mixes, group * reads
    whole = first + second + third
    place = ticket + tl.where(ticket >= first, second + third, 0)
    place += tl.where((rounds == 1) & (place >= whole), first, 0)
    place += tl.where(place >= whole + first + second, third, 0)
    place += tl.where((rounds > 1) & (place >= rounds * whole), first, 0)
    place += tl.where(place >= (rounds + 1) * whole, first + second, 0)
    turn = place // whole
    rest = place % whole
    step = tl.where(rest < first, 0, tl.where(rest < first + second, 1, 2))
    rest -= tl.where(step == 0, 0, tl.where(step == 1, first, first + second))
    count = tl.where(step == 0, summaries, tl.where(step == 1, mixes, reads))
    return step, (turn - step) * group + rest // count, rest % count


@triton.jit
def wait_until(counter_ptr, count):
    while tl.atomic_add(counter_ptr, 0, sem="acquire") < count:
        pass


@triton.jit
def count_done(counter_ptr):
    tl.debug_barrier()  # all threads have stored
    tl.atomic_add(counter_ptr, 1, sem="release")


@triton.jit(do_not_specialize=_FORWARD_SIZES, do_not_specialize_on_alignment=_FORWARD_SIZES)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, query_table_ptr, key_table_ptr, rope_ptr, key_rope_ptr, query_rstd_ptr, key_rstd_ptr,
    query_weight_ptr, key_weight_ptr, m_ptr, state_ptr, mixed_ptr, out_weight_ptr, gate_ptr, local_ptr, out_ptr,
    counter_ptr,
    q_stride_b, q_stride_n, q_stride_h, k_stride_b, k_stride_n, k_stride_h, v_stride_b, v_stride_n, v_stride_h,
    gate_stride_b, gate_stride_n, gate_stride_h, local_stride_b, local_stride_n, local_stride_h,
    lines, group, heads, m_stride_h, low_part, rows, columns,
    query_tokens, QM, QN, query_chunks, query_chunk, QG0, QG1, QG2, QB0, QB1, QB2,
    key_tokens, KM, KN, key_chunks, key_chunk, KG0, KG1, KG2, KB0, KB1, KB2,
    feature_eps, query_norm_eps, key_norm_eps, denominator_eps, out_norm_eps, gate_bias,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, TD: tl.constexpr, BV: tl.constexpr, TV: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, KEY_BN: tl.constexpr, KEY_STAGES: tl.constexpr,
    BM: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, MIX_STAGES: tl.constexpr, QUERY_BN: tl.constexpr,
    QUERY_STAGES: tl.constexpr, KEY_TILE: tl.constexpr, QUERY_TILE: tl.constexpr,
    TABLE: tl.constexpr, KEY_TABLE: tl.constexpr, WIDE: tl.constexpr, ROPE: tl.constexpr, KEY_ROPE: tl.constexpr,
    QUERY_NORM: tl.constexpr, KEY_NORM: tl.constexpr, DIVIDE: tl.constexpr, OUT_NORM: tl.constexpr,
    GATE: tl.constexpr, LOCAL: tl.constexpr, STEP: tl.constexpr, DOT: tl.constexpr, MIX_DOT: tl.constexpr,
    STATE_DOT: tl.constexpr,
):  # fmt: skip
    """Summaries, mixing and read-out. counter_ptr: zeros, int32 (1 + 2 * lines,): tickets, then per line two counts."""
    summaries = KM * key_chunks
    row_tiles = tl.cdiv(rows, BM)
    mixes = row_tiles * tl.cdiv(SIZE, BP)
    ticket = tl.atomic_add(counter_ptr, 1, sem="relaxed")
    step, line, item = place_of(ticket, lines, group, summaries, mixes, QM * query_chunks)
    summarised_ptr = counter_ptr + 1 + line
    mixed_count_ptr = summarised_ptr + lines
    batch = (line // heads).to(tl.int64)
    head = (line % heads).to(tl.int64)
    if line < lines:
        if step == 0:
            summarise(
                k_ptr, v_ptr, key_table_ptr, key_rope_ptr, key_rstd_ptr, key_weight_ptr, k_ptr, k_ptr, state_ptr,
                k_stride_b, k_stride_n, k_stride_h, v_stride_b, v_stride_n, v_stride_h,
                key_tokens, KM, KN, key_chunks, key_chunk, heads, KG0, KG1, KG2, KB0, KB1, KB2,
                feature_eps, key_norm_eps, batch, head, item, 0,
                D, DV, BD, TD, BV, TV, KEY_BN, KEY_STAGES, KEY_TILE, KEY_TABLE, WIDE, KEY_ROPE, KEY_NORM, DIVIDE,
                False, STEP, DOT,
            )  # fmt: skip
            count_done(summarised_ptr)
        else:
            if step == 1:
                wait_until(summarised_ptr, summaries)
                mix_tile(
                    m_ptr, state_ptr, mixed_ptr, m_stride_h, low_part, heads, rows, columns, line,
                    item % row_tiles, item // row_tiles, SIZE, WIDTH, BM, BP, BN, MIX_STAGES, MIX_DOT,
                )  # fmt: skip
                count_done(mixed_count_ptr)
            else:
                wait_until(mixed_count_ptr, mixes)
                read_out(
                    q_ptr, query_table_ptr, rope_ptr, query_rstd_ptr, query_weight_ptr, mixed_ptr, out_weight_ptr,
                    gate_ptr, local_ptr, out_ptr,
                    q_stride_b, q_stride_n, q_stride_h, gate_stride_b, gate_stride_n, gate_stride_h,
                    local_stride_b, local_stride_n, local_stride_h,
                    query_tokens, QM, QN, query_chunks, query_chunk, heads, QG0, QG1, QG2, QB0, QB1, QB2,
                    feature_eps, query_norm_eps, denominator_eps, out_norm_eps, gate_bias, batch, head, item, 0,
                    D, DV, BD, TD, BV, TV, QUERY_BN, QUERY_STAGES, QUERY_TILE, TABLE, WIDE, ROPE, QUERY_NORM,
                    DIVIDE, DIVIDE, OUT_NORM, GATE, LOCAL, STEP, STATE_DOT,
                )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "width"])
def rstd_kernel(
    x_ptr, rstd_ptr, stride_b, stride_n, num_tokens, width, norm_eps, BN: tl.constexpr, BW: tl.constexpr
):
    """1 / sqrt(mean(x^2) + eps) over all heads of a token. Program (tokens, batch); x (B, N, H * D) by rows."""
    token = tl.program_id(0) * BN + tl.arange(0, BN)
    batch = tl.program_id(1).to(tl.int64)
    real = token < num_tokens
    x_ptr += batch * stride_b
    total = tl.zeros((BN, BW), dtype=tl.float32)
    for start in range(0, width, BW):
        channel = start + tl.arange(0, BW)
        x = tl.load(
            x_ptr + token.to(tl.int64)[:, None] * stride_n + channel[None, :],
            mask=real[:, None] & (channel < width)[None, :],
            other=0.0,
        ).to(tl.float32)
        total += x * x
    rstd = tl.rsqrt(tl.sum(total, axis=1) / width + norm_eps)
    tl.store(rstd_ptr + batch * num_tokens + token, rstd, mask=real)
