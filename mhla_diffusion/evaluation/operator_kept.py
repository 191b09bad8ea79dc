"""What an earlier run of `mhla bench op` left in its file: which of it stays, and what is still missing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from .operator_cases import CASES, FORM_CASES, SCALING, Case, shape_of

__all__ = ["in_order", "kept_of", "missing_peers", "stopped_peers"]

ALIKE = ("device", "versions", "dtype", "note", "repeats")
REPEATS = 30  # of files that do not say
# Measured once, so that all floors of a file are of one roof.
ROOFS = ("copy_bandwidth_gb_per_s", "product_tflop_per_s")
LEFT_OUT = "left out"  # a peer for want of time, or because it was not asked for
UNTRIED = (LEFT_OUT, "not installed")
PLACES = {case.name: place for place, case in enumerate((*CASES, *SCALING, *FORM_CASES))}


def kept_of(out: Path, start: dict, parts: dict[str, Sequence[Case]], again: bool) -> dict:
    """`start`, with what an earlier run measured that was like it: all but what failed.

    parts: what is asked for, by part of the file. again: that is measured anew, only the rest stays.

    Raises ValueError when the file is of another device, version or setting.
    """
    if not out.is_file():
        return start
    found = {"repeats": REPEATS, **json.loads(out.read_text(encoding="utf-8"))}
    differing = [name for name in ALIKE if found.get(name) != start[name]]
    if differing:
        raise ValueError(
            f"{out} holds measurements with another {' and '.join(differing)}: give another file with --out"
        )
    kept = {name: found[name] for name in ROOFS} | {"begun": found.get("begun", found["date"])}
    for part, cases in parts.items():
        wanted = {case.name: shape_of(case) for case in cases}
        kept[part] = [row for row in found.get(part, []) if stays(row, wanted, again)]
    return start | kept


def stays(row: dict, wanted: dict[str, dict], again: bool) -> bool:
    name = row["name"]
    if "error" in row or (again and name in wanted):
        return False
    return name not in wanted or row.get("shape", wanted[name]) == wanted[name]


def missing_peers(row: dict, names: Iterable[str]) -> list[str]:
    """Peers without a time, and without a reason that would still hold."""
    unknown = [name for name in names if name not in row["peers_ms"]]
    return [name for name in unknown if row["peers_not_run"].get(name, LEFT_OUT) in UNTRIED]


def stopped_peers(row: dict) -> dict[str, str]:
    """Peers that ran too long, took too much or failed, with the reason and where that was."""
    reasons = {name: why for name, why in row["peers_not_run"].items() if why not in UNTRIED}
    return {name: why if " (at " in why else f"{why} (at {row['name']})" for name, why in reasons.items()}


def in_order(rows: Sequence[dict]) -> list[dict]:
    """As the cases are listed, whichever was measured first; a case's rows stay as they came."""
    return sorted(rows, key=lambda row: PLACES.get(row["name"].removesuffix(", small"), len(PLACES)))
