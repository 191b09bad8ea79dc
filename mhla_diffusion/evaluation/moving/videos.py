"""Shares of videos on disk that move as their captions say, ready for JSON: what the protocol moving_emoji reports."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ...provenance import DISTRIBUTIONS, versions
from ..faults import InsufficientSamples
from ..vbench.check import decoded
from .captions import Asked, asked_of
from .scores import ScoredClip, along, measured, row_of, score_clip, share, standard_error, with_background
from .tracking import COLOURS, MOTIONS

SCHEMA = 2


def score_motions(
    paths: Sequence[Path],
    captions: Sequence[str],
    *,
    progress: Callable[[int], object] = lambda count: None,
) -> dict:
    """The result: `motion` of all, `direction` of those that are to move along, `background` where one is named.

    Standard errors are over captions, chance stands beside. Raises InsufficientSamples for no videos; ValueError for
    one that cannot be read or a caption that names no motion.
    """
    if not paths:
        raise InsufficientSamples("there are no videos: give a folder with some")
    started, clips = time.perf_counter(), []
    asked = []
    for path, caption in zip(paths, captions, strict=True):
        try:
            asked.append(asked_of(caption))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    for path, prompt in zip(paths, asked, strict=True):
        clips.append(read_and_score(path, prompt))
        progress(1)
    values = {"motion": value(clips, "motion_right", len(MOTIONS))}
    if own := along(clips):
        values["direction"] = value(own, "motion_right", len(MOTIONS))
    if own := with_background(clips):
        values["background"] = value(own, "background_right", len(COLOURS))
    lost = sum(clip.found.name == "nothing" for clip in clips)
    return {
        "schema_version": SCHEMA,
        "protocol": "moving_emoji",
        "values": values,
        "warnings": [f"{lost} of {len(clips)} videos show no object that could be followed"] if lost else [],
        "measured": measured(clips),
        "videos": [{"video": path.name} | row_of(clip) for path, clip in zip(paths, clips, strict=True)],
        "environment": {
            "device": "cpu",
            "versions": versions(DISTRIBUTIONS),
            "date": datetime.date.today().isoformat(),
        },
        "timings": {"seconds": round(time.perf_counter() - started, 3)},
    }


def read_and_score(path: Path, prompt: Asked) -> ScoredClip:
    try:
        return score_clip(np.stack(list(decoded(path))), prompt)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def value(clips: list[ScoredClip], right: str, choices: int) -> dict:
    """A row of the result: the share of the clips, beside what choosing at random gives."""
    found = {"value": share([getattr(clip, right) for clip in clips]), "n": len(clips)}
    found |= {"higher_is_better": True, "chance": 1 / choices}
    error = standard_error(clips, right)
    return found if error is None else found | {"std": error}
