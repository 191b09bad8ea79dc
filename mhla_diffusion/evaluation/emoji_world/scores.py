"""Retrieval of concepts, and verdicts on scenes, for a set of pictures; results ready for JSON."""

from __future__ import annotations

import datetime
import functools
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ...provenance import DISTRIBUTIONS, versions
from ..concepts import chance
from ..geneval.judge import overall, task_scores
from ..image_scores import SCHEMA
from ..passes import Look, Rows, Scoring, by_itself
from ..picture_sets import PictureSet
from ..text_image.prompts import Prompts
from .naming import NEAREST, Namer, object_crops, whole_crop
from .reading import background_of, objects_of, union
from .scenes import TASKS, Scene, SceneVerdict, judge_scene, name_objects


def retrieval_scoring(
    samples: PictureSet, prompts: Prompts, namer: Namer, *, batch_size: int = 50
) -> Scoring:
    """How often a picture's own concept is the nearest of all concepts, or among the five nearest, and chance.

    Raises MissingWeights for a prompt of an unknown concept when MiniLM is nowhere.
    """
    known = set(namer.names)
    own = [namer.concept_of(text) for text in prompts.texts]
    column = torch.tensor([namer.names.index(name) for name in own])

    def find(batch: Tensor, first: int) -> dict[str, Tensor]:
        cosine = namer.similarities(torch.stack([whole_crop(picture) for picture in batch]))
        mine = cosine.gather(1, column[first : first + len(batch), None])
        return {"rank": (cosine > mine).sum(1)}

    look = Look(samples, Rows(find), batch_size)
    yield [look]
    rank = look.rows["rank"]
    candidates = len(namer.names)
    values = {
        f"r_at_{k}": row((rank < k).double().mean(), len(rank), chance=chance(candidates, k)) for k in (1, 5)
    }
    new = sorted(set(own) - known)
    notes = (
        [f"{len(new)} prompts ask for concepts that the heads were not made for, e.g. {new[0]!r}"]
        if new
        else []
    )
    notes += samples.doubts()
    about = {"candidates": candidates, "batch_size": batch_size}
    return as_result("emoji_retrieval", values, notes, namer, look, prompts, about)


def row(value, count: int, **more) -> dict:
    return {"value": float(value), "n": count, "higher_is_better": True, **more}


score_retrieval = by_itself(retrieval_scoring)


def scene_scoring(
    samples: PictureSet, prompts: Prompts, scenes: dict[str, Scene], namer: Namer, *, batch_size: int = 50
) -> Scoring:
    """Share of right pictures of each task, their mean, and what is right by the pixels alone.

    Raises ValueError for a picture whose prompt is not in the list.
    """
    asked = []
    for index, text in enumerate(prompts.texts):
        if text not in scenes:
            raise ValueError(
                f"{samples.name_of(index)} was drawn from {text!r}, which the list of scenes does not have: "
                "draw eval/prompts/emoji_scenes.txt, or give the list with --prompts"
            )
        asked.append(scenes[text])

    def verdict_on(picture: Tensor, scene: Scene) -> SceneVerdict:
        background = background_of(picture)
        boxes = objects_of(picture, background)
        count = len(boxes)
        if scene.objects == 1 and count > 1:  # one drawing may be all of them together
            boxes = [*boxes, functools.reduce(union, boxes)]
        ranked = namer.nearest(object_crops(picture, boxes, background))
        detections = name_objects(boxes, ranked, scene.names)
        size = (picture.shape[2], picture.shape[1])
        return judge_scene(scene, background, detections, size, count)

    def find(batch: Tensor, first: int) -> dict[str, list]:
        shown = zip(batch, asked[first : first + len(batch)], strict=True)
        return {"verdicts": [tuple(verdict_on(picture, scene)) for picture, scene in shown]}

    look = Look(samples, Rows(find), batch_size)
    yield [look]
    seen = look.rows["verdicts"]
    verdicts = [(scene, SceneVerdict(*each)) for scene, each in zip(asked, seen, strict=True)]
    rows = [(scene.tag, scene.prompt, verdict.correct) for scene, verdict in verdicts]
    scores = task_scores(rows)
    values = {}
    notes = []
    total = overall(scores, TASKS)
    if total is None:
        missing = [task for task in TASKS if task not in scores]
        notes.append(f"no overall score: no picture of {', '.join(missing)}")
    else:
        values["emoji_geneval"] = row(total, len(rows), tasks=len(TASKS))
    for task in TASKS:
        if task in scores:
            each = scores[task]
            values[task] = row(
                each.value, each.pictures, prompts=each.prompts, prompts_right=each.prompts_right
            )
    values["objects_found"] = row(
        sum(verdict.found for _, verdict in verdicts) / len(verdicts), len(verdicts)
    )
    for name, title in (
        ("background", "pixels_background"),
        ("count", "pixels_count"),
        ("place", "pixels_place"),
    ):
        found = [getattr(verdict, name) for _, verdict in verdicts]
        found = [value for value in found if value is not None]
        if found:
            values[title] = row(sum(found) / len(found), len(found))
    lost = len(scenes) - len({scene.prompt for scene in asked})
    if lost:
        notes.append(f"{lost} of {len(scenes)} prompts have no picture")
    notes += samples.doubts()
    about = {
        "nearest": NEAREST,
        "batch_size": batch_size,
        "reasons": reasons_of(verdicts),
    }
    prompts = Prompts(prompts.texts, prompts.about | {"sha256": digest_of(scenes), "scenes": len(scenes)})
    return as_result("emoji_scenes", values, notes, namer, look, prompts, about)


score_scenes = by_itself(scene_scoring)


def digest_of(scenes: dict[str, Scene]) -> str:
    return hashlib.sha256("\n".join(repr(scene) for scene in scenes.values()).encode()).hexdigest()


def reasons_of(verdicts: Sequence[tuple[Scene, SceneVerdict]], most: int = 50) -> list[str]:
    """The first pictures that are wrong: prompt and reasons."""
    wrong = [f"{scene.prompt}: {'; '.join(v.reasons)}" for scene, v in verdicts if not v.correct]
    return wrong[:most]


def as_result(
    name: str,
    values: dict,
    notes: list[str],
    namer: Namer,
    look: Look,
    prompts: Prompts,
    settings: dict,
) -> dict:
    where = namer.device
    return {
        "schema_version": SCHEMA,
        "protocol": name,
        "values": values,
        "skipped": {},
        "warnings": notes,
        "features": namer.about,
        "inputs": {"samples": look.pictures.about(), "prompts": prompts.about},
        "settings": settings,
        "environment": {
            "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
            "precision": "float32",
            "versions": versions(DISTRIBUTIONS),
            "date": datetime.date.today().isoformat(),
        },
        "timings": {"features_seconds": round(look.seconds, 3)},
    }
