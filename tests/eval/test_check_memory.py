"""The calls that the memory checker looks at run, here in Triton's interpreter and without the checker."""

import os
import subprocess
import sys
from pathlib import Path

import torch

PROGRAM = Path(__file__).resolve().parent.parent.parent / "eval" / "check_memory.py"


def run(*options: str, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(PROGRAM), *options]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


def test_calls_run_without_the_checker():
    names = ["dual", "a table cut out of another", "all steps fused, norm over all heads", "gated depthwise"]
    done = run("--calls", *names, TRITON_INTERPRET="0" if torch.cuda.is_available() else "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"ran {name}" for name in names]


def test_without_a_gpu_nothing_is_claimed(tmp_path):
    if not torch.cuda.is_available():
        done = run("--out", str(tmp_path / "memcheck.txt"))
        assert done.returncode == 1 and "needs a CUDA device" in done.stderr
        assert not (tmp_path / "memcheck.txt").exists()
