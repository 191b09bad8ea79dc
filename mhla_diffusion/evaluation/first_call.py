"""How long the very first call takes, with nothing compiled before: in a process of its own, with an empty cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from .operator_cases import CASES, Case, Inputs, small

__all__ = ["first_call"]


def first_call(case: Case, device: torch.device) -> dict:
    """Seconds of the first forward call of a case, and of its first forward and backward call after that.

    Loading torch, making inputs and starting CUDA are not counted.
    """
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", __name__, case.name, device.type]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no word about why"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def _seconds(call, device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main(name: str, kind: str) -> None:
    device = torch.device(kind)
    large = device.type == "cuda"
    case = next(case if large else small(case) for case in CASES if name in (case.name, small(case).name))
    inputs = Inputs(case, device, torch.bfloat16 if large else torch.float32, 0)
    if large:
        torch.cuda.synchronize()
    forward = _seconds(inputs.forward, device)
    print(
        json.dumps(
            {"name": case.name, "forward_s": forward, "forward_backward_s": _seconds(inputs.both, device)}
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
