"""Mean and covariance of features, gathered in any batches and on any number of processes, in float64.

The state is one tensor `(features + 2, features)`: the count in row 0 (repeated), the mean in row 1, below it the
scatter matrix (the sum of outer products around the mean). Two states merge by Chan's formula, so nothing is lost where
means are large beside standard deviations, as it is with sums of squares.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..faults import InsufficientSamples


class Moments(NamedTuple):
    """Mean `(d,)` and covariance `(d, d)`, float64. `count`: samples behind them, None where a file does not say."""

    mean: Tensor
    covariance: Tensor
    count: int | None = None

    @property
    def rank(self) -> int:
        """The largest rank that the covariance can have."""
        width = len(self.mean)
        return width if self.count is None else min(width, self.count - 1)


def checked_features(features: Tensor) -> Tensor:
    """`features` in float64. Raises ValueError unless they are finite and of shape `(N, d)`."""
    if features.ndim != 2 or features.shape[1] == 0:
        raise ValueError(f"features have the shape {tuple(features.shape)}: give (samples, features)")
    features = features.detach().double()
    if not torch.isfinite(features).all():
        row = int((~torch.isfinite(features)).any(1).nonzero()[0])
        raise ValueError(
            f"the features of sample {row} are not finite: look at that picture and at the weights"
        )
    return features


def empty_state(width: int) -> Tensor:
    return torch.zeros(width + 2, width, dtype=torch.float64)


def state_of(features: Tensor) -> Tensor:
    """State of one batch `(N, d)`, float64, on the features' device."""
    features = checked_features(features)
    state = features.new_zeros(features.shape[1] + 2, features.shape[1])
    if len(features):
        mean = features.mean(0)
        centred = features - mean
        state[0], state[1], state[2:] = len(features), mean, centred.T @ centred
    return state


def merge_two(a: Tensor, b: Tensor) -> Tensor:
    """Chan, Golub and LeVeque, 1979. Counts stay on the device: no waiting for it."""
    count = a[0] + b[0]
    share = b[0] / count.clamp(min=1)  # 0 where both are empty
    difference = b[1] - a[1]
    merged = torch.empty_like(a)
    merged[0] = count
    merged[1] = a[1] + difference * share
    merged[2:] = a[2:] + b[2:] + torch.outer(difference, difference * (a[0] * share))
    return merged


def merge(states: Tensor) -> Tensor:
    """One state of several, `(K, d + 2, d)` -> `(d + 2, d)`; pairwise, so that rounding grows with log K."""
    parts = list(states)
    while len(parts) > 1:
        pairs = [merge_two(*parts[i : i + 2]) for i in range(0, len(parts) - 1, 2)]
        parts = pairs + (parts[-1:] if len(parts) % 2 else [])
    return parts[0]


def moments_of_state(state: Tensor, what: str = "set") -> Moments:
    """Unbiased covariance. Raises InsufficientSamples for fewer than two samples."""
    count = int(state[0, 0])
    if count < 2:
        raise InsufficientSamples(
            f"the {what} has {count} pictures: a covariance needs at least 2 images per side"
        )
    return Moments(state[1], state[2:] / (count - 1), count)


def moments_of(features: Tensor, what: str = "set") -> Moments:
    """Moments of features `(N, d)`."""
    return moments_of_state(state_of(features), what)
