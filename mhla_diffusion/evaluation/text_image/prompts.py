"""Which prompt each picture was drawn from: a file, or what the pictures themselves say."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from ...pipelines.pictures import read_settings
from ..picture_sets import Folder, PictureSet, Tar

WAYS = "a .json as MJHQ-30K's meta_data.json (key -> prompt), a .jsonl of {file, prompt}, a .txt with a prompt a line"


@dataclass(frozen=True)
class Prompts:
    """One prompt for each picture of a set, in its order, and what result files store about them."""

    texts: list[str]
    about: dict


def prompts_of(
    pictures: PictureSet,
    file: str | None,
    *,
    keyed: bool = False,
    whole: bool = True,
    advice: str = f"give --prompts FILE, {WAYS}",
) -> Prompts:
    """Prompts of all pictures.

    Args:
        file: of prompts; None reads what `mhla generate` embeds in PNGs, or the captions in a .tar.
        keyed: only a file of keys will do. whole: each prompt of a file must have its picture.
        advice: what is said when pictures carry none.

    Raises ValueError, naming the first, for a picture without a prompt or a prompt without its picture.
    """
    if file is None:
        if keyed:
            raise ValueError(
                "this protocol needs the file of its prompts: give --prompts path/to/meta_data.json"
            )
        return embedded(pictures, advice)
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"there is no file of prompts {path}: give {WAYS}")
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors put a mark before the first letter
        if path.suffix == ".txt" and not keyed:
            texts = in_order([line for line in text.splitlines() if line.strip()], pictures, path)
        elif path.suffix in (".json", ".jsonl"):
            by_name = by_key(json.loads(text)) if path.suffix == ".json" else by_file(text)
            texts = by_name_of(by_name, pictures, path, whole)
        else:
            raise ValueError(f"{path} is no file of prompts: give {WAYS}")
    except UnicodeDecodeError as error:  # its words hold the whole file
        raise ValueError(f"{path} is no text in UTF-8 (byte {error.start}): store it as that") from None
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read as prompts ({error!r}): give {WAYS}") from None
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return Prompts(texts, {"file": str(path), "sha256": sha256, "count": len(texts)})


def embedded(pictures: PictureSet, advice: str) -> Prompts:
    if isinstance(pictures, Folder):
        found = [(read_settings(file) or {}).get("prompt") for file in pictures.files]
        where = "embedded in the pictures"
    elif isinstance(pictures, Tar):
        found = [record.get("caption") or record.get("prompt") for record in pictures.records]
        where = "captions in the tar"
    else:
        found, where = [None], ""
    lost = [index for index, text in enumerate(found) if not isinstance(text, str)]
    if lost:
        raise ValueError(f"{pictures.name_of(lost[0])} carries no prompt: {advice}")
    # Of the prompts alone: sets of other seeds compare.
    digest = hashlib.sha256("\n".join(sorted(set(found))).encode()).hexdigest()
    return Prompts(found, {"file": where, "sha256": digest, "count": len(found)})


def in_order(lines: list[str], pictures: PictureSet, path: Path) -> list[str]:
    """A line for each picture; under a limit, those of all pictures will do."""
    if len(lines) not in (len(pictures), pictures.total):
        raise ValueError(
            f"{path} has {len(lines)} prompts for {pictures.total} pictures: give one for each, in order"
        )
    return lines[: len(pictures)]


def by_key(records: dict) -> dict[str, str]:
    """MJHQ-30K's layout: key -> {prompt, ...}, or key -> prompt."""
    return {key: record if isinstance(record, str) else record["prompt"] for key, record in records.items()}


def by_file(text: str) -> dict[str, str]:
    """A line for each picture: {file or image, prompt or caption}. Raises ValueError for two prompts of one picture."""
    found: dict[str, str] = {}
    for line in filter(str.strip, text.splitlines()):
        record = json.loads(line)
        name = record["file"] if "file" in record else record["image"]
        prompt = record["prompt"] if "prompt" in record else record["caption"]
        if found.setdefault(name, prompt) != prompt:
            raise ValueError(f"{name} has two prompts, {found[name]!r} and {prompt!r}: keep one")
    return found


def by_name_of(prompts: dict[str, str], pictures: PictureSet, path: Path, whole: bool) -> list[str]:
    """A picture's name is its path below the folder, its file name, or that without its suffix."""
    if not isinstance(pictures, Folder):
        raise ValueError(f"{pictures.source} has no file names to find in {path}: give a folder of pictures")
    texts, used = [], set()
    for file in pictures.files:
        names = (file.relative_to(pictures.root).as_posix(), file.name, file.stem)
        name = next((name for name in names if name in prompts), None)
        if name is None:
            raise ValueError(
                f"{file} is not named in {path}, whose first name is {next(iter(prompts), None)!r}"
            )
        if name in used:
            raise ValueError(f"two pictures are named {name}, the second is {file}: keep one")
        if not isinstance(prompts[name], str):
            raise ValueError(f"{path}: the prompt of {name} is {prompts[name]!r}: give text")
        used.add(name)
        texts.append(prompts[name])
    lost = [name for name in prompts if name not in used]
    if whole and lost:
        raise ValueError(
            f"{len(texts)} of {len(prompts)} expected pictures found in {pictures.source}, the first missing is "
            f"{lost[0]}: draw it, or score only some with --limit"
        )
    return texts
