"""The program that lists scenes and paints them, and the scorer on what it paints."""

import json
import subprocess
import sys
from pathlib import Path

from mhla_diffusion.cli import main
from mhla_diffusion.evaluation.emoji_world.scenes import TASKS, read_scenes

ROOT = Path(__file__).resolve().parent.parent.parent
SAMPLE = str(ROOT / "assets" / "emoji_sample.tar")


def run(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "eval" / "emoji_scenes.py"), "--data", SAMPLE, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_painted_scenes_are_judged_right(tmp_path):
    result = run("--number", "3", "--out", str(tmp_path), "--paint", str(tmp_path / "p"))
    assert result.returncode == 0, result.stderr
    scenes = read_scenes(tmp_path / "emoji_scenes.jsonl")
    assert [scene.tag for scene in scenes.values()] == [task for task in TASKS for _ in range(3)]
    command = [
        "eval",
        "run",
        "emoji_scenes",
        "--samples",
        str(tmp_path / "p"),
        "--out",
        str(tmp_path / "a.json"),
    ]
    assert main([*command, "--prompts", str(tmp_path / "emoji_scenes.jsonl")]) == 0
    values = json.loads((tmp_path / "a.json").read_text())["values"]
    assert values["emoji_geneval"]["n"] == 18 and values["emoji_geneval"]["value"] > 0.7
    assert values["pixels_background"]["value"] == values["pixels_place"]["value"] == 1
    again = run("--number", "3", "--out", str(tmp_path / "again"))
    assert again.returncode == 0
    for name in ("emoji_scenes.jsonl", "emoji_scenes.txt"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_nothing_to_do_and_no_data_are_one_line():
    assert run().returncode == 2
    command = [sys.executable, str(ROOT / "eval" / "emoji_scenes.py"), "--data", "none.tar", "--out", "x"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
