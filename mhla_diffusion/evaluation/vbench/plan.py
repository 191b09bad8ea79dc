"""Which videos VBench wants: for each prompt how many, under which file name, from which seed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from ...pipelines.requests import MAX_SEED
from ..networks.weight_files import ROLES, find_weights, sha256_of
from .dimensions import DIMENSIONS

SAMPLES = 5
# Of the videos for this dimension a filter keeps five still ones, so more are drawn.
FLICKER, FLICKER_SAMPLES = "temporal_flickering", 25
LONGEST_NAME = 255  # bytes, on the usual file systems
SCHEMA = 1


def read_records(given: str | Path | None = None) -> tuple[list[dict], dict]:
    """Records of `VBench_full_info.json`, and which file it is.

    Raises MissingWeights when there is none, ValueError when it is something else.
    """
    found = find_weights("vbench-prompts", given)
    try:
        records = json.loads(found.path.read_text(encoding="utf-8"))
        for record in records:
            unknown = set(record["dimension"]) - DIMENSIONS.keys()
            if not isinstance(record["prompt_en"], str) or unknown or not record["dimension"]:
                raise KeyError(f"dimension {sorted(unknown)}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{found.path} is no VBench_full_info.json ({error!r}): give vbench's own") from None
    if not records:
        raise ValueError(f"{found.path} holds no prompts: give vbench's own")
    about = {"path": str(found.path), "sha256": sha256_of(found.path), "records": len(records)}
    return records, about


def read_rewritten(path: str | Path, count: int) -> list[str]:
    """Prompts that take the place of VBench's when drawing, one a line, in the order of the records.

    Raises ValueError, naming the file, when it is none, or has another number of lines.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): give a text in UTF-8 with one prompt a line"
        ) from None
    if len(lines) != count or not all(line.strip() for line in lines):
        raise ValueError(
            f"{path} has {len(lines)} lines, some maybe empty; the prompt list has {count} records"
        )
    return [line.strip() for line in lines]


def plan(
    records: Sequence[dict],
    about: dict,
    *,
    dimensions: Sequence[str] = (),
    samples: int = SAMPLES,
    flicker_samples: int = FLICKER_SAMPLES,
    seed: int = 0,
    extension: str = ".mp4",
    rewritten: Sequence[str] | None = None,
) -> dict:
    """A plan, ready for JSON: `settings`, `warnings`, and `videos`, each with file, prompt, seed and dimensions.

    Args:
        dimensions: only their prompts (default: all).
        seed: of sample 0; sample i of every prompt has seed + i.
        rewritten: longer prompts to draw from; files keep the names of the original ones, which VBench looks for.

    Raises ValueError for a dimension that is unknown or has no prompt, no samples, or a prompt that cannot be a file
    name.
    """
    unknown = [name for name in dimensions if name not in DIMENSIONS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no dimension of VBench: they are {', '.join(DIMENSIONS)}")
    if samples < 1 or flicker_samples < 1:
        raise ValueError(f"{samples} samples, {flicker_samples} for {FLICKER}: give at least 1")
    last = MAX_SEED - max(samples, flicker_samples)
    if not 0 <= seed <= last:
        raise ValueError(f"seed {seed} is out of range: give a number from 0 to {last}")
    if not extension.startswith(".") or len(extension) < 2:
        raise ValueError(f"extension {extension!r}: give it with its dot, for example .mp4")
    wanted = set(dimensions or DIMENSIONS)
    by_prompt: dict[str, list[str]] = defaultdict(list)
    drawn_from: dict[str, str] = {}
    for index, record in enumerate(records):
        own = [name for name in record["dimension"] if name in wanted]
        if own:
            prompt = record["prompt_en"]
            by_prompt[prompt] += [name for name in own if name not in by_prompt[prompt]]
            drawn_from.setdefault(prompt, rewritten[index] if rewritten else prompt)
    there = {name for own in by_prompt.values() for name in own}
    if lost := [name for name in dimensions if name not in there]:
        raise ValueError(
            f"{about['path']} has no prompt for {lost[0]}: leave it out, or give vbench's own list"
        )
    videos = []
    for prompt, own in by_prompt.items():
        count = max(flicker_samples if name == FLICKER else samples for name in own)
        name = f"{prompt}-{count - 1}{extension}"
        if "/" in prompt or "\0" in prompt or len(name.encode()) > LONGEST_NAME:
            raise ValueError(
                f"the prompt {prompt[:60]!r} cannot be a file name: VBench could not find its videos"
            )
        for sample in range(count):
            file = f"{prompt}-{sample}{extension}"
            row = {"file": file, "prompt": drawn_from[prompt], "seed": seed + sample, "dimensions": own}
            videos.append(row)
    folded: dict[str, set[str]] = defaultdict(set)
    for prompt in by_prompt:
        folded[prompt.casefold()].add(prompt)
    twins = [sorted(group) for group in folded.values() if len(group) > 1]
    notes = []
    if about["sha256"] != ROLES["vbench-prompts"].sha256:
        notes.append(f"{about['path']} is not the prompt list of vbench 0.1.5: scores may not compare")
    notes += [f"{a!r} and {b!r} are one file where the case of letters does not count" for a, b, *_ in twins]
    return {
        "schema_version": SCHEMA,
        "protocol": "vbench_standard" if not dimensions else "vbench_partial",
        "settings": {
            "prompt_file": about,
            "rewritten": rewritten is not None,
            "dimensions": sorted(wanted, key=list(DIMENSIONS).index),
            "samples": samples,
            "flicker_samples": flicker_samples,
            "seed": seed,
            "extension": extension,
        },
        "warnings": notes,
        "videos": videos,
    }


def read_plan(path: str | Path) -> dict:
    """A plan that `mhla eval vbench plan` wrote. Raises ValueError when it is something else."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"there is no plan {path}: make one with mhla eval vbench plan {path.name}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["schema_version"] != SCHEMA or not found["videos"]:
            raise KeyError("schema_version")
        for row in found["videos"]:
            texts = isinstance(row["file"], str) and isinstance(row["prompt"], str) and row["file"]
            if not texts or type(row["seed"]) is not int or not set(row["dimensions"]) <= DIMENSIONS.keys():
                raise KeyError(row["file"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no plan of this version ({error!r}): make it again") from None
    return found
