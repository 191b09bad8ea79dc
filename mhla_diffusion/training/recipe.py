"""Reads a TOML recipe into `config.Recipe`: strict about names, types and ranges, one-line errors."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import math
import tomllib
import types
import typing
from pathlib import Path

from .config import VIDEO_KINDS, Recipe

# Settings that may change between a checkpoint and its continuation without changing what is computed.
NEUTRAL = (
    "run.name", "run.out", "run.device", "run.log_every", "run.tracker", "run.max_minutes", "run.compile",
    "run.compile_scope", "run.cuda_graph", "run.gradient_checkpointing", "run.init_from", "run.first_step",
    "data.cache", "data.encode_batch", "data.keep_on", "model.defaults", "checkpoint", "sample",
)  # fmt: skip


def nearest(name: str, allowed: typing.Iterable[str]) -> str:
    """The allowed name closest to `name`, as the words of an error message."""
    allowed = sorted(allowed)
    close = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(allowed)}"


def _type_name(hint, many: bool = False) -> str:
    """A type in the words of an error message; `many` for the entries of a list."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(a) for a in args)
    if origin is list:
        return f"{'lists' if many else 'a list'} of {_type_name(args[0], many=True)}"
    if origin is types.UnionType:
        return " or ".join(_type_name(a, many) for a in args if a is not type(None))
    if dataclasses.is_dataclass(hint) or hint is dict:
        return "tables" if many else "a table"
    if hint is bool:
        return "true or false"
    one = {str: "a string", int: "an integer", float: "a number"}[hint]
    return f"{one.split()[1]}s" if many else one


def _example(hint, default) -> str:
    """What to write instead, as the end of an error message: the setting's default, where that says something."""
    if typing.get_origin(hint) is typing.Literal or isinstance(default, bool):
        return ""
    return (
        f", for example {json.dumps(default)}" if isinstance(default, int | float | list) and default else ""
    )


def _typed(value, hint, where: str, default=None):
    """`value` as `hint`, or a ValueError that names the place, the value and what is expected."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    wrong = ValueError(f"recipe: {where} = {value!r} is not {_type_name(hint)}{_example(hint, default)}")
    if origin is types.UnionType:
        choices = [a for a in args if a is not type(None)]
        if len(choices) == 1:
            return _typed(value, choices[0], where)
        for choice in choices:
            try:
                return _typed(value, choice, where)
            except ValueError:
                continue
        raise wrong
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise wrong
        return _section(hint, value, where)
    if origin is typing.Literal:
        if value not in args or isinstance(value, bool):
            if where == "run.mixed_precision" and value in ("fp16", "float16"):
                raise ValueError(
                    'recipe: run.mixed_precision = "fp16" overflows in linear attention and ends in NaN; '
                    'write "bf16" (same speed, float32 range) or "no"'
                )
            raise wrong
        return value
    if origin is list:
        if not isinstance(value, list):
            raise wrong
        return [_typed(item, args[0], f"{where}[{i}]") for i, item in enumerate(value)]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise wrong
    return dict(value) if hint is dict else value


def _section(cls, table: dict, where: str = ""):
    hints = typing.get_type_hints(cls)
    defaults = {
        setting.name: setting.default_factory() if callable(setting.default_factory) else setting.default
        for setting in dataclasses.fields(cls)
    }
    values = {}
    for key, value in table.items():
        if key not in hints:
            place = f"[{where}]" if where else "the recipe"
            raise ValueError(f"recipe: unknown key {key!r} in {place}; {nearest(key, hints)}")
        values[key] = _typed(value, hints[key], f"{where}.{key}" if where else key, defaults[key])
    return cls(**values)


def check_model_table(table: dict, allowed: typing.Iterable[str], where: str) -> None:
    """ValueError naming the nearest field when a model table holds a name the model does not know."""
    allowed = set(allowed)
    for key in table:
        if key not in allowed:
            raise ValueError(f"recipe: unknown key {key!r} in [{where}]; {nearest(key, allowed)}")


def constructor_fields(cls) -> list[str]:
    """Names that the constructor of a Diffusers model class takes."""
    return [name for name in inspect.signature(cls.__init__).parameters if name != "self"]


def _override(table: dict, text: str) -> None:
    """Puts one `section.key=value` into the recipe's table; the value is TOML, or else a plain string."""
    name, sign, value = text.partition("=")
    name = name.strip()
    if not sign or not name:
        raise ValueError(f"override {text!r}: write it as section.key=value, such as optimizer.lr=3e-4")
    try:
        value = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = value.strip()
    *sections, key = name.split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ValueError(f"override {text!r}: {section!r} is not a table")
    table[key] = value


def read_table(path: str | Path, cls: type, overrides: typing.Iterable[str] = ()):
    """Reads a TOML file into the dataclass `cls`; `overrides` are `key=value` or `section.key=value` texts.

    Raises:
        ValueError: missing file, bad TOML, unknown key (names the nearest), wrong type (names the expected one).
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"no recipe at {path}: give the path of a .toml file, such as train/recipes/<name>.toml"
        )
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe {path} is not valid TOML: {error}") from None
    for text in overrides:
        _override(table, text)
    return _section(cls, table)


def load_recipe(path: str | Path, overrides: typing.Iterable[str] = ()) -> Recipe:
    """Reads and checks a recipe.

    Args:
        path: a TOML file.
        overrides: `section.key=value` texts that replace what the file says.

    Raises:
        ValueError: as `read_table`, and for values out of range. Nothing is computed before.
    """
    recipe = read_table(path, Recipe, overrides)
    _check_ranges(recipe)
    recipe.run.out = recipe.run.out or f"runs/{recipe.run.name}"
    return recipe


def _check_ranges(recipe: Recipe) -> None:
    run, model, data, optimizer = recipe.run, recipe.model, recipe.data, recipe.optimizer

    def need(condition: bool, name: str, value, allowed: str) -> None:
        if not condition:
            raise ValueError(f"recipe: {name} = {value!r}; allowed: {allowed}")

    need(
        run.name != "" and "/" not in run.name,
        "run.name",
        run.name,
        'a name without slashes, such as "my-run"',
    )
    for name in ("steps", "batch_size", "gradient_accumulation", "log_every"):
        need(getattr(run, name) >= 1, f"run.{name}", getattr(run, name), "1 or more")
    need(run.seed >= 0, "run.seed", run.seed, "0 or more")
    need(run.first_step >= -1, "run.first_step", run.first_step, "0 or more, or -1 to go by run.init_from")
    sections = {"checkpoint": recipe.checkpoint, "sample": recipe.sample}
    for section, name in (("checkpoint", "every"), ("checkpoint", "export_every"), ("sample", "every")):
        value = getattr(sections[section], name)
        need(value >= 0, f"{section}.{name}", value, "0 (never in between) or more steps")
    need(run.max_minutes >= 0, "run.max_minutes", run.max_minutes, "0 (no limit) or more")
    need(model.base != "", "model.base", model.base, "the path of a pipeline folder")
    need(data.path != "", "data.path", data.path, "the path of the images or videos")
    videos = data.kind in VIDEO_KINDS
    sized = all(len(size) == 3 and min(size) >= 1 for size in data.sizes) and bool(data.sizes) == videos
    need(
        sized,
        "data.sizes",
        data.sizes,
        "one or more [frames, height, width], such as [[81, 480, 832]]"
        if videos
        else 'only with data.kind = "videos" or "moving-emoji"',
    )
    need(data.fps >= 0, "data.fps", data.fps, "0 (as they are) or more frames a second")
    need(0 <= data.caption_dropout <= 1, "data.caption_dropout", data.caption_dropout, "0 to 1")
    need(data.size >= 1, "data.size", data.size, "1 or more pixels")
    need("{}" in data.template, "data.template", data.template, "a text with {} where the class name goes")
    length = data.max_sequence_length
    need(length >= 0, "data.max_sequence_length", length, "0 (the base pipeline's own) or more tokens")
    need(0 <= data.backgrounds, "data.backgrounds", data.backgrounds, "0 or more")
    need(data.clips >= 1, "data.clips", data.clips, "1 or more")
    need(0 <= data.compositions, "data.compositions", data.compositions, "0 or more")
    need(data.encode_batch >= 1, "data.encode_batch", data.encode_batch, "1 or more")
    need(0 < optimizer.lr < math.inf, "optimizer.lr", optimizer.lr, "above 0")
    need(optimizer.eps > 0, "optimizer.eps", optimizer.eps, "above 0")
    need(0 <= optimizer.lr_min <= 1, "optimizer.lr_min", optimizer.lr_min, "a share of lr, 0 to 1")
    need(optimizer.mixing_lr >= 0, "optimizer.mixing_lr", optimizer.mixing_lr, "0 or more")
    need(optimizer.weight_decay >= 0, "optimizer.weight_decay", optimizer.weight_decay, "0 or more")
    need(
        len(optimizer.betas) == 2 and all(0 <= b < 1 for b in optimizer.betas),
        "optimizer.betas",
        optimizer.betas,
        "two numbers in [0, 1), such as [0.9, 0.99]",
    )
    need(optimizer.max_grad_norm >= 0, "optimizer.max_grad_norm", optimizer.max_grad_norm, "0 (off) or more")
    need(optimizer.warmup >= 0, "optimizer.warmup", optimizer.warmup, "0 or more steps")
    need(recipe.distill.steps >= 0, "distill.steps", recipe.distill.steps, "0 (none) or more")
    rate = recipe.distill.lr
    need(rate is None or 0 < rate < math.inf, "distill.lr", rate, "above 0, or left out for optimizer.lr")
    weight = recipe.loss.variational_weight
    need(0 <= weight < math.inf, "loss.variational_weight", weight, "0 or more")
    need(math.isfinite(recipe.flow.logit_mean), "flow.logit_mean", recipe.flow.logit_mean, "a finite number")
    need(recipe.flow.logit_std > 0, "flow.logit_std", recipe.flow.logit_std, "above 0")
    need(recipe.flow.shift > 0, "flow.shift", recipe.flow.shift, "above 0")
    need(recipe.ema.warmup >= 0, "ema.warmup", recipe.ema.warmup, "0 (none) or more")
    need(model.lora.rank >= 1, "model.lora.rank", model.lora.rank, "1 or more")
    need(0 <= recipe.ema.decay < 1, "ema.decay", recipe.ema.decay, "0 to below 1")
    need(recipe.checkpoint.keep >= 1, "checkpoint.keep", recipe.checkpoint.keep, "1 or more")
    need(recipe.sample.steps >= 1, "sample.steps", recipe.sample.steps, "1 or more")
    need(recipe.sample.guidance >= 0, "sample.guidance", recipe.sample.guidance, "0 or more")
    if recipe.sample.every > 0:
        need(len(recipe.sample.prompts) > 0, "sample.prompts", recipe.sample.prompts, "at least one prompt")
    if model.transformer is not None and model.convert is not None:
        raise ValueError(
            "recipe: [model.transformer] builds a fresh transformer, so there is nothing for "
            "[model.convert] to convert; keep one of them"
        )
    if recipe.distill.steps and model.transformer is not None and not run.init_from:
        raise ValueError(
            f"recipe: distill.steps = {recipe.distill.steps}, but [model.transformer] builds a fresh transformer, "
            "whose attention has nothing to teach; write distill.steps = 0, or take a trained base with [model.convert]"
        )
    if model.text_encoder is not None and not model.train_text_encoder and not run.init_from:
        raise ValueError(
            "recipe: a fresh [model.text_encoder] that is not trained says nothing; "
            "write model.train_text_encoder = true"
        )
    if run.batch_size % run.gradient_accumulation:
        raise ValueError(
            f"recipe: run.batch_size = {run.batch_size} does not divide into "
            f"run.gradient_accumulation = {run.gradient_accumulation} micro-batches"
        )


def flat(recipe: Recipe | dict) -> dict:
    """A recipe as one flat `{"section.key": value}`; inner tables become dotted names."""
    pairs = {}

    def walk(prefix: str, value) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else key, inner)
        else:
            pairs[prefix] = value

    walk("", dataclasses.asdict(recipe) if dataclasses.is_dataclass(recipe) else recipe)
    return pairs


def differing_keys(recipe: Recipe, other: dict) -> list[str]:
    """Names of settings in which `recipe` computes something else than `other` (a stored `asdict`).

    A setting that `other` is too old to have counts as its default, which stands for what was computed then.
    """
    ours, theirs = flat(recipe), flat(other)
    defaults = {name: value for name, value in flat(Recipe()).items() if name not in theirs}
    neutral = NEUTRAL
    if recipe.optimizer.schedule == "constant":
        neutral += ("run.steps", "optimizer.lr_min")
    names = [
        n
        for n in sorted(ours.keys() | theirs.keys())
        if ours.get(n, "absent") != theirs.get(n, defaults.get(n, "absent"))
    ]
    return [n for n in names if not any(n == key or n.startswith(key + ".") for key in neutral)]


def describe() -> str:
    """Every setting as a Markdown table: name, type, default, meaning."""
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]

    def walk(cls, prefix: str) -> None:
        hints = typing.get_type_hints(cls)
        for item in dataclasses.fields(cls):
            hint, name = hints[item.name], f"{prefix}{item.name}"
            inner = next((a for a in typing.get_args(hint) if dataclasses.is_dataclass(a)), hint)
            if dataclasses.is_dataclass(inner):
                walk(inner, f"{name}.")
                continue
            default = item.default if item.default is not dataclasses.MISSING else item.default_factory()
            kind = _type_name(hint).replace("|", "or")
            rows.append(f"| `{name}` | {kind} | `{default!r}` | {item.metadata['doc']} |")

    walk(Recipe, "")
    return "\n".join(rows)
