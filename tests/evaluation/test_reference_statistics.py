"""Statistics on disk: ours, ADM's, and broken ones."""

import numpy as np
import pytest
import torch

from mhla_diffusion.evaluation.faults import ReferenceMismatch
from mhla_diffusion.evaluation.metrics.moments import Moments, moments_of
from mhla_diffusion.evaluation.reference_statistics import (
    check_reference,
    holds_statistics,
    read_statistics,
    write_statistics,
)

NETWORK = {"network": "inception-2015-12-05", "protocol": "fid_adm", "weights": {"sha256": "a" * 64}}


@pytest.fixture
def moments():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(9, 5, generator=draw, dtype=torch.float64)
    return {"pool": moments_of(x), "spatial": moments_of(x[:, :3]), "768": moments_of(x[:, :2])}


def test_what_is_written_is_read_and_adms_names_are_kept(tmp_path, moments):
    path = tmp_path / "new" / "a.npz"
    write_statistics(path, moments, {"features": NETWORK})
    found = read_statistics(path)
    assert found.about == {"features": NETWORK} and len(found.sha256) == 64
    for tap, expected in moments.items():
        assert found.moments[tap].count == 9
        assert torch.equal(found.moments[tap].mean, expected.mean)
        assert torch.equal(found.moments[tap].covariance, expected.covariance)
    with np.load(path, allow_pickle=False) as file:
        assert {"mu", "sigma", "mu_s", "sigma_s", "count"} <= set(file.files)
    assert check_reference(found, NETWORK, {"pool": 5, "spatial": 3}) == []


def test_pytorch_fid_reads_ours(tmp_path, moments):
    from pytorch_fid.fid_score import compute_statistics_of_path

    write_statistics(tmp_path / "a.npz", moments, {"features": NETWORK})
    mean, covariance = compute_statistics_of_path(str(tmp_path / "a.npz"), None, 1, 1, "cpu")
    np.testing.assert_array_equal(mean, moments["pool"].mean.numpy())
    np.testing.assert_array_equal(covariance, moments["pool"].covariance.numpy())


def test_adms_file_is_read(tmp_path, moments):
    path = tmp_path / "adm.npz"
    pool = moments["pool"]
    np.savez(
        path,
        mu=pool.mean.float().numpy(),
        sigma=pool.covariance.numpy(),
        arr_0=np.zeros((2, 4, 4, 3), np.uint8),
    )
    found = read_statistics(path)
    assert found.about is None and found.moments["pool"].count is None and found.moments["pool"].rank == 5
    assert "does not say which network" in check_reference(found, NETWORK, {"pool": 5})[0]
    with pytest.raises(ReferenceMismatch, match="no 'spatial' features, only pool"):
        check_reference(found, NETWORK, {"spatial": 3})


def test_statistics_of_another_network_are_refused(tmp_path, moments):
    write_statistics(tmp_path / "a.npz", moments, {"features": NETWORK})
    found = read_statistics(tmp_path / "a.npz")
    for key, value in (("network", "dinov2"), ("protocol", "fid_clean")):
        with pytest.raises(ReferenceMismatch, match=f"was made with {key} .* these samples with '{value}'"):
            check_reference(found, NETWORK | {key: value}, {"pool": 5})
    with pytest.raises(ReferenceMismatch, match="5 'pool' features, the network has 7"):
        check_reference(found, NETWORK, {"pool": 7})
    assert "another file of weights" in check_reference(found, NETWORK | {"weights": None}, {"pool": 5})[0]


def test_broken_files_are_named(tmp_path, moments):
    mu, sigma = np.zeros(3), np.eye(3)
    skewed = sigma.copy()
    skewed[0, 1] = 1
    for name, arrays, message in (
        ("none", {"a": mu}, "mhla eval stats"),
        ("shape", {"mu": mu, "sigma": np.eye(4)}, r"shape \(3,\), sigma \(4, 4\)"),
        ("nan", {"mu": mu * np.nan, "sigma": sigma}, "not finite"),
        ("skewed", {"mu": mu, "sigma": skewed}, "not symmetric"),
        ("half", {"mu": mu, "sigma": sigma, "mu_s": mu}, "mu_s without sigma_s"),
        ("about", {"mu": mu, "sigma": sigma, "about": np.array('"mine"')}, "cannot be read"),
        ("features", {"mu": mu, "sigma": sigma, "about": np.array('{"features": {}}')}, "names no network"),
        ("count", {"mu": mu, "sigma": sigma, "count": 1}, "count is 1"),
        ("complex", {"mu": mu, "sigma": sigma * 1j}, "cannot be read"),
        ("pickled", {"mu": np.array([{}], object), "sigma": sigma}, "cannot be read"),
    ):
        np.savez(tmp_path / f"{name}.npz", **arrays)
        with pytest.raises(ValueError, match=message):
            read_statistics(tmp_path / f"{name}.npz")
    (tmp_path / "text.npz").write_text("no archive")
    assert not holds_statistics(tmp_path / "text.npz") and not holds_statistics(tmp_path / "absent.npz")
    with pytest.raises(ValueError, match="must end with .npz"):
        write_statistics(tmp_path / "a.txt", moments, {})
    with pytest.raises(ValueError, match="gather them in one pass"):
        write_statistics(tmp_path / "a.npz", moments | {"64": Moments(torch.zeros(2), torch.eye(2), 4)}, {})
