"""The timing of features runs and stores what it measured. How fast it is, is not asserted."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "eval" / "feature_speed.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_a_few_pictures_on_a_cpu(tmp_path):
    out = tmp_path / "speed.json"
    done = run(
        "--pictures",
        "5",
        "--different",
        "3",
        "--size",
        "32",
        "--workers",
        "1",
        "--device",
        "cpu",
        "--out",
        str(out),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["pictures"] == 5 and found["pictures_per_second"] > 0
    assert found["environment"]["device"] == "cpu" and found["settings"]["codecs"] == {"png": 5}
    assert "5/5" in done.stderr  # the progress bar


def test_an_unknown_protocol_is_named():
    done = run("--protocol", "fid", "--device", "cpu")
    assert done.returncode == 2 and "'fid': give fid_adm" in done.stderr
