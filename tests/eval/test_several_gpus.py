"""The timing on several GPUs runs, here in two processes on a CPU, and counts what is sent. No time is asserted."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parent.parent.parent / "eval" / "several_gpus.py"


def run(*options: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), "--device", "cpu", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)


def test_two_processes_send_what_the_shapes_say(tmp_path):
    out = tmp_path / "gpus.json"
    done = run("--gpus", "1,2", "--variants", "hybrid,full", "--seconds", "0.05", "--out", str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(out.read_text())["rows"]
    assert [(row["gpus"], row["variant"]) for row in rows] == [
        (1, "hybrid"),
        (1, "full"),
        (2, "hybrid"),
        (2, "full"),
    ]
    assert all(row["eager_ms"] > 0 for row in rows) and "sent_per_layer" not in rows[0]
    # 5 x 6 x 10 tokens of 24 channels: q, k, v and the output, of which half stays; 12 blocks' summaries of two heads.
    softmax, mhla = 4 * (150 * 24 * 4) // 2, 12 * 2 * 12 * 12 * 4
    assert rows[2]["sent_per_layer"] == {"all_to_all": softmax}
    assert rows[2]["sent_per_mhla_layer"] == rows[3]["sent_per_layer"] == {"all_reduce": mhla}


def test_an_unknown_variant_is_named(tmp_path):
    done = run("--variants", "flat", "--out", str(tmp_path / "x.json"))
    assert done.returncode == 2 and "no variant 'flat'" in done.stderr
