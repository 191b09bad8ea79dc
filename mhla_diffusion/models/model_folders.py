"""What is wrong with a folder that a model is to be loaded from, in one line."""

import os
from collections.abc import Mapping
from pathlib import Path

import diffusers

from ..weights import original_files, original_wan
from .tensor_files import WEIGHT_FILE, WEIGHTS_NAME, open_tensors, weight_files

__all__ = ["check_family", "check_model_folder", "check_weight_files"]


def check_model_folder(place: str | os.PathLike | None, subfolder: str | None, name: str) -> None:
    """Raise ValueError when `place` is a file, a pipeline's folder, or one in an original layout.

    Args:
        name: of the class that is to be loaded.
    """
    place = Path(place or "")
    if place.is_file() and place.suffix != ".json":
        raise ValueError(
            f"{place} is one file, {name}.from_pretrained reads a folder: use from_single_file({str(place)!r}), or "
            f"`mhla convert {place} OUT`"
        )
    folder = place / (subfolder or "")
    if not folder.is_dir():
        return
    bare = not (folder / "config.json").is_file()
    if bare and (folder / "model_index.json").is_file():
        raise ValueError(
            f"{folder} is the folder of a pipeline: give {name}.from_pretrained the one of its transformer, with "
            'subfolder="transformer"'
        )
    if bare or original_wan(folder):
        for path in original_files(folder):
            what = "Wan's config.json" if path == folder else f"{path.relative_to(folder)}, no config.json"
            raise ValueError(
                f"{folder} holds a model in its original layout ({what}): `mhla convert {path} OUT` makes a "
                f"folder of it that {name}.from_pretrained reads"
            )


def check_weight_files(folder: Path, variant: str | None) -> None:
    """Raise ValueError when weight files of a model's folder are damaged.

    Raises OSError, as Diffusers does, when they are of a variant that was not asked for.
    """
    if not (folder / "config.json").is_file():
        return
    for path in weight_files(folder, variant):
        open_tensors(path)
        found = WEIGHT_FILE.fullmatch(path.name)["variant"]
        if found and not variant:
            raise OSError(
                f"Error no file named {WEIGHTS_NAME}.bin found in directory {folder}: it holds weights of the variant "
                f"{found} only, give variant={found!r}"
            )


def check_family(config: Mapping, kind: type) -> None:
    """Raise ValueError when a config is of a model that `kind` is no version of."""
    name = config.get("_class_name")
    kin = {base.__name__ for base in kind.__mro__} | {"Transformer2DModel"}  # as early DiT folders name it
    # A subclass of a user's own may be loaded as ours.
    strange = (
        isinstance(name, str) and name not in kin and (name.startswith("MHLA") or hasattr(diffusers, name))
    )
    if strange:
        raise ValueError(f"the config is of a {name}, not of a {kind.__name__}: load it with {name}")
