"""Improved precision and recall (Kynkäänniemi et al., arXiv 1904.06991), and distances to the nearest picture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..faults import InsufficientSamples, ReferenceMismatch
from .moments import checked_features

ARITHMETIC = ("float64", "float32", "float16")


class Shares(NamedTuple):
    """Shares in [0, 1], float64, 0-dim: samples inside the reference's manifold, and references inside the samples'."""

    precision: Tensor
    recall: Tensor


def squared_distances(a: Tensor, b: Tensor, arithmetic: str) -> Tensor:
    """`(len(a), len(b))`. float16, as ADM's evaluator computes: where that overflows, float32."""
    dtype = getattr(torch, arithmetic)
    low_a, low_b = a.to(dtype), b.to(dtype)
    found = low_a.square().sum(1)[:, None] - 2 * low_a @ low_b.T + low_b.square().sum(1)[None]
    if arithmetic == "float16" and not torch.isfinite(found).all():
        return squared_distances(a, b, "float32")
    return found.clamp(min=0)


def rows(a: Tensor, b: Tensor, arithmetic: str, chunk: int) -> Iterator[Tensor]:
    for part in a.split(chunk):
        yield squared_distances(part, b, arithmetic)


def squared_radii(features: Tensor, k: int, arithmetic: str, chunk: int) -> Tensor:
    """Squared distance of each sample to its k-th nearest other one."""
    parts = [part.kthvalue(k + 1, dim=1).values for part in rows(features, features, arithmetic, chunk)]
    return torch.cat([part.double() for part in parts])


def covered(points: Tensor, centres: Tensor, radii: Tensor, arithmetic: str, chunk: int) -> Tensor:
    """Share of the points that lie within the radius of at least one centre."""
    parts = [(part.double() <= radii[None]).any(1) for part in rows(points, centres, arithmetic, chunk)]
    return torch.cat(parts).double().mean()


def check_counts(reference: int, samples: int, k: int = 3) -> None:
    """Raises InsufficientSamples when a side has not more than k samples."""
    if min(reference, samples) <= k:
        raise InsufficientSamples(f"{reference} and {samples} samples: k={k} needs at least {k + 1} per side")


def precision_recall(
    reference: Tensor, samples: Tensor, *, k: int = 3, arithmetic: str = "float64", chunk: int = 2048
) -> Shares:
    """Precision and recall of samples `(M, d)` against references `(N, d)`.

    Args:
        k: a sample's neighbourhood reaches to its k-th nearest neighbour in its own set.
        arithmetic: float64; float16 for the numbers that ADM's evaluator prints (squared distances).
        chunk: rows of the table of distances held at once.

    Raises InsufficientSamples when a side has not more than k samples.
    """
    if arithmetic not in ARITHMETIC:
        raise ValueError(f"arithmetic={arithmetic!r}: give {', '.join(ARITHMETIC)}")
    if k < 1:
        raise ValueError(f"k={k}: give at least 1")
    reference, samples = checked_features(reference), checked_features(samples)
    if reference.shape[1] != samples.shape[1]:
        raise ReferenceMismatch(
            f"{reference.shape[1]} features on one side, {samples.shape[1]} on the other: use one network"
        )
    check_counts(len(reference), len(samples), k)
    how = (arithmetic, chunk)
    return Shares(
        covered(samples, reference, squared_radii(reference, k, *how), *how),
        covered(reference, samples, squared_radii(samples, k, *how), *how),
    )


def nearest(samples: Tensor, reference: Tensor, chunk: int = 2048) -> tuple[Tensor, Tensor]:
    """Distance (float64) and index of each sample's nearest reference: `(M, d)`, `(N, d)` -> `(M,)`, `(M,)`.

    Samples much nearer to training pictures than held-out pictures are were memorised.
    """
    samples, reference = checked_features(samples), checked_features(reference)
    found = [part.min(1) for part in rows(samples, reference, "float64", chunk)]
    return torch.cat([part.values for part in found]).sqrt(), torch.cat([part.indices for part in found])
