"""CLIP score from embeddings: both scales, any batches, nothing clamped."""

import pytest
import torch

from mhla_diffusion.evaluation.faults import InsufficientSamples, ReferenceMismatch
from mhla_diffusion.evaluation.metrics.accumulators import ClipScore
from mhla_diffusion.evaluation.metrics.clip_score import cosines, estimate


def pairs(count: int = 11, width: int = 7):
    draw = torch.Generator().manual_seed(3)
    return torch.randn(count, width, generator=draw), torch.randn(count, width, generator=draw)


def test_known_angles():
    images = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0], [1.0, 0.0]])
    texts = torch.tensor([[5.0, 0.0], [1.0, 0.0], [1.0, 0.0], [-2.0, 0.0]])
    found = estimate(cosines(images, texts), truncated=2)
    assert float(found.cosine) == pytest.approx((1 + 0 + 0.5**0.5 - 1) / 4, rel=1e-12)
    assert float(found.score) == pytest.approx(100 * float(found.cosine)) and found.truncated == 2
    opposite = estimate(cosines(images[:1], -texts[:1]))
    assert float(opposite.score) == -100 and float(opposite.std) == 0


@pytest.mark.parametrize("batch", [1, 4, 11])
def test_the_metric_is_the_function_for_any_batches(batch):
    images, texts = pairs()
    metric = ClipScore()
    for first in range(0, len(images), batch):
        metric.update(images[first : first + batch], texts[first : first + batch])
    found, expected = metric.compute(), estimate(cosines(images, texts))
    assert found.count == 11
    for name in ("score", "cosine", "std"):
        assert float(getattr(found, name)) == pytest.approx(float(getattr(expected, name)), rel=1e-12)
    metric.reset()
    with pytest.raises(InsufficientSamples):
        metric.compute()


def test_what_does_not_pair_is_refused():
    images, texts = pairs()
    with pytest.raises(ReferenceMismatch, match="one caption for each picture"):
        cosines(images, texts[:3])
