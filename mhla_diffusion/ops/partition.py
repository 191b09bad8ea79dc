"""How the tokens of one side (queries or keys) are cut into blocks, in the form the backends use."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..blocks import block_table, check_block_table, effective_block_grid

__all__ = ["LARGEST_BLOCK", "Partition", "grid_partition", "layout_partition", "table_partition"]

LARGEST_BLOCK = 1 << 19  # the kernels' index arithmetic is exact below twice this; larger blocks take a table

# Tables that passed the check, by identity: table -> (tensor version, number of tokens).
_CHECKED = WeakIdKeyDictionary()


class Partition(NamedTuple):
    """One side's blocks.

    table: `(M, n_max)` token ids, -1 = padding. None when the blocks follow from `layout`; `with_table` then builds it.
    num_blocks, block_size: M and n_max.
    num_tokens: N of this side.
    grid, block_grid: set when every axis divides evenly, so that blocks are views of the token axis.
    equal: all blocks have the same number of tokens, nothing is padded.
    trusted: every token is known to appear exactly once. False for a table on an accelerator, whose values are never
        read by the host: there padding is assumed, and tokens in no block yield zeros.
    layout: three token counts and three block counts, last axis last (leading ones for fewer axes), when blocks can be
        found by index arithmetic.
    """

    table: torch.Tensor | None
    num_blocks: int
    block_size: int
    num_tokens: int
    grid: tuple[int, ...] | None
    block_grid: tuple[int, ...] | None
    equal: bool
    trusted: bool
    layout: tuple[int, ...] | None = None

    @property
    def even(self) -> bool:
        return self.grid is not None

    @property
    def padded(self) -> bool:
        """Whether slots may be padding and must be masked."""
        return not (self.equal and self.trusted)

    def with_table(self, device: torch.device) -> torch.Tensor:
        """The table, built (and cached) when the blocks follow from a grid."""
        if self.table is not None:
            return self.table
        grid, blocks = (
            (self.grid, self.block_grid) if self.layout is None else (self.layout[:3], self.layout[3:])
        )
        return block_table(grid, blocks, device)


def grid_partition(
    grid: Sequence[int], block_grid: Sequence[int], num_tokens: int, device: torch.device | None
) -> Partition:
    """Blocks of a whole token grid. Raises ValueError when the grid does not hold `num_tokens` tokens."""
    grid, block_grid = tuple(grid), tuple(block_grid)
    if torch.compiler.is_compiling():  # sizes may be symbolic there
        return _grid_partition(grid, block_grid, num_tokens, device)
    try:
        return _cached_grid_partition(len(grid), num_tokens, device, *grid, *block_grid)
    except TypeError:  # symbolic sizes of other tracers, or what is no number at all
        return _grid_partition(grid, block_grid, num_tokens, device)


@functools.lru_cache(maxsize=256, typed=True)  # typed: True is not 1, and is refused
def _cached_grid_partition(axes: int, num_tokens: int, device: torch.device | None, *sizes) -> Partition:
    return _grid_partition(sizes[:axes], sizes[axes:], num_tokens, device)


def _grid_partition(
    grid: tuple, block_grid: tuple, num_tokens: int, device: torch.device | None
) -> Partition:
    blocks = effective_block_grid(grid, block_grid)
    if math.prod(grid) != num_tokens:
        raise ValueError(
            f"grid {grid} holds {math.prod(grid)} tokens but q has {num_tokens}: give the token grid of this call"
        )
    # One condition, not one for each axis: under torch.compile every condition on a size makes kinds of graphs.
    even = sum([length % count for length, count in zip(grid, blocks, strict=True)]) == 0
    size = math.prod([-(-length // count) for length, count in zip(grid, blocks, strict=True)])
    # The kernels multiply each axis' tokens by its blocks, in 32 bits. `layout` has more axes of one token: they add 0.
    reach = sum([length * count - 1 for length, count in zip(grid, blocks, strict=True)])
    layout = None
    if len(grid) <= 3 and size <= LARGEST_BLOCK and reach < 2**31 - 1:
        ones = (1,) * (3 - len(grid))
        layout = (*ones, *grid, *ones, *blocks)
    table = None if even or layout is not None else block_table(grid, blocks, device)
    whole = (grid, blocks) if even else (None, None)
    return Partition(table, math.prod(blocks), size, num_tokens, *whole, even, True, layout)


@functools.lru_cache(maxsize=256)
def layout_partition(layout: tuple[int, ...]) -> Partition:
    """The partition that a `Partition.layout` stands for, without its table."""
    return grid_partition(layout[:3], layout[3:], math.prod(layout[:3]), None)


def table_partition(name: str, table: torch.Tensor, num_tokens: int, device: torch.device) -> Partition:
    """Blocks given as a table of token ids.

    A table on the CPU is checked once (again after it was written to); one on an accelerator is not read. The kernels
    read rows that lie one after the other: other strides are copied.
    """
    if table.ndim != 2 or table.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name} has shape {tuple(table.shape)} and dtype {table.dtype}: give an int64 (M, n_max) table of token "
            "ids with -1 as padding, e.g. block_table(grid, block_grid)"
        )
    if table.device != device:
        raise ValueError(f"{name} is on {table.device} but q is on {device}: pass {name}.to(q.device)")
    if table.numel() < num_tokens:
        raise ValueError(
            f"{name} of shape {tuple(table.shape)} has room for {table.numel()} tokens but there are {num_tokens}: "
            "build it for the grid of this call, block_table(grid, block_grid)"
        )
    trusted = False
    if table.device.type == "cpu" and not torch.compiler.is_compiling():
        # Tensors made under inference mode carry no version: they are checked on each call.
        stamp = None if table.is_inference() else (table._version, num_tokens)
        if stamp is None or _CHECKED.get(table) != stamp:
            check_block_table(table, num_tokens)
            _CHECKED[table] = stamp
        trusted = True
    blocks, size = table.shape
    whole = table.numel() == num_tokens
    return Partition(table.contiguous(), blocks, size, num_tokens, None, None, whole, trusted)
