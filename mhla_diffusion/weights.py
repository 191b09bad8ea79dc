"""Where pipelines lie on disk, and whether their files are whole; reads headers, imports no torch.

A pipeline is looked for by explicit path, then in the folders of `$MHLA_WEIGHTS`, then in the checkout that
this package is imported from, then among installed packages. Nothing is ever downloaded from here.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path

DEFAULT_PIPELINE = "sana-mhla-emoji"
WEIGHTS_VARIABLE = "MHLA_WEIGHTS"
# A package that ships pipelines names each of them here: `sana-mhla-emoji = "package.folder"`.
ENTRY_POINT_GROUP = "mhla_diffusion.pipelines"


@dataclass(frozen=True)
class Place:
    """A folder that is looked into for a pipeline, and what makes it a candidate."""

    path: Path
    why: str

    @property
    def found(self) -> bool:
        return (self.path / "model_index.json").is_file()


def search_places(name: str) -> list[Place]:
    """Every folder that may hold the pipeline `name`, in the order in which they are looked into."""
    places = [Place(Path(name).expanduser(), "path")]
    if places[0].path.is_absolute():
        return places
    for root in filter(None, os.environ.get(WEIGHTS_VARIABLE, "").split(os.pathsep)):
        places.append(Place(Path(root).expanduser() / name, f"${WEIGHTS_VARIABLE}"))
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "pyproject.toml").is_file():
        places.append(Place(checkout / "pipelines" / name, "checkout"))
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name):
        spec = importlib.util.find_spec(entry.module)
        for folder in spec.submodule_search_locations or [] if spec else []:
            places.append(Place(Path(folder), f"package {entry.module}"))
    return places


def find_pipeline(name: str | os.PathLike) -> Path:
    """Folder of the pipeline `name`, a path or the name of a folder in one of the searched places.

    Raises ValueError (one line: every place searched and what to type) when there is none, when the folder is
    not a pipeline, or when one of its files is missing or cut short.
    """
    name = os.fspath(name)
    places = search_places(name)
    for place in places:
        if place.found:
            check_pipeline(place.path)
            return place.path
    given = places[0].path
    if (given / "config.json").is_file():
        raise ValueError(
            f"{given} holds a single model, not a pipeline (it has config.json but no model_index.json): "
            f"give the pipeline folder, often {given.resolve().parent}"
        )
    if given.is_dir():
        raise ValueError(
            f"{given} is not a pipeline folder (no model_index.json in it): give a folder in "
            "Diffusers' layout, as pipeline.save_pretrained(folder) writes it"
        )
    searched = ", ".join(f"{place.path} ({place.why})" for place in places)
    unset = "" if os.environ.get(WEIGHTS_VARIABLE) else f"; ${WEIGHTS_VARIABLE} is not set"
    raise ValueError(
        f"no pipeline {name!r}; searched {searched}{unset}. Give the path of a pipeline folder, set "
        f"{WEIGHTS_VARIABLE} to the folder that holds it, or clone the repository, whose pipelines/ folder "
        "has the small ones (the installed package ships none)"
    )


def check_pipeline(folder: Path) -> None:
    """Raise ValueError if a component of the pipeline lacks a file or a weight file is not whole."""
    components = read_json(folder / "model_index.json")
    for name, value in components.items():
        is_component = isinstance(value, list) and len(value) == 2 and not name.startswith("_")
        if is_component and value[1] and isinstance(value[1], str):
            lacking = what_is_lacking(folder / name, value[1])
            if lacking:
                raise ValueError(
                    f"{folder} lacks {lacking} that model_index.json names: copy the pipeline folder again"
                )
    check_files(folder)


def check_files(folder: Path) -> None:
    """Raise ValueError unless every safetensors file in a folder and below it is whole."""
    for path in sorted(folder.rglob("*.safetensors")):
        check_safetensors(path)


# One of them holds the vocabulary; without any, transformers builds an empty tokenizer and says nothing.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.spm", "*.model")
WEIGHTS = ("*.safetensors", "*.bin")


def what_is_lacking(part: Path, class_name: str) -> str | None:
    """What the folder of one component lacks, as the words of an error message; None when it has all."""
    if not part.is_dir():
        return f"the component folder {part.name}/"
    if "Tokenizer" in class_name:
        if not any(any(part.glob(pattern)) for pattern in VOCABULARIES):
            return f"the vocabulary (tokenizer.json) in the component {part.name}/"
        return None
    if class_name.endswith("Scheduler"):
        if not (part / "scheduler_config.json").is_file():
            return f"the scheduler_config.json in the component {part.name}/"
        return None
    weighed = any(any(part.glob(pattern)) for pattern in WEIGHTS)
    if (part / "config.json").is_file():
        read_json(part / "config.json")
        if not weighed:
            return f"the weights (.safetensors) in the component {part.name}/"
    elif weighed:
        return f"the config.json in the component {part.name}/"
    for listing in part.glob("*.safetensors.index.json"):
        weight_map = read_json(listing).get("weight_map")
        names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
        if not names or not all(isinstance(name, str) for name in names):
            return f"the weight_map of {listing.name} in the component {part.name}/"
        for shard in sorted(names):
            if not (part / shard).is_file():
                return f"the weights {shard} in the component {part.name}/"
    return None


def read_json(path: Path, remedy: str = "copy the pipeline folder again") -> dict:
    """The object in a JSON file of a pipeline. Raises ValueError, with the file and what to do, when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): {remedy}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object: {remedy}")
    return value


def original_wan(folder: Path) -> list[Path]:
    """Where Wan's transformers in the original layout are: in the folder itself, or in one for each of two experts.

    That layout has a config.json of another kind than Diffusers'. Empty for every other folder.
    """
    for places in ([folder], [folder / "high_noise_model", folder / "low_noise_model"]):
        configs = [place / "config.json" for place in places]
        if all(path.is_file() and read_json(path).get("_class_name") == "WanModel" for path in configs):
            return places
    return []


def original_files(folder: Path) -> list[Path]:
    """What `mhla convert` reads of a folder that is not in Diffusers' layout: weight files, or Wan's folder itself."""
    if (folder / "model_index.json").is_file():
        return []
    if original_wan(folder):
        return [folder]  # its weights may be in many files, and others beside them are of other models
    patterns = ("*.pth", "*.pt", "*.ckpt", "*/*.pth", "*/*.pt", "*/*.ckpt")
    found = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    if not (folder / "config.json").is_file():
        found += sorted(folder.glob("*.safetensors"))
    return found


def check_safetensors(path: Path) -> None:
    """Raise ValueError unless the size of a safetensors file is the one that its header promises."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":
            raise ValueError(
                f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its repository"
            )
        if len(start) < 8 or length > size - 8:
            raise ValueError(
                f"{path} is cut short or no safetensors file ({size} bytes): copy or download it again"
            )
        try:
            header = json.loads(file.read(length))
            end = max(
                (t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"), default=0
            )
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ValueError(
                f"{path} has no readable safetensors header: copy or download it again"
            ) from None
    if size != 8 + length + end:
        raise ValueError(
            f"{path} is cut short: {size} bytes, its header promises {8 + length + end}; "
            "copy or download it again"
        )


def fingerprint(folder: Path) -> str:
    """sha256 over the names and contents of every JSON and safetensors file of a pipeline folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".json", ".safetensors") and path.is_file():
            with open(path, "rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def known_pipelines() -> dict[str, Path]:
    """Name and folder of each pipeline that `find_pipeline` would find by name alone."""
    names = {entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)} | {
        DEFAULT_PIPELINE
    }
    for place in search_places("any")[1:]:
        if place.path.parent.is_dir():
            names.update(path.name for path in place.path.parent.iterdir() if path.is_dir())
    found = {name: next((p.path for p in search_places(name)[1:] if p.found), None) for name in sorted(names)}
    return {name: path for name, path in found.items() if path}
