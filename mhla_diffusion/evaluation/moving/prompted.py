"""The repository's prompts of moving emoji, with known truth, and what clips drawn for them score, over seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .captions import Asked, asked_of
from .scores import WAYS, ScoredClip, measured, row_of, shares, standard_error

LIST = Path(__file__).resolve().parents[3] / "eval" / "prompts" / "moving_emoji.jsonl"
SPLITS = ("heldout", "train")


@dataclass(frozen=True)
class Prompt(Asked):
    """A prompt of the list. `number`: of the planned clip whose caption it is."""

    concept: str
    split: str
    number: int


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
                asked = asked_of(entry.prompt)
                if (asked.motion, asked.background) != (entry.motion, entry.background) or (
                    entry.split not in SPLITS
                ):
                    raise ValueError(f"{entry.prompt!r} is not of its motion, background or split")
                listed[entry.prompt] = entry
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is no list of clips ({error})") from None
    if not listed:
        raise ValueError(f"{path} lists no prompt")
    return listed


def shuffled(clips: Sequence[ScoredClip]) -> list[ScoredClip]:
    """The same clips, each with a prompt drawn from all of theirs: the score of a model that does not listen."""
    draw = np.random.default_rng(0).permutation(len(clips))
    return [
        ScoredClip(clips[int(other)].prompt, clip.seed, clip.found, clip.flickering)
        for clip, other in zip(clips, draw, strict=True)
    ]


def summary(clips: Sequence[ScoredClip]) -> dict:
    """Scores of each split: over all seeds, of each seed, and the standard error of `motion` over prompts."""
    splits = {}
    for split in SPLITS:
        own = [clip for clip in clips if clip.prompt.split == split]
        if not own:
            continue
        seeds = sorted({clip.seed for clip in own})
        splits[split] = {
            "clips": len(own),
            "prompts": len({clip.prompt.prompt for clip in own}),
            **shares(own),
            "motion_standard_error": standard_error(own),
            "motion_with_shuffled_prompts": shares(shuffled(own))["motion"],
            "seeds": {str(seed): shares([clip for clip in own if clip.seed == seed]) for seed in seeds},
            "measured": measured(own),
        }
    return splits


def rows(clips: Sequence[ScoredClip]) -> list[dict]:
    """Each clip for JSON."""
    return [row_of(clip) | {"split": clip.prompt.split} for clip in clips]


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
