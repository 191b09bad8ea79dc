"""GenEval's score of a set of detections, ready for JSON."""

from __future__ import annotations

import datetime
import hashlib
from collections import Counter
from pathlib import Path

from ...provenance import versions
from .judge import COUNTING_THRESHOLD, TASKS, THRESHOLD, judge, overall, task_scores
from .records import PICTURES_EACH, Found, Record, read_records, record_of

MOST_REASONS = 50


def score_detections(found: list[Found], about: dict, metadata: Path, *, schema: int) -> dict:
    """The mean over GenEval's six tasks, each task, and the first reasons of wrong pictures.

    Raises ValueError for a picture whose prompt is unknown, or which is there twice.
    """
    records = read_records(metadata)
    by_prompt = {record.prompt: index for index, record in enumerate(records)}
    rows, reasons, used = [], [], Counter()
    names = Counter(each.image for each in found)
    doubled = [name for name, count in names.items() if count > 1]
    if doubled:
        raise ValueError(f"{doubled[0]} is there {names[doubled[0]]} times: keep one line for each picture")
    for each in found:
        index = record_of(each.image, each.prompt, records, by_prompt)
        record = records[index]
        used[index] += 1
        try:
            verdict = judge(
                each.detections, record.include, record.exclude, counting=record.tag == "counting"
            )
        except ValueError as error:
            raise ValueError(f"{each.image}: {error}") from None
        rows.append((record.tag, str(index), verdict.correct))
        if not verdict.correct:
            reasons.append(f"{each.image} ({record.prompt}): {'; '.join(verdict.reasons)}")
    scores = task_scores(rows)
    notes = notes_of(records, used, scores)
    if about.get("official") is not True:
        notes.append(
            "the detections are not known to be of GenEval's own detector: published numbers may not compare"
        )
    values = {}
    total = overall(scores)
    if total is not None:
        values["geneval"] = {"value": total, "n": len(rows), "higher_is_better": True, "tasks": len(TASKS)}
    for task in TASKS:
        if task in scores:
            score = scores[task]
            values[task] = {"value": score.value, "n": score.pictures, "higher_is_better": True}
            values[task] |= {"prompts": score.prompts, "prompts_right": score.prompts_right}
    return {
        "schema_version": schema,
        "protocol": "geneval",
        "values": values,
        "skipped": {},
        "warnings": notes,
        "features": {"network": about.get("detector", "unknown detector"), "protocol": "geneval", **about},
        "inputs": {
            "samples": {"pictures": len(rows), "listing_sha256": listing(found)},
            "prompts": {
                "file": str(metadata),
                "sha256": hashlib.sha256(metadata.read_bytes()).hexdigest(),
                "count": len(records),
            },
        },
        "settings": {
            "threshold": THRESHOLD,
            "counting_threshold": COUNTING_THRESHOLD,
            "overall": "mean of the six tasks",
            "reasons": reasons[:MOST_REASONS],
        },
        "environment": {"versions": versions(), "date": datetime.date.today().isoformat()},
        "timings": {},
    }


def listing(found: list[Found]) -> str:
    return hashlib.sha256("\n".join(each.image for each in found).encode()).hexdigest()


def notes_of(records: list[Record], used: Counter, scores: dict) -> list[str]:
    """What keeps the score from comparing with published ones."""
    notes = []
    missing = [record.prompt for index, record in enumerate(records) if index not in used]
    if missing:
        there = len(records) - len(missing)
        notes.append(f"{there} of {len(records)} prompts have pictures, the first without is {missing[0]!r}")
    counts = sorted(set(used.values()))
    if counts != [PICTURES_EACH]:
        notes.append(f"{', '.join(map(str, counts))} pictures of a prompt, published are {PICTURES_EACH}")
    lost = [task for task in TASKS if task not in scores]
    if lost:
        notes.append(f"no overall score: no picture of {', '.join(lost)}")
    return notes
