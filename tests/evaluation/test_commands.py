"""`mhla eval`: results, exit statuses, one line for a mistake."""

import json
import socket
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from safetensors.torch import save_file

from mhla_diffusion.cli import main
from mhla_diffusion.evaluation.faults import InsufficientSamples
from mhla_diffusion.evaluation.gathering import gather
from mhla_diffusion.evaluation.image_protocols import PROTOCOLS
from mhla_diffusion.evaluation.image_scores import as_lines, score
from mhla_diffusion.evaluation.networks.extractors import efficientnet, random_network
from mhla_diffusion.evaluation.networks.inception import FIDInception
from mhla_diffusion.evaluation.networks.weight_files import find_weights
from mhla_diffusion.evaluation.picture_sets import open_pictures


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.delenv("MHLA_WEIGHTS", raising=False)


def pattern(count: int, seed: int = 0, noise: float = 0.0, blur: float = 0.0) -> torch.Tensor:
    """Discs of any place, size and colour."""
    draw, disturb = np.random.default_rng(seed), np.random.default_rng(99)
    rows, columns = np.mgrid[:40, :40]
    found = []
    for _ in range(count):
        y, x, radius = draw.uniform(10, 30, 2).tolist() + [draw.uniform(4, 12)]
        inside = ((rows - y) ** 2 + (columns - x) ** 2 < radius**2)[..., None]
        picture = np.where(inside, draw.integers(0, 256, 3), draw.integers(0, 256, 3)).astype(float)
        picture = (picture + disturb.normal(0, 1, picture.shape) * noise).clip(0, 255).astype(np.uint8)
        image = Image.fromarray(picture).filter(ImageFilter.GaussianBlur(blur))
        found.append(np.asarray(image))
    return torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2).contiguous()


@pytest.fixture
def folders(tmp_path):
    for name, seed in (("samples", 1), ("real", 2)):
        (tmp_path / name).mkdir()
        for index, picture in enumerate(pattern(9, seed)):
            Image.fromarray(picture.permute(1, 2, 0).numpy()).save(tmp_path / name / f"{index}.png")
    return tmp_path


def run_of(
    folders, *, protocol: str = "smoke", samples: str = "samples", reference: str | None = "real"
) -> list[str]:
    """The command that scores one of the folders, up to its other options."""
    command = ["eval", "run", protocol, "--samples", str(folders / samples)]
    return command + (["--reference", str(folders / reference)] if reference else [])


def test_a_run_writes_all_it_was_made_with(folders, capsys):
    command = run_of(folders)
    assert main([*command, "--out", str(folders / "a.json"), "--floor", "--batch-size", "4"]) == 0
    out, err = capsys.readouterr()
    assert "FD" in out and "FID" not in out and "floor" in out and "too few for a covariance" in err
    result = json.loads((folders / "a.json").read_text())
    assert list(result["values"]) == ["fd", "kid", "precision", "recall"] and result["protocol"] == "smoke"
    assert result["values"]["fd"]["n"] == result["values"]["fd"]["reference_n"] == 9
    assert result["floor"]["pool"]["n"] == 5 and result["inputs"]["samples"]["sizes"] == {"40x40": 9}
    assert result["environment"]["versions"]["torchmetrics"] and len(result["warnings"]) == 3
    assert main([*command, "--out", str(folders / "b.json"), "--batch-size", "1"]) == 0
    again = json.loads((folders / "b.json").read_text())
    for metric, row in result["values"].items():
        assert again["values"][metric]["value"] == pytest.approx(row["value"], rel=1e-5, abs=1e-9)


def test_statistics_take_the_place_of_pictures(folders, capsys, monkeypatch):
    real, file = str(folders / "real"), str(folders / "real.npz")
    assert main(["eval", "stats", real, file, "--protocol", "smoke"]) == 0
    command = [*run_of(folders, reference=None), "--out", str(folders / "a.json")]
    assert (
        main([*run_of(folders, samples="real", reference="real.npz"), "--out", str(folders / "a.json")]) == 0
    )
    assert "real.npz was made of pictures listed as" in capsys.readouterr().err
    assert main([*command, "--reference", real, "--metrics", "fd"]) == 0
    direct = json.loads((folders / "a.json").read_text())["values"]["fd"]["value"]
    assert main([*command, "--reference", file]) == 0
    found = json.loads((folders / "a.json").read_text())
    assert found["values"].keys() == {"fd"} and found["values"]["fd"]["value"] == pytest.approx(
        direct, rel=1e-10
    )
    assert len(found["inputs"]["reference"]["sha256"]) == 64
    monkeypatch.setenv("HOME", str(folders))
    assert main([*command, "--reference", "~/real.npz"]) == 0
    capsys.readouterr()
    assert main([*command, "--reference", file, "--metrics", "kid"]) == 2
    assert "needs the reference's pictures" in capsys.readouterr().err
    assert main([*command, "--reference", file, "--floor"]) == 2
    # Statistics and pictures in one file, as ADM's are: each metric takes what it needs.
    with np.load(file) as both:
        arrays = {name: both[name] for name in both.files}
    np.savez(folders / "both.npz", **arrays, arr_0=pattern(9, 2).permute(0, 2, 3, 1).numpy())
    assert main([*command, "--reference", str(folders / "both.npz")]) == 0
    found = json.loads((folders / "a.json").read_text())
    assert found["values"].keys() == {"fd", "kid", "precision", "recall"}
    assert found["values"]["fd"]["value"] == pytest.approx(direct, rel=1e-10)
    assert "arr_0" not in found["inputs"]["reference"] and found["inputs"]["reference"]["pictures"] == 9


SMOKE = "run smoke --samples SAMPLES --reference REAL"


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("run smok --samples SAMPLES --reference REAL", 2, "did you mean smoke?"),
        ("run smoke --samples SAMPLES --reference SAMPLES", 2, "both the samples and the reference"),
        ("run smoke --samples SAMPLES --reference absent", 2, "there is no absent"),
        (f"{SMOKE} --limit 1", 2, "at least 2 images"),
        (f"{SMOKE} --batch-size 0", 2, "--batch-size 0"),
        (f"{SMOKE} --metrics sfd", 2, "has no 'sfd'"),
        ("run smoke --samples S --reference R --metrics clip", 2, "invalid choice: 'clip'"),
        (f"{SMOKE} --weights a=b", 2, "no weights 'a'"),
        (f"{SMOKE} --weights a", 2, "is not NAME=PATH"),
        ("run fd_dinov2 --samples SAMPLES --reference REAL", 3, "no weights 'dinov2'; searched"),
        ("run fid_adm_full --samples SAMPLES --reference REAL", 3, "needs the classifier"),
        ("stats REAL out.txt", 2, "must end with .npz"),
        (f"{SMOKE} --device cuda:99", 2, "device cuda:99 is not there"),
        (f"{SMOKE} --device tpu0", 2, "unknown device 'tpu0'"),
        (f"{SMOKE} --out /proc/x/y.json", 2, "give another folder with --out"),
        (f"{SMOKE} --out FOLDER", 2, "is a folder: give a file, for example"),
        (f"{SMOKE} --floor --limit 3 --metrics fd", 2, "a floor compares halves of at least 2"),
        ("stats REAL /proc/x/y.npz --protocol smoke", 2, "cannot write into /proc/x"),
        ("stats REAL out.npz --protocol cmmd", 2, "compares no means"),
    ],
)
def test_a_mistake_is_one_line(folders, capsys, words, status, message):
    places = {"SAMPLES": str(folders / "samples"), "REAL": str(folders / "real"), "FOLDER": str(folders)}
    assert main(["eval", *(places.get(word, word) for word in words.split())]) == status
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_features_that_several_metrics_read_are_put_together_once():
    pictures = open_pictures(pattern(9))
    found = gather(pictures, random_network(device="cpu"), moments=set(), features={"pool"}, batch_size=2)
    assert found.features("pool").shape == (9, 64) and found.features("pool") is found.features("pool")


def test_too_few_for_neighbours_are_refused_before_a_pass():
    extractor = random_network(device="cpu")
    few, many = open_pictures(pattern(3)), open_pictures(pattern(9, seed=1))
    with pytest.raises(InsufficientSamples, match="9 and 3 samples: k=3 needs at least 4 per side"):
        score(few, many, PROTOCOLS["smoke"], extractor=extractor)
    assert extractor.passes == 0
    assert set(score(few, many, PROTOCOLS["smoke"], extractor=extractor, metrics=("fd",))["values"]) == {"fd"}


def test_missing_weights_are_named_before_torch_is_imported(folders):
    """At once, in a program that could not even import what takes seconds."""
    samples, real = str(folders / "samples"), str(folders / "real")
    lines = [
        ["run", "fd_dinov2", "--samples", samples, "--reference", real],
        ["run", "fid_adm_full", "--samples", samples, "--reference", real],
        ["run", "cmmd", "--samples", samples, "--reference", real, "--weights", "clip-image=nowhere"],
        ["run", "clip_score", "--samples", samples],
        ["stats", real, "x.npz", "--protocol", "fd_dinov2"],
        ["run", "--protocol", "mjhq30k_sana", "--samples", samples, "--reference", real, "--prompts", "x"],
        ["vbench", "plan", "x.json"],
        ["run", "geneval", "--samples", samples, "--prompts", str(folders / "metadata.jsonl")],
        ["run", "--protocol", "geneval", "--samples", samples, "--prompts", str(folders / "metadata.jsonl")],
    ]
    asked = {
        "tag": "colors",
        "prompt": "a red cup",
        "include": [{"class": "cup", "count": 1, "color": "red"}],
    }
    (folders / "metadata.jsonl").write_text(json.dumps(asked))
    code = (
        "import json, sys\n"
        "sys.modules['torch'] = None\n"
        "from mhla_diffusion.cli import main\n"
        "print([main(['eval', *line]) for line in json.loads(sys.argv[1])])\n"
    )
    command = [sys.executable, "-c", code, json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=folders)
    assert done.stdout == f"{[3] * len(lines)}\n", done.stderr
    told = done.stderr.splitlines()
    assert len(told) == len(lines) and all("searched" in line or "nowhere" in line for line in told)
    assert "The other 5 metrics of fid_adm_full can run: add --skip-missing" in told[1]


def test_a_missing_pipeline_is_named_before_torch_is_imported(folders):
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from mhla_diffusion.cli import main\n"
        "print(main(['eval', 'run', 'attention', '--samples', 'nowhere']), main(['eval', 'attention', 'nowhere']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=folders
    )
    assert done.stdout == "2 2\n", done.stderr
    assert [line.partition(";")[0] for line in done.stderr.splitlines()] == [
        "mhla: no pipeline 'nowhere'"
    ] * 2


def test_pictures_that_are_all_black_are_doubted(folders, capsys):
    """Case: floats in [0, 1] were cast to bytes."""
    np.savez(folders / "cast.npz", arr_0=(pattern(9).permute(0, 2, 3, 1) > 127).to(torch.uint8).numpy())
    line = [*run_of(folders, samples="cast.npz"), "--out", str(folders / "a.json")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once, with the set's name
        assert main(line) == 0
    assert "every picture is black, as of floats" in capsys.readouterr().err
    cast = [str(folders / "cast.npz"), str(folders / "cast_statistics.npz")]
    assert main(["eval", "stats", *cast, "--protocol", "smoke"]) == 0
    assert "every picture is black, as of floats" in capsys.readouterr().err
    found = json.loads((folders / "a.json").read_text())["warnings"]
    assert len([note for note in found if "cast.npz is above 1" in note]) == 1


def test_the_same_pictures_in_another_form_are_noticed(folders, capsys):
    """A copy in an archive has another listing; the distance says it."""
    rows = pattern(9, 1)[torch.arange(8, -1, -1)].permute(0, 2, 3, 1)
    np.savez(folders / "copy.npz", arr_0=rows.numpy())
    line = [*run_of(folders, reference="copy.npz"), "--out", str(folders / "a.json")]
    assert main(line) == 0
    assert "fd is 0 but for rounding: samples and reference hold the same" in capsys.readouterr().err
    assert main([*run_of(folders), "--out", str(folders / "b.json")]) == 0
    assert "but for rounding" not in capsys.readouterr().err


def test_the_list_says_what_can_run(capsys):
    assert main(["eval", "list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in PROTOCOLS) and "ready: inception from" in out
    assert "not ready: no weights 'dinov2'" in out


def test_what_is_missing_can_be_left_out(folders, capsys):
    torch.manual_seed(0)
    network = FIDInception(classifier=True).state_dict()
    save_file(network, folders / "whole.safetensors")
    save_file(
        {name: value for name, value in network.items() if "fc" not in name}, folders / "part.safetensors"
    )
    base = [*run_of(folders, protocol="fid_adm_full"), "--out", str(folders / "a.json")]
    base += ["--metrics", "kid", "inception_score", "--limit", "4", "--weights"]
    part = [*base, f"inception={folders / 'part.safetensors'}"]
    assert main(part) == 3
    assert "The other 1 metrics of fid_adm_full can run: add --skip-missing" in capsys.readouterr().err
    assert main([*part, "--skip-missing"]) == 0
    out, err = capsys.readouterr()
    assert "KID " in out and "inception_score is left out: no weights" in err
    result = json.loads((folders / "a.json").read_text())
    assert result["values"].keys() == {"kid"} and "searched" in result["skipped"]["inception_score"]
    assert main([*base, f"inception-classifier={folders / 'whole.safetensors'}"]) == 0
    whole = json.loads((folders / "a.json").read_text())
    assert whole["values"]["inception_score"]["value"] >= 1 and whole["skipped"] == {}
    assert "4 samples are no multiple of 5000, the published parts" in " ".join(whole["warnings"])
    assert whole["values"]["kid"]["value"] == pytest.approx(
        result["values"]["kid"]["value"], rel=1e-4, abs=1e-7
    )


def test_distances_grow_with_noise_and_with_blur():
    protocol, extractor = PROTOCOLS["smoke"], random_network(32, device="cpu")
    reference = open_pictures(pattern(60))
    for change, strengths in (("noise", (0, 10, 30, 90)), ("blur", (0, 1, 3, 9))):
        sets = [open_pictures(pattern(60, **{change: strength})) for strength in strengths]
        results = [score(each, reference, protocol, extractor=extractor, metrics=("fd",)) for each in sets]
        found = [result["values"]["fd"]["value"] for result in results]
        assert found == sorted(found) and found[0] < 1e-9 < found[1], (change, found)


def test_weights_that_are_given_take_the_place_of_the_packages(folders, capsys):
    own = efficientnet(device="cpu").about["weights"]["sha256"]
    state = torch.load(find_weights("efficientnet-lite0").path, weights_only=True)
    torch.save({name: value * 1.01 for name, value in state.items()}, folders / "mine.pth")
    (folders / "none.pth").write_bytes(b"no weights")
    line = [*run_of(folders, protocol="fd_efficientnet"), "--metrics", "kid", "--device", "cpu"]
    found = {}
    for name, more in (("own", []), ("mine", ["--weights", f"efficientnet-lite0={folders / 'mine.pth'}"])):
        assert main([*line, *more, "--out", str(folders / f"{name}.json")]) == 0
        found[name] = json.loads((folders / f"{name}.json").read_text())
    assert (
        found["own"]["features"]["weights"]["sha256"] == own != found["mine"]["features"]["weights"]["sha256"]
    )
    assert found["own"]["values"]["kid"]["value"] != found["mine"]["values"]["kid"]["value"]
    assert main([*line, "--weights", f"efficientnet-lite0={folders / 'none.pth'}"]) == 2
    assert "none.pth does not hold EfficientNet-Lite0 (it holds more than tensors" in capsys.readouterr().err


def test_the_network_of_a_package_scores_offline():
    reference, extractor = open_pictures(pattern(12, 2)), efficientnet(device="cpu")
    result = score(
        open_pictures(pattern(12, 1)), reference, PROTOCOLS["fd_efficientnet"], extractor=extractor
    )
    worse = score(
        open_pictures(pattern(12, 1, blur=6)), reference, PROTOCOLS["fd_efficientnet"], extractor=extractor
    )
    assert 0 < result["values"]["fd"]["value"] < worse["values"]["fd"]["value"]
    near = result["values"]["nearest"]
    assert any("between references" in line for line in as_lines(result))
    assert 0 < near["smallest"] <= near["value"] < 3 * near["reference_median"]
    copies = score(
        reference, open_pictures(pattern(14, 2)), PROTOCOLS["fd_efficientnet"], extractor=extractor
    )
    assert copies["values"]["nearest"]["value"] == pytest.approx(0, abs=1e-4)
    assert result["features"]["weights"]["sha256"] and extractor.taps == {"pool": 1280}
