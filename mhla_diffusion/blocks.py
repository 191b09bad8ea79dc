"""Partition of a token grid into blocks.

A model fixes the *number* of blocks on each axis (`block_grid`), never their size, so one mixing matrix serves every
resolution. The edges are balanced, `floor(i * length / count)`, hence every grid can be partitioned; block sizes on an
axis differ by at most one token. Tokens are numbered in raster order (last axis fastest), blocks as well.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import torch

__all__ = [
    "block_centres",
    "block_distances",
    "block_edges",
    "block_table",
    "check_block_table",
    "effective_block_grid",
    "integer",
    "positive_ints",
]


def block_edges(length: int, count: int) -> list[int]:
    """`count + 1` balanced edges of an axis: block `i` holds the tokens `edges[i] .. edges[i + 1] - 1`.

    Raises ValueError unless `1 <= count <= length`.
    """
    if count < 1 or length < count:
        raise ValueError(
            f"cannot cut an axis of {length} tokens into {count} blocks: give between 1 and {max(length, 1)} blocks, "
            "or use effective_block_grid, which takes the minimum per axis"
        )
    return [i * length // count for i in range(count + 1)]


def integer(value) -> int | None:
    """`value` as an int if it is an integer of any kind, NumPy's included; None otherwise, also for True and False."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def positive_ints(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """One positive integer for each axis, of any kind of integer. Raises ValueError, which calls them `name`."""
    sequence = (values,) if isinstance(values, int) else tuple(values)
    if not all(
        [isinstance(v, int) for v in sequence]
    ):  # under torch.compile they may be symbolic, which must stay
        sequence = tuple([integer(v) for v in sequence])
    if not sequence or not all([isinstance(v, int) and not isinstance(v, bool) and v >= 1 for v in sequence]):
        raise ValueError(f"{name}={values!r}: give one positive integer for each axis, e.g. {name}=(16, 16)")
    return sequence


def effective_block_grid(grid: Sequence[int], block_grid: Sequence[int]) -> tuple[int, ...]:
    """Blocks per axis that a grid can hold: `min(tokens, blocks)` on every axis.

    An axis with fewer tokens than blocks (one frame, a tiny picture) gets one block per token.
    Raises ValueError when an entry is not a positive integer or the numbers of axes differ.
    """
    grid, block_grid = positive_ints("grid", grid), positive_ints("block_grid", block_grid)
    if len(grid) != len(block_grid):
        raise ValueError(
            f"grid {grid} has {len(grid)} axes but block_grid {block_grid} has {len(block_grid)}: "
            f"give one block count for each of the {len(grid)} axes"
        )
    # Not min(): of a symbolic size under torch.compile it would be symbolic as well, where blocks are known.
    pairs = zip(grid, block_grid, strict=True)
    return tuple([blocks if blocks <= tokens else tokens for tokens, blocks in pairs])


def block_table(grid: Sequence[int], block_grid: Sequence[int], device=None) -> torch.Tensor:
    """Token ids of every block of a 1-D, 2-D or 3-D token grid (any number of axes works).

    Args:
        grid: tokens per axis, e.g. `(frames, rows, columns)`.
        block_grid: blocks per axis; an axis with fewer tokens than blocks gets one block per token.
        device: where the table lives (CPU by default).

    Returns:
        int64 tensor `(M, n_max)`, M = number of blocks, n_max = tokens of the largest block: raster token ids in raster
        order inside the block, then -1 as padding. Tables are cached and shared, so they must not be written to.
    """
    grid = positive_ints("grid", grid)
    blocks = effective_block_grid(grid, block_grid)
    device = torch.device("cpu" if device is None else device)
    if torch.compiler.is_compiling():  # sizes may be symbolic there: one graph builds the table of any grid
        return _new_table(grid, blocks, device)
    return _cached_table(grid, blocks, str(device))


@functools.lru_cache(maxsize=512)
def _cached_table(grid: tuple[int, ...], blocks: tuple[int, ...], device: str) -> torch.Tensor:
    # A table built under inference mode could not be saved for a later backward pass.
    with torch.inference_mode(False):
        ids = _new_table(grid, blocks, torch.device("cpu"))
        # Padding goes to the end of each row, so that a kernel meets whole tiles of it.
        order = torch.argsort((ids < 0).to(torch.uint8), dim=1, stable=True)
        return ids.gather(1, order).contiguous().to(device)


def _new_table(grid: tuple[int, ...], blocks: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The table with the padding of each axis where it falls."""
    ndim = len(grid)
    ids = torch.zeros((1,) * (2 * ndim), dtype=torch.int64, device=device)
    valid = torch.ones((1,) * (2 * ndim), dtype=torch.bool, device=device)
    for axis, (length, count) in enumerate(zip(grid, blocks, strict=True)):
        edges = torch.arange(count + 1, device=device) * length // count  # as `block_edges`
        slots = torch.arange(-(-length // count), device=device)
        position = edges[:-1, None] + slots[None, :]  # (blocks, slots) on this axis
        shape = [1] * (2 * ndim)
        shape[axis], shape[ndim + axis] = position.shape
        ids = ids * length + position.view(shape)
        valid = valid & (position < edges[1:, None]).view(shape)
    return torch.where(valid, ids, -1).reshape(math.prod(blocks), -1)


def check_block_table(table: torch.Tensor, num_tokens: int) -> None:
    """Raise ValueError unless every token id in `[0, num_tokens)` appears exactly once and the rest is -1.

    The check reads values, so on a table that lives on an accelerator it waits for the device.
    """
    if table.ndim != 2 or table.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"block_table has shape {tuple(table.shape)} and dtype {table.dtype}: give an int64 (M, n_max) table, "
            "e.g. from block_table(grid, block_grid)"
        )
    ids = table.detach().flatten().to("cpu", torch.int64)
    outside = ids[(ids < -1) | (ids >= num_tokens)]
    if outside.numel():
        raise ValueError(
            f"block_table holds token id {int(outside[0])}, allowed are 0..{num_tokens - 1} and -1 for padding: "
            "build it with block_table(grid, block_grid) for the grid of this call"
        )
    counts = torch.bincount(ids[ids >= 0], minlength=num_tokens)
    wrong = torch.nonzero(counts != 1).flatten()
    if wrong.numel():
        token = int(wrong[0])
        raise ValueError(
            f"block_table holds token {token} {int(counts[token])} times, it must appear exactly once "
            f"({num_tokens} tokens in all): build it with block_table(grid, block_grid)"
        )


def block_centres(block_grid: Sequence[int]) -> torch.Tensor:
    """Float64 `(M, ndim)` centres of the blocks in index coordinates, unit spacing on every axis, on the CPU."""
    block_grid = positive_ints("block_grid", block_grid)
    # Whatever torch's default device is: some accelerators have no float64.
    axes = [torch.arange(count, dtype=torch.float64, device="cpu") for count in block_grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, len(block_grid))


def block_distances(block_grid: Sequence[int]) -> torch.Tensor:
    """Float64 `(M, M)` Euclidean distances between block centres (MHLA, arXiv 2601.07832, locality bias)."""
    centres = block_centres(block_grid)
    return (centres[:, None, :] - centres[None, :, :]).square().sum(-1).sqrt()
