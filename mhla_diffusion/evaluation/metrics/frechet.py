"""Fréchet distance between Gaussians (Dowson and Landau, 1982), as FID uses it (Heusel et al., arXiv 1706.08500)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..faults import InsufficientSamples, ReferenceMismatch
from .moments import Moments, checked_features

# Below zero by so much of the largest is rounding, of files in float32 at the most.
NEGLIGIBLE = 1e-3


def factor(moments: Moments) -> Tensor:
    """`(d, r)` with F F^T = covariance.

    Directions beyond the rank that the count allows are left out: their eigenvalues are rounding errors, and a square
    root makes 1e-8 of 1e-16, which is what spoils distances of few samples.
    """
    values, vectors = torch.linalg.eigh((moments.covariance + moments.covariance.T) / 2)
    if values[0] < -NEGLIGIBLE * values[-1].abs():
        raise ValueError(
            f"a covariance has the negative eigenvalue {float(values[0]):.3g}, so it is none: make the statistics again"
        )
    rank = moments.rank
    return vectors[:, -rank:] * values[-rank:].clamp(min=0).sqrt()


def unclamped_distance(a: Moments, b: Moments) -> Tensor:
    """|m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)), float64, 0-dim; rounding can make it slightly negative.

    tr (S1 S2)^(1/2) is the sum of the singular values of F1^T F2, where S = F F^T.

    Raises:
        ReferenceMismatch: the two have different numbers of features.
        ValueError: a mean or a covariance is not finite, not of shapes (d,) and (d, d), or no covariance.
    """
    for moments in (a, b):
        width = len(moments.mean)
        if moments.mean.ndim != 1 or tuple(moments.covariance.shape) != (width, width):
            raise ValueError(
                f"mean of shape {tuple(moments.mean.shape)}, covariance {tuple(moments.covariance.shape)}: "
                "give (d,) and (d, d)"
            )
        if not (torch.isfinite(moments.mean).all() and torch.isfinite(moments.covariance).all()):
            raise ValueError("a mean or a covariance is not finite: make the statistics again")
    if len(a.mean) != len(b.mean):
        raise ReferenceMismatch(
            f"{len(a.mean)} features on one side, {len(b.mean)} on the other: use one network"
        )
    a, b = (Moments(m.mean.double(), m.covariance.double(), m.count) for m in (a, b))
    cross = torch.linalg.svdvals(factor(a).T @ factor(b)).sum()
    return (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace() - 2 * cross


def frechet_distance(a: Moments, b: Moments) -> Tensor:
    """As `unclamped_distance`, with what rounding puts below zero set to zero."""
    return unclamped_distance(a, b).clamp(min=0)


def frechet_distance_of_features(x: Tensor, y: Tensor) -> Tensor:
    """The distance of features `(N, d)` and `(M, d)` without any covariance: exact for few samples, and fast then."""
    x, y = checked_features(x), checked_features(y)
    if x.shape[1] != y.shape[1]:
        raise ReferenceMismatch(
            f"{x.shape[1]} features on one side, {y.shape[1]} on the other: use one network"
        )
    if min(len(x), len(y)) < 2:
        raise InsufficientSamples(f"{len(x)} and {len(y)} samples: give at least 2 images per side")
    mean_x, mean_y = x.mean(0), y.mean(0)
    x, y = (x - mean_x) / (len(x) - 1) ** 0.5, (y - mean_y) / (len(y) - 1) ** 0.5
    cross = torch.linalg.svdvals(x @ y.T).sum()  # of the same matrix, up to rotations, as F1^T F2
    distance = (mean_x - mean_y).square().sum() + x.square().sum() + y.square().sum() - 2 * cross
    return distance.clamp(min=0)
