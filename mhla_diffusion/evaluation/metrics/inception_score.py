"""Inception Score (Salimans et al., arXiv 1606.03498) of class logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..faults import InsufficientSamples
from .moments import checked_features


class ScoreEstimate(NamedTuple):
    """Mean and standard deviation (not corrected) over the splits, float64, 0-dim."""

    mean: Tensor
    std: Tensor


def score_of_split(logits: Tensor) -> Tensor:
    """exp of the mean divergence of p(class | picture) from p(class)."""
    log_p = torch.log_softmax(logits, 1)
    log_mean = torch.logsumexp(log_p, 0) - torch.log(torch.tensor(float(len(log_p)), dtype=log_p.dtype))
    return (log_p.exp() * (log_p - log_mean)).sum(1).mean().exp()


def inception_score(
    logits: Tensor, *, splits: int | None = None, split_size: int | None = None
) -> ScoreEstimate:
    """Score of logits `(N, classes)` in their order.

    Args:
        splits: parts of equal size, up to rounding (10 if neither is given).
        split_size: samples per part, as ADM's evaluator takes 5,000; a shorter last part counts like the others.

    Raises InsufficientSamples for fewer samples than splits; ValueError when both are given.
    """
    logits = checked_features(logits)
    count = len(logits)
    if splits is not None and split_size is not None:
        raise ValueError(f"splits={splits} and split_size={split_size}: give one of them")
    if split_size is not None:
        if split_size < 1:
            raise ValueError(f"split_size={split_size}: give at least 1")
        parts = list(logits.split(split_size))
    else:
        splits = 10 if splits is None else splits
        if splits < 1:
            raise ValueError(f"splits={splits}: give at least 1")
        if count < splits:
            raise InsufficientSamples(f"{count} samples are fewer than {splits} splits: give more pictures")
        edges = [count * i // splits for i in range(splits + 1)]
        parts = [logits[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    if not count:
        raise InsufficientSamples("there are no samples: give pictures")
    scores = torch.stack([score_of_split(part) for part in parts])
    return ScoreEstimate(scores.mean(), scores.std(unbiased=False))
