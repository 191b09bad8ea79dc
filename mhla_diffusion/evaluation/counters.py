"""Hardware counters of the operator's kernels, read from what NVIDIA's Nsight Compute (`ncu`) writes."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

__all__ = ["COUNTERS", "choose_metrics", "parse_counters", "summary"]

# What is reported -> names of the metric, the first that this version of ncu knows on this GPU is taken.
COUNTERS = {
    "time_ns": ("gpu__time_duration.sum",),
    "dram_bytes": ("dram__bytes.sum",),
    "dram_read_bytes": ("dram__bytes_read.sum", "dram__bytes_op_read.sum"),
    "dram_write_bytes": ("dram__bytes_write.sum", "dram__bytes_op_write.sum"),
    "dram_pct_of_peak": ("dram__throughput.avg.pct_of_peak_sustained_elapsed",),
    "l2_bytes": ("lts__t_bytes.sum",),
    "l2_hit_pct": ("lts__t_sector_hit_rate.pct",),
    "l2_pct_of_peak": ("lts__throughput.avg.pct_of_peak_sustained_elapsed",),
    "tensor_pct_of_peak": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active",
    ),
    "sm_pct_of_peak": ("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
    "warps_pct_of_peak": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "registers": ("launch__registers_per_thread",),
    **{
        f"stalled_{reason}": (f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio",)
        for reason in ("long_scoreboard", "short_scoreboard", "barrier", "mio_throttle", "lg_throttle",
                       "math_pipe_throttle", "wait", "gmma")
    },
}  # fmt: skip
# Known wherever ncu runs, for when it does not say which metrics there are.
_CERTAIN = ("time_ns", "dram_bytes", "dram_pct_of_peak", "l2_hit_pct", "sm_pct_of_peak")
# The launch's own facts are no hardware metrics and in no list of them.
_LAUNCH = "launch__"


def choose_metrics(known: str) -> dict[str, str]:
    """Counter -> metric, out of what `ncu --query-metrics` printed; a sure few when it printed nothing of use."""
    names = {line.split()[0] for line in known.splitlines() if line.strip()}
    if "gpu__time_duration" not in names:
        return {counter: COUNTERS[counter][0] for counter in _CERTAIN}
    chosen = {}
    for counter, metrics in COUNTERS.items():
        usable = [m for m in metrics if m.partition(".")[0] in names or m.startswith(_LAUNCH)]
        if usable:
            chosen[counter] = usable[0]
    return chosen


def parse_counters(text: str) -> list[dict]:
    """Kernels in the order of their launches, from `ncu --csv`: {"kernel", "grid", "block", "metrics": {name: value}}.

    Lines before the table are ncu's and the program's own output. A metric that could not be read is None.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    kernels: dict[str, dict] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if not (row.get("ID") or "").isdigit() or row.get("Metric Name") is None:
            continue  # output of the program, mixed in
        kernel = kernels.setdefault(
            row["ID"],
            {
                "kernel": row["Kernel Name"].partition("(")[0],
                "grid": row.get("Grid Size", ""),
                "block": row.get("Block Size", ""),
                "metrics": {},
            },
        )
        kernel["metrics"][row["Metric Name"]] = _number(row["Metric Value"])
    return list(kernels.values())


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:  # n/a, or (!) n/a
        return None


def summary(kernels: Sequence[dict], chosen: dict[str, str], launched: Sequence[dict]) -> list[dict]:
    """One line for each kernel: our names for its counters, achieved bandwidth, and the step it belongs to.

    launched: `{"name", "step", "kernel"}` in order, as the program noted them; left out where the two lists differ.
    """
    same = [row["kernel"] for row in kernels] == [row["kernel"] for row in launched]
    rows = []
    for i, kernel in enumerate(kernels):
        counters = {name: kernel["metrics"].get(metric) for name, metric in chosen.items()}
        row = {**({k: launched[i][k] for k in ("name", "step")} if same else {}), "kernel": kernel["kernel"]}
        row |= {"grid": kernel["grid"], "block": kernel["block"], **counters}
        if counters.get("time_ns") and counters.get("dram_bytes") is not None:
            row["dram_gb_per_s"] = counters["dram_bytes"] / counters["time_ns"]
        rows.append(row)
    return rows
