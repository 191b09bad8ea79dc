"""Whole pipeline calls at toy size: the parts add up, and what is not measured is called extrapolated."""

import json

import pytest
import torch

from mhla_diffusion.cli import main
from mhla_diffusion.evaluation import bench_pipeline
from mhla_diffusion.evaluation.bench_pipeline import ROWS, facts_of, run

pytestmark = pytest.mark.filterwarnings("ignore:the token grid holds only")
NAMES = ["stock", "full", "hybrid", "full, VAE tiling", "full, VAE tiling, model offload"]


def quiet(line: str) -> None:
    pass


def test_rows_hold_the_parts_of_a_call_and_the_extrapolated_whole(tmp_path):
    lines = []
    out = tmp_path / "deeper" / "wan.json"
    result = run(out, steps=3, eager=True, device="cpu", progress=lines.append)
    assert json.loads(out.read_text()) == json.loads(json.dumps(result))
    assert [row["name"] for row in result["rows"]] == [row.name for row in ROWS] == NAMES
    assert [row["pipeline"] for row in result["rows"]] == ["WanPipeline"] + ["MHLAWanPipeline"] * 4
    for row in result["rows"]:
        measured, whole = row["measured"], row["extrapolated"]
        assert measured["steps"] == 3 and measured["transformer_calls"] == 6 and whole["steps"] == 50
        for part in (measured, whole):
            parts = part["transformer_s"] + part["vae_decode_s"] + part["rest_s"]
            assert part["total_s"] == pytest.approx(parts) and 0 < part["transformer_share"] < 1
            assert min(part["transformer_s"], part["vae_decode_s"], part["rest_s"]) > 0
        assert whole["vae_decode_s"] == measured["vae_decode_s"]
        assert whole["total_s"] == pytest.approx(measured["total_s"] + 47 * row["step_s"])
    assert set(result["times_faster_than_stock"]) == {"full", "hybrid"} and result["left_out"] == []
    assert "UMT5-XXL" in result["settings"]["text encoder"] and result["settings"]["tiny"]
    assert lines[0].startswith("stock: measured, 3 steps:") and "extrapolated, 50 steps:" in lines[0]
    assert "times faster than stock" in lines[-1]


def test_a_later_call_adds_rows_and_measures_none_twice(tmp_path):
    out = tmp_path / "w.json"
    (full,) = run(out, rows=("full",), steps=3, eager=True, device="cpu", progress=quiet)["rows"]
    result = run(out, rows=("stock", "full"), steps=3, eager=True, device="cpu", progress=quiet)
    assert [row["name"] for row in result["rows"]] == ["stock", "full"]
    assert result["rows"][1] == json.loads(json.dumps(full)) and set(result["times_faster_than_stock"]) == {
        "full"
    }
    with pytest.raises(ValueError, match="holds rows of another device, version or setting"):
        run(out, rows=("hybrid",), steps=4, eager=True, device="cpu")


def test_without_guidance_a_step_is_one_call_and_layers_are_compiled(tmp_path, monkeypatch):
    compiled = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda model, mode, dynamic, **how: compiled(model, backend="eager", **how)
    )
    result = run(tmp_path / "w.json", steps=4, guidance=1.0, rows=("full",), device="cpu", progress=quiet)
    (row,) = result["rows"]
    assert row["measured"]["transformer_calls"] == 4 and result["times_faster_than_stock"] == {}


def test_extrapolation_takes_the_median_step():
    facts = facts_of(10.0, [0.9, 0.9, 0.5, 0.4, 0.5, 0.5, 0.4, 0.5], [3.0], [4.0, 5.0, 6.5, 7.5])
    assert facts["step_s"] == 1.0
    assert facts["extrapolated"]["total_s"] == 10 + 46
    assert facts["extrapolated"]["transformer_s"] == pytest.approx(4.6 + 46 * 0.9)
    assert facts["measured"]["rest_s"] == pytest.approx(10 - 4.6 - 3)


def test_what_fails_or_does_not_fit_is_named(tmp_path, monkeypatch):
    lines = []
    out = tmp_path / "w.json"
    assert run(out, minutes=0, device="cpu", progress=lines.append)["left_out"] == NAMES
    assert lines[0] == "stock: not measured, 0 minutes are over"

    def fails(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(bench_pipeline, "pipeline_of", fails)
    (row,) = run(out, rows=("stock",), device="cpu", progress=lines.append)["rows"]
    assert row["error"] == "RuntimeError: out of memory" and lines[-1] == "stock: RuntimeError: out of memory"
    with pytest.raises(ValueError, match="no row 'all': they are stock; full; hybrid"):
        run(out, rows=("all",), device="cpu")
    with pytest.raises(ValueError, match="steps=2: give 3 to 50"):
        run(out, steps=2, device="cpu")


def test_the_command(tmp_path, capsys):
    assert main(["bench", "pipeline", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == NAMES
    out = tmp_path / "w.json"
    options = ["--rows", "hybrid", "--size", "480", "832", "33", "--steps", "3", "--eager", "--device", "cpu"]
    assert main(["bench", "pipeline", *options, "--out", str(out)]) == 0
    assert json.loads(out.read_text())["settings"]["size"] == "480x832x33"
    assert f"{out} written" in capsys.readouterr().out
    assert main(["bench", "pipeline", "--rows", "all", "--device", "cpu", "--out", str(out)]) == 2
    assert "no row 'all'" in capsys.readouterr().err
