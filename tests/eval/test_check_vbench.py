"""The check of VBench's networks of motion; the whole of it needs VBench's environment of 6 GB."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_without_the_environment_it_is_said_how_to_have_it(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "eval" / "check_vbench.py"),
        "--environment",
        str(tmp_path / "absent"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "mhla eval vbench setup" in done.stderr and not (tmp_path / "outputs").exists()


def test_what_is_published_agrees():
    found = json.loads((ROOT / "eval" / "results" / "vbench_random_weights.json").read_text())
    assert found["largest_difference"] < 1e-6 and found["vbench_environment"]["versions"]["vbench"] == "0.1.5"
    dimensions = {row["dimension"] for row in found["videos"]}
    assert dimensions == {"motion_smoothness", "dynamic_degree", "temporal_flickering"}
    assert {row["run"] for row in found["videos"] if row["dimension"] == "dynamic_degree"} == {0, 1}
