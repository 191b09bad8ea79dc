"""Wan over several processes equals Wan in one: outputs, and gradients summed over the processes."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import parallel_wan
import pytest
import torch
from parallel_wan import CASES
from tiny_wan import relative

SUPPORT = Path(parallel_wan.__file__).parent


@pytest.fixture(scope="module", params=[2, 3])
def shared(request, tmp_path_factory) -> list[dict]:
    """What each of two or three processes found in every case."""
    folder, ranks = tmp_path_factory.mktemp("ranks"), request.param
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    running = [
        subprocess.Popen(
            [sys.executable, SUPPORT / "parallel_wan.py", str(rank), str(ranks), folder],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    said = [process.communicate(timeout=400)[0] for process in running]
    assert all(process.returncode == 0 for process in running), "\n".join(text[-3000:] for text in said)
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(ranks)]


@functools.cache
def alone(name: str) -> dict:
    case = CASES[name]._replace(backend="auto")
    return parallel_wan.result_of(parallel_wan.model_of(case), case)


@pytest.mark.parametrize("name", CASES)
def test_processes_compute_what_one_does(shared, name):
    expected = alone(name)
    for found in shared:
        assert relative(found[name]["sample"], expected["sample"]) < 1e-5
    for key, gradient in expected.items():
        if key != "sample":
            total = sum(found[name][key] for found in shared if key in found[name])
            assert relative(total, gradient) < 1e-4, key
