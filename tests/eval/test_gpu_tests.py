"""The record of a run on a GPU counts what its logs say, and no more."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parent.parent.parent / "eval" / "gpu_tests.py"
HEADER = "device: NVIDIA H200 x 1; torch 2.11.0, triton 3.6.0\n"
PARALLEL = HEADER + (
    "[gw3] [  0%] PASSED tests/ops/test_a.py::test_one[1-a b] \n"
    "[gw1] [ 50%] FAILED tests/ops/test_a.py::test_two \n"
    "[gw0] [100%] PASSED tests/models/test_b.py::test_three \n"
)
SINGLE = HEADER + "tests/ops/test_a.py::test_two PASSED                   [100%]\n"


def record(tmp_path, *logs, commits=("abc",)):
    paths = []
    for number, text in enumerate(logs):
        paths.append(tmp_path / f"{number}.log")
        paths[-1].write_text(text)
    out = tmp_path / "out.json"
    command = [sys.executable, PROGRAM, *paths, "--commit", *commits, "--out", out]
    return subprocess.run(command, capture_output=True, text=True), out


def test_a_later_log_counts(tmp_path):
    done, out = record(tmp_path, PARALLEL, SINGLE, commits=("abc", "def"))
    figures = json.loads(out.read_text())
    assert done.returncode == 0 and figures["passed"] == 3 and figures["not_passed"] == []
    assert figures["files"] == {"tests/models/test_b.py": 1, "tests/ops/test_a.py": 2}
    assert [(run["commit"], run["tests"]) for run in figures["runs"]] == [("abc", 3), ("def", 1)]


def test_a_failure_stands_and_is_named(tmp_path):
    done, out = record(tmp_path, PARALLEL)
    assert done.returncode == 1
    assert json.loads(out.read_text())["not_passed"] == ["tests/ops/test_a.py::test_two FAILED"]


def test_an_error_after_passing_counts(tmp_path):
    done, _ = record(tmp_path, SINGLE + "tests/ops/test_a.py::test_two ERROR   [100%]\n")
    assert done.returncode == 1 and "test_two ERROR" in done.stdout


def test_a_log_of_something_else_is_refused(tmp_path):
    done, out = record(tmp_path, "no tests here\n")
    assert done.returncode == 2 and "pytest -v -m gpu" in done.stderr and not out.exists()
