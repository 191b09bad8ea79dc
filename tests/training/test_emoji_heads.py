"""The program that trains the heads, on the sample and with a toy text encoder."""

import json
import subprocess
import sys
from pathlib import Path

import tiny_minilm

from mhla_diffusion.evaluation.emoji_world.heads import load_heads

ROOT = Path(__file__).resolve().parent.parent.parent


def test_heads_are_trained_reported_and_the_same_again(tmp_path):
    minilm = tiny_minilm.folder(tmp_path / "minilm")
    command = [
        *(sys.executable, str(ROOT / "train" / "emoji_heads.py"), "--data"),
        *(str(ROOT / "assets" / "emoji_sample.tar"), "--minilm", str(minilm), "--epochs", "30"),
        *("--seeds", "1", "--cache", str(tmp_path / "cache.pt")),
    ]
    files = []
    for name in ("a", "b"):
        out, report = tmp_path / f"{name}.safetensors", tmp_path / f"{name}.json"
        result = subprocess.run(
            [*command, "--out", str(out), "--report", str(report)],
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert result.returncode == 0, result.stderr
        files.append(out.read_bytes())
    assert files[0] == files[1]
    heads, about = load_heads(tmp_path / "a.safetensors")
    stored = json.loads((tmp_path / "a.json").read_text())
    assert stored["heads"] == about["sha256"] and len(heads.concepts) == 13
    run = stored["runs"][0]
    assert run["train/whole"]["r_at_1"] > 0.5 > 4 * run["train/whole"]["chance_at_1"]
    assert run["heldout/whole"]["candidates"] == 13 and run["val/whole"]["pictures"] == 10
    assert stored["settings"]["sentences"]["role"] == "minilm"
