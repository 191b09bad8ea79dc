"""Launch configurations of the operator's kernels: what is fastest on this GPU, and the table lines to paste.

`python -m mhla_diffusion.evaluation.tune_operator --out results --minutes 8` compiles the candidates in parallel
processes (Triton keeps compiled kernels on disk), then times each kernel alone in this one. `tune.json` is written
after every kernel; the lines printed last go into `ops/triton_configs.py`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..ops.backends import choose_backend
from ..ops.partition import grid_partition
from ..ops.rotation import three_axes
from ..ops.triton_configs import (
    override,
)
from .operator_cases import CASES, Case, Inputs
from .timing import about, milliseconds
from .tune_candidates import candidates, kind_of, with_fewer_registers

__all__ = ["candidates", "stages", "tune"]

SHAPES = {case.name: case for case in CASES}
TRY = "set TRITON_INTERPRET=1 and pass --device cpu to try the program out"
DEFAULT = ["wan 480x800x81", "dit 512", "sana 4K", "dit 256"]


def stages(inputs: Inputs) -> dict[str, Callable[[], object]]:
    """A call of every kernel of a case; the kernels before it have run once, outside."""
    from ..ops import dual_launch, states_launch

    case, q, k, v, grad, mixing = inputs.case, inputs.q, inputs.k, inputs.v, inputs.grad, inputs.mixing
    part = grid_partition(case.grid, case.block_grid, q.shape[1], q.device)
    mass, eps = case.normalizer == "paper", 1e-6
    rope = (three_axes(inputs.options["rope"].frequencies), None) if case.rope else None
    norms = [inputs.options.get(name) for name in ("query_norm", "key_norm")]
    after = None
    if case.fused:
        after = states_launch.Epilogue(
            inputs.options["norm_weight"], 1e-6, inputs.options["gate"], inputs.options["gate_bias"]
        )
    kept = {"state_dtype": torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32}
    read = {"divide": mass, "mass": mass, "denominator_eps": 0.0, "out_dtype": q.dtype}
    state = states_launch.summarise(k, v, part, rope, eps, mass=mass, norm=norms[1], **kept)
    mixed = states_launch.mix(mixing, state, q, v.shape[-1])
    found = {
        "summarise": lambda: states_launch.summarise(k, v, part, rope, eps, mass=mass, norm=norms[1], **kept),
        "mix": lambda: states_launch.mix(mixing, state, q, v.shape[-1]),
        "read_out": lambda: states_launch.read_out(
            q, mixed, v.shape[-1], part, rope, eps, norm=norms[0], after=after, **read
        ),
    }
    if case.backward:
        options = {"mass": mass, "denominator_eps": 0.0, **kept}
        found["query_gradients"] = lambda: states_launch.query_gradients(
            q, grad, mixed, part, rope, eps, **options
        )
        found["key_gradients"] = lambda: states_launch.key_gradients(k, v, mixed, part, rope, eps, mass=mass)
        found["mix_gradient"] = lambda: states_launch.mix_gradient(mixed, state, mixing, q, v.shape[-1])
    if has_dual(case):
        out, den = dual_launch.dual_forward(q, k, v, mixing, part, part, None, None, eps, 0.0, mass, q.dtype)
        found["dual_forward"] = lambda: dual_launch.dual_forward(
            q, k, v, mixing, part, part, None, None, eps, 0.0, mass, q.dtype
        )
        if case.backward:
            # Both backward kernels run in one call; the one that is not tuned keeps its configuration.
            found["dual_query"] = found["dual_key"] = lambda: dual_launch.dual_backward(
                grad, q, k, v, mixing, out, den, part, part, None, None, eps, mass
            )
    return found


def kernels_of(case: Case) -> list[str]:
    found = ["summarise", "mix", "read_out"]
    if case.backward:
        found += ["query_gradients", "key_gradients", "mix_gradient"]
    if has_dual(case):
        found += ["dual_forward", "dual_query", "dual_key"] if case.backward else ["dual_forward"]
    return found


def least_bytes(case: Case, kernel: str, item: int) -> int:
    """What a kernel (for dual_query and dual_key: both) must read and write, with states in the inputs' dtype."""
    lines = case.batch * case.heads
    tokens = lines * math.prod(case.grid) * case.dim * item
    size = case.dim * (case.dim + (case.normalizer == "paper"))
    states = lines * math.prod(case.block_grid) * size * item
    of_tokens, of_states = {
        "summarise": (2, 1), "mix": (0, 2), "read_out": (3 if case.fused else 2, 1), "query_gradients": (3, 2),
        "key_gradients": (4, 1), "mix_gradient": (0, 2), "dual_forward": (4, 0),
    }.get(kernel, (8, 0))  # fmt: skip
    return of_tokens * tokens + of_states * states


def has_dual(case: Case) -> bool:
    return case.dim <= 128 and not case.rope and math.prod(case.grid) <= 1024


def first_tensors(result) -> list[torch.Tensor]:
    return [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, torch.Tensor)]


def compile_one(case: Case, kernel: str, config, device: str, dtype: torch.dtype) -> str | None:
    """Run a candidate once, in a process of its own: the compiled kernel stays on disk. Returns what failed."""
    try:
        if case not in _made:
            _made.clear()
            _made[case] = stages(Inputs(case, torch.device(device), dtype, 0))
        with override(**{kernel: config}):
            _made[case][kernel]()
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


_made: dict = {}


def time_kernel(
    case: Case, kernel: str, calls: list[dict], trials: list, device: torch.device, repeats: int, end: float
) -> list[dict]:
    """Every candidate's time and its difference from the table's configuration, the fastest first."""
    from ..ops import triton_launch

    want = [x.float() for x in first_tensors(calls[0][kernel]())]
    ms = milliseconds([call[kernel] for call in calls], device, repeats)
    rows = [{"shape": case.name, "kernel": kernel, "config": "table", "difference": 0.0, "ms": ms}]
    for config in trials:
        if time.monotonic() > end:
            break
        row = {"shape": case.name, "kernel": kernel, "config": list(config)}
        try:
            triton_launch._step.clear()
            with override(**{kernel: config}):
                got = first_tensors(calls[0][kernel]())
                if triton_launch._step:
                    continue  # this configuration gave way to plain torch
                # Same shapes, unless the tile decides how a sum is cut.
                pairs = [(a.float(), b) for a, b in zip(got, want, strict=True) if a.shape == b.shape]
                row["difference"] = max([float((a - b).norm() / b.norm()) for a, b in pairs], default=0.0)
                row["ms"] = milliseconds([call[kernel] for call in calls], device, repeats)
        except Exception as error:
            row["error"] = str(error)[:200]
        rows.append(row)
    triton_launch._step.clear()
    return sorted(rows, key=duration)


def duration(row: dict) -> float:
    return row.get("ms", math.inf)


def finished(jobs: list, case: Case, kernel: str, result: dict, end: float) -> list:
    """The configurations that compile; what failed is written down."""
    usable = []
    for config, job in jobs:
        failure = job.result(timeout=max(1.0, end - time.monotonic()))
        if failure is None:
            usable.append(config)
        else:
            result["failures"].append([case.name, kernel, list(config), failure])
    return usable


def named(trial: dict) -> dict[str, str]:
    return {name: str(x) for name, x in trial.items()}


def choices_of(case: Case, calls: list[dict], device: torch.device, repeats: int) -> list[dict]:
    """Orders of the heads, over the three forward kernels."""
    forward = [
        lambda call=call: [call[name]() for name in ("summarise", "mix", "read_out")] for call in calls
    ]
    trials: list[dict] = [{}]
    trials += [{"head_group": group} for group in range(1, case.heads + 1) if case.heads % group == 0]
    rows = []
    for trial in trials:
        with override(**trial):
            ms = milliseconds(forward, device, repeats)
        rows.append({"shape": case.name, "choice": named(trial), "ms": ms})
    return rows


def tune(
    cases: Sequence[Case], out: Path, device: torch.device, dtype: torch.dtype, *, minutes: float = 8.0,
    repeats: int = 20, workers: int = 12, limit: int | None = None, kernels: Sequence[str] | None = None,
) -> dict:  # fmt: skip
    """Time every candidate (the first `limit`) of the kernels (default: all) at the shapes, in order, as far as the
    time goes."""
    end = time.monotonic() + 60 * minutes
    out.mkdir(parents=True, exist_ok=True)
    result = {**about(device), "kernels": [], "choices": [], "failures": [], "lines": []}
    jobs = {}
    chosen = {
        case: [name for name in kernels_of(case) if kernels is None or name in kernels] for case in cases
    }
    pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))

    def compile_in(pool, case: Case, kernel: str, config):
        return pool.submit(compile_one, case, kernel, config, device.type, dtype)

    for case in cases:
        for kernel in chosen[case]:
            trials = list(candidates(kernel, case.dim))[:limit]
            jobs[case, kernel] = [(config, compile_in(pool, case, kernel, config)) for config in trials]
    try:
        for case in cases:
            calls = [stages(Inputs(case, device, dtype, seed)) for seed in range(2)]
            for kernel in chosen[case]:
                usable = finished(jobs[case, kernel], case, kernel, result, end)
                # Compilation of later kernels goes on meanwhile: it uses the GPU for moments, which medians do not see.
                rows = time_kernel(case, kernel, calls, usable, device, repeats, end)
                capped = [
                    (config, compile_in(pool, case, kernel, config))
                    for config in with_fewer_registers(rows)[:limit]
                ]
                usable = finished(capped, case, kernel, result, end)
                more = time_kernel(case, kernel, calls, usable, device, repeats, end)
                rows = sorted(rows + [row for row in more if row["config"] != "table"], key=duration)
                result["kernels"] += rows
                for row in rows:
                    if "ms" in row:
                        row["gb_per_s"] = least_bytes(case, kernel, dtype.itemsize) / row["ms"] / 1e6
                best = rows[0]["config"]
                if best != "table":
                    best = f"{kind_of(kernel).__name__}{tuple(best)}"
                result["lines"].append(
                    f"{case.name} | {kernel}: {best}  {rows[0]['ms']:.4f} ms  {rows[0]['gb_per_s']:.0f} GB/s"
                )
                for row in rows[:5] + [row for row in rows[5:] if row["config"] == "table"]:
                    print(case.name, kernel, row["config"], row.get("ms"), row.get("difference"), flush=True)
                (out / "tune.json").write_text(json.dumps(result, indent=1))
            if time.monotonic() < end:
                result["choices"] += choices_of(case, calls, device, repeats)
            (out / "tune.json").write_text(json.dumps(result, indent=1))
    except concurrent.futures.TimeoutError:
        print("out of time: the rest was not compiled yet", flush=True)
    pool.shutdown(wait=False, cancel_futures=True)
    for row in result["choices"]:
        print(row["shape"], row["choice"], f"{row['ms']:.4f} ms")
    print("\n".join(result["lines"]), flush=True)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Find launch configurations for this GPU.")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=DEFAULT)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 3))
    parser.add_argument(
        "--limit", type=int, help="candidates for each kernel; 0 times the table's choices only"
    )
    parser.add_argument("--kernels", nargs="+", help="only these, e.g. summarise dual_query (default: all)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu tries the program out, with TRITON_INTERPRET=1",
    )
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"no CUDA device here: {TRY}")
    try:
        choose_backend("triton", device, torch.float32, 64)
    except ValueError:  # on a CPU the kernels run by Triton's interpreter alone
        parser.error(f"the kernels do not run on a CPU as it is: {TRY}")
    tune(
        [SHAPES[name] for name in options.shapes],
        options.out,
        device,
        torch.bfloat16 if device.type == "cuda" else torch.float32,
        minutes=options.minutes,
        repeats=options.repeats,
        workers=options.workers,
        limit=options.limit,
        kernels=options.kernels,
    )


if __name__ == "__main__":
    main()
