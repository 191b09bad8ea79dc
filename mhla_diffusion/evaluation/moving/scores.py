"""Clips that move as they are asked to, on the background that is asked for: one clip, and shares of many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from ..vbench.flicker import flickering
from .captions import Asked
from .tracking import DIRECTIONS, MOTIONS, Motion, track

WAYS = tuple(motion for motion in MOTIONS if motion not in DIRECTIONS)


@dataclass(frozen=True)
class ScoredClip:
    """A clip of a prompt: what was asked, what was measured, and VBench's score of flickering (1: nothing changes)."""

    prompt: Asked
    seed: int
    found: Motion
    flickering: float

    @property
    def motion_right(self) -> bool:
        return self.found.name == self.prompt.motion

    @property
    def background_right(self) -> bool:
        """True, too, where no background is asked for."""
        return self.prompt.background in (None, self.found.background)


def score_clip(frames: np.ndarray, prompt: Asked, seed: int = 0) -> ScoredClip:
    """A clip `(F, H, W, 3)` uint8 that was made for the prompt. Raises ValueError for another array."""
    found = track(torch.from_numpy(np.ascontiguousarray(frames)).movedim(-1, 1))
    return ScoredClip(prompt, seed, found, flickering(frames))


def share(values: Sequence[bool]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def along(clips: Sequence[ScoredClip]) -> list[ScoredClip]:
    """Those asked to move in a direction."""
    return [clip for clip in clips if clip.prompt.motion in DIRECTIONS]


def with_background(clips: Sequence[ScoredClip]) -> list[ScoredClip]:
    """Those that a background was asked for."""
    return [clip for clip in clips if clip.prompt.background is not None]


def shares(clips: Sequence[ScoredClip]) -> dict[str, float | None]:
    """Of clips: whose motion is right, of those asked to move in a direction, and in each other way; whose background
    is; both. None where nothing of the kind was asked. And how much they flicker."""
    found = {"motion": share([clip.motion_right for clip in clips])}
    found["direction"] = share([clip.motion_right for clip in along(clips)])
    for motion in WAYS:
        found[motion] = share([clip.motion_right for clip in clips if clip.prompt.motion == motion])
    found["background"] = share([clip.background_right for clip in with_background(clips)])
    found["motion_and_background"] = share([clip.motion_right and clip.background_right for clip in clips])
    found["no_object"] = share([clip.found.name == "nothing" for clip in clips])
    found["flickering"] = float(np.mean([clip.flickering for clip in clips]))
    return found


def standard_error(clips: Sequence[ScoredClip], right: str = "motion_right") -> float | None:
    """Of a share, over prompts; None for a single prompt.

    A prompt counts once, with the mean of its seeds: clips of one prompt are no independent samples of what a model
    knows.
    """
    by_prompt: dict[str, list[bool]] = {}
    for clip in clips:
        by_prompt.setdefault(clip.prompt.prompt, []).append(getattr(clip, right))
    means = np.array([np.mean(values) for values in by_prompt.values()])
    return float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else None


def measured(clips: Sequence[ScoredClip]) -> dict[str, dict[str, int]]:
    """Asked motion -> measured motion -> how many."""
    found: dict[str, dict[str, int]] = {}
    for clip in clips:
        row = found.setdefault(clip.prompt.motion, {})
        row[clip.found.name] = row.get(clip.found.name, 0) + 1
    return {motion: dict(sorted(found[motion].items())) for motion in MOTIONS if motion in found}


def row_of(clip: ScoredClip) -> dict:
    """What was asked of a clip and what was measured, for JSON."""
    return {
        "prompt": clip.prompt.prompt,
        "seed": clip.seed,
        "flickering": round(clip.flickering, 5),
        "measured": {name: rounded(value) for name, value in asdict(clip.found).items()},
    }


def rounded(value):
    """Numbers with four digits behind the point; names as they are."""
    if isinstance(value, tuple):
        return [rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value
