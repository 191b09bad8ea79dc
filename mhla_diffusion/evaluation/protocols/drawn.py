"""With what the samples were drawn: the settings that `mhla generate` puts into every picture and video, summed up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...pipelines.pictures import read_settings

MOST_FILES = 2000  # are looked at; of more, so many are spread over all
MOST_VALUES = 8  # of one setting are listed
# What must be known of a drawing to draw it again.
KEYS = ("pipeline", "pipeline_sha256", "pipeline_class", "scheduler", "steps", "guidance", "flow_shift", "height",
        "width", "frames", "fps", "negative_prompt", "dtype", "device", "versions")  # fmt: skip
# Of these several values make a set that was not drawn in one way.
ONE_VALUE = ("pipeline_sha256", "scheduler", "steps", "guidance", "flow_shift", "negative_prompt")


def drawn_with(source: str, kind: str, asked: dict[str, Any]) -> tuple[dict, list[str]]:
    """Settings of the samples as {key: value, or list of values}, and warnings about them.

    Args:
        kind: pictures or videos. asked: what the protocol says of drawing; steps and guidance are compared.

    A set whose files carry no settings gives {"known": 0, ...}.
    """
    folder = Path(source).expanduser()
    if kind not in ("pictures", "videos") or not folder.is_dir():
        return {}, []
    paths, read = files_of(folder, kind)
    step = -(-len(paths) // MOST_FILES) if paths else 1
    looked = paths[::step]
    found = [settings for path in looked if (settings := read(path))]
    result: dict[str, Any] = {"files": len(paths), "looked_at": len(looked), "known": len(found)}
    notes = []
    if not found:
        return result, [f"{source} carries no settings: how it was drawn is not known"]
    if len(found) < len(looked):
        notes.append(f"{len(looked) - len(found)} of {len(looked)} {kind} carry no settings")
    for key in KEYS:
        values = distinct([settings[key] for settings in found if settings.get(key) is not None])
        if not values:
            continue
        result[key] = values[0] if len(values) == 1 else values[:MOST_VALUES]
        if key in ONE_VALUE and len(values) > 1:
            shown = ", ".join(map(str, values[:3]))
            notes.append(f"the {kind} were drawn with several values of {key}: {shown}")
    seeds = sorted({settings["seed"] for settings in found if isinstance(settings.get("seed"), int)})
    if seeds:
        result["seeds"] = {"first": seeds[0], "last": seeds[-1], "different": len(seeds)}
    for key in ("steps", "guidance"):
        wanted, given = asked.get(key), result.get(key)
        if wanted is not None and given is not None and given != wanted:
            notes.append(f"the {kind} were drawn with {key} {given}, the protocol says {wanted}")
    return result, notes


def note_drawing(result: dict, source: str) -> None:
    """Put how pictures were drawn under "settings", and what is odd about it among the warnings, as far as they say."""
    found, notes = drawn_with(source, "pictures", {})
    if found.get("known"):
        result["settings"]["drawn"] = found
        result["warnings"] += notes


def files_of(folder: Path, kind: str) -> tuple[list[Path], Callable[[Path], dict | None]]:
    if kind == "videos":
        from ...pipelines.videos import read_video_settings
        from ..vbench.check import VIDEO_SUFFIXES

        return sorted(p for p in folder.iterdir() if p.suffix.lower() in VIDEO_SUFFIXES), read_video_settings
    from ..decoding import picture_files

    return picture_files(folder), read_settings


def distinct(values: Sequence[Any]) -> list[Any]:
    """In order of appearance; dicts and lists are allowed."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found
