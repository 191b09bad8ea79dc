"""The plain torch path now and at an earlier revision, in turns in one process, at the shipped pipeline's shapes.

    python eval/compare_eager.py e9f2165 --out eval/results/operator_cpu.json

Adds `against_revision` to the result file of `python -m mhla_diffusion.evaluation.speed`. The two take turns in
runs of ten calls; a time is the lower quartile, which other work on the machine moves least.
"""

import argparse
import importlib.util
import json
import math
import statistics
import subprocess
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path

import torch

from mhla_diffusion.evaluation.timing import about
from mhla_diffusion.mixing import initial_mixing
from mhla_diffusion.ops import eager
from mhla_diffusion.ops.partition import grid_partition

ROOT = Path(__file__).resolve().parent.parent
FILE = "mhla_diffusion/ops/eager.py"
# batch, grid: 8 heads of 32 channels in 4 x 4 blocks; the last grid is one that the blocks do not divide.
SHAPES = [(1, (16, 16)), (2, (16, 16)), (4, (16, 16)), (8, (16, 16)), (8, (15, 17))]
HEADS, DIM, BLOCKS = 8, 32, (4, 4)


def module_at(revision: str) -> types.ModuleType:
    """The plain torch path of a revision, as a further module of the package it lies in."""
    command = ["git", "show", f"{revision}:{FILE}"]
    source = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if source.returncode:
        raise SystemExit(f"{revision!r} is no revision with {FILE}: {source.stderr.strip()}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "earlier_eager.py"
        path.write_text(source.stdout)
        spec = importlib.util.spec_from_file_location("mhla_diffusion.ops.earlier_eager", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def in_turns(calls: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Lower quartile of the milliseconds of each call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            call()
            for _ in range(10):
                start = time.perf_counter()
                call()
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.quantiles(values, n=4)[0] for name, values in times.items()}


def calls(module: types.ModuleType, batch: int, grid: tuple[int, ...]) -> dict[str, Callable[[], object]]:
    """Forward without gradients, and forward and backward, on fixed random inputs; gate and local branch included."""
    tokens = math.prod(grid)
    generator = torch.Generator().manual_seed(0)
    q, k, v, gate, local, grad = torch.randn(6, batch, tokens, HEADS, DIM, generator=generator)
    mixing = initial_mixing(BLOCKS)
    part = grid_partition(grid, BLOCKS, tokens, q.device)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, mixing, gate, local)]

    def attend(q, k, v, mixing, gate, local) -> torch.Tensor:
        out = module.eager_core(q, k, v, mixing, part, part)
        return module.epilogue(out, None, 1e-6, gate, 1.2784645, local)

    def forward() -> torch.Tensor:
        with torch.inference_mode():
            return attend(q, k, v, mixing, gate, local)

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(attend(*leaves), leaves, grad)

    return {"forward": forward, "forward_backward": both}


def compare(earlier: types.ModuleType, turns: int) -> list[dict]:
    rows = []
    for batch, grid in SHAPES:
        before, after = (calls(module, batch, grid) for module in (earlier, eager))
        assert torch.allclose(before["forward"](), after["forward"](), rtol=1e-4, atol=1e-5)
        row: dict = {
            "B": batch,
            "H": HEADS,
            "N": math.prod(grid),
            "D": DIM,
            "M": math.prod(BLOCKS),
            "grid": grid,
        }
        for direction in before:
            ms = in_turns({"before": before[direction], "after": after[direction]}, turns)
            times = ms["before"] / ms["after"]
            row[direction] = {"before_ms": ms["before"], "after_ms": ms["after"], "times_faster": times}
            change = f"{ms['before']:.3f} -> {ms['after']:.3f} ms, {times:.2f}x"
            print(f"{batch} x {grid} {direction}: {change}", flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Time the plain torch path beside an earlier revision of it."
    )
    parser.add_argument("revision", help="a commit that git knows")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out", type=Path, help="result file to add to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = compare(module_at(options.revision), options.turns)
    result = {**about(torch.device("cpu")), "revision": options.revision, "dtype": "float32", "rows": rows}
    if options.out:
        kept = json.loads(options.out.read_text()) if options.out.is_file() else {}
        options.out.write_text(json.dumps({**kept, "against_revision": result}, indent=1) + "\n")
        print(f"{options.out} written")


if __name__ == "__main__":
    main()
