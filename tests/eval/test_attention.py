"""The program that looks at the attention of a pipeline and its twins, on untrained ones of toy size."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import tiny_sana
from model_checks import stirred

from mhla_diffusion.models.sana import MHLASanaTransformer2DModel
from mhla_diffusion.pipelines.sana import MHLASanaPipeline

PROGRAM = Path(__file__).resolve().parents[2] / "eval" / "attention.py"
SOFTMAX = {"mhla_layers": [], "mhla_other_layers": "softmax"}


def save(folder, **options):
    transformer = MHLASanaTransformer2DModel(**tiny_sana.TRANSFORMER, **options)
    MHLASanaPipeline(**tiny_sana.components(stirred(transformer).eval())).save_pretrained(folder)
    return folder


def run(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["attention.py", *map(str, arguments), "--device", "cpu"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    return stopped.value.code


def test_a_pipeline_and_its_twins_stand_in_one_table(tmp_path, monkeypatch, capsys):
    ours = save(tmp_path / "ours", mhla_block_grid=(2, 2))
    for name, options in (
        ("softmax-0", SOFTMAX),
        ("linear-0", {"mhla_block_grid": (1, 1)}),
        ("linear-1", SOFTMAX),
    ):
        save(tmp_path / "twins" / "runs" / name / "pipeline", **options)
    common = (ours, "--steps", 2, "--at", 1, "--prompts", 1, "--out", tmp_path / "out")
    assert run(monkeypatch, "--pipeline", *common, "--twins", tmp_path / "twins") == 0
    out = capsys.readouterr().out
    for row in (
        "| ours | mhla |",
        "| ours | linear (one block",
        "| softmax-0 | softmax |",
        "| linear-0 | linear |",
    ):
        assert row in out
    assert "linear-1" not in out and "254.8" in out
    found = json.loads((tmp_path / "out" / "softmax-0.json").read_text())
    assert found["settings"]["at"] == [1] and found["environment"]["dtype"] == "float32"
    assert (tmp_path / "out" / "attention.md").is_file()
    together = json.loads((tmp_path / "out" / "attention.json").read_text())["pipelines"]
    assert list(together) == ["ours", "linear-0", "softmax-0"]
    assert together["softmax-0"]["kinds"] == found["kinds"] and "heads" not in together["softmax-0"]


def test_without_twins_it_goes_on_and_says_so(tmp_path, monkeypatch, capsys):
    ours = save(tmp_path / "ours", mhla_block_grid=(2, 2))
    common = (
        "--steps",
        2,
        "--at",
        1,
        "--prompts",
        1,
        "--out",
        tmp_path / "out",
        "--twins",
        tmp_path / "none",
    )
    assert run(monkeypatch, "--pipeline", ours, *common) == 0
    assert "no trained twins in" in capsys.readouterr().err
    assert run(monkeypatch, "--pipeline", tmp_path / "absent", *common) == 2
    assert "no pipeline" in capsys.readouterr().err
