import json
import subprocess
import sys
from pathlib import Path

import tiny_sana

from mhla_diffusion.models.convert import convert
from mhla_diffusion.pipelines.sana import MHLASanaPipeline

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "eval" / "concepts.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def test_the_program_scores_drawings_beside_real_ones_and_says_with_what(tmp_path):
    parts = tiny_sana.components(convert(tiny_sana.stock_transformer(), block_grid=(2, 2)))
    pipe = MHLASanaPipeline(
        **parts, default_steps=1, default_height=64, default_width=64, max_sequence_length=8
    )
    pipe.save_pretrained(tmp_path / "toy")
    sample = str(ROOT / "assets" / "emoji_sample.tar")
    line = [
        "--pipeline",
        str(tmp_path / "toy"),
        "--data",
        sample,
        "--out",
        str(tmp_path / "out"),
        "--device",
        "cpu",
    ]
    result = run(*line, "--limit", "3")
    assert result.returncode == 0, result.stderr
    stored = json.loads((tmp_path / "out" / "result.json").read_text())
    assert stored["drawn"]["all"]["pictures"] == 3
    assert 0 <= stored["drawn"]["all"]["top_5"] <= 1
    assert stored["real"]["all"]["top_5"] > stored["chance"]["top_5"]
    assert stored["settings"]["split"] == "heldout" and len(stored["settings"]["data_sha256"]) == 64
    assert stored["settings"]["steps"] == 1 and stored["versions"]["torch"]
    failed = run(*line, "--split", "unknown")
    assert failed.returncode == 2 and failed.stderr.count("\n") == 1
