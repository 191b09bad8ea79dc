"""GenEval's prompts with their requirements, and files of detections, a picture a line."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...pipelines.pictures import write_atomically
from .judge import TASKS, Detection, judge

PICTURES_EACH = 4  # of every prompt, in the published protocol
ADVICE = "give GenEval's evaluation_metadata.jsonl (github.com/djghosh13/geneval, prompts/) with --prompts"


@dataclass(frozen=True)
class Record:
    """A line of GenEval's metadata."""

    tag: str
    prompt: str
    include: list[dict]
    exclude: list[dict] = field(default_factory=list)


@dataclass(frozen=True)
class Found:
    """What a detector saw in one picture; `image` is its path below the folder of samples."""

    image: str
    detections: list[Detection]
    prompt: str | None = None


def read_records(path: Path) -> list[Record]:
    """Prompts in the order of the file, whose line i belongs to folder `0000i`.

    Raises ValueError, naming the line, for a file that is none.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}: {ADVICE}")
    records = []
    for number, line in enumerate(lines_of(path), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            record = Record(fields["tag"], fields["prompt"], fields["include"], fields.get("exclude", []))
            if record.tag not in TASKS:
                raise ValueError(f"tag {record.tag!r}, there are {', '.join(TASKS)}")
            judge([], record.include, record.exclude)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}, is no prompt of GenEval ({error}): {ADVICE}") from None
        records.append(record)
    if not records:
        raise ValueError(f"{path} holds no prompts: {ADVICE}")
    return records


def read_detections(path: Path) -> tuple[list[Found], dict[str, Any]]:
    """Pictures, and what the file says about its detector (its first line, if it is `{"about": ...}`).

    Raises ValueError, naming the line, for one that is none.
    """
    if not path.is_file():
        raise ValueError(f"there is no file of detections {path}: give one, or a folder of pictures")
    found, about = [], {}
    for number, line in enumerate(lines_of(path), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            if "about" in fields:
                about = dict(fields["about"])
                continue
            detections = [detection_of(each) for each in fields["detections"]]
            image, prompt = fields["image"], fields.get("prompt")
            if not isinstance(image, str) or not image or not isinstance(prompt, str | None):
                raise ValueError(f"image {image!r} or prompt {prompt!r} is no text")
            found.append(Found(image, detections, prompt))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f'{path}, line {number}, is no picture ({error!r}): give {{"image": "00000/samples/0000.png", '
                '"detections": [{"class", "score", "box": [left, top, right, bottom], "color"}]}'
            ) from None
    if not found:
        raise ValueError(f"{path} holds no picture: detect again")
    return found, about | {"file": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def lines_of(path: Path) -> list[str]:
    """Raises ValueError, naming the file, when it is no text in UTF-8."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 (byte {error.start}): store it as that") from None


def detection_of(fields: dict) -> Detection:
    """Raises ValueError for a box or a score that is none; every comparison with NaN would just come out false."""
    box, score = tuple(float(edge) for edge in fields["box"]), float(fields["score"])
    if len(box) != 4 or not all(map(math.isfinite, box)) or box[2] < box[0] or box[3] < box[1]:
        raise ValueError(f"box {list(box)} is not left, top, right, bottom")
    if not 0 <= score <= 1:
        raise ValueError(f"score {score} is not in [0, 1]")
    return Detection(str(fields["class"]), score, box, fields.get("color"))


def write_detections(path: Path, found: Iterable[Found], about: dict) -> None:
    lines = [json.dumps({"about": about})]
    for each in found:
        rows = [
            {
                "class": d.name,
                "score": round(d.score, 6),
                "box": [round(edge, 2) for edge in d.box],
                "color": d.color,
            }
            for d in each.detections
        ]
        lines.append(json.dumps({"image": each.image, "prompt": each.prompt, "detections": rows}))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.write(("\n".join(lines) + "\n").encode()))


def needed_weights(source: str | Path, metadata: str | Path) -> tuple[str, ...]:
    """Roles that judging `source` needs: none for detections; for pictures the detector, and CLIP if colours are asked.

    Raises ValueError as `read_records`.
    """
    if Path(source).suffix == ".jsonl":
        return ()
    asked = [
        each
        for record in read_records(Path(metadata).expanduser())
        for each in (*record.include, *record.exclude)
    ]
    return ("mask2former", "clip") if any("color" in each for each in asked) else ("mask2former",)


def record_of(image: str, prompt: str | None, records: list[Record], by_prompt: dict[str, int]) -> int:
    """Index of a picture's prompt: by the prompt it carries, else by the number of its first folder.

    Raises ValueError when neither tells.
    """
    if prompt is not None:
        if prompt in by_prompt:
            return by_prompt[prompt]
        raise ValueError(f"{image} was drawn from {prompt!r}, which GenEval's list does not have")
    first = Path(image).parts[0]
    if first.isdecimal() and int(first) < len(records):
        return int(first)
    raise ValueError(
        f"{image} carries no prompt, and no number of one: name pictures as GenEval does, 00000/samples/0000.png"
    )
