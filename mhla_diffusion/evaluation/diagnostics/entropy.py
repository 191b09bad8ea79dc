"""Entropy of attention rows, from tiles of rows: memory for some rows, never for all."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .matrices import AttentionMatrix


@dataclass(frozen=True)
class RowEntropy:
    """Entropy of rows in nats. A row is taken as shares of its absolute values, `|a| / sum |a|`.

    mean, std, smallest, largest: over the rows.
    relative: mean / log N; 1 is a uniform row.
    error: standard error of the mean when rows were sampled, 0 of all rows.
    rows: how many were taken. empty: how many of them hold zeros only, and are left out.
    negative: share of the absolute mass that is negative; not zero where keys are rotated behind the feature map.
    """

    mean: float
    std: float
    smallest: float
    largest: float
    relative: float
    error: float
    rows: int
    empty: int
    negative: float


def row_entropy(matrix: AttentionMatrix, *, max_rows: int = 4096, seed: int = 0) -> RowEntropy:
    """Entropy of all rows, or of `max_rows` drawn without replacement. Raises ValueError unless max_rows >= 2."""
    if max_rows < 2:
        raise ValueError(f"{max_rows} rows for the entropy: give at least 2")
    tokens, sampled = matrix.tokens, max_rows < matrix.tokens
    ids = torch.arange(tokens)
    if sampled:
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randperm(tokens, generator=draw)[:max_rows].sort().values
    found, negative, empty = [], 0.0, 0
    step = len(next(matrix.tiles()))
    for part in ids.to(matrix.device).split(step):
        rows = matrix.rows(part)
        mass = rows.abs().sum(dim=1)
        alive = mass > 0
        empty += int((~alive).sum())
        shares = rows[alive] / mass[alive, None]
        negative += float(-shares.clamp(max=0).sum())
        shares = shares.abs()
        found.append(-torch.special.xlogy(shares, shares).sum(dim=1))
    values = torch.cat(found)
    count = len(values)
    if not count:
        return RowEntropy(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, len(ids), empty, 0.0)
    mean = float(values.mean())
    std = float(values.std()) if count > 1 else 0.0
    left = 1 - len(ids) / tokens  # of a finite set of rows, what the sample does not know
    return RowEntropy(
        mean=mean,
        std=std,
        smallest=float(values.min()),
        largest=float(values.max()),
        relative=mean / math.log(tokens) if tokens > 1 else 1.0,
        error=std * math.sqrt(left / count) if sampled else 0.0,
        rows=len(ids),
        empty=empty,
        negative=negative / count,
    )
