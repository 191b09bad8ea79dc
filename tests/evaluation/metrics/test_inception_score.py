"""Inception Score: its bounds, and agreement with torch-fidelity."""

import pytest
import torch

from mhla_diffusion.evaluation.faults import InsufficientSamples
from mhla_diffusion.evaluation.metrics.inception_score import inception_score


def logits(count: int, classes: int = 11) -> torch.Tensor:
    return 3 * torch.randn(count, classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_the_bounds():
    certain = 1e3 * torch.eye(7).repeat(4, 1)
    assert inception_score(certain, splits=1).mean.item() == pytest.approx(7)
    assert inception_score(torch.zeros(20, 7)).mean.item() == pytest.approx(1)
    assert inception_score(certain, splits=4).std.item() == pytest.approx(0, abs=1e-9)


def test_torch_fidelity_agrees():
    from torch_fidelity.metric_isc import isc_features_to_metric

    x = logits(103)
    theirs = isc_features_to_metric(x, splits=4, shuffle=False)
    ours = inception_score(x, splits=4)
    assert ours.mean.item() == pytest.approx(theirs["inception_score_mean"], rel=1e-10)
    assert ours.std.item() == pytest.approx(theirs["inception_score_std"], rel=1e-9)


def test_splits_by_size_are_taken_in_order():
    x = logits(25)
    parts = torch.stack([inception_score(part, splits=1).mean for part in x.split(10)])
    ours = inception_score(x, split_size=10)
    torch.testing.assert_close(ours.mean, parts.mean())
    torch.testing.assert_close(ours.std, parts.std(unbiased=False))


def test_what_cannot_be_scored_is_refused():
    with pytest.raises(InsufficientSamples, match="3 samples are fewer than 10 splits"):
        inception_score(logits(3))
    with pytest.raises(ValueError, match="give one of them"):
        inception_score(logits(3), splits=1, split_size=1)
    for wrong in ({"splits": 0}, {"split_size": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            inception_score(logits(3), **wrong)
    with pytest.raises(InsufficientSamples, match="no samples"):
        inception_score(logits(0), split_size=5)
