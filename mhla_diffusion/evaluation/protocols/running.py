"""Runs each kind of scorer on what was given: scorings (see `passes`) whose result has "values" and "warnings"."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from pathlib import Path

from ...weights import find_pipeline
from ..faults import InsufficientSamples, ReferenceMismatch
from ..image_protocols import PROTOCOLS
from ..text_image.protocols import TEXT_IMAGE_PROTOCOLS
from .inputs import VBENCH_TOTALS, Inputs, listed, optional
from .schema import Part, Protocol, Unreadable


def opened(protocol: Protocol, inputs: Inputs, source: str | Path, split: str | None):
    """The set behind a path, the same for all parts that read it alike: one reading then serves them."""
    from ..picture_sets import open_pictures

    how = {
        "limit": inputs.limit,
        "split": split,
        "mixed_sizes": inputs.mixed_sizes,
        "background": inputs.background or protocol.samples.background,
    }
    key = (str(source), *how.values())
    if key not in inputs.sets:
        inputs.sets[key] = open_pictures(source, **how)
    return inputs.sets[key]


def open_samples(protocol: Protocol, inputs: Inputs):
    return opened(protocol, inputs, inputs.samples, inputs.samples_split)


def at_once(score: Callable[[Part, Protocol, Inputs], dict]) -> Callable[..., Generator]:
    """The scoring of what looks at no pictures that others could share."""

    @functools.wraps(score)
    def scoring(part: Part, protocol: Protocol, inputs: Inputs) -> Generator:
        yield []
        return score(part, protocol, inputs)

    return scoring


def check_samples(protocol: Protocol, inputs: Inputs) -> list[str]:
    """Warnings about the number and size of the samples. Raises ValueError where the protocol refuses them."""
    rules, notes = protocol.samples, []
    if rules.kind == "pictures":
        pictures = open_samples(protocol, inputs)
        count = len(pictures)
        first = next(iter(pictures.batches(1)))
        size = tuple(first.shape[2:])
    elif rules.kind == "videos":
        folder = Path(inputs.samples).expanduser()
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}: give the one with the videos")
        count = len(video_paths(inputs))
        size = None
    else:
        if rules.kind == "pipeline":
            find_pipeline(inputs.samples)  # now, not after seconds of imports
        return []
    checked = any(part.scorer == "vbench_check" for part in protocol.parts)  # which says what is missing
    if count < rules.least and not checked:
        raise InsufficientSamples(
            f"{inputs.samples} has {count} {rules.kind}, {protocol.protocol} takes no fewer than {rules.least}"
        )
    if rules.count is not None and count != rules.count:
        words = f"{inputs.samples} has {count} {rules.kind}, {protocol.protocol} asks for {rules.count}"
        if rules.other_count == "refuse":
            raise InsufficientSamples(f"{words}: give all of them")
        notes.append(f"{words}: not comparable with published numbers")
    if rules.size is not None and size is not None and size != rules.size:
        height, width = rules.size
        words = f"samples of {size[1]}x{size[0]}, {protocol.protocol} asks for {width}x{height}"
        if rules.other_size == "refuse":
            raise ReferenceMismatch(f"{words}: draw them in that size")
        notes.append(f"{words}: not comparable with published numbers")
    return notes


def run_distances(part: Part, protocol: Protocol, inputs: Inputs) -> Generator:
    """Distances to a reference by one of the networks and resizes of `image_protocols`."""
    from ..image_scores import beyond, scoring
    from ..picture_sets import holds_pictures
    from ..reference_statistics import holds_statistics, read_statistics

    path = Path(inputs.reference).expanduser()
    statistics = read_statistics(path) if holds_statistics(path) else None
    pictures = None
    if statistics is None or holds_pictures(path):
        split = inputs.reference_split or protocol.reference.split
        if split and not inputs.reference_split and path.exists() and path.suffix != ".tar":
            raise ReferenceMismatch(
                f"{protocol.protocol} compares with split {split} of a .tar "
                f"({protocol.reference.what or 'whose JSON names splits'}), {path} has none"
            )
        pictures = opened(protocol, inputs, path, split)
    if protocol.reference.kind == "pictures" and pictures is None:
        raise ReferenceMismatch(f"{path} holds statistics only, {protocol.protocol} asks for pictures")
    way, wanted, notes = PROTOCOLS[part.scorer], part.metrics, []
    lost = beyond(wanted or (), statistics, pictures is not None)
    needs = "; ".join(f"{name} needs {need}" for name, need in lost.items())
    if lost and (not inputs.skip_missing or len(lost) == len(wanted)):
        raise ReferenceMismatch(
            f"{needs}; {path} does not hold that: give another file (ADM's has all), or leave out what lacks it with "
            "--skip-missing"
        )
    if lost:
        wanted = tuple(name for name in wanted if name not in lost)
        notes = [f"left out, for {path} does not hold it: {needs}"]
    found = yield from scoring(
        open_samples(protocol, inputs),
        statistics or pictures,
        way,
        reference_pictures=pictures,
        metrics=wanted,
        weights={role: path for role, path in inputs.weights.items() if role in way.roles},
        device=inputs.device,
        batch_size=inputs.batch_size,
        seed=inputs.seed,
        skip_missing=inputs.skip_missing,
    )
    found["warnings"] = notes + found["warnings"]
    return found


def run_captions(part: Part, protocol: Protocol, inputs: Inputs) -> Generator:
    """Scores of pictures and their prompts: CLIP score, retrieval, scenes, GenEval."""
    from ..text_image.run import set_scoring

    way = TEXT_IMAGE_PROTOCOLS[part.scorer]
    long_prompts = part.options.get("long_prompts", "truncate")
    if long_prompts not in ("truncate", "error"):
        raise Unreadable(f"option long_prompts is {long_prompts!r}: give truncate or error")
    roles = (*way.roles, *way.optional)
    result = yield from set_scoring(
        way,
        inputs.samples,
        lambda: open_samples(protocol, inputs),
        prompts=inputs.prompts,
        whole=inputs.limit is None,
        weights={role: path for role, path in inputs.weights.items() if role in roles},
        device=inputs.device,
        long_prompts=long_prompts,
        detections_out=inputs.out / "detections.jsonl",
        batch_size=inputs.batch_size,
    )
    return only(result, part)


def only(result: dict, part: Part) -> dict:
    """The result with the part's metrics alone."""
    if part.metrics:
        result["values"] = {name: row for name, row in result["values"].items() if name in part.metrics}
    return result


def video_paths(inputs: Inputs) -> list[Path]:
    """All videos, whatever the limit."""
    from ..vbench.check import VIDEO_SUFFIXES

    folder = Path(inputs.samples).expanduser()
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in VIDEO_SUFFIXES)


def run_flicker(part: Part, protocol: Protocol, inputs: Inputs) -> dict:
    from ..vbench.flicker import flickering_of_videos

    paths = video_paths(inputs)[: inputs.limit]
    inputs.expect(len(paths))
    mean, rows = flickering_of_videos(paths)
    inputs.progress(len(rows))
    return {
        "values": {"temporal_flickering": {"value": mean, "n": len(rows), "higher_is_better": True}},
        "warnings": ["temporal_flickering is of all videos; the published protocol takes still ones only"],
        "videos": [{**row, "video_path": Path(row["video_path"]).name} for row in rows],
    }


def run_motions(part: Part, protocol: Protocol, inputs: Inputs) -> dict:
    """Motions and backgrounds of videos, whose captions they carry or a file of prompts has."""
    from ..moving.videos import score_motions

    paths = video_paths(inputs)
    captions = captions_of(paths, inputs.prompts, inputs.limit)
    inputs.expect(len(captions))
    return only(score_motions(paths[: inputs.limit], captions, progress=inputs.progress), part)


def captions_of(paths: list[Path], file: str | None, limit: int | None) -> list[str]:
    """A caption for each of the first videos. Raises ValueError, naming the first video without one."""
    from ...pipelines.requests import read_prompts
    from ...pipelines.videos import read_video_settings

    if file is not None:
        found = read_prompts(file)
        if len(found) not in (len(paths), len(paths[:limit])):
            raise ValueError(
                f"{file} has {len(found)} prompts for {len(paths)} videos: give one for each, in order"
            )
        return found[:limit]
    paths = paths[:limit]
    found = [(read_video_settings(path) or {}).get("prompt") for path in paths]
    for path, text in zip(paths, found, strict=True):
        if not isinstance(text, str):
            raise ValueError(
                f"{path} carries no prompt: give --prompts FILE with one for each video, in order"
            )
    return found


def run_video_check(part: Part, protocol: Protocol, inputs: Inputs) -> dict:
    """Whether the videos of a plan are there and alike. Raises ValueError with what is wrong."""
    from ..networks.weight_files import sha256_of
    from ..vbench.check import check_videos, faults
    from ..vbench.plan import plan, read_plan, read_records

    options = part.options
    if inputs.plan:
        made, about = read_plan(inputs.plan), {"path": inputs.plan, "sha256": sha256_of(Path(inputs.plan))}
    else:
        records, about = read_records(inputs.weights.get("vbench-prompts") or inputs.prompts)
        made = plan(records, about, dimensions=listed(options, "dimensions", str) or ())
    size = listed(options, "size", int)
    if size and len(size) != 2:
        raise Unreadable(f"option size is {size}: give [width, height]")
    report = check_videos(
        Path(inputs.samples).expanduser(),
        made,
        size=tuple(size) if size else None,
        **optional(options, float, fps="fps"),
        **optional(options, int, frames="frames"),
    )
    if wrong := faults(report):
        raise ValueError("; ".join(wrong))
    row = {"value": report["found"], "n": report["expected"], "higher_is_better": None}
    notes = report["warnings"] + made["warnings"]
    return {
        "values": {"videos_found": row},
        "warnings": notes,
        "plan": about | {"settings": made["settings"]},
        "videos": report["videos"],
    }


def run_totals(part: Part, protocol: Protocol, inputs: Inputs) -> dict:
    """VBench's scores from its result files. Raises ValueError when a metric that the part names is not in them."""
    from ..vbench.aggregate import aggregate, read_results

    found = aggregate(read_results(inputs.results))
    values = {
        name: {"value": row["value"], "n": row["videos"], "higher_is_better": True}
        for name, row in found["values"].items()
    }
    for name in VBENCH_TOTALS:
        if found[name] is not None:
            values[name] = {
                "value": 100 * found[name],
                "n": None,
                "higher_is_better": True,
                "scale": "0 to 100",
            }
    lost = [name for name in part.metrics or () if name not in values]
    if lost:
        raise ValueError(
            f"VBench's results hold no {', '.join(lost)}: {'; '.join(found['warnings']) or 'score them'}"
        )
    result = {key: found[key] for key in ("warnings", "missing", "rescaled", "inputs", "settings")}
    return only({"values": values, **result}, part)


def run_attention(part: Part, protocol: Protocol, inputs: Inputs) -> dict:
    """Diagnostics of a pipeline's attention; its pictures and JSON go beside the result."""
    from ..diagnostics.commands import diagnose
    from ..diagnostics.study import Options

    options = part.options
    prompts, at = listed(options, "prompts", str), listed(options, "at", int)
    how = optional(options, int, entropy_rows="entropy_rows", exact_limit="exact_limit")
    how |= optional(options, float, threshold="threshold") | optional(options, bool, one_block="one_block")
    folder = find_pipeline(inputs.samples)
    inputs.expect(1)
    found = diagnose(
        folder,
        out=inputs.out,
        stem="attention",
        prompts=prompts,
        seed=inputs.seed,
        sizes=optional(options, int, steps="steps"),
        at=at,
        options=Options(**how, seed=inputs.seed),
        device=inputs.device,
    )
    inputs.progress(1)
    kept = (
        "values",
        "warnings",
        "pipeline",
        "inputs",
        "settings",
        "kinds",
        "mixing",
        "pictures",
        "environment",
    )
    result = {name: found[name] for name in kept}
    if part.metrics:
        lost = [name for name in part.metrics if name not in result["values"]]
        if lost:
            raise ValueError(f"no {lost[0]} here: the layers give {', '.join(result['values'])}")
    return only(result, part)
