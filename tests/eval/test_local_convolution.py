"""The program that times the local branch runs on a CPU. How fast either side is, is not asserted."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_both_sides_are_timed_and_judged_by_float64(tmp_path):
    out = tmp_path / "results" / "local.json"
    command = [sys.executable, str(ROOT / "eval" / "local_convolution.py"), "--out", str(out)]
    command += ["--repeats", "1", "--tiles"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == len(done.stdout.splitlines()) >= 2
    for row in rows:
        for side in ("torch", "ours"):
            assert row[f"{side}_forward_ms"] > 0 and row[f"{side}_both_ms"] > 0
            assert len(row[f"{side}_error"]) == 4 and max(row[f"{side}_error"].values()) < 2e-2
        assert {name: len(times) for name, times in row["tiles_ms"].items()} == {
            "local": 13,
            "local_gradient": 9,
        }
