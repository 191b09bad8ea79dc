"""The operator's measurements as text: what was timed, beside what, and how far from the floors."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["as_table", "one_line", "row_names"]


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            [
                f"{cell:<{width}}" if i < 2 else f"{cell:>{width}}"
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
        ).rstrip()
        for line in lines
    ]


def row_names(row: dict) -> tuple[str, str]:
    return row["name"], {"forward": "fwd", "forward_backward": "fwd+bwd"}[row["direction"]]


def one_line(row: dict) -> str:
    """A row as it is measured."""
    if "error" in row:
        return f"{row['name']}: failed: {row['error']}"
    parts = [f"{' '.join(row_names(row))}: {_ms(row['ours_ms'])} ms"]
    if row.get("target_ms"):
        parts.append(f"target {_ms(row['target_ms'])}")
    parts += [f"{name} {_ms(ms)} ({ms / row['ours_ms']:.1f}x)" for name, ms in row["peers_ms"].items()]
    parts.append(f"byte floor {_ms(row['byte_floor_ms'])}, error {row['error_vs_float64']:.1e}")
    return " · ".join(parts)


def _measured(rows: Sequence[dict]) -> list[str]:
    titles = (
        "shape", "pass", "B", "H", "N", "D", "M", "ours ms", "target", "met", "byte floor", "FLOP floor", "GB/s",
        "TFLOP/s", "extra MB", "form", "error",
    )  # fmt: skip
    lines = [titles]
    for row in rows:
        met = {True: "yes", False: "no", None: "-"}[row["target_met"]]
        wanted = [] if row["target_ms"] is None else [f"<={_ms(row['target_ms'])}"]
        wanted += [] if row["target_ratio"] is None else [f">={row['target_ratio']:g}x"]
        wanted += [] if row["target_memory_mb"] is None else [f"<={row['target_memory_mb']:g} MB"]
        extra = "-" if row["extra_memory_mb"] is None else f"{row['extra_memory_mb']:.1f}"
        lines.append(
            (
                *row_names(row), *map(str, row["shape"].values()), _ms(row["ours_ms"]), " ".join(wanted) or "-", met,
                _ms(row["byte_floor_ms"]), _ms(row["flop_floor_ms"]), f"{row['achieved_gb_per_s']:.0f}",
                f"{row['achieved_tflop_per_s']:.3g}", extra, row["form"], f"{row['error_vs_float64']:.1e}",
            )
        )  # fmt: skip
    return _aligned(lines)


def _peers(rows: Sequence[dict]) -> list[str]:
    names = list(dict.fromkeys([name for row in rows for name in (*row["peers_ms"], *row["peers_not_run"])]))
    lines = [("shape", "pass", "ours", *names)]
    for row in rows:
        cells = []
        for name in names:
            ms = row["peers_ms"].get(name)
            reason = row["peers_not_run"].get(name, "not run").partition(":")[0]
            cells.append(reason if ms is None else f"{_ms(ms)} ({ms / row['ours_ms']:.1f}x)")
        lines.append((*row_names(row), _ms(row["ours_ms"]), *cells))
    return _aligned(lines)


def _kernels(kernels: Sequence[dict]) -> list[str]:
    titles = (
        "shape", "step", "kernel", "ms", "GB/s", "TFLOP/s", "registers", "spills", "shared KB", "warps", "stages",
        "programs",
    )  # fmt: skip
    lines = [titles]
    for row in kernels:
        for i, kernel in enumerate(row["launches"] or [{"kernel": "-"}]):
            first = [
                f"{row['ms']:.4f}", f"{row['gb_per_s']:.0f}", f"{row['tflop_per_s']:.1f}",
            ]  # fmt: skip
            shared = kernel.get("shared_bytes")
            lines.append(
                (
                    row["name"] if i == 0 else "", row["step"] if i == 0 else "", kernel["kernel"],
                    *(first if i == 0 else ("", "", "")), str(kernel.get("registers", "-")),
                    str(kernel.get("spills", "-")), "-" if shared is None else f"{shared / 1024:.1f}",
                    str(kernel.get("warps", "-")), str(kernel.get("stages", "-")), str(kernel.get("programs", "-")),
                )
            )  # fmt: skip
    return _aligned(lines)


def _forms(forms: Sequence[dict]) -> list[str]:
    titles = [[f"states {name}", f"dual {name}", "chosen", "regret"] for name in ("fwd", "fwd+bwd")]
    lines = [("shape", "M", *titles[0], *titles[1])]
    for row in forms:
        cells = [row["name"], str(row["shape"]["M"])]
        for name, suffix in (("forward", ""), ("both", "_with_gradients")):
            cells += [_ms(row[f"{form}_{name}_ms"]) for form in ("states", "dual")]
            regret = row[f"regret{suffix}"]
            cells += [row[f"chosen{suffix}"], "-" if regret is None else f"{100 * regret:.0f} %"]
        lines.append(cells)
    return _aligned(lines)


def as_table(result: dict) -> str:
    """Everything that a result file of the operator holds, for people."""
    versions = ", ".join([f"{name} {version}" for name, version in result["versions"].items()])
    lines = [
        f"{result['device']} · {versions} · {result['date']} · {result['dtype']}",
        f"floors: {result['copy_bandwidth_gb_per_s']:.0f} GB/s as a large copy here, "
        f"{result['product_tflop_per_s']:.3g} TFLOP/s as a large matmul here",
    ]
    lines += [result["note"]] if result["note"] else []
    rows = [row for row in result["rows"] if "error" not in row]
    if rows:
        lines += ["", *_measured(rows), "", "peers, in ms (and how many times ours)", *_peers(rows)]
    reasons = {name: reason for row in rows for name, reason in row["peers_not_run"].items()}
    lines += [f"{name}: {reason}" for name, reason in reasons.items()]
    for row in (row for row in result["first_call"] if "error" not in row):
        lines += ["", f"first call with an empty cache, {row['name']}: {row['forward_s']:.1f} s forward, then "
                      f"{row['forward_backward_s']:.1f} s forward and backward"]  # fmt: skip
    if result["kernels"]:
        lines += [
            "",
            "kernels, each alone",
            *_kernels([row for row in result["kernels"] if "error" not in row]),
        ]
    if forms := [row for row in result["forms"] if "error" not in row]:
        lines += ["", "both forms, in ms; regret of the chosen one", *_forms(forms)]
    if result["largest_regret"] is not None:
        regrets = [f"{100 * result[f'largest_regret{suffix}']:.0f} %" for suffix in ("", "_with_gradients")]
        lines.append(f"largest regret {regrets[0]}, with gradients {regrets[1]}")
    parts = ("rows", "first_call", "kernels", "forms")
    lines += [one_line(row) for part in parts for row in result[part] if "error" in row]
    if result["left_out"]:
        lines.append(f"left out for want of time: {', '.join(result['left_out'])}")
    return "\n".join(lines)
