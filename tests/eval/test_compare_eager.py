"""The plain torch path beside an earlier revision of itself. How fast either is, is not asserted."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "eval" / "compare_eager.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_both_are_timed_and_added_to_what_is_there(tmp_path):
    out = tmp_path / "operator_cpu.json"
    out.write_text('{"ratio": 2.0}')
    done = run("HEAD", "--turns", "1", "--threads", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    stored = json.loads(out.read_text())
    rows = stored["against_revision"]["rows"]
    assert stored["ratio"] == 2.0 and stored["against_revision"]["revision"] == "HEAD"
    assert [(row["B"], row["N"]) for row in rows] == [(1, 256), (2, 256), (4, 256), (8, 256), (8, 255)]
    for row in rows:
        for direction in ("forward", "forward_backward"):
            timed = row[direction]
            assert timed["times_faster"] == timed["before_ms"] / timed["after_ms"] > 0


def test_an_unknown_revision_is_named():
    done = run("nowhere")
    assert done.returncode == 1 and "'nowhere' is no revision" in done.stderr
