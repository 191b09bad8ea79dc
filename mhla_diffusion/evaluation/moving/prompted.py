"""Prompts of moving emoji with known truth, and the scores of clips drawn for them from several seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from ..vbench.flicker import flickering
from .scores import asked_of
from .tracking import DIRECTIONS, MOTIONS, Motion, track

LIST = Path(__file__).resolve().parents[3] / "eval" / "prompts" / "moving_emoji.jsonl"
SPLITS = ("heldout", "train")
WAYS = tuple(motion for motion in MOTIONS if motion not in DIRECTIONS)


@dataclass(frozen=True)
class Prompt:
    """A prompt and what its clip must show. `number`: of the planned clip whose caption it is."""

    prompt: str
    motion: str
    background: str
    concept: str
    split: str
    number: int


@dataclass(frozen=True)
class ScoredClip:
    """A clip of a prompt: what was asked, what was measured, and VBench's score of flickering (1: nothing changes)."""

    prompt: Prompt
    seed: int
    found: Motion
    flickering: float

    @property
    def motion_right(self) -> bool:
        return self.found.name == self.prompt.motion

    @property
    def background_right(self) -> bool:
        return self.found.background == self.prompt.background


def read_prompts(path: Path | None = None) -> dict[str, Prompt]:
    """Prompt -> what is known of it, of a .jsonl (default: the repository's). Raises ValueError for another file."""
    path = path or LIST
    if not path.is_file():
        raise ValueError(f"there is no list of prompts {path}: give --prompts path/to/moving_emoji.jsonl")
    listed = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip():
                entry = Prompt(**json.loads(line))
                if asked_of(entry.prompt) != (entry.motion, entry.background) or entry.split not in SPLITS:
                    raise ValueError(f"{entry.prompt!r} is not of its motion, background or split")
                listed[entry.prompt] = entry
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is no list of clips ({error})") from None
    if not listed:
        raise ValueError(f"{path} lists no prompt")
    return listed


def score_clip(frames: np.ndarray, prompt: Prompt, seed: int = 0) -> ScoredClip:
    """A clip `(F, H, W, 3)` uint8 that was made for the prompt. Raises ValueError for another array."""
    found = track(torch.from_numpy(np.ascontiguousarray(frames)).movedim(-1, 1))
    return ScoredClip(prompt, seed, found, flickering(frames))


def share(values: Sequence[bool]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def shares(clips: Sequence[ScoredClip]) -> dict[str, float | None]:
    """Of clips: whose motion is right, of those asked to move in a direction, and in each other way; whose background
    is; both. None where nothing of the kind was asked. And how much they flicker."""
    found = {"motion": share([clip.motion_right for clip in clips])}
    for name, motions in {"direction": DIRECTIONS, **{motion: (motion,) for motion in WAYS}}.items():
        found[name] = share([clip.motion_right for clip in clips if clip.prompt.motion in motions])
    found["background"] = share([clip.background_right for clip in clips])
    found["motion_and_background"] = share([clip.motion_right and clip.background_right for clip in clips])
    found["no_object"] = share([clip.found.name == "nothing" for clip in clips])
    found["flickering"] = float(np.mean([clip.flickering for clip in clips]))
    return found


def shuffled(clips: Sequence[ScoredClip]) -> list[ScoredClip]:
    """The same clips, each with a prompt drawn from all of theirs: the score of a model that does not listen."""
    draw = np.random.default_rng(0).permutation(len(clips))
    return [
        ScoredClip(clips[int(other)].prompt, clip.seed, clip.found, clip.flickering)
        for clip, other in zip(clips, draw, strict=True)
    ]


def summary(clips: Sequence[ScoredClip]) -> dict:
    """Scores of each split: over all seeds, of each seed, and the standard error of `motion` over prompts.

    A prompt counts once in the standard error, with the mean of its seeds: clips of one prompt are no independent
    samples of what the model knows.
    """
    splits = {}
    for split in SPLITS:
        own = [clip for clip in clips if clip.prompt.split == split]
        if not own:
            continue
        seeds = sorted({clip.seed for clip in own})
        by_prompt: dict[str, list[bool]] = {}
        for clip in own:
            by_prompt.setdefault(clip.prompt.prompt, []).append(clip.motion_right)
        means = np.array([np.mean(values) for values in by_prompt.values()])
        error = float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else None
        splits[split] = {
            "clips": len(own),
            "prompts": len(by_prompt),
            **shares(own),
            "motion_standard_error": error,
            "motion_with_shuffled_prompts": shares(shuffled(own))["motion"],
            "seeds": {str(seed): shares([clip for clip in own if clip.seed == seed]) for seed in seeds},
            "measured": measured(own),
        }
    return splits


def measured(clips: Sequence[ScoredClip]) -> dict[str, dict[str, int]]:
    """Asked motion -> measured motion -> how many."""
    found: dict[str, dict[str, int]] = {}
    for clip in clips:
        row = found.setdefault(clip.prompt.motion, {})
        row[clip.found.name] = row.get(clip.found.name, 0) + 1
    return {motion: dict(sorted(found[motion].items())) for motion in MOTIONS if motion in found}


def rows(clips: Sequence[ScoredClip]) -> list[dict]:
    """Each clip for JSON."""
    return [
        {
            "prompt": clip.prompt.prompt,
            "split": clip.prompt.split,
            "seed": clip.seed,
            "flickering": round(clip.flickering, 5),
            "measured": {name: rounded(value) for name, value in asdict(clip.found).items()},
        }
        for clip in clips
    ]


def rounded(value):
    """Numbers with four digits behind the point; names as they are."""
    if isinstance(value, tuple):
        return [rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def table(results: Mapping[str, dict], split: str = "heldout") -> str:
    """Summaries of several sets of clips, one row each, as Markdown."""
    columns = ("motion", "direction", *WAYS, "background")
    lines = [
        f"| {split} | clips | {' | '.join(columns)} | flickering |",
        f"|---|---|{'---|' * (len(columns) + 1)}",
    ]
    for name, result in results.items():
        found = result[split]
        cells = ["–" if found[column] is None else f"{100 * found[column]:.1f} %" for column in columns]
        if found["motion_standard_error"] is not None:
            cells[0] += f" ± {100 * found['motion_standard_error']:.1f}"
        lines.append(f"| {name} | {found['clips']} | {' | '.join(cells)} | {found['flickering']:.4f} |")
    return "\n".join(lines)
