"""VBench's Quality, Semantic and Total from raw scores, and the result files that hold those."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TypeVar

from .dimensions import DIMENSIONS, GROUP_WEIGHTS, members

T = TypeVar("T", str, Path)
# Mean cosines of a video and its text, which can be negative.
COSINES = {"appearance_style", "temporal_style", "overall_consistency"}
# A mean of cosines in float32, as of a video that stands still, can lie so little above 1.
HIGHEST = 1 + 1e-3


@dataclass
class RawScores:
    """Raw score of each dimension, in [0, 1] (cosines in [-1, 1]), and where it came from."""

    values: dict[str, float] = field(default_factory=dict)
    videos: dict[str, int] = field(default_factory=dict)  # how many a result file lists
    rescaled: dict[str, float] = field(default_factory=dict)  # what the file said, of those given out of 100
    sources: list[dict[str, str]] = field(default_factory=list)
    settings: dict[str, dict] = field(default_factory=dict)  # of those that `run` scored
    doubts: list[str] = field(default_factory=list)  # scores whose scale is not sure


def totals(raw: Mapping[str, float], *, missing: str = "refuse") -> dict[str, float | None]:
    """`quality`, `semantic` and `total` as VBench publishes them, from raw scores in [0, 1].

    Each score is (raw - low) / (high - low), unclipped; a group is the weighted mean of its own; the total weighs
    quality four times. A group that lacks a dimension is None, and so is then the total.

    Args:
        missing: "zero" counts a dimension without a score as raw 0, as the official script does; with nothing at all
            its total is -0.57.
    """
    if missing not in ("refuse", "zero"):
        raise ValueError(f"missing={missing!r}: give refuse or zero")
    found: dict[str, float | None] = {}
    for group in GROUP_WEIGHTS:
        own = members(group)
        if missing == "refuse" and not own.keys() <= raw.keys():
            found[group] = None
            continue
        parts = [(raw.get(name, 0.0) - d.low) / (d.high - d.low) * d.weight for name, d in own.items()]
        found[group] = math.fsum(parts) / sum(d.weight for d in own.values())
    if None in found.values():
        return found | {"total": None}
    weighed = sum(weight * found[group] for group, weight in GROUP_WEIGHTS.items())
    return found | {"total": weighed / sum(GROUP_WEIGHTS.values())}


def documents(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of each result file behind a path: a file, a folder of them, or a zip."""
    if path.is_dir():
        files = results_among(sorted(path.rglob("*.json"))) or sorted(path.glob("*.json"))
        if not files:
            raise ValueError(f"{path} holds no result files (*_eval_results.json): give another folder")
        for file in files:
            yield str(file), file.read_bytes()
    elif path.suffix == ".zip":
        try:
            with zipfile.ZipFile(path) as archive:
                names = [name for name in sorted(archive.namelist()) if name.endswith(".json")]
                names = results_among(names) or names
                for name in names:
                    yield f"{path}:{name}", archive.read(name)
        except zipfile.BadZipFile as error:
            raise ValueError(f"{path} cannot be read ({error}): copy it again") from None
        if not names:
            raise ValueError(f"{path} holds no .json: give a zip of result files")
    elif path.is_file():
        yield str(path), path.read_bytes()
    else:
        raise ValueError(f"there is no {path}: give a result file of VBench, a folder or a zip of them")


def results_among(names: Sequence[T]) -> list[T]:
    """Those that VBench names results. Beside them lie its lists of videos, our settings, and copies of macOS's."""
    plain = (name for name in names if not PurePath(name).name.startswith("."))
    return [name for name in plain if str(name).endswith("_eval_results.json")]


def one_score(name: str, value, source: str) -> tuple[float, int | None]:
    """Score and number of videos of one entry: a number, or VBench's [number, [one entry per video]]."""
    videos = None
    if isinstance(value, list) and value:
        videos = len(value[1]) if len(value) > 1 and isinstance(value[1], list) else None
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{source}: {name} is {value!r}, no number: score that dimension again")
    if not math.isfinite(value):
        raise ValueError(f"{source}: {name} is {value}: no video was scored; score that dimension again")
    least = -1 if name in COSINES else 0
    if not least <= value <= 100:
        raise ValueError(
            f"{source}: {name} is {value}, outside [{least}, 1]: are that dimension's weights the right ones?"
        )
    return float(value), videos


def read_results(paths: Sequence[str | Path]) -> RawScores:
    """Raw scores of result files, VBench's own or {dimension: number}, merged.

    A score above 1 (but for rounding) is taken to be out of 100, and noted. Dimensions may be written with spaces.

    Raises ValueError, naming the file, for an unknown dimension, a score that is none, or two different ones.
    """
    if not paths:
        raise ValueError("no result files: give files, folders or zips")
    raw = RawScores()
    for path in paths:
        for source, content in documents(Path(path).expanduser()):
            try:
                entries = json.loads(content)
            except ValueError as error:
                raise ValueError(f"{source} is not valid JSON ({error})") from None
            if not isinstance(entries, dict):
                raise ValueError(f"{source} holds no scores by dimension")
            own = settings_beside(source)
            raw.settings |= {name: own for name in entries if own}
            raw.sources.append({"path": source, "sha256": hashlib.sha256(content).hexdigest()})
            names = {key.strip().lower().replace(" ", "_"): entry for key, entry in entries.items()}
            for name, entry in names.items():
                add(raw, name, entry, source)
            raw.doubts += two_scales(raw, names, source)
    return raw


def settings_beside(source: str) -> dict | None:
    """What `run` noted beside a result: mode, plan, how the videos were drawn, VBench's release; None for others."""
    path = Path(source.removesuffix("_eval_results.json") + "_run.json")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return record["settings"] | {"vbench": record["key"]["vbench"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def common_settings(raw: RawScores, notes: list[str]) -> dict:
    """The settings that the dimensions share; where they differ or are unknown, `notes` gets a warning."""
    known = list(raw.settings.values())
    if not known:
        return {}
    if len(known) < len(raw.values):
        notes.append(f"{len(raw.values) - len(known)} dimensions do not say how their videos were drawn")
    differing = [key for key in known[0] if any(own.get(key) != known[0][key] for own in known)]
    if differing:
        notes.append(f"the dimensions were scored with different settings: {', '.join(differing)}")
    return {key: value for key, value in known[0].items() if key not in differing} | (
        {"differing": {name: {key: own.get(key) for key in differing} for name, own in raw.settings.items()}}
        if differing
        else {}
    )


def add(raw: RawScores, name: str, entry, source: str) -> None:
    if name not in DIMENSIONS:
        near = difflib.get_close_matches(name, DIMENSIONS, n=1)
        hint = f", did you mean {near[0]}?" if near else f": they are {', '.join(DIMENSIONS)}"
        raise ValueError(f"{source}: {name!r} is no dimension of VBench{hint}")
    given, videos = one_score(name, entry, source)
    value = given / 100 if given > HIGHEST else given
    if name in raw.values and not math.isclose(raw.values[name], value, rel_tol=1e-9):
        raise ValueError(
            f"{source}: {name} is {value}, another file says {raw.values[name]}: give one of them"
        )
    raw.values[name] = value
    if given > HIGHEST:
        raw.rescaled[name] = given
    if videos is not None:
        raw.videos[name] = videos


def two_scales(raw: RawScores, names: Iterable[str], source: str) -> list[str]:
    """Of a file in percent, what is below 1 all the same. VBench itself prints imaging quality out of 100."""
    percent = [name for name in names if name in raw.rescaled and name != "imaging_quality"]
    others = [name for name in names if name not in raw.rescaled and raw.values[name] > 0]
    if not percent or not others:
        return []
    return [
        f"{source}: {', '.join(percent[:3])} are out of 100, {others[0]} is {raw.values[others[0]]:g}: if that is out "
        "of 100, too, divide it"
    ]


def aggregate(raw: RawScores, *, missing: str = "refuse") -> dict:
    """Result of `mhla eval vbench aggregate`, ready for JSON."""
    found = totals(raw.values, missing=missing)
    absent = [name for name in DIMENSIONS if name not in raw.values]
    notes = [
        f"{name}: {given} is out of 100, taken as {raw.values[name]:.6g}"
        for name, given in raw.rescaled.items()
    ]
    notes += raw.doubts
    if absent and missing == "zero":
        notes.append(
            f"{len(absent)} dimensions count as raw 0, as in the official script: {', '.join(absent)}"
        )
    elif absent:
        notes.append(
            f"no total: {len(absent)} of {len(DIMENSIONS)} dimensions are missing: {', '.join(absent)}"
        )
    settings = common_settings(raw, notes)
    rows = {}
    for name, dimension in DIMENSIONS.items():
        if name in raw.values:
            value = raw.values[name]
            rows[name] = {
                "value": value,
                "normalised": (value - dimension.low) / (dimension.high - dimension.low),
                "group": dimension.group,
                "weight": dimension.weight,
                "videos": raw.videos.get(name),
                "higher_is_better": True,
            }
    return {
        "schema_version": 1,
        "protocol": "vbench_standard",
        "values": rows,
        **found,
        "missing": absent,
        "rescaled": raw.rescaled,
        "settings": {"missing": missing} | settings,
        "inputs": raw.sources,
        "warnings": notes,
    }
