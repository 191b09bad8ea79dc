"""A process's share of the tokens: a contiguous run of the raster order, whatever the blocks are.

A block's tokens may then be spread over processes. Each sums what it holds of every block; the sums of all processes
are the block's summary. So any split is exact, into any number of processes, ragged ones included.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..blocks import block_table
from .partition import Partition
from .rotation import exact_dtype, kept_angles

if dist.is_available():  # some builds of torch come without
    import torch.distributed._functional_collectives as collectives

__all__ = ["LocalBlocks", "Share", "local_angles", "local_blocks", "sum_over"]


class Share(NamedTuple):
    """Which of the processes this one is. group: over which they talk; None: the default one."""

    rank: int
    ranks: int
    group: dist.ProcessGroup | None = None

    def span(self, tokens: int) -> tuple[int, int]:
        """First token of this process and the one behind its last; the first processes hold one more where needed."""
        return span_of(self.rank, self.ranks, tokens)

    def spans(self, tokens: int) -> list[tuple[int, int]]:
        """`span` of every process."""
        return [span_of(rank, self.ranks, tokens) for rank in range(self.ranks)]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all processes' x; its gradient is the sum of all processes' gradients."""
        return sum_over(x, self.group)


def span_of(rank: int, ranks: int, tokens: int) -> tuple[int, int]:
    each, more = tokens // ranks, tokens % ranks  # compilers know no divmod of symbolic sizes
    start = rank * each + (rank if rank < more else more)
    return start, start + each + (1 if rank < more else 0)


class _SumOver(torch.autograd.Function):
    """Each process's result depends on every process's x, hence its gradient is a sum over processes as well."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group) -> torch.Tensor:
        ctx.group = group
        return _all_reduced(x, group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return _all_reduced(grad, ctx.group), None


def _all_reduced(x: torch.Tensor, group) -> torch.Tensor:
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group))


def sum_over(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Differentiable all-reduce; every process of the group calls it with the same shape, dtype and order."""
    group = dist.group.WORLD if group is None else group
    return _SumOver.apply(x, group)


class LocalBlocks(NamedTuple):
    """The blocks of a run of tokens, its tokens numbered from 0.

    query: the blocks that hold any of them. rows: `(Mq,)` which ones these are; None: all. key: all blocks, those
    without a token of the run being empty.
    """

    query: Partition
    rows: torch.Tensor | None
    key: Partition


def local_blocks(
    grid: Sequence[int], block_grid: Sequence[int], start: int, stop: int, device: torch.device
) -> LocalBlocks:
    """Blocks of the tokens `start .. stop - 1` of a grid cut into exactly `block_grid` blocks."""
    if (
        torch.compiler.is_compiling()
    ):  # no size may depend on values there: slots of all blocks, most of them padding
        table = _renumbered(block_table(grid, block_grid, device), start, stop)
        part = _partition(table, stop - start)
        return LocalBlocks(part, None, part)
    return _kept_blocks(tuple(grid), tuple(block_grid), start, stop, str(device))


def _renumbered(table: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return torch.where((table >= start) & (table < stop), table - start, -1)


def _partition(table: torch.Tensor, tokens: int) -> Partition:
    blocks, size = table.shape
    return Partition(table, blocks, size, tokens, None, None, table.numel() == tokens, True)


@functools.lru_cache(maxsize=256)
def _kept_blocks(grid: tuple[int, ...], blocks: tuple[int, ...], start: int, stop: int, device: str):
    # Tables made in inference mode could not be saved for a later backward pass.
    with torch.inference_mode(False):
        table = _renumbered(block_table(grid, blocks), start, stop)
        counts = (table >= 0).sum(dim=1)
        order = torch.argsort((table < 0).to(torch.uint8), dim=1, stable=True)  # padding behind the tokens
        key = table.gather(1, order)[:, : int(counts.max())].contiguous()
        rows = counts.nonzero()[:, 0]
        query = key[rows]
        everything = len(rows) == math.prod(blocks)
        key, query, rows = (x.to(device) for x in (key, query, rows))
        tokens = stop - start
        return LocalBlocks(_partition(query, tokens), None if everything else rows, _partition(key, tokens))


def local_angles(
    frequencies: torch.Tensor, grid: Sequence[int], start: int, stop: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) `(stop - start, D / 2)` of a run of tokens. frequencies: `(axes, D / 2)`, see `GridRope`."""
    exact = exact_dtype(frequencies.device)

    def build(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        place = torch.arange(start, stop, device=given.device)
        places = []
        for size in reversed(grid):
            places.append(place % size)
            place = place // size
        places = torch.stack(places[::-1], dim=-1).to(exact)  # (N, axes)
        angle = (places[:, :, None] * given.to(exact)).sum(dim=1)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    return kept_angles(frequencies, ("run", tuple(grid), start, stop, dtype), build)
