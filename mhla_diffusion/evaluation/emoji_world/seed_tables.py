"""What scores of several seeds come to, and tables of several pipelines."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .scenes import TASKS

# Words, metric and the format of its numbers, of each row.
DISTANCES = (
    ("FD, EfficientNet-Lite0", "fd_efficientnet.fd", ".1f"),
    ("KID, EfficientNet-Lite0", "fd_efficientnet.kid", ".4f"),
    ("precision", "fd_efficientnet.precision", ".3f"),
    ("recall", "fd_efficientnet.recall", ".3f"),
    ("FID", "fid_adm.fd", ".2f"),
    ("KID, Inception", "fid_adm.kid", ".5f"),
    ("nearest training picture", "fd_efficientnet.nearest", ".2f"),
    ("R@1", "r_at_1", ".3f"),
    ("R@5", "r_at_5", ".3f"),
)
MORE = ("objects_found", "pixels_background", "pixels_count", "pixels_place")
SCENES = tuple((metric, metric, ".3f") for metric in ("emoji_geneval", *TASKS, *MORE))
TABLES = {
    "train": ("Captions that were trained on", DISTANCES),
    "heldout": ("Held-out captions: known concepts in styles that they were never shown in", DISTANCES),
    "scenes": ("Scenes", SCENES),
}
NEAREST = "fd_efficientnet.nearest"


def summed_up(runs: Sequence[dict[str, dict]]) -> dict[str, dict]:
    """Each metric over the seeds: mean, deviation (with n - 1; None of one seed), lowest, highest, number of seeds."""
    found = {}
    for metric, row in runs[0].items():
        values = [run[metric]["value"] for run in runs if metric in run]
        found[metric] = {
            "mean": statistics.fmean(values),
            "std": statistics.stdev(values) if len(values) > 1 else None,
            "lowest": min(values),
            "highest": max(values),
            "seeds": len(values),
            "n": row["n"],
        }
    return found


def as_markdown(
    summaries: dict[str, dict[str, dict]], floors: dict[str, float], between: float | None
) -> list[str]:
    """A table for each set, a row for each metric, a column for each pipeline: mean and deviation over the seeds.

    Args:
        summaries: pipeline -> set -> what `summed_up` gives.
        floors: scorer -> distance between halves of the reference.
        between: how far a reference picture is from the nearest other.
    """
    lines = []
    for name, (title, rows) in TABLES.items():
        columns = {label: sets[name] for label, sets in summaries.items() if name in sets}
        if not columns:
            continue
        count = next(iter(next(iter(columns.values())).values()))["n"]
        extra = {f"{scorer}.fd": value for scorer, value in floors.items()} if name == "train" else {}
        heads = [*columns, *(["halves of the training pictures"] if extra else [])]
        lines += [f"## {title}", "", f"{count} pictures for each seed; mean ± deviation over the seeds.", ""]
        lines += ["| | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
        for words, metric, digits in rows:
            cells = [number(column.get(metric), digits) for column in columns.values()]
            if not any(cells):
                continue
            if extra:
                cells.append(format(extra[metric], digits) if metric in extra else "")
            lines.append(f"| {words} | " + " | ".join(cells) + " |")
        if between is not None and any(NEAREST in column for column in columns.values()):
            lines += ["", f"Between training pictures the nearest other is {between:.2f} away (median)."]
        lines.append("")
    return lines


def number(row: dict | None, digits: str) -> str:
    if row is None:
        return ""
    spread = "" if row["std"] is None else f" ± {row['std']:{digits}}"
    return f"{row['mean']:{digits}}{spread}"
