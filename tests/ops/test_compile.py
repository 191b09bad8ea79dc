"""The kernels compile for GPUs that this machine does not have."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAMS = Path(__file__).parent


def test_kernels_compile_for_ampere_and_hopper(tmp_path):
    # A process of its own: kernels defined under the interpreter cannot be compiled.
    done = subprocess.run(
        [sys.executable, PROGRAMS / "compile_kernels.py", "--arch", "80", "90"],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert ", 0 faults" in done.stdout


def test_repeated_launches_are_those_of_triton(tmp_path):
    done = subprocess.run(
        [sys.executable, PROGRAMS / "replay_launches.py"],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("launches repeated") == 3
