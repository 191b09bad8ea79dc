"""The check against VBench's own class, with a package named vbench that does the same by another way."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

STAND_IN = """
import json
from pathlib import Path
import numpy as np
from mhla_diffusion.pipelines.videos import read_video

class VBench:
    def __init__(self, device, info, out):
        self.out = Path(out)

    def evaluate(self, videos_path, name, dimension_list, mode):
        rows = []
        for path in sorted(Path(videos_path).iterdir()):
            frames = read_video(path).frames.astype(np.float32)
            score = float(1 - np.abs(np.diff(frames, axis=0)).mean() / 255) + {shift}
            rows.append({{"video_path": str(path), "video_results": score}})
        mean = sum(row["video_results"] for row in rows) / len(rows)
        (self.out / f"{{name}}_eval_results.json").write_text(json.dumps({{dimension_list[0]: [mean, rows]}}))
"""


@pytest.mark.parametrize(("shift", "status"), [(0, 0), (1e-3, 1)])
def test_both_scores_are_stored_and_a_difference_fails(tmp_path, shift, status):
    site = tmp_path / "site"
    site.mkdir()
    (site / "vbench.py").write_text(STAND_IN.format(shift=shift))
    for name in ("vbench", "decord"):
        (site / f"{name}-0.dist-info").mkdir()
        (site / f"{name}-0.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n"
        )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}:{ROOT}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    out = tmp_path / "out.json"
    command = [
        sys.executable,
        str(ROOT / "eval" / "check_flicker.py"),
        "--python",
        str(python),
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == status, done.stderr
    found = json.loads(out.read_text())
    assert len(found["videos"]) == 3 and found["vbench_environment"]["vbench"] == "0"
    assert found["largest_difference"] == pytest.approx(shift, abs=1e-6)


def test_a_python_without_vbench_is_named(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "eval" / "check_flicker.py"),
        "--out",
        str(tmp_path / "a"),
        "--python",
    ]
    for python, message in (
        (sys.executable, "No module named 'vbench'"),
        (str(tmp_path / "absent"), "cannot run"),
    ):
        done = subprocess.run([*command, python], capture_output=True, text=True, timeout=200)
        assert done.returncode == 2 and message in done.stderr


def test_what_is_published_agrees():
    found = json.loads((ROOT / "eval" / "results" / "vbench_flicker.json").read_text())
    assert found["vbench_environment"]["vbench"] == "0.1.5" and len(found["videos"]) == 3
    scores = [(row["ours"], row["vbench"]) for row in (*found["videos"], found["mean"])]
    assert max(abs(ours - theirs) for ours, theirs in scores) < 1e-6
    assert len({round(ours, 2) for ours, _ in scores[:3]}) == 3  # they flicker differently
