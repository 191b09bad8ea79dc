"""The program that scores clips of moving emoji: list, real clips, their scores, and a pipeline's."""

import json
import sys
from pathlib import Path

import pytest
import tiny_wan_pipeline
import torch
from programs import load_program
from tiny_wan import model

from mhla_diffusion import MHLAWanPipeline
from mhla_diffusion.evaluation.moving.prompted import read_prompts
from mhla_diffusion.training.moving_emoji import MOTIONS

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "assets" / "emoji_sample.tar"
pytestmark = pytest.mark.filterwarnings("ignore:the token grid holds only")


@pytest.fixture(scope="module")
def program():
    return load_program("eval/moving_emoji.py")


@pytest.fixture
def call(program, monkeypatch):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["moving_emoji.py", *map(str, arguments)])
        return program.main()

    return run


@pytest.fixture
def short_list(program, tmp_path, monkeypatch):
    """A list and clips of the sample set, with few prompts."""
    monkeypatch.setattr(program, "EACH", {"heldout": 0, "train": 1})
    monkeypatch.setattr(program, "SEED", 5)
    program.write_list(str(SAMPLE), tmp_path)
    return tmp_path / "moving_emoji.jsonl"


def test_real_clips_score_as_they_are(call, short_list, tmp_path, capsys):
    scenes = read_prompts(short_list)
    assert sorted(scene.motion for scene in scenes.values()) == sorted(MOTIONS)
    assert call("--data", SAMPLE, "--prompts", short_list, "--paint", tmp_path / "clips") == 0
    out = tmp_path / "real.json"
    assert call("--prompts", short_list, "--score", tmp_path / "clips", "--out", out) == 0
    assert "| clips | 12 | 100.0 %" in capsys.readouterr().out
    found = json.loads(out.read_text())
    scores = found["scores"]["train"]
    assert scores["motion"] == scores["background"] == 1 and scores["no_object"] == 0
    assert scores["motion_with_shuffled_prompts"] < 0.4
    assert len(found["clips"]) == 12 and 0.9 < scores["flickering"] < 1


def test_a_pipeline_is_drawn_and_scored(call, short_list, tmp_path):
    folder, out = tmp_path / "pipe", tmp_path / "drawn.json"
    torch.manual_seed(0)
    pipe = MHLAWanPipeline(
        **tiny_wan_pipeline.components(model()), default_steps=1, default_height=16, default_width=16,
        default_frames=5, default_guidance_scale=1.0, max_sequence_length=8,
    )  # fmt: skip
    pipe.save_pretrained(folder)
    arguments = ["--prompts", short_list, "--pipeline", folder, "--out", out, "--limit", 2, "--seeds", "0,1"]
    arguments += ["--keep", tmp_path / "kept", "--batch-size", 3, "--device", "cpu"]
    assert call(*arguments) == 0
    found = json.loads(out.read_text())
    assert found["scores"]["train"]["clips"] == 4 and set(found["scores"]["train"]["seeds"]) == {"0", "1"}
    assert found["pipeline"]["name"] == "pipe" and len(found["pipeline"]["sha256"]) == 64
    assert found["steps"] == 1 and found["frames"] == 5 and found["dtype"] == "float32"
    assert len(list((tmp_path / "kept").glob("*.mp4"))) == 4
    assert call("--prompts", short_list, "--score", tmp_path / "kept", "--out", tmp_path / "again.json") == 0
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["scores"]["train"]["clips"] == 4


def test_a_set_of_too_few_sprites_is_refused(program, monkeypatch, tmp_path):
    monkeypatch.setattr(program, "TRIES", 20)
    with pytest.raises(ValueError, match="too few sprites of heldout for 8 prompts"):
        program.write_list(str(SAMPLE), tmp_path)


def test_faults_are_one_line(call, short_list, tmp_path, capsys):
    assert call("--prompts", tmp_path / "none.jsonl", "--score", tmp_path) == 2
    assert call("--prompts", short_list, "--score", tmp_path) == 2
    assert "none of the clips has a prompt of the list" in capsys.readouterr().err
    assert call("--prompts", short_list, "--score", tmp_path / "none") == 2
    assert "there is no folder" in capsys.readouterr().err
    assert call("--prompts", short_list, "--pipeline", ROOT / "pipelines" / "sana-mhla-emoji") == 2
    assert "draws pictures, no videos" in capsys.readouterr().err
    assert call("--prompts", short_list, "--pipeline", "none") == 2
    assert call("--pipeline", "none", "--seeds", "0,a") == 2
    assert "--seeds 0,a: give whole numbers joined by commas" in capsys.readouterr().err
