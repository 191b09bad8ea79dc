"""GenEval's rules on the objects found in a picture, and its score. Plain Python: no weights, no torch.

A requirement is one of GenEval's: `{"class": "cup", "count": 2, "color": "red", "position": ["left of", 0]}`, its
position being relative to the requirement of that index. A picture is right when every requirement of `include` holds
and none of `exclude` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
RELATIONS = ("left of", "right of", "above", "below")
THRESHOLD, COUNTING_THRESHOLD = 0.3, 0.9  # a detection counts above it
MOST_OF_A_CLASS = 16
SHRINK = 0.1  # an offset is shortened by this share of both boxes' sizes
SLANT = 0.5  # a direction counts when it makes up more than this share of the offset


class Detection(NamedTuple):
    """One object: its class, confidence, box (left, top, right, bottom) in pixels, and its colour if it was asked."""

    name: str
    score: float
    box: tuple[float, float, float, float]
    color: str | None = None


class Verdict(NamedTuple):
    """Whether a picture is right, and the reasons why it is not."""

    correct: bool
    reasons: tuple[str, ...]


def kept(detections: Sequence[Detection], counting: bool = False) -> dict[str, list[Detection]]:
    """Class -> detections above the threshold, the most confident first, at most 16."""
    threshold = COUNTING_THRESHOLD if counting else THRESHOLD
    found: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda each: -each.score):
        if detection.score > threshold:
            found.setdefault(detection.name, []).append(detection)
    return {name: group[:MOST_OF_A_CLASS] for name, group in found.items()}


def relations(first: Sequence[float], second: Sequence[float]) -> set[str]:
    """How the first box lies to the second: some of left of, right of, above, below; none for overlapping middles."""
    offset, shortened = [], []
    for axis in (0, 1):
        sizes = abs(first[axis + 2] - first[axis]) + abs(second[axis + 2] - second[axis])
        middle = (first[axis] + first[axis + 2]) / 2 - (second[axis] + second[axis + 2]) / 2
        offset.append(middle)
        shortened.append(math.copysign(max(abs(middle) - SHRINK * sizes, 0.0), middle))
    if max(map(abs, shortened)) < 1e-3:
        return set()
    length = math.hypot(*offset)
    across, down = (part / length for part in shortened)
    found = {"left of"} if across < -SLANT else {"right of"} if across > SLANT else set()
    return found | ({"above"} if down < -SLANT else {"below"} if down > SLANT else set())


def judge(
    detections: Sequence[Detection],
    include: Sequence[dict],
    exclude: Sequence[dict] = (),
    *,
    counting: bool = False,
) -> Verdict:
    """The verdict on one picture.

    Raises ValueError for a requirement that is none, or when a colour is asked and a detection has none.
    """
    objects = kept(detections, counting)
    reasons: list[str] = []
    groups: list[list[Detection] | None] = []
    for requirement in include:
        name, count = checked(requirement)
        found = objects.get(name, [])[:count]
        if len(found) < count:
            reasons.append(f"expected {name}>={count}, found {len(found)}")
            groups.append(None)
            continue
        right = True
        if color := requirement.get("color"):
            colors = [colour_of(each) for each in found]
            if colors.count(color) < count:
                right = False
                reasons.append(f"expected {color} {name}>={count}, found {', '.join(colors)}")
        if right and (position := requirement.get("position")):
            relation, target = position
            right = in_place(name, found, relation, target, groups, reasons)
        groups.append(found if right else None)
    for requirement in exclude:
        name, count = checked(requirement)
        if len(objects.get(name, [])) >= count:
            reasons.append(f"expected {name}<{count}, found {len(objects[name])}")
    return Verdict(not reasons, tuple(reasons))


def checked(requirement: dict) -> tuple[str, int]:
    name, count = requirement.get("class"), requirement.get("count")
    if not isinstance(name, str) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{requirement!r} is no requirement: give class and count, from 1 on")
    return name, count


def colour_of(detection: Detection) -> str:
    if detection.color is None:
        raise ValueError(
            f'a {detection.name} has no colour and one is asked for: give detections with "color"'
        )
    return detection.color


def in_place(
    name: str,
    found: list[Detection],
    relation: str,
    target: int,
    groups: list[list[Detection] | None],
    reasons: list[str],
) -> bool:
    """Whether every object stands in `relation` to every object of the requirement `target`."""
    if relation not in RELATIONS:
        raise ValueError(f"no relation is called {relation!r}: they are {', '.join(RELATIONS)}")
    if not 0 <= target < len(groups):
        raise ValueError(f"{name} is to be {relation} requirement {target}, which does not stand before it")
    others = groups[target]
    if others is None:
        reasons.append(f"no target for {name} to be {relation}")
        return False
    for each in found:
        for other in others:
            seen = relations(each.box, other.box)
            if relation not in seen:
                reasons.append(
                    f"expected {name} {relation} {other.name}, found {' and '.join(sorted(seen)) or 'neither'}"
                )
                return False
    return True


class TaskScore(NamedTuple):
    """Share of right pictures of a task, and how many pictures and prompts it is of."""

    value: float
    pictures: int
    prompts: int
    prompts_right: float  # share of prompts with at least one right picture


def task_scores(verdicts: Sequence[tuple[str, str, bool]]) -> dict[str, TaskScore]:
    """(task, prompt, correct) of each picture -> task -> its score, tasks in the order in which they come."""
    found = {}
    for task in dict.fromkeys(task for task, _, _ in verdicts):
        rows = [(prompt, correct) for name, prompt, correct in verdicts if name == task]
        prompts = {prompt for prompt, _ in rows}
        right = {prompt for prompt, correct in rows if correct}
        share = sum(correct for _, correct in rows) / len(rows)
        found[task] = TaskScore(share, len(rows), len(prompts), len(right) / len(prompts))
    return found


def overall(scores: dict[str, TaskScore], tasks: Sequence[str] = TASKS) -> float | None:
    """Mean of the tasks' scores, not of the pictures; None unless every task is there."""
    if any(task not in scores for task in tasks):
        return None
    return sum(scores[task].value for task in tasks) / len(tasks)
