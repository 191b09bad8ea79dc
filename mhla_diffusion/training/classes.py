"""Classes in place of captions: their names in a data set, their numbers in a model."""

from __future__ import annotations

import difflib
import json
import tarfile
from pathlib import Path

from .config import DataConfig
from .emoji_sprites import BUILD_HINT
from .picture_files import check_path, list_pictures


def emoji_labels(path: str | Path, field: str, split: str | None = None) -> list[str]:
    """The subgroup or group of each drawing of the set, in its order, without decoding a picture.

    Raises:
        ValueError: the file is missing or broken.
    """
    try:
        with tarfile.open(path, "r:") as archive:
            files = {
                member.name: archive.extractfile(member).read()
                for member in archive
                if member.name.endswith(".json")
            }
        count = json.loads(files["manifest.json"])["images"]
        records = [json.loads(files[f"{i:06d}.json"]) for i in range(count)]
        return [record[field] for record in records if split in (None, record["split"])]
    except (tarfile.TarError, OSError, KeyError, TypeError, ValueError) as fault:
        raise ValueError(f"{path} is not a whole emoji set ({fault}); build it with: {BUILD_HINT}") from fault


def class_names(config: DataConfig) -> list[str]:
    """Names of the data set's classes in alphabetical order; of the emoji set those of all its splits.

    Raises:
        ValueError: no classes, composed scenes (which have none), or a name with a comma.
    """
    check_path(config)
    if config.kind == "emoji":
        if config.compositions:
            raise ValueError(
                f"recipe: data.compositions = {config.compositions}, but a composed scene has no class; write 0"
            )
        names = set(emoji_labels(config.path, config.label))
    else:
        root = Path(config.path)
        if not root.is_dir():
            raise ValueError(f"recipe: data.path = {config.path!r} is not a folder; give a folder of images")
        names = {texts[0] for _, texts in list_pictures(root, config.template, by_class=True)}
    for name in names:
        if "," in name:  # a pipeline takes it for several names of one class
            raise ValueError(f"class {name!r} of {config.path}: write the name without commas")
    return sorted(names)


def named_classes(id2label: dict | None) -> dict[str, int]:
    """Name -> number, as DiT pipelines read `id2label`: several names of one class stand between commas."""
    return {
        name.strip(): int(number)
        for number, names in (id2label or {}).items()
        for name in names.split(",")
        if name.strip()
    }


def class_numbers(names: list[str], count: int, id2label: dict | None, by: str) -> dict[str, int]:
    """The number of each of the data's classes in a model that has `count` classes already.

    Args:
        id2label: label names of the model's pipeline, if it has any.
        by: "names" or "order", as `data.classes`.

    Raises:
        ValueError: a class that the model does not have.
    """
    if by == "order":
        if len(names) != count:
            raise ValueError(
                f'recipe: data.classes = "order" with {len(names)} classes, but the model has {count}; name the '
                'folders by class and write "names", or write model.new_classes = true'
            )
        return {name: number for number, name in enumerate(names)}
    known, numbers = named_classes(id2label), {}
    for name in names:
        if name in known:
            numbers[name] = known[name]
        elif name.isdecimal() and int(name) < count:
            numbers[name] = int(name)
        else:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(
                f"class {name!r} of the data is neither a name nor a number of the model's {count} classes{hint}; to "
                "learn the data's own classes write model.new_classes = true, or for folders in ImageNet's order "
                'data.classes = "order"'
            )
    return numbers
