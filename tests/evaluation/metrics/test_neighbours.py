"""Precision, recall and nearest pictures: truths, and agreement with torch-fidelity."""

import pytest
import torch

from mhla_diffusion.evaluation.faults import InsufficientSamples, ReferenceMismatch
from mhla_diffusion.evaluation.metrics.neighbours import nearest, precision_recall


def features(count: int, seed: int = 0, width: int = 8) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_identical_and_disjoint_sets():
    x = features(60)
    assert precision_recall(x, x.flip(0)) == (1.0, 1.0)
    assert precision_recall(x, x + 1e3) == (0.0, 0.0)


def test_samples_in_one_corner_are_precise_and_recall_little():
    reference = features(300)
    corner = reference[reference[:, 0] > 1]
    found = precision_recall(reference, corner)
    assert found.precision == 1 and found.recall < 0.6
    swapped = precision_recall(corner, reference)
    assert (swapped.precision, swapped.recall) == (found.recall, found.precision)


@pytest.mark.parametrize("k", [1, 3])
def test_torch_fidelity_agrees(k):
    from torch_fidelity.metric_prc import prc_features_to_metric

    reference, samples = features(200, 1), features(150, 2) * 0.8 + 0.4
    theirs = prc_features_to_metric(
        samples, reference, prc_neighborhood=k, prc_batch_size=64, save_cpu_ram=False, verbose=False
    )
    ours = precision_recall(reference, samples, k=k)
    assert 0 < ours.recall < 1 and 0 < ours.precision < 1
    # They take means of float32, shares of 150 and 200 samples.
    assert ours.precision.item() == pytest.approx(theirs["precision"], abs=1e-6)
    assert ours.recall.item() == pytest.approx(theirs["recall"], abs=1e-6)


def test_chunks_change_nothing_and_half_precision_falls_back():
    reference, samples = features(70, 3), features(50, 4) + 0.2
    assert precision_recall(reference, samples, chunk=9) == precision_recall(reference, samples)
    half = precision_recall(reference, samples, arithmetic="float16")
    assert abs(half.precision - precision_recall(reference, samples).precision) < 0.1
    far = (reference * 1e4, samples * 1e4)  # squares beyond 65504: computed in float32
    assert precision_recall(*far, arithmetic="float16") == precision_recall(*far, arithmetic="float32")


def test_nearest_pictures():
    reference = features(40, 5)
    distances, indices = nearest(reference[[7, 3]] + 1e-3, reference, chunk=1)
    assert indices.tolist() == [7, 3]
    torch.testing.assert_close(
        distances, torch.full((2,), 1e-3 * 8**0.5, dtype=torch.float64), rtol=1e-5, atol=0
    )


def test_what_cannot_be_compared_is_refused():
    x = features(20)
    with pytest.raises(InsufficientSamples, match="k=3 needs at least 4 per side"):
        precision_recall(x, x[:3])
    with pytest.raises(ReferenceMismatch, match="use one network"):
        precision_recall(x, x[:, :5])
    with pytest.raises(ValueError, match="arithmetic='int8'"):
        precision_recall(x, x, arithmetic="int8")
    with pytest.raises(ValueError, match="k=0"):
        precision_recall(x, x, k=0)
