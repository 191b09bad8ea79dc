"""The operator at the shapes of real models, beside its peers in the same run: `mhla bench op`.

The result file is written after every row, so that a run that is cut short keeps what it measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..ops.dispatch import dual_obstacle, form_costs
from ..ops.partition import grid_partition
from .first_call import first_call
from .kernel_report import report
from .operator_cases import CASES, EVEN, FORM_CASES, SCALING, Case, Inputs, floors, shape_of, small
from .operator_peers import COMPILED, CUDNN, peer_names, time_peers
from .operator_table import as_table, one_line
from .timing import (
    about,
    copy_bandwidth,
    graphed,
    host_milliseconds,
    milliseconds,
    peak_extra_bytes,
    product_rate,
)

__all__ = ["bench", "run"]

TRY = "small shapes on a CPU: this tries the program out and measures nothing of interest"
PARTS = ("rows", "kernels", "first_call", "forms")
ALIKE = ("device", "versions", "dtype", "note")
# Of the rows whose steps are also timed alone: one of each kind of kernel.
REPORTED = (0, 1, 2, 5, 7, 8)


def input_sets(case: Case, device: torch.device, dtype: torch.dtype) -> list[Inputs]:
    """Together larger than the L2 cache: a call never finds its inputs there, as in a model."""
    shape = shape_of(case)
    size = 4 * shape["B"] * shape["N"] * shape["H"] * shape["D"] * dtype.itemsize
    count = max(2, min(8, -(-(200 << 20) // size))) if device.type == "cuda" else 2
    return [Inputs(case, device, dtype, seed) for seed in range(count)]


def measure(
    case: Case, device: torch.device, dtype: torch.dtype, limits: tuple[float, float], repeats: int
) -> list[dict]:
    """Our rows of a case, without peers. limits: measured bandwidth in bytes/s and rate in FLOP/s."""
    sets = input_sets(case, device, dtype)
    rows = []
    for backward in (False, True) if case.backward else (False,):
        plain = [inputs.both if backward else inputs.forward for inputs in sets]
        calls: list[Callable[[], object]] = plain
        if case.graph and device.type == "cuda":
            calls = [graphed(call) for call in calls]
        ours = milliseconds(calls, device, repeats)
        extra = peak_extra_bytes(plain[0], device)
        least = floors(case, dtype.itemsize, *limits, backward)
        rows.append(
            {
                "name": case.name,
                "shape": shape_of(case),
                "direction": "forward_backward" if backward else "forward",
                "ours_ms": ours,
                "peers_ms": {},
                "peers_not_run": {},
                "ratio_vs_cudnn": None,
                **least,
                "achieved_gb_per_s": least["bytes_mb"] / ours,
                "achieved_tflop_per_s": least["gflop"] / ours,
                "extra_memory_mb": None if extra is None else extra / 1e6,
                "form": chosen_form(sets[0]),
                "error_vs_float64": sets[0].error(backward),
                "host_ms": host_milliseconds(calls[0], device),
                "target_ms": case.target[backward],
                "target_ratio": case.ratio[backward],
                "target_memory_mb": None if backward else case.memory,
                "target_met": None,
            }
        )
    return rows


def add_peers(row: dict, case: Case, names: Sequence[str], device, dtype, repeats: int) -> None:
    sets = input_sets(case, device, dtype)
    times, reasons = time_peers(names, sets, row["direction"] == "forward_backward", device, repeats)
    row["peers_ms"] |= times
    row["peers_not_run"] |= reasons
    if CUDNN in row["peers_ms"]:
        row["ratio_vs_cudnn"] = row["peers_ms"][CUDNN] / row["ours_ms"]


def judge(rows: Sequence[dict], cases: Sequence[Case]) -> None:
    """Say of every row whether it meets its target, where it has one."""
    known = {case.name: case for case in cases}
    for row in rows:
        case = known[row["name"]]
        even = [
            other for other in rows if other["name"] == case.like and other["direction"] == row["direction"]
        ]
        if even:
            per_token = [one["ours_ms"] / one["shape"]["N"] for one in (row, even[0])]
            row["per_token_vs_even"] = per_token[0] / per_token[1]
            row["target_ms"] = 1.1 * per_token[1] * row["shape"]["N"]
        met = [] if row["target_ms"] is None else [row["ours_ms"] <= row["target_ms"]]
        if row["target_ratio"] is not None and row["ratio_vs_cudnn"] is not None:
            met.append(row["ratio_vs_cudnn"] >= row["target_ratio"])
        if row["target_memory_mb"] is not None and row["extra_memory_mb"] is not None:
            met.append(row["extra_memory_mb"] <= row["target_memory_mb"])
        row["target_met"] = all(met) if met else None


def chosen_form(inputs: Inputs) -> str:
    if inputs.q.device.type != "cuda":
        return "plain torch"
    costs = expected(inputs)
    return min(costs, key=costs.get)


def expected(inputs: Inputs) -> dict[str, float]:
    part = grid_partition(inputs.case.grid, inputs.case.block_grid, inputs.q.shape[1], inputs.q.device)
    costs = form_costs(inputs.q, inputs.v, part, part, 2 if inputs.q.dtype == torch.bfloat16 else 4)
    if dual_obstacle(inputs.q, inputs.v, inputs.options.get("rope"), inputs.case.normalizer, part, part):
        del costs["dual"]
    return costs


def compare_forms(case: Case, device: torch.device, dtype: torch.dtype, repeats: int) -> dict:
    """Both forms in both directions; regret: the chosen form's forward time over the better one's, less 1."""
    sets = [Inputs(case, device, dtype, seed) for seed in range(2)]
    times = {}
    for form in ("states", "dual"):
        for name in ("forward", "both"):
            calls = [lambda x=x, name=name, form=form: getattr(x, name)(form=form) for x in sets]
            times[f"{form}_{name}_ms"] = milliseconds(calls, device, repeats)
    chosen = chosen_form(sets[0])
    best = min(times["states_forward_ms"], times["dual_forward_ms"])
    return {
        "name": case.name,
        "shape": shape_of(case),
        **times,
        "expected_us": expected(sets[0]),
        "chosen": chosen,
        "regret": times[f"{chosen}_forward_ms"] / best - 1 if chosen in ("states", "dual") else None,
    }


class _Run:
    """One run's result, its time and its file."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        out: Path,
        minutes: float,
        note: str,
        keep: Sequence[str],
    ):
        self.end, self.out, self.device = time.monotonic() + 60 * minutes, out, device
        large = device.type == "cuda"
        self.limits = (
            copy_bandwidth(device, 1024 if large else 16),
            product_rate(device, dtype, 8192 if large else 512),
        )
        self.result = {
            **about(device),
            "dtype": str(dtype).removeprefix("torch."),
            "note": note,
            "copy_bandwidth_gb_per_s": self.limits[0] / 1e9,
            "product_tflop_per_s": self.limits[1] / 1e12,
            "rows": [],
            "first_call": [],
            "kernels": [],
            "forms": [],
            "largest_regret": None,
            "left_out": [],
        }
        if keep and out.is_file():
            earlier = json.loads(out.read_text())
            if [earlier.get(name) for name in ALIKE] == [self.result[name] for name in ALIKE]:
                self.result |= {part: earlier[part] for part in keep if part in earlier}
        out.parent.mkdir(parents=True, exist_ok=True)
        self.write()

    def write(self) -> None:
        self.out.write_text(json.dumps(self.result, indent=1) + "\n")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def step(self, part: str, name: str, what: Callable[[], list[dict]]) -> list[dict]:
        """Add `what()` to a part of the result, or what went wrong; nothing new is begun when the time is up."""
        if time.monotonic() > self.end:
            self.result["left_out"].append(f"{name} ({part})")
            return []
        try:
            found = what()
        except Exception as error:  # one shape that fails must not cost the others' measurements
            found = [{"name": name, "error": f"{type(error).__name__}: {error}"[:500]}]
        self.result[part] += found
        self.write()
        return found


def run(
    cases: Sequence[Case], forms: Sequence[Case], device: torch.device, out: Path, *, minutes: float = 8.0,
    repeats: int = 30, dtype: torch.dtype = torch.bfloat16, compiled: bool = True, reported: Sequence[Case] = (),
    first: Sequence[Case] = (), note: str = "", stopping: bool = False, keep: Sequence[str] = (),
) -> dict:  # fmt: skip
    """Measure what fits into the time, writing the file `out` after every row.

    First all rows with the peers that compile nothing, then steps alone, first calls, compiled peers, both forms.
    stopping: a peer that was too slow or too large for one row is left out of the later ones, which have more tokens.
    keep: parts that an earlier run with the same device and versions has written into `out` and that stay.
    """
    run = _Run(device, dtype, out, minutes, note, keep)
    stopped: dict[str, str] = {}

    def peers(row: dict, case: Case, names: Sequence[str]) -> None:
        row["peers_not_run"] |= {name: stopped[name] for name in names if name in stopped}
        add_peers(row, case, [name for name in names if name not in stopped], device, dtype, repeats)
        if stopping:
            new = {name: why for name, why in row["peers_not_run"].items() if name not in stopped}
            stopped.update({name: f"{why} (at {case.name})" for name, why in new.items()})
        judge([row for row in run.result["rows"] if "error" not in row], cases)
        run.write()

    eager = [name for name in peer_names(device) if name not in COMPILED]
    measured: list[tuple[dict, Case]] = []
    for case in cases:
        rows = run.step(
            "rows", case.name, lambda case=case: measure(case, device, dtype, run.limits, repeats)
        )
        for row in rows:
            if "error" not in row:
                measured.append((row, case))
                peers(row, case, eager)
            print(one_line(row), flush=True)
    for case in reported:
        run.step("kernels", case.name, lambda case=case: report(case, device, dtype, repeats))
    for case in first:
        run.step("first_call", case.name, lambda case=case: [first_call(case, device)])
    for row, case in measured:
        if compiled and time.monotonic() < run.end:
            peers(row, case, COMPILED)
        else:
            row["peers_not_run"] |= dict.fromkeys(COMPILED, "left out")
    for case in forms:
        found = run.step("forms", case.name, lambda case=case: [compare_forms(case, device, dtype, repeats)])
        print(*[json.dumps(row) for row in found], sep="\n", flush=True)
    regrets = [row["regret"] for row in run.result["forms"] if row.get("regret") is not None]
    run.result["largest_regret"] = max(regrets, default=None)
    run.write()
    print("\n" + as_table(run.result), flush=True)
    return run.result


def bench(
    *, out: Path, rows: Sequence[str] = (), minutes: float = 8.0, repeats: int = 30, device: str = "auto",
    quick: bool = False, scaling: bool = False, parts: Sequence[str] = (),
) -> dict:  # fmt: skip
    """`mhla bench op`. rows: parts of names, none takes all. quick: few repeats, no compiled peers, rows and kernels.
    parts: of the measurement, none takes all; with some, the others stay as `out` has them.

    Raises ValueError for a device that is not there, and for rows that are none.
    """
    chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device here: pass --device cpu to try the program out on small shapes")
    all_cases = SCALING if scaling else CASES
    wanted = [case for case in all_cases if not rows or any([part in case.name for part in rows])]
    if not wanted:
        raise ValueError(
            f"no row's name holds {', '.join(rows)}: the rows are {', '.join([c.name for c in all_cases])}"
        )
    taken = set(parts or (("rows", "kernels") if quick else PARTS))
    if scaling:
        taken = {"rows"}
    reported = [case for i, case in enumerate(CASES) if i in REPORTED and case in wanted]
    reported = reported if "kernels" in taken else []
    first = [case for case in wanted if case.name == EVEN] if "first_call" in taken else []
    compared = FORM_CASES if "forms" in taken and not rows else []
    wanted = wanted if "rows" in taken else []
    note = ""
    if chosen.type == "cpu":
        wanted, compared, reported, first, note = [small(case) for case in wanted], [], [], [], TRY
        print(TRY, flush=True)
    return run(
        wanted, compared, chosen, out, minutes=minutes, repeats=min(repeats, 10) if quick else repeats,
        dtype=torch.bfloat16 if chosen.type == "cuda" else torch.float32, compiled=not quick, reported=reported,
        first=first, note=note, stopping=scaling, keep=[part for part in PARTS if part not in taken] if parts else (),
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit("type: mhla bench op, or python -m mhla_diffusion.cli bench op (see --help)")
