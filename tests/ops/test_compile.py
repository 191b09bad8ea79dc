"""The kernels compile for GPUs that this machine does not have."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("compile_kernels.py")


def test_kernels_compile_for_ampere_and_hopper(tmp_path):
    # A process of its own: kernels defined under the interpreter cannot be compiled.
    done = subprocess.run(
        [sys.executable, PROGRAM, "--arch", "80", "90"],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert ", 0 faults" in done.stdout
