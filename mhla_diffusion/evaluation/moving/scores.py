"""Share of videos that move as their captions say, on the background that they name; ready for JSON."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from ...provenance import DISTRIBUTIONS, versions
from ..faults import InsufficientSamples
from ..vbench.check import decoded
from .tracking import COLOURS, DIRECTIONS, MOTIONS, Motion, track

SCHEMA = 1
PHRASES = {**{f"moving {name}": name for name in DIRECTIONS}, "bouncing": "bounce", "spinning": "spin",
           "growing": "grow", "shrinking": "shrink"}  # fmt: skip
_MOTION = re.compile("|".join(sorted(map(re.escape, PHRASES), key=len, reverse=True)))
_BACKGROUND = re.compile(rf"\bon an? ({'|'.join(sorted(COLOURS, key=len, reverse=True))}) background\b")


def asked_of(caption: str) -> tuple[str, str | None]:
    """Motion, and background or None, that a caption names. Raises ValueError when it names no motion.

    "a flat rocket moving up on a blue background" -> ("up", "blue").
    """
    text = caption.lower()
    background = _BACKGROUND.search(text)
    found = _MOTION.findall(text[: background.start()] if background else text)
    if not found:
        raise ValueError(f"the caption {caption!r} names no motion: {', '.join(PHRASES)}")
    return PHRASES[found[-1]], background[1] if background else None  # the last: nouns come before


def standard_error(share: float, count: int) -> float:
    return (share * (1 - share) / count) ** 0.5


def score_motions(
    paths: Sequence[Path],
    captions: Sequence[str],
    *,
    progress: Callable[[int], object] = lambda count: None,
) -> dict:
    """The result: `motion_right` of all, `direction_right` of those that are to move along, `background_right`.

    Chance stands beside. Raises InsufficientSamples for no videos; ValueError for one that cannot be read or a caption
    that names no motion.
    """
    if not paths:
        raise InsufficientSamples("there are no videos: give a folder with some")
    started, rows = time.perf_counter(), []
    asked = []
    for path, caption in zip(paths, captions, strict=True):
        try:
            asked.append(asked_of(caption))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    for path, caption, (motion, background) in zip(paths, captions, asked, strict=True):
        found = tracked(path)
        rows.append(
            {
                "video": path.name,
                "caption": caption,
                "asked": motion,
                "motion": found.name,
                "asked_background": background,
                "background": found.background,
                "moved": [round(value, 4) for value in found.moved],
                "grown": round(found.grown, 4),
                "turned": round(found.turned, 4),
            }
        )
        progress(1)
    values = {"motion_right": share(rows, chance=1 / len(MOTIONS))}
    along = [row for row in rows if row["asked"] in DIRECTIONS]
    if along:
        values["direction_right"] = share(along, chance=1 / len(MOTIONS))
    coloured = [row for row in rows if row["asked_background"] is not None]
    if coloured:
        values["background_right"] = share(
            coloured, "background", "asked_background", chance=1 / len(COLOURS)
        )
    lost = sum(row["motion"] == "nothing" for row in rows)
    notes = [f"{lost} of {len(rows)} videos show no object that could be followed"] if lost else []
    return {
        "schema_version": SCHEMA,
        "protocol": "moving_emoji",
        "values": values,
        "warnings": notes,
        "by_motion": {
            motion: share(own)
            for motion in MOTIONS
            if (own := [row for row in rows if row["asked"] == motion])
        },
        "mistaken": mistaken(rows),
        "videos": rows,
        "environment": {
            "device": "cpu",
            "versions": versions(DISTRIBUTIONS),
            "date": datetime.date.today().isoformat(),
        },
        "timings": {"seconds": round(time.perf_counter() - started, 3)},
    }


def tracked(path: Path) -> Motion:
    try:
        frames = np.stack(list(decoded(path)))
        return track(torch.from_numpy(frames).permute(0, 3, 1, 2).contiguous())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def share(rows: list[dict], key: str = "motion", wanted: str = "asked", chance: float | None = None) -> dict:
    value = sum(row[key] == row[wanted] for row in rows) / len(rows)
    row = {"value": value, "std": standard_error(value, len(rows)), "n": len(rows), "higher_is_better": True}
    return row if chance is None else row | {"chance": chance}


def mistaken(rows: list[dict]) -> dict[str, int]:
    """How often which motion was taken for which, "asked -> measured"."""
    found: dict[str, int] = {}
    for row in rows:
        if row["asked"] != row["motion"]:
            name = f"{row['asked']} -> {row['motion']}"
            found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items(), key=lambda item: -item[1]))
