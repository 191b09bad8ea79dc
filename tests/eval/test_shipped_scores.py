"""The program that draws and scores pipelines of emoji, on an untrained one of toy size."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_sana
from PIL import Image

from mhla_diffusion.evaluation.picture_sets import open_pictures
from mhla_diffusion.models.convert import convert
from mhla_diffusion.pipelines.generation import generate
from mhla_diffusion.pipelines.sana import MHLASanaPipeline

ROOT = Path(__file__).resolve().parents[2]


def run(*options) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "eval" / "shipped_scores.py"), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scores") / "toy"
    parts = tiny_sana.components(convert(tiny_sana.stock_transformer(), block_grid=(2, 2)))
    pipe = MHLASanaPipeline(
        **parts, default_steps=1, default_height=64, default_width=64, max_sequence_length=8
    )
    pipe.save_pretrained(folder)
    return folder


def test_every_seed_is_drawn_and_scored_and_stands_in_the_result(toy, tmp_path):
    data = ROOT / "assets" / "emoji_sample.tar"
    line = [toy, "--data", data, "--drawn", tmp_path / "drawn", "--out", tmp_path / "scores.json"]
    line += ["--seeds", 0, 1, "--limit", 5, "--device", "cpu", "--batch-size", 1]
    drawn = run(*line, "--draw-only")
    assert drawn.returncode == 0, drawn.stderr
    path = tmp_path / "drawn" / "toy.1.tar"
    before = path.read_bytes()
    pictures = open_pictures(path, split="heldout")
    caption = pictures.records[0]["caption"]
    report = generate(
        [caption], pipeline=toy, seeds=[pictures.records[0]["seed"]], out=tmp_path / "png", device="cpu"
    )
    png = np.asarray(Image.open(report.drawn[0]))
    ours = next(iter(pictures.batches(1)))[0].permute(1, 2, 0).numpy()
    assert np.array_equal(ours, png)  # the picture that mhla generate draws of this seed

    result = run(*line, "--without", "fid_adm")
    assert result.returncode == 0, result.stderr
    assert path.read_bytes() == before
    stored = json.loads((tmp_path / "scores.json").read_text())
    entry = stored["pipelines"]["toy"]
    assert entry["sets"] == {"train": 5, "heldout": 5, "scenes": 5}
    for metric, row in entry["summary"]["train"].items():
        values = [entry["seeds"][seed]["train"][metric]["value"] for seed in "01"]
        assert row["mean"] == pytest.approx(np.mean(values)) and row["seeds"] == 2
        assert row["std"] == pytest.approx(np.std(values, ddof=1))
    for metric in ("fd_efficientnet.fd", "fd_efficientnet.nearest", "r_at_1", "r_at_5"):
        assert metric in entry["summary"]["heldout"]
    real = stored["pipelines"]["real drawings"]["summary"]["heldout"]
    assert real["fd_efficientnet.fd"]["mean"] < entry["summary"]["heldout"]["fd_efficientnet.fd"]["mean"]
    assert stored["floors"]["fd_efficientnet"]["value"] > 0
    assert "single_object" in entry["summary"]["scenes"]
    assert entry["drawn"]["steps"] == 1 and len(entry["drawn"]["pipeline_sha256"]) == 64
    assert stored["skipped"] == {"fid_adm": "not asked for (--without)"}
    assert "| R@1 |" in (tmp_path / "scores.md").read_text()


def test_pictures_of_other_prompts_are_not_taken_for_these(toy, tmp_path):
    line = [toy, "--data", ROOT / "assets" / "emoji_sample.tar", "--drawn", tmp_path, "--seeds", 0]
    line += ["--device", "cpu", "--draw-only", "--batch-size", 4, "--limit"]
    assert run(*line, 1).returncode == 0
    failed = run(*line, 2)
    assert failed.returncode == 2 and "was drawn by other weights or of other prompts" in failed.stderr
