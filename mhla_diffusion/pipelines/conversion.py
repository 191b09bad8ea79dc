"""Folders and original files made into folders with an MHLA model, weight by weight."""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mhla_diffusion.models.checkpoint_plan import Plan, make_plan
from mhla_diffusion.models.tensor_files import (
    WEIGHTS_NAME,
    Entry,
    check_index,
    check_sum,
    find_index,
    open_tensors,
    weight_files,
    write_safetensors,
)
from mhla_diffusion.provenance import versions
from mhla_diffusion.weights import check_pipeline, is_original_wan, original_files, read_json

__all__ = ["Conversion", "convert_folder"]

PART = "transformer"
LAYOUT_DIFFUSERS = "diffusers"
SHARD_BYTES = 10 * 10**9  # Diffusers' own limit for one weight file
RECORD = "mhla_conversion.json"


@dataclass(frozen=True)
class Source:
    """What is converted: weight files, the config.json beside them, if any, and the pipeline around them."""

    files: list[Path]
    config: Path | None
    pipeline: Path | None
    known: Mapping = field(default_factory=dict)  # arguments of the model that stand beside original files


@dataclass(frozen=True)
class Conversion:
    """What was done, or would be: the folder, the plan, and how many files had a checksum that was compared."""

    out: Path
    plan: Plan
    sums_checked: int

    def report(self) -> list[str]:
        sums = f"sha256 on record compared: {self.sums_checked} of {len(self.plan.files)} weight files"
        return [*self.plan.summary(), *([sums] if self.sums_checked else [])]


def convert_folder(
    source: str | os.PathLike,
    out: str | os.PathLike,
    *,
    block_grid: Sequence[int] | None = None,
    layers: str | Sequence[int] | None = None,
    layout: str = "auto",
    config: Mapping | str | os.PathLike | None = None,
    gate: bool = False,
    local_conv: int | None = None,
    variant: str | None = None,
    weights: str | None = None,
    pipeline: str | os.PathLike | None = None,
    dry_run: bool = False,
) -> Conversion:
    """Convert a model and write the result to the new folder `out`, which appears whole or not at all.

    Weights keep their values and dtypes, except that mixing matrices are float32. They are read and written one
    at a time: beside the model's meta data, no more than the largest weight file is ever in memory. A sha256
    that lies beside a file is compared first.

    Args:
        source: a pipeline or transformer folder in Diffusers' layout, stock or MHLA, with one weight file or
            shards; or a file in the original layout of DiT, SANA, Wan or the released MHLA code, or its folder.
        block_grid: blocks per axis, (rows, columns) or for video (frames, rows, columns). None: (4, 4) for a stock
            model, (3, 5, 10) for Wan, and for released MHLA weights what is in the file. The matrices of an MHLA model
            are interpolated (`interpolate_mixing`).
        layers: "all" (also None), a share such as "2/3", or indices of the layers to convert; [] converts none.
        layout: "auto", "diffusers", or the name of an original layout (see `checkpoint_layouts`).
        config: arguments of the model, or a JSON file with them, which an original file does not tell.
        gate, local_conv: as in `convert`.
        variant: which weights of a folder to take, such as "fp16".
        weights: which entry of a pickled checkpoint to take; None: the average, where there is one.
        pipeline: with an original file, a pipeline folder whose other components `out` gets, too.
        dry_run: work everything out and write nothing.

    Raises ValueError (one line) on anything amiss; `out` does not exist then.
    """
    source, out = Path(source).expanduser(), Path(out).expanduser()
    if out.exists() and not dry_run:
        raise ValueError(f"{out} exists already: give the name of a new folder")
    found = find_source(source, variant, None if pipeline is None else Path(pipeline).expanduser())
    sums = sum(check_sum(path) for path in found.files)
    files = [open_tensors(path, weights) for path in found.files]
    check_index(files, find_index(found.files))
    if found.config is None and layout == LAYOUT_DIFFUSERS:
        raise ValueError(
            f"{source} is a single file without config.json: give the folder in Diffusers' layout"
        )
    try:
        plan = make_plan(
            files,
            None if found.config is None else read_json(found.config),
            layout=layout,
            given={**found.known, **read_config(config)},
            block_grid=None if block_grid is None else tuple(block_grid),
            layers=layers,
            gate=gate,
            local_conv=local_conv,
        )
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    if found.pipeline is not None:
        check_component(found.pipeline, plan)
        if out.resolve().is_relative_to(found.pipeline.resolve()) and not dry_run:
            raise ValueError(
                f"{out} is inside {found.pipeline}, which is copied: give a folder outside of it"
            )
    result = Conversion(out, plan, sums)
    if not dry_run:
        write(found, result, source)
    return result


def read_config(config: Mapping | str | os.PathLike | None) -> dict:
    """Arguments of the model that the caller gives, without what Diffusers puts beside them."""
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        path = Path(config).expanduser()
        if not path.is_file():
            raise ValueError(f"there is no config file {path}: give a JSON file with arguments of the model")
        config = read_json(path)
    return {key: value for key, value in config.items() if not key.startswith("_")}


def find_source(source: Path, variant: str | None, pipeline: Path | None) -> Source:
    """Sort out what `source` is. Raises ValueError when it is nothing that can be converted."""
    if pipeline is not None and not (pipeline / "model_index.json").is_file():
        raise ValueError(
            f"{pipeline} is no pipeline folder (no model_index.json in it): give one with --pipeline"
        )
    if source.is_dir() and is_original_wan(source):
        if pipeline is not None:
            check_pipeline(pipeline)
        return Source(weight_files(source, variant), None, pipeline, wan_arguments(source))
    if source.is_file():
        if pipeline is not None:
            check_pipeline(pipeline)
        return Source([source], None, pipeline)
    in_pipeline = (source / "model_index.json").is_file()
    folder = source / PART if in_pipeline else source
    if (folder / "config.json").is_file():
        if pipeline is not None:
            raise ValueError(
                f"{source} has a config.json: --pipeline goes with a file in an original layout only"
            )
        files = weight_files(folder, variant)
        if in_pipeline:
            check_pipeline(source)
        return Source(files, folder / "config.json", source if in_pipeline else None)
    original = original_files(source) if source.is_dir() and not in_pipeline else []
    if len(original) == 1:
        return find_source(original[0], variant, pipeline)
    if original:
        names = ", ".join(str(path) for path in original[:5])
        raise ValueError(f"{source} holds several files in an original layout: give one of {names}")
    name = str(source)
    remote = not source.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    hint = f"; to get it from the Hub: hf download {name} --local-dir {source.name}" if remote else ""
    raise ValueError(
        f"{source} is neither a pipeline nor a transformer folder in Diffusers' layout (no {folder / 'config.json'}), "
        f"nor a file in an original one: give one of these{hint}"
    )


def wan_arguments(folder: Path) -> dict:
    """What the config.json of an original Wan folder says that the shapes of its weights do not."""
    config = read_json(folder / "config.json")
    known = {"eps": config["eps"]} if "eps" in config else {}
    if config.get("dim") and config.get("num_heads"):
        known["num_attention_heads"] = config["num_heads"]
        known["attention_head_dim"] = config["dim"] // config["num_heads"]
    return known


def check_component(pipeline: Path, plan: Plan) -> None:
    """Raise ValueError unless the pipeline's transformer is of the kind that takes its place."""
    value = read_json(pipeline / "model_index.json").get(PART)
    name = value[1] if isinstance(value, list) and len(value) == 2 else None
    allowed = (plan.family.stock.__name__, plan.family.ours.__name__, "Transformer2DModel")
    if name not in allowed:
        raise ValueError(
            f"{pipeline} has a {name} as its transformer, where a {type(plan.model).__name__} cannot go: "
            f"give a pipeline with a {allowed[0]}"
        )


def write(source: Source, conversion: Conversion, given: Path) -> None:
    """Write everything into a folder beside the final one, and rename it when it is whole."""
    out, plan = conversion.out, conversion.plan
    part = out.absolute().with_name(f".{out.name}.{os.getpid()}.part")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        shards = split(plan.entries())
        needed = sum(entry.size for _, shard in shards for entry in shard)
        free = shutil.disk_usage(part.parent).free
        if free < needed:
            raise ValueError(
                f"{out} needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free there: make room"
            )
        folder = part
        if source.pipeline is not None:
            copy_components(source.pipeline, part, type(plan.model).__name__)
            folder = part / PART
        folder.mkdir(parents=True)
        plan.model.save_config(folder)
        write_shards(folder, shards, plan)
        record = {"source": given.name, "report": conversion.report(), "round_trip_error": plan.drift}
        record |= {"layout": plan.layout.name if plan.layout else LAYOUT_DIFFUSERS, "versions": versions()}
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        os.replace(part, out)
    except OSError as error:
        reason = " ".join(str(error.strerror or error).split())
        raise ValueError(f"cannot write {out} ({reason}): give another folder") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def copy_components(pipeline: Path, part: Path, class_name: str) -> None:
    """The other components as they are, and an index that names our model for this one."""
    root = str(pipeline)
    shutil.copytree(
        pipeline,
        part,
        ignore=lambda path, names: {PART, ".cache", ".git"} & set(names) if path == root else (),
    )
    index = read_json(pipeline / "model_index.json")
    index[PART] = ["mhla_diffusion", class_name]
    (part / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def split(lists: Sequence[Sequence[Entry]]) -> list[tuple[int, list[Entry]]]:
    """Entries of each output file with the number of the input file that they come from."""
    shards: list[tuple[int, list[Entry]]] = []
    for number, entries in enumerate(lists):
        size = 0
        for entry in entries:
            if not shards or shards[-1][0] != number or size + entry.size > SHARD_BYTES:
                shards.append((number, []))
                size = 0
            shards[-1][1].append(entry)
            size += entry.size
    return shards


def write_shards(folder: Path, shards: Sequence[tuple[int, list[Entry]]], plan: Plan) -> None:
    """The weight files, and their index when there are several."""
    total = len(shards)
    weight_map = {}
    for number, (source, entries) in enumerate(shards, 1):
        end = "" if total == 1 else f"-{number:05d}-of-{total:05d}"
        name = f"{WEIGHTS_NAME}{end}.safetensors"
        write_safetensors(folder / name, entries)
        weight_map |= {entry.key: name for entry in entries}
        if number == total or shards[number][0] != source:
            plan.files[source].close()
    if total > 1:
        size = sum(entry.size for _, entries in shards for entry in entries)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        path = folder / f"{WEIGHTS_NAME}.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
