"""Scores one set by a protocol of pictures and prompts, whatever its kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from ..passes import Look, Rows, Scoring, by_itself
from ..picture_sets import PictureSet
from .prompts import prompts_of
from .protocols import TextImageProtocol


def set_scoring(
    protocol: TextImageProtocol,
    source: str | os.PathLike,
    opened: Callable[[], PictureSet],
    *,
    prompts: str | None = None,
    whole: bool = True,
    weights: Mapping[str, str] | None = None,
    device: str = "auto",
    long_prompts: str = "truncate",
    clip_model_name: str | None = None,
    clip_pretrained: str | None = None,
    random_weights: bool = False,
    detections_out: Path | None = None,
    batch_size: int = 50,
) -> Scoring:
    """A scoring whose result has the schema of `image_scores.score`.

    Args:
        source: what was typed: a set of pictures, or for GenEval also a .jsonl of detections.
        opened: opens the set. whole: each prompt of a keyed file must have its picture.
        prompts: a file: of prompts, of scenes (emoji_scenes), of GenEval's metadata.
        weights: role -> path.
        detections_out: where GenEval's detections are written, if they are made here.

    Raises MissingWeights; ValueError for what does not fit, before anything is computed.
    """
    weights = dict(weights or {})
    roles = (*protocol.roles, *protocol.optional)
    foreign = sorted(weights.keys() - set(roles))
    if foreign:
        raise ValueError(
            f"protocol {protocol.name} uses no weights {foreign[0]!r}: it uses {', '.join(roles)}"
        )
    if protocol.kind != "clip" and (random_weights or clip_model_name or clip_pretrained):
        raise ValueError(
            f"protocol {protocol.name} takes no --clip-model, --clip-pretrained or --random-weights"
        )
    if protocol.kind == "detections":
        return (yield from by_geneval(source, opened, prompts, weights, device, detections_out))
    pictures = opened()
    if protocol.kind == "clip":
        from ..networks.clip import clip_model
        from .scores import caption_scoring

        texts = prompts_of(pictures, prompts, keyed=protocol.keyed, whole=whole)
        model = clip_model(
            weights.get("clip"),
            model=clip_model_name or protocol.model,
            pretrained=clip_pretrained or protocol.pretrained,
            random_weights=random_weights,
            device=device,
        )
        how = {"long_prompts": long_prompts, "batch_size": batch_size}
        return (yield from caption_scoring(pictures, texts, protocol, model, **how))
    from ..emoji_world.naming import Namer
    from ..emoji_world.scores import retrieval_scoring, scene_scoring

    if protocol.kind == "retrieval":
        texts = prompts_of(pictures, prompts, whole=whole)
        namer = Namer(weights, device)
        return (yield from retrieval_scoring(pictures, texts, namer, batch_size=batch_size))
    from ..emoji_world.scenes import read_scenes

    scenes = read_scenes(Path(prompts) if prompts else None)
    texts = prompts_of(
        pictures, None, advice="draw the list of scenes by mhla generate, which puts it into each PNG"
    )
    namer = Namer(weights, device)
    return (yield from scene_scoring(pictures, texts, scenes, namer, batch_size=batch_size))


score_set = by_itself(set_scoring)


def by_geneval(
    source: str | os.PathLike,
    opened: Callable[[], PictureSet],
    prompts: str | None,
    weights: dict,
    device: str,
    out: Path | None,
) -> Scoring:
    """GenEval from a .jsonl of detections, or from pictures, which are detected first."""
    from ..geneval.records import ADVICE, Found, read_detections, read_records, record_of, write_detections
    from ..geneval.scores import score_detections
    from ..image_scores import SCHEMA

    if prompts is None:
        raise ValueError(f"GenEval's prompts are needed: {ADVICE}")
    metadata = Path(prompts).expanduser()
    path = Path(source).expanduser()
    if path.suffix == ".jsonl":
        yield []
        found, about = read_detections(path)
        return score_detections(found, about, metadata, schema=SCHEMA)
    from ...pipelines.pictures import read_settings
    from ..geneval.detector import Detector
    from ..geneval.judge import Detection
    from ..picture_sets import Folder

    records = read_records(metadata)
    pictures = opened()
    if not isinstance(pictures, Folder):
        raise ValueError(f"{source} has no file names: give a folder of pictures, or a .jsonl of detections")
    pictures.mixed_sizes = True  # each picture is judged alone
    names = [file.relative_to(pictures.root).as_posix() for file in pictures.files]
    carried = [(read_settings(file) or {}).get("prompt") for file in pictures.files]
    by_prompt = {record.prompt: index for index, record in enumerate(records)}
    own = [
        records[record_of(name, text, records, by_prompt)] for name, text in zip(names, carried, strict=True)
    ]
    coloured = [{each["class"] for each in record.include if "color" in each} for record in own]
    asked = [each for record in records for each in (*record.include, *record.exclude)]
    detector = Detector(weights, colours=any("color" in each for each in asked), device=device)
    detector.check_classes([each["class"] for each in asked])
    rows = Rows(
        lambda batch, first: {"seen": [[tuple(each) for each in detector(batch[0], coloured[first])]]}
    )
    yield [Look(pictures, rows, 1)]
    seen = [[Detection(*each) for each in detections] for detections in rows["seen"]]
    found = [Found(*each) for each in zip(names, seen, carried, strict=True)]
    if out is not None:
        write_detections(out, found, detector.about)
    result = score_detections(found, detector.about, metadata, schema=SCHEMA)
    result["warnings"] += pictures.doubts()
    return result
