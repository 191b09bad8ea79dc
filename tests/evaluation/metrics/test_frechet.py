"""Fréchet distances: closed forms, and agreement with four other codes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mhla_diffusion.evaluation.faults import InsufficientSamples, ReferenceMismatch
from mhla_diffusion.evaluation.metrics.frechet import (
    frechet_distance,
    frechet_distance_of_features,
    unclamped_distance,
)
from mhla_diffusion.evaluation.metrics.moments import Moments, merge, moments_of, moments_of_state, state_of
from mhla_diffusion.evaluation.networks.extractors import random_network


def features(count: int, width: int, seed: int) -> torch.Tensor:
    """Correlated features of decaying size, positive like those of a pooled layer."""
    draw = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=draw, dtype=torch.float64) / width**0.5
    return torch.randn(count, width, generator=draw, dtype=torch.float64).abs() @ mixing + 0.3


@pytest.fixture(scope="module")
def sets():
    return features(300, 48, 1), features(260, 48, 2) * 1.1


def test_diagonal_gaussians_have_the_closed_form():
    mean = torch.tensor([[0.0, 1.0, 2.0], [0.5, 1.0, -1.0]], dtype=torch.float64)
    std = torch.tensor([[1.0, 2.0, 0.1], [3.0, 2.0, 0.4]], dtype=torch.float64)
    a, b = (Moments(m, torch.diag(s**2)) for m, s in zip(mean, std, strict=True))
    expected = (mean[0] - mean[1]).square().sum() + (std[0] - std[1]).square().sum()
    assert frechet_distance(a, b).item() == pytest.approx(expected.item(), rel=1e-12)


def test_identical_shifted_and_scaled_sets(sets):
    x, _ = sets
    own = moments_of(x)
    assert abs(unclamped_distance(own, own).item()) < 1e-11 and frechet_distance(own, own) >= 0
    shift = torch.linspace(-1, 1, 48, dtype=torch.float64)
    shifted = frechet_distance(own, moments_of(x + shift))
    assert shifted.item() == pytest.approx(shift.square().sum().item(), rel=1e-10)
    centred = x - x.mean(0)
    scaled = frechet_distance(moments_of(centred), moments_of(3 * centred))
    assert scaled.item() == pytest.approx((4 * own.covariance.trace()).item(), rel=1e-10)


@pytest.fixture(scope="module")
def sets_of_pictures():
    """Features of pictures by a network of random weights."""
    draw = torch.Generator().manual_seed(7)
    pictures = torch.randint(0, 256, (560, 3, 32, 32), generator=draw, dtype=torch.uint8)
    network = random_network(48, device="cpu")
    return network(pictures[:300])["pool"].double(), network(pictures[300:] // 2)["pool"].double()


@pytest.mark.parametrize("name", ["sets", "sets_of_pictures"])
def test_other_codes_agree(name, request):
    import scipy.linalg
    from cleanfid.fid import frechet_distance as clean_fid
    from pytorch_fid.fid_score import calculate_frechet_distance as pytorch_fid
    from torch_fidelity.metric_fid import fid_statistics_to_metric
    from torchmetrics.image.fid import _compute_fid

    sets = request.getfixturevalue(name)
    x, y = sets
    ours = frechet_distance(moments_of(x), moments_of(y)).item()
    (m1, s1), (m2, s2) = ((side.mean(0).numpy(), np.cov(side.numpy(), rowvar=False)) for side in sets)
    with pytest.warns(DeprecationWarning, match="disp"):  # an argument that scipy is about to take away
        theirs = {"clean-fid": clean_fid(m1, s1, m2, s2), "pytorch-fid": pytorch_fid(m1, s1, m2, s2)}
    theirs["scipy"] = ((m1 - m2) ** 2).sum() + np.trace(s1 + s2 - 2 * scipy.linalg.sqrtm(s1 @ s2).real)
    statistics = ({"mu": m1, "sigma": s1}, {"mu": m2, "sigma": s2})
    fidelity = fid_statistics_to_metric(*statistics, verbose=False)
    theirs["torch-fidelity"] = next(iter(fidelity.values()))
    theirs["torchmetrics"] = _compute_fid(*(torch.tensor(value) for value in (m1, s1, m2, s2))).item()
    assert {name: float(value) for name, value in theirs.items()} == pytest.approx(
        dict.fromkeys(theirs, ours), rel=1e-10
    )


@pytest.mark.parametrize(("first", "second", "width"), [(20, 30, 64), (2, 2, 5), (40, 200, 64)])
def test_few_samples_lose_no_digits(first, second, width):
    x, y = features(first, width, 3), features(second, width, 4)
    from_moments = frechet_distance(moments_of(x), moments_of(y)).item()
    assert from_moments == pytest.approx(frechet_distance_of_features(x, y).item(), rel=1e-11)
    same = moments_of(x)
    assert abs(unclamped_distance(same, same).item()) < 1e-11


@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=9),
    order=st.randoms(use_true_random=False),
    offset=st.sampled_from([0.0, 1e4]),
)
def test_moments_do_not_depend_on_batches_or_their_order(sizes, order, offset):
    """With a mean of 1e4 a sum of squares in float64 would lose half of the digits."""
    if sum(sizes) < 2:
        sizes = [*sizes, 2]
    x = features(sum(sizes), 6, 5) * 1e-2 + offset
    parts = list(x.split(sizes))
    order.shuffle(parts)
    gathered = moments_of_state(merge(torch.stack([state_of(part) for part in parts])))
    assert gathered.count == len(x)
    torch.testing.assert_close(gathered.mean, x.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        gathered.covariance, torch.cov(x.T), rtol=1e-6 if offset else 1e-11, atol=1e-14
    )


def test_noise_moves_away_step_by_step(sets):
    x, _ = sets
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    distances = [
        frechet_distance(moments_of(x), moments_of(x + s * noise)).item() for s in (0, 0.1, 0.3, 1, 3)
    ]
    assert distances == sorted(distances) and distances[1] > 1e-4


def test_what_cannot_be_compared_is_refused(sets):
    x, y = sets
    for one in (x[:1], x[:0]):
        with pytest.raises(InsufficientSamples, match="at least 2 images per side"):
            moments_of(one)
        with pytest.raises(InsufficientSamples, match="at least 2 images per side"):
            frechet_distance_of_features(one, y)
    with pytest.raises(ReferenceMismatch, match="48 features on one side, 40"):
        frechet_distance(moments_of(x), moments_of(y[:, :40]))
    with pytest.raises(ReferenceMismatch, match="use one network"):
        frechet_distance_of_features(x, y[:, :40])
    broken = x.clone()
    broken[7, 3] = torch.inf
    with pytest.raises(ValueError, match="sample 7 are not finite"):
        moments_of(broken)
    with pytest.raises(ValueError, match="not finite"):
        frechet_distance(Moments(x[0] * torch.nan, torch.eye(48)), moments_of(y))
    with pytest.raises(ValueError, match=r"covariance \(3, 3\)"):
        frechet_distance(Moments(x[0], torch.eye(3)), moments_of(y))
    with pytest.raises(ValueError, match="samples, features"):
        moments_of(x[0])


def test_a_covariance_that_is_none_is_refused():
    """Its distance would be 0 to everything, since negative eigenvalues count as none."""
    good = Moments(torch.zeros(4).double(), torch.eye(4).double(), None)
    for bad in (-torch.eye(4), torch.diag(torch.tensor([1.0, 1.0, 1.0, -0.1]))):
        with pytest.raises(ValueError, match="negative eigenvalue"):
            frechet_distance(good, Moments(torch.zeros(4).double(), bad.double(), None))
    rounded = torch.diag(torch.tensor([1.0, 1.0, 1.0, -1e-6])).double()
    assert frechet_distance(good, Moments(torch.zeros(4).double(), rounded, None)) == pytest.approx(
        1, abs=1e-5
    )
