"""Maximum mean discrepancies: KID (Binkowski et al., arXiv 1801.01401), CMMD (Jayasumana et al., arXiv 2401.09603)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..faults import InsufficientSamples, ReferenceMismatch
from .moments import checked_features


class KernelEstimate(NamedTuple):
    """Mean and standard deviation (over subsets, not corrected) of the squared discrepancy, float64, 0-dim."""

    mean: Tensor
    std: Tensor


def pair(x: Tensor, y: Tensor, least: int) -> tuple[Tensor, Tensor]:
    x, y = checked_features(x), checked_features(y)
    if x.shape[1] != y.shape[1]:
        raise ReferenceMismatch(
            f"{x.shape[1]} features on one side, {y.shape[1]} on the other: use one network"
        )
    if min(len(x), len(y)) < least:
        raise InsufficientSamples(f"{len(x)} and {len(y)} samples: give at least {least} images per side")
    return x, y


def polynomial_discrepancy(
    x: Tensor, y: Tensor, *, degree: int = 3, gamma: float | None = None, coef: float = 1.0
) -> Tensor:
    """Unbiased squared MMD of `(N, d)` and `(M, d)` with the kernel (gamma x.y + coef)^degree; gamma: 1/d if None."""
    gamma = 1 / x.shape[1] if gamma is None else gamma

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T * gamma + coef) ** degree

    def within(a: Tensor) -> Tensor:
        values = kernel(a, a)
        return (values.sum() - values.diagonal().sum()) / (len(a) * (len(a) - 1))

    return within(x) + within(y) - 2 * kernel(x, y).mean()


def kernel_distance(
    x: Tensor,
    y: Tensor,
    *,
    subsets: int = 100,
    subset_size: int = 1000,
    degree: int = 3,
    gamma: float | None = None,
    coef: float = 1.0,
    generator: torch.Generator | None = None,
) -> KernelEstimate:
    """KID of features: the unbiased discrepancy of random subsets.

    Args:
        generator: draws the subsets; None takes torch's global one.

    Raises InsufficientSamples when a side has fewer than `subset_size` samples.
    """
    if subsets < 1 or subset_size < 2:
        raise ValueError(f"{subsets} subsets of {subset_size}: give at least 1 of at least 2 samples")
    x, y = pair(x, y, 2)
    if min(len(x), len(y)) < subset_size:
        raise InsufficientSamples(
            f"{len(x)} and {len(y)} samples are fewer than a subset of {subset_size}: "
            f"give more pictures, or subset_size={min(len(x), len(y)) // 2}"
        )
    values = []
    for _ in range(subsets):
        first = torch.randperm(len(x), generator=generator)[:subset_size].to(x.device)
        second = torch.randperm(len(y), generator=generator)[:subset_size].to(y.device)
        values.append(polynomial_discrepancy(x[first], y[second], degree=degree, gamma=gamma, coef=coef))
    values = torch.stack(values)
    return KernelEstimate(values.mean(), values.std(unbiased=False))


def clip_discrepancy(
    x: Tensor, y: Tensor, *, sigma: float = 10.0, scale: float = 1000.0, chunk: int = 4096
) -> Tensor:
    """CMMD of CLIP's image embeddings `(N, d)` and `(M, d)`: RBF kernel on unit vectors, pairs with itself included.

    Raises InsufficientSamples for an empty side; ValueError for an embedding of length 0.
    """
    x, y = pair(x, y, 1)
    for side in (x, y):
        if (side.norm(dim=1) == 0).any():
            raise ValueError("an embedding has length 0: look at the weights")
    x, y = torch.nn.functional.normalize(x, dim=1), torch.nn.functional.normalize(y, dim=1)

    def mean_kernel(a: Tensor, b: Tensor) -> Tensor:
        # |a - b|^2 = 2 - 2 a.b on the sphere; expm1 keeps the digits of values near 1.
        sums = [torch.expm1((part @ b.T - 1) / sigma**2).sum() for part in a.split(chunk)]
        return torch.stack(sums).sum() / (len(a) * len(b))

    return scale * (mean_kernel(x, x) + mean_kernel(y, y) - 2 * mean_kernel(x, y))
