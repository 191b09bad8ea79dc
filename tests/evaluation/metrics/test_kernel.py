"""KID and CMMD: unbiasedness, closed forms, agreement with torchmetrics."""

import pytest
import torch

from mhla_diffusion.evaluation.faults import InsufficientSamples, ReferenceMismatch
from mhla_diffusion.evaluation.metrics.kernel import clip_discrepancy, kernel_distance, polynomial_discrepancy


def features(count: int, width: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_torchmetrics_agrees_on_the_same_subsets():
    from torchmetrics.image.kid import poly_mmd

    x, y = features(90), features(80, seed=1) + 0.2
    ours = kernel_distance(x, y, subsets=7, subset_size=50, generator=torch.Generator().manual_seed(3))
    draw = torch.Generator().manual_seed(3)
    theirs = []
    for _ in range(7):
        first, second = (torch.randperm(len(side), generator=draw)[:50] for side in (x, y))
        theirs.append(poly_mmd(x[first], y[second]))
    theirs = torch.stack(theirs)
    torch.testing.assert_close(ours.mean, theirs.mean(), rtol=1e-10, atol=0)
    torch.testing.assert_close(ours.std, theirs.std(unbiased=False), rtol=1e-10, atol=0)


def test_the_discrepancy_is_unbiased_and_sees_a_shift():
    same = torch.stack(
        [polynomial_discrepancy(features(40, seed=2 * i), features(40, seed=2 * i + 1)) for i in range(60)]
    )
    assert abs(same.mean()) < 3 * same.std() / 60**0.5  # zero within three standard errors
    assert polynomial_discrepancy(features(40), features(40, seed=1) + 1) > same.max()


def test_the_kernel_by_hand():
    x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[2.0], [3.0]])
    # kernel (xy + 1)^3: within x: k(0, 1) = 1; within y: k(2, 3) = 343; across: 1, 1, 27, 64
    assert polynomial_discrepancy(x, y).item() == pytest.approx(1 + 343 - 2 * 93 / 4)


def test_clip_discrepancy_by_hand_in_any_chunks():
    x = torch.tensor([[2.0, 0.0], [0.0, 5.0]])
    y = torch.tensor([[1.0, 0.0]])
    k = torch.exp(torch.tensor(-1 / 100, dtype=torch.float64))  # unit vectors at right angles: |a - b|^2 = 2
    expected = 1000 * ((1 + k) / 2 + 1 - (1 + k))
    assert clip_discrepancy(x, y).item() == pytest.approx(expected.item(), rel=1e-10)
    x, y = features(30), features(20, seed=1) + 0.3
    whole = clip_discrepancy(x, y)
    torch.testing.assert_close(clip_discrepancy(x, y, chunk=7), whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(clip_discrepancy(x.flip(0), 3 * y), whole, rtol=1e-10, atol=0)
    assert abs(clip_discrepancy(x, x)) < 1e-10


def test_what_cannot_be_compared_is_refused():
    x = features(20)
    with pytest.raises(InsufficientSamples, match="subset_size=10"):
        kernel_distance(x, x)
    with pytest.raises(ReferenceMismatch, match="16 features on one side, 9"):
        kernel_distance(x, x[:, :9], subset_size=5)
    with pytest.raises(ValueError, match="0 subsets"):
        kernel_distance(x, x, subsets=0)
    with pytest.raises(InsufficientSamples, match="at least 1 image"):
        clip_discrepancy(x, x[:0])
    with pytest.raises(ValueError, match="length 0"):
        clip_discrepancy(x, x * 0)
