"""The files of a data set: what is there, and the captions or classes that belong to each picture."""

from __future__ import annotations

import json
from pathlib import Path

from .config import DataConfig

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
VIDEO_SUFFIXES = {".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v"}


def check_path(config: DataConfig) -> None:
    """ValueError unless there is something at `data.path`."""
    if not Path(config.path).exists():
        raise ValueError(
            f"recipe: data.path = {config.path!r} does not exist; give "
            + {"folder": "a folder of images", "videos": "a folder of videos"}.get(
                config.kind, "the emoji tar made by train/"
            )
        )


def list_pictures(
    root: Path, template: str, by_class: bool = False, videos: bool = False
) -> list[tuple[Path, list[str]]]:
    """(path, captions) of a folder: by captions.jsonl where present, else by class folders.

    captions.jsonl has one object a line: `{"file": "a.png", "caption": "..."}`; a list of captions gives variants. With
    `by_class` the only caption is the class: the folder's name as it is, or "label" in captions.jsonl. With `videos`
    they count as well as pictures, and "file" may be a folder of frames.
    """
    what = "videos" if videos else "pictures"
    suffixes = IMAGE_SUFFIXES | VIDEO_SUFFIXES if videos else IMAGE_SUFFIXES
    key = "label" if by_class else "caption"
    listing = root / "captions.jsonl"
    pairs = []
    if listing.is_file():
        for number, line in enumerate(listing.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                file, caption = entry["file"], entry[key]
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f'{listing} line {number}: write {{"file": "name.png", "{key}": "what it shows"}}, '
                    f"not {line.strip()[:80]!r}"
                ) from None
            texts = [str(caption)] if by_class else caption if isinstance(caption, list) else [caption]
            if not texts or not all(isinstance(text, str) for text in texts):
                raise ValueError(
                    f"{listing} line {number}: caption {caption!r} is neither a text nor a list of texts"
                )
            if not (root / file).is_file() and not (videos and (root / file).is_dir()):
                raise ValueError(f"{listing} line {number}: there is no file {file!r} in {root}")
            pairs.append((root / file, texts))
    else:
        for folder in sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")):
            words = folder.name.replace("_", " ").replace("-", " ")
            caption = folder.name if by_class else template.format(words)
            files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in suffixes)
            pairs += [(path, [caption]) for path in files]
    if not pairs:
        raise ValueError(
            f'{root} holds no {what} with {key}s; add captions.jsonl with lines {{"file": ..., '
            f'"{key}": ...}}, or put the {what} into one folder per class'
        )
    return pairs
