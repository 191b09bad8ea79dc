"""Tokens that a process needs besides its own: those within reach of a convolution over the token grid."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .share import Share

if dist.is_available():
    import torch.distributed._functional_collectives as collectives

__all__ = ["reach_of", "with_neighbours"]


def reach_of(grid: tuple[int, ...], radius: int) -> int:
    """How many tokens before or behind a token, in raster order, hold everything within `radius` on each axis."""
    reach, size = 0, 1
    for length in reversed(grid):
        reach += min(radius, length - 1) * size
        size *= length
    return reach


def lent(share: Share, tokens: int, reach: int, giver: int, taker: int) -> tuple[int, int]:
    """First token of the giver's that the taker needs, and the one behind the last; of processes side by side."""
    (low, high), (start, stop) = (share.spans(tokens)[rank] for rank in (giver, taker))
    if giver < taker:
        low = max(low, start - reach)
    elif giver > taker:
        high = min(high, stop + reach)
    return (low, max(low, high)) if giver != taker else (low, low)


class _WithNeighbours(torch.autograd.Function):
    """`(n, ...)` -> `(left + n + right, ...)`; backward the neighbours' gradients go home and are added there."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, share: Share, tokens: int, reach: int) -> torch.Tensor:
        ctx.plan = share, tokens, reach
        start, _ = share.span(tokens)
        given, taken = _counts(share, tokens, reach)
        pieces = [
            x[low - start : high - start]
            for low, high in [lent(share, tokens, reach, share.rank, r) for r in range(share.ranks)]
        ]
        came = _exchanged(torch.cat(pieces), taken, given, share)
        left = sum(taken[: share.rank])
        return torch.cat((came[:left], x, came[left:]))

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        share, tokens, reach = ctx.plan
        start, stop = share.span(tokens)
        given, taken = _counts(share, tokens, reach)
        left = sum(taken[: share.rank])
        own = grad[left : left + stop - start].clone()
        came = _exchanged(torch.cat((grad[:left], grad[left + stop - start :])), given, taken, share)
        for rank, piece in enumerate(came.split(given)):
            low, high = lent(share, tokens, reach, share.rank, rank)
            own[low - start : high - start] += piece
        return own, None, None, None


def _counts(share: Share, tokens: int, reach: int) -> tuple[list[int], list[int]]:
    """Tokens that go to each process, and that come from each."""
    every = range(share.ranks)
    given = [lent(share, tokens, reach, share.rank, rank) for rank in every]
    taken = [lent(share, tokens, reach, rank, share.rank) for rank in every]
    return [high - low for low, high in given], [high - low for low, high in taken]


def _exchanged(x: torch.Tensor, coming: list[int], going: list[int], share: Share) -> torch.Tensor:
    group = dist.group.WORLD if share.group is None else share.group
    return collectives.wait_tensor(collectives.all_to_all_single(x.contiguous(), coming, going, group))


def with_neighbours(x: torch.Tensor, share: Share, tokens: int, reach: int) -> tuple[torch.Tensor, int]:
    """This process's tokens `(B, n, C)` with up to `reach` more on each side, and the id of the first of them.

    `tokens` are there in all. Every process of the share calls it. The gradient of the added ones goes to where they
    came from.
    """
    start, _ = share.span(tokens)
    wide = _WithNeighbours.apply(x.transpose(0, 1), share, tokens, reach)
    return wide.transpose(0, 1), max(0, start - reach)
