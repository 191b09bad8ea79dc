"""Twins that make videos: trained, measured by loss and by motion, and merged into one report."""

import json
import sys
from pathlib import Path

import pytest
import tiny_wan_pipeline
from PIL import Image
from programs import load_program
from tiny_wan import TRANSFORMER, stock_transformer

from mhla_diffusion.evaluation.moving.prompted import read_prompts
from mhla_diffusion.training.config import SampleConfig

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:the token grid holds only")
RECIPE = """
[run]
name = "toy"
steps = 2
batch_size = 2
device = "cpu"
tracker = "none"
[model]
base = "{base}"
train_text_encoder = true
transformer_class = "MHLAWanTransformer3DModel"
[model.transformer]
{fields}
[data]
kind = "moving-emoji"
path = "{data}"
sizes = [[5, 16, 16]]
clips = 4
cache = "{cache}"
max_sequence_length = 6
[checkpoint]
every = 0
"""


@pytest.fixture
def twins(monkeypatch):
    module = load_program("train/twins.py")
    listed = list(read_prompts().values())
    few = [next(p for p in listed if p.motion == motion) for motion in ("up", "spin", "grow", "bounce")]
    monkeypatch.setattr(module, "read_prompts", lambda: {p.prompt: p for p in few})
    monkeypatch.setattr(module, "CLIPS", 2)
    monkeypatch.setattr(module, "DRAWN", (0, 1))
    monkeypatch.setattr(module, "SHEET", SampleConfig(steps=1, guidance=2.0))
    return module


def test_two_twins_and_their_report(twins, tmp_path, monkeypatch, capsys):
    base = tmp_path / "base"
    tiny_wan_pipeline.stock_pipeline(stock_transformer()).save_pretrained(base)
    kept = {name: value for name, value in TRANSFORMER.items() if not name.startswith("mhla")}
    fields = "\n".join(
        f"{name} = {json.dumps(list(value) if isinstance(value, tuple) else value)}"
        for name, value in kept.items()
    )
    recipe = tmp_path / "toy.toml"
    data = ROOT / "assets" / "emoji_sample.tar"
    recipe.write_text(RECIPE.format(base=base, fields=fields, data=data, cache=tmp_path / "cache"))

    def call(*arguments):
        monkeypatch.setattr(
            sys, "argv", ["twins.py", str(recipe), "--out", str(tmp_path / "out"), *arguments]
        )
        return twins.main()

    assert call("--only", "other:0") == 2
    assert "choose among softmax, linear, mhla, hybrid" in capsys.readouterr().err
    # The text encoder of the base is trained on from its weights.
    assert call("--only", "hybrid:0,softmax:0", "--set", "run.compile=false") == 0
    facts = json.loads((tmp_path / "out" / "hybrid-0.json").read_text())
    assert facts["settings"]["model"]["transformer"]["mhla_layers"] == "2/3" and facts["steps"] == 2
    assert facts["flow_loss"]["heldout"]["pictures"] == 2
    assert facts["motion"]["heldout"]["clips"] == 8 and facts["motion"]["heldout"]["prompts"] == 4
    with Image.open(tmp_path / "out" / "hybrid-0.png") as row:
        assert row.width == 4 * len(twins.SHOWN) * 16 + 2 * (4 * len(twins.SHOWN) - 1)
    assert call("--only", "softmax:0") == 0
    assert "softmax:0 is done already" in capsys.readouterr().out

    assert call("--report", "--report-to", str(tmp_path / "report"), "--remark", "A try.") == 0
    page = (tmp_path / "report" / "twins_wan_emoji.md").read_text()
    assert page.startswith("# Twins on clips of moving emoji") and "A try." in page
    assert "| hybrid, seed 0 | 8 |" in page and "| softmax | 0 |" in page
    assert page.index("softmax, seed 0") < page.index("hybrid, seed 0") and "2 steps of 2 clips" in page
    merged = json.loads((tmp_path / "report" / "twins_wan_emoji.json").read_text())
    assert {run["twin"] for run in merged["runs"]} == {"hybrid", "softmax"}
