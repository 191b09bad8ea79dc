"""Whole transformers, converted beside stock: a forward pass or a training step, eager and compiled, in the same run.

`mhla bench model --out results/image_models.json` writes the file after every model, and goes on where an earlier run
on the same device stopped. The floor is the model with its mixing replaced by q + k + v: the same projections, and
nothing between them, so that the compiler cannot drop any of them. `image_rows.py` and `wan_rows.py` say what the rows
of each kind of model are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import diffusers
import torch

from ..pipelines.painter import choose_device
from . import image_rows, wan_rows
from .model_steps import How, released, step_milliseconds
from .profile_model import profile_step
from .timing import about, earlier_result

__all__ = ["MODELS", "chosen", "default_out", "run"]

# By the name that --model takes. Without it the first kind is measured of whose rows one is asked for.
MODELS: dict[str, ModuleType] = {"images": image_rows, "wan-1.3b": wan_rows}
OUT = {"images": "outputs/image_models.json", "wan-1.3b": "outputs/wan.json"}


def kind_of(texts: Sequence[str], model: str | None = None) -> str:
    """The name in `MODELS` whose rows are meant."""
    if model is not None:
        if model not in MODELS:
            raise ValueError(f"no rows for model {model!r}: choose one of {', '.join(MODELS)}")
        return model
    found = [
        name
        for name, kind in MODELS.items()
        if any(text in case.name for text in texts for case in kind.CASES)
    ]
    return next(iter(found or MODELS))


def default_out(texts: Sequence[str], model: str | None = None) -> str:
    return OUT[kind_of(texts, model)]


def chosen(texts: Sequence[str], model: str | None = None) -> list:
    """The cases of a model whose name holds one of the texts; ValueError when a text is in none."""
    cases = MODELS[kind_of(texts, model)].CASES
    for text in texts:
        if not any(text in case.name for case in cases):
            raise ValueError(
                f"no row's name holds {text!r}: they are {', '.join(case.name for case in cases)}"
            )
    return [case for case in cases if not texts or any(text in case.name for text in texts)]


def kept_of(out: Path, start: dict) -> dict:
    """`start`, with what an earlier run with the same device, versions and settings measured."""
    found = earlier_result(out, start)
    if found is None:
        return start
    rows = [{name: value for name, value in row.items() if name != "error"} for row in found["rows"]]
    return start | {"rows": rows, "profiles": [row for row in found["profiles"] if "error" not in row]}


def run(
    out: Path,
    *,
    model: str | None = None,
    rows: Sequence[str] = (),
    minutes: float = 9.0,
    device: str = "auto",
    compile_mode: str = "default",
    fuse_qkv: bool = False,
    graph: bool = True,
    profile: bool = False,
    seconds: float = 2.0,
) -> dict:
    """Measure what fits into the time, writing the JSON file `out` after every row.

    Args:
        model: a name in `MODELS`; None: that of the rows, or images.
        rows: texts of which a row's name must hold one; none: all rows.
        minutes: no row begins after this time.
        device: "auto", "cuda", "cuda:N", or "cpu", which tries the program on tiny models.
        compile_mode: `mode` of `torch.compile`, which compiles each layer; of image models with a graph only one that
            makes no CUDA graphs of its own.
        fuse_qkv: call `fuse_qkv_projections()` on ours before a forward pass, and `share_embedders()` on a DiT.
        graph: on a GPU, capture the pass or training step of each compiled row of an image model as one CUDA graph and
            time its replay; the row holds the time without it as well.
        profile: in place of times, say where an eager forward pass spends its time (see `profile_step`).
        seconds: how long a variant is measured.

    Raises ValueError when the device is not there, when no row is meant, when `out` holds rows of another device,
    version or setting, or when compile_mode and graph exclude each other.
    """
    where = choose_device(device)
    if not seconds > 0:
        raise ValueError(f"seconds={seconds}: give more than 0")
    dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
    how = How(where, dtype, compile_mode, fuse_qkv, seconds, time.monotonic() + 60 * minutes, graph)
    cases, family = chosen(rows, model), MODELS[kind_of(rows, model)]
    if profile:
        cases = [case for case in cases if case.mode == "eager" and case.direction == "forward"]
    start = {**about(where), "settings": family.settings_of(how)}
    start["versions"] = start["versions"] | {"diffusers": diffusers.__version__}
    result = kept_of(out, start | {"rows": [], "profiles": [], "left_out": []})
    out.parent.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        out.write_text(json.dumps(result, indent=1), encoding="utf-8")

    kind = "profiles" if profile else "rows"
    done = {row["name"]: row for row in result[kind]}
    for case in cases:
        row = done.get(case.name)
        if row is not None and (profile or not family.missing(row)):
            continue
        if time.monotonic() > how.end:
            result["left_out"].append(case.name)
            print(f"{case.name}: not measured, {minutes:g} minutes are over", flush=True)
            continue
        if row is None:
            row = family.row_head(case) if profile else family.new_row(case)
            result[kind].append(row)
        try:
            if profile:
                profiled(family, case, row, how)
            else:
                family.measure(case, row, write, how)
        except Exception as error:  # a row that fails must not cost the others' measurements
            row["error"] = f"{type(error).__name__}: {error}"[:500]
        if "error" in row:
            print(f"{case.name}: {row['error']}", flush=True)
        elif not profile:
            print(family.as_line(row, case), flush=True)
        released(where)
        write()
    write()
    return result


def profiled(family: ModuleType, case, row: dict, how: How) -> None:
    """The eager forward pass of ours and of stock taken apart."""
    for variant, step in family.steps(case, family.PROFILED, how):
        wall_ms = step_milliseconds(step, how.device, how.seconds)
        row[variant] = profile_step(step, step.model, how.device, wall_ms=wall_ms)
        print(f"{case.name}, {variant}: {row[variant]['summary']}", flush=True)
        del step
