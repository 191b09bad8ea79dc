"""The operator at the shapes of real models, beside its peers in the same run: `mhla bench op`.

The result file is written after every row. A later run with the same file goes on where it was cut short.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .first_call import first_call
from .kernel_report import report
from .operator_cases import CASES, EVEN, FORM_CASES, SCALING, Case, Inputs, floors, shape_of, small
from .operator_forms import chosen_form, compare_forms, judge_forms, largest_regrets
from .operator_kept import LEFT_OUT, REPEATS, in_order, kept_of, missing_peers, stopped_peers
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
from .tune_operator import kernels_of

__all__ = ["bench", "run"]

TRY = "small shapes on a CPU: this tries the program out and measures nothing of interest"
PARTS = ("rows", "kernels", "first_call", "forms")
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
                "form": chosen_form(case, device, dtype, backward),
                "error_vs_float64": sets[0].error(backward),
                "host_ms": host_milliseconds(calls[0], device),
                "target_ms": case.target[backward],
                "target_ratio": case.ratio[backward],
                "target_memory_mb": None if backward else case.memory,
                "target_met": None,
            }
        )
    return rows


def add_peer(row: dict, name: str, sets: Sequence[Inputs], device: torch.device, repeats: int) -> None:
    times, reasons = time_peers([name], sets, row["direction"] == "forward_backward", device, repeats)
    row["peers_ms"] |= times
    row["peers_not_run"].pop(name, None)
    row["peers_not_run"] |= reasons
    if CUDNN in row["peers_ms"]:
        row["ratio_vs_cudnn"] = row["peers_ms"][CUDNN] / row["ours_ms"]


def judge(rows: Sequence[dict], cases: Sequence[Case]) -> None:
    """Say of every row of the cases whether it meets its target, where it has one."""
    known = {case.name: case for case in cases}
    for row in rows:
        if row["name"] not in known:
            continue
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


class _Run:
    """One run's result, its time and its file."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        out: Path,
        minutes: float,
        note: str,
        repeats: int,
        parts: dict[str, Sequence[Case]],
        again: bool,
    ):
        self.end, self.out, self.device, self.dtype = time.monotonic() + 60 * minutes, out, device, dtype
        self.cases = (*CASES, *SCALING, *FORM_CASES, *[case for cases in parts.values() for case in cases])
        start = {
            **about(device),
            "dtype": str(dtype).removeprefix("torch."),
            "note": note,
            "repeats": repeats,
            "rows": [],
            "first_call": [],
            "kernels": [],
            "forms": [],
            "left_out": [],
        }
        self.result = kept_of(out, start, parts, again)
        if "copy_bandwidth_gb_per_s" not in self.result:
            large = device.type == "cuda"
            self.result["copy_bandwidth_gb_per_s"] = copy_bandwidth(device, 1024 if large else 16) / 1e9
            self.result["product_tflop_per_s"] = product_rate(device, dtype, 8192 if large else 512) / 1e12
        self.limits = (
            self.result["copy_bandwidth_gb_per_s"] * 1e9,
            self.result["product_tflop_per_s"] * 1e12,
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        self.write()

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end

    def write(self) -> None:
        for part in PARTS:
            self.result[part] = in_order(self.result[part])
        judge([row for row in self.result["rows"] if "error" not in row], self.cases)
        judge_forms(self.result["forms"], self.cases, self.device, self.dtype)
        self.result |= largest_regrets(self.result["forms"])
        self.out.write_text(json.dumps(self.result, indent=1) + "\n")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def of(self, part: str, case: Case) -> list[dict]:
        return [row for row in self.result[part] if row["name"] == case.name and "error" not in row]

    def step(self, part: str, case: Case, what: Callable[[], list[dict]], count: int = 1) -> list[dict]:
        """The `count` entries of a case in a part of the result: those that are there, or else `what()`, or what went
        wrong with it. Nothing new is begun when the time is up."""
        found = self.of(part, case)
        if len(found) == count:
            return found
        if self.over:
            self.result["left_out"].append(f"{case.name} ({part})")
            return []
        try:
            new = what()
        except Exception as error:  # one shape that fails must not cost the others' measurements
            new = [{"name": case.name, "error": f"{type(error).__name__}: {error}"[:500]}]
        self.result[part] = [row for row in self.result[part] if row["name"] != case.name] + new
        self.write()
        return new


def run(
    cases: Sequence[Case], forms: Sequence[Case], device: torch.device, out: Path, *, minutes: float = 8.0,
    repeats: int = REPEATS, dtype: torch.dtype = torch.bfloat16, compiled: bool = True, reported: Sequence[Case] = (),
    first: Sequence[Case] = (), note: str = "", stopping: bool = False, again: bool = False,
) -> dict:  # fmt: skip
    """Measure what `out` does not hold yet and what fits into the time, writing the file after every row.

    First all rows with the peers that compile nothing, then first calls, steps alone, both forms, and at last compiled
    peers, those of new rows before others.
    stopping: a peer that was too slow or too large for one row is left out of the later ones, which have more tokens.
    again: measure all of it anew; what is not asked for stays in the file.

    Raises ValueError when `out` holds measurements with another device, version or setting.
    """
    asked = {"rows": cases, "kernels": reported, "first_call": first, "forms": forms}
    run = _Run(device, dtype, out, minutes, note, repeats, asked, again)
    stopped: dict[str, str] = {}

    def peers(row: dict, case: Case, names: Sequence[str]) -> bool:
        """Add the peers that a row lacks; whether there were any."""
        missing, late, sets = missing_peers(row, names), [], []
        for name in missing:
            if name in stopped:
                row["peers_not_run"][name] = stopped[name]
            elif run.over:
                row["peers_not_run"][name] = LEFT_OUT
                late.append(name)
            else:
                sets = sets or input_sets(case, device, dtype)
                add_peer(row, name, sets, device, repeats)
                run.write()
        if late:
            run.result["left_out"].append(f"{case.name}, {row['direction']} ({', '.join(late)})")
        if stopping:
            stopped.update({name: why for name, why in stopped_peers(row).items() if name not in stopped})
        if missing:
            run.write()
        return bool(missing)

    eager = [name for name in peer_names(device) if name not in COMPILED]
    new: list[tuple[dict, Case]] = []
    earlier: list[tuple[dict, Case]] = []
    for case in cases:
        rows = run.step(
            "rows",
            case,
            lambda case=case: measure(case, device, dtype, run.limits, repeats),
            count=1 + case.backward,
        )
        for row in rows:
            if "error" in row:
                print(one_line(row), flush=True)
            elif peers(row, case, eager):
                new.append((row, case))
                print(one_line(row), flush=True)
            else:
                earlier.append((row, case))
    for case in first:
        run.step("first_call", case, lambda case=case: [first_call(case, device)])
    for case in reported:
        run.step(
            "kernels", case, lambda case=case: report(case, device, dtype, repeats), len(kernels_of(case))
        )
    for case in forms:
        run.step("forms", case, lambda case=case: [compare_forms(case, device, dtype, repeats)])
        print(*[json.dumps(row) for row in run.of("forms", case)], sep="\n", flush=True)
    for row, case in (*new, *earlier):
        if compiled:
            peers(row, case, COMPILED)
        else:
            row["peers_not_run"] |= dict.fromkeys(missing_peers(row, COMPILED), LEFT_OUT)
    run.write()
    print("\n" + as_table(run.result), flush=True)
    return run.result


def bench(
    *, out: Path, rows: Sequence[str] = (), minutes: float = 8.0, repeats: int = REPEATS, device: str = "auto",
    quick: bool = False, scaling: bool = False, parts: Sequence[str] = (), again: bool = False,
) -> dict:  # fmt: skip
    """`mhla bench op`. rows: parts of names, none takes all. quick: few repeats, no compiled peers, rows and kernels.
    parts: of the measurement, none takes all. What `out` holds is not measured once more, but with again.

    Raises ValueError for a device that is not there, for rows that are none, and when `out` holds measurements with
    another device, version or setting.
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
        first=first, note=note, stopping=scaling, again=again,
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit("type: mhla bench op, or python -m mhla_diffusion.cli bench op (see --help)")
