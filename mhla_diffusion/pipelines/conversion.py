"""Folders and original files made into folders with an MHLA model, weight by weight."""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mhla_diffusion.folders import check_writable, folder_in_the_making
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
from mhla_diffusion.weights import check_pipeline, original_files, original_wan, read_json

__all__ = ["Conversion", "convert_folder"]

PART = "transformer"
SECOND = "transformer_2"  # the other expert of a Wan 2.2 with two, which is converted alike
LAYOUT_DIFFUSERS = "diffusers"
SHARD_BYTES = 10 * 10**9  # Diffusers' own limit for one weight file
RECORD = "mhla_conversion.json"


@dataclass(frozen=True)
class Model:
    """One model to convert: its weight files, and the config.json beside them, if any."""

    files: list[Path]
    config: Path | None = None
    known: Mapping = field(default_factory=dict)  # arguments of the model that stand beside original files


@dataclass(frozen=True)
class Source:
    """What is converted: a model, or two experts, by their names in a pipeline, and the pipeline around them."""

    models: dict[str, Model]
    pipeline: Path | None = None


@dataclass(frozen=True)
class Conversion:
    """What was done, or would be: the folder, a plan for each model, and how many checksums were compared."""

    out: Path
    plans: dict[str, Plan]
    sums_checked: int

    @property
    def plan(self) -> Plan:
        return self.plans[PART]

    def report(self) -> list[str]:
        lines = []
        for name, plan in self.plans.items():
            mark = f"{name}: " if len(self.plans) > 1 else ""
            lines += [mark + line for line in plan.summary()]
        count = sum(len(plan.files) for plan in self.plans.values())
        sums = f"sha256 on record compared: {self.sums_checked} of {count} weight files"
        return [*lines, *([sums] if self.sums_checked else [])]

    def key_map(self) -> list[str]:
        """One line for each weight: where it comes from and what it becomes."""
        return [line for plan in self.plans.values() for line in plan.key_map()]


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
    if (out.exists() or out.is_symlink()) and not dry_run:  # also a link that leads nowhere
        raise ValueError(f"{out} exists already: give the name of a new folder")
    if not dry_run:
        check_writable(out)
    found = find_source(source, variant, None if pipeline is None else Path(pipeline).expanduser())
    plans, sums = {}, 0
    for name, model in found.models.items():
        sums += sum(check_sum(path) for path in model.files)
        files = [open_tensors(path, weights) for path in model.files]
        check_index(files, find_index(model.files))
        if model.config is None and layout == LAYOUT_DIFFUSERS:
            raise ValueError(
                f"{source} is a single file without config.json: give the folder in Diffusers' layout"
            )
        try:
            plans[name] = make_plan(
                files,
                None if model.config is None else read_json(model.config),
                layout=layout,
                given={**model.known, **read_config(config)},
                block_grid=None if block_grid is None else tuple(block_grid),
                layers=layers,
                gate=gate,
                local_conv=local_conv,
            )
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
    if found.pipeline is not None:
        for name, plan in plans.items():
            check_component(found.pipeline, name, plan)
        if out.resolve().is_relative_to(found.pipeline.resolve()) and not dry_run:
            raise ValueError(
                f"{out} is inside {found.pipeline}, which is copied: give a folder outside of it"
            )
    result = Conversion(out, plans, sums)
    if dry_run:
        for plan in plans.values():
            plan.check_values()
    else:
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
        config = read_json(path, 'give arguments of the model such as {"num_attention_heads": 16}')
    return {key: value for key, value in config.items() if not key.startswith("_")}


def find_source(source: Path, variant: str | None, pipeline: Path | None) -> Source:
    """Sort out what `source` is. Raises ValueError when it is nothing that can be converted."""
    if pipeline is not None and not (pipeline / "model_index.json").is_file():
        raise ValueError(
            f"{pipeline} is no pipeline folder (no model_index.json in it): give one with --pipeline"
        )
    wan = original_wan(source)
    if wan:
        if pipeline is not None:
            check_pipeline(pipeline)
        models = {
            name: Model(weight_files(folder, variant), known=wan_arguments(folder))
            for name, folder in zip((PART, SECOND), wan, strict=False)
        }
        return Source(models, pipeline)
    if source.is_file():
        if pipeline is not None:
            check_pipeline(pipeline)
        return Source({PART: Model([source])}, pipeline)
    in_pipeline = (source / "model_index.json").is_file()
    folder = source / PART if in_pipeline else source
    if (folder / "config.json").is_file():
        if pipeline is not None:
            raise ValueError(
                f"{source} has a config.json: --pipeline goes with a file in an original layout only"
            )
        folders = {PART: folder}
        if in_pipeline and (source / SECOND / "config.json").is_file():
            folders[SECOND] = source / SECOND
        models = {name: Model(weight_files(x, variant), x / "config.json") for name, x in folders.items()}
        if in_pipeline:
            check_pipeline(source)
        return Source(models, source if in_pipeline else None)
    original = original_files(source) if source.is_dir() and not in_pipeline else []
    if len(original) == 1:
        return find_source(original[0], variant, pipeline)
    if original:
        names = ", ".join(str(path) for path in original[:5])
        raise ValueError(f"{source} holds several files in an original layout: give one of {names}")
    if not source.exists():
        name = str(source)
        remote = re.fullmatch(r"[\w.-]+/[\w.-]+", name)
        hint = f"; to get it from the Hub: hf download {name} --local-dir {source.name}" if remote else ""
        raise ValueError(
            f"there is no {source}: give a pipeline or a transformer folder in Diffusers' layout, or a file in an "
            f"original one{hint}"
        )
    raise ValueError(
        f"{source} is neither a pipeline nor a transformer folder in Diffusers' layout (no {folder / 'config.json'}), "
        "nor a file in an original one: give one of these"
    )


def wan_arguments(folder: Path) -> dict:
    """What the config.json of an original Wan folder says that the shapes of its weights do not."""
    config = read_json(folder / "config.json")
    known = {"eps": config["eps"]} if "eps" in config else {}
    if config.get("dim") and config.get("num_heads"):
        known["num_attention_heads"] = config["num_heads"]
        known["attention_head_dim"] = config["dim"] // config["num_heads"]
    return known


def check_component(pipeline: Path, part: str, plan: Plan) -> None:
    """Raise ValueError unless the pipeline's transformer is of the kind that takes its place."""
    value = read_json(pipeline / "model_index.json").get(part)
    name = value[1] if isinstance(value, list) and len(value) == 2 else None
    allowed = (plan.family.stock.__name__, plan.family.ours.__name__, "Transformer2DModel")
    if name not in allowed:
        raise ValueError(
            f"{pipeline} has a {name} as its {part}, where a {type(plan.model).__name__} cannot go: "
            f"give a pipeline with a {allowed[0]}"
        )


def write(source: Source, conversion: Conversion, given: Path) -> None:
    """Write everything into a folder beside the final one, which takes its name when it is whole."""
    out, plans = conversion.out, conversion.plans
    shards = {name: split(plan.entries()) for name, plan in plans.items()}
    try:
        with folder_in_the_making(out) as part:
            check_room(out, part, sum(x.size for each in shards.values() for _, shard in each for x in shard))
            if source.pipeline is not None:
                copy_components(
                    source.pipeline, part, {name: type(plan.model).__name__ for name, plan in plans.items()}
                )
            for name, plan in plans.items():
                folder = part if source.pipeline is None and len(plans) == 1 else part / name
                folder.mkdir(exist_ok=True)
                plan.model.save_config(folder)
                write_shards(folder, shards[name], plan)
                write_record(folder, plan, conversion, given)
    except shutil.Error as error:  # of several files, each with its path and reason
        path, _, reason = error.args[0][0]
        raise ValueError(f"cannot copy {path} ({reason}): copy or download the pipeline again") from None
    except OSError as error:
        reason = " ".join(str(error.strerror or error).split())
        raise ValueError(f"cannot write {out} ({reason}): give another folder") from None


def check_room(out: Path, place: Path, needed: int) -> None:
    """Raise ValueError unless so many bytes fit where the folder `place` is."""
    disk = shutil.disk_usage(place)
    if 0 < disk.total and disk.free < needed:  # some file systems do not tell
        raise ValueError(
            f"{out} needs {needed / 1e9:.1f} GB, {disk.free / 1e9:.1f} GB are free there: make room"
        )


def write_record(folder: Path, plan: Plan, conversion: Conversion, given: Path) -> None:
    """What was made out of what, beside the weights."""
    record = {
        "source": given.name,
        "report": conversion.report(),
        "round_trip_error": plan.drift,
        "layout": plan.layout.name if plan.layout else LAYOUT_DIFFUSERS,
        "versions": versions(),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def copy_components(pipeline: Path, part: Path, class_names: Mapping[str, str]) -> None:
    """The other components as they are, and an index that names our models for those that are converted."""
    root = str(pipeline)

    def left_out(path: str, names: list[str]) -> set[str]:
        for name in names:
            link = Path(path, name)
            if link.is_symlink() and link.is_dir() and Path(path).resolve().is_relative_to(link.resolve()):
                raise ValueError(
                    f"{link} leads to a folder that it is in, so the copy would have no end: remove it"
                )
        return {*class_names, ".cache", ".git"} & set(names) if path == root else set()

    shutil.copytree(pipeline, part, ignore=left_out, dirs_exist_ok=True)
    index = read_json(pipeline / "model_index.json")
    index |= {name: ["mhla_diffusion", class_name] for name, class_name in class_names.items()}
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
