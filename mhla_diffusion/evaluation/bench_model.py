"""Whole transformers, converted beside stock: a forward pass or a training step, eager and compiled, in the same run.

`mhla bench model --out results/image_models.json` writes the file after every model, and goes on where an earlier run
on the same device stopped. The floor is the converted model with its mixing replaced by q + k + v: the same
projections, and nothing between them, so that the compiler cannot drop any of them.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import diffusers
import torch
from diffusers.models.attention_processor import Attention

from ..mixing import clip_mixings, learnable_mixings
from ..models.convert import convert
from ..models.dit_presets import dit_config
from ..models.sana_presets import sana_config
from .profile_model import profile_step
from .timing import about

__all__ = ["CASES", "Case", "floor_of", "run"]

VARIANTS = ("stock", "ours", "floor")
CAPTION_TOKENS = 300


class Case(NamedTuple):
    """One row. target: ours over stock, compiled, as aimed at."""

    family: str  # sana or dit
    model: str
    size: int
    batch: int
    block_grid: tuple[int, int]
    direction: str = "forward"
    mode: str = "compiled"
    target: float | None = None

    @property
    def name(self) -> str:
        return f"{self.family}-{self.model}-{self.size}/{self.direction}/{self.mode}"

    @property
    def title(self) -> str:
        return f"{'SANA' if self.family == 'sana' else 'DiT'}-{self.model}"


# The settings of the paper's models: guidance runs SANA with two items; blocks of 64 to 256 tokens.
FORWARD = [
    Case("sana", "0.6B", 1024, 2, (4, 4), target=0.90),
    Case("sana", "0.6B", 2048, 2, (8, 8), target=0.87),
    Case("sana", "0.6B", 4096, 2, (8, 8), target=0.82),
    Case("dit", "XL/2", 512, 16, (4, 4), target=0.86),
    Case("dit", "XL/2", 256, 32, (4, 4), target=1.0),
]
TRAIN = [
    Case("dit", "XL/2", 512, 16, (4, 4), "train", target=0.90),
    Case("dit", "S/2", 512, 32, (4, 4), "train"),
]
# What there is a target for comes first: a run that is cut short leaves the others out.
CASES = [case._replace(mode=mode) for mode in ("compiled", "eager") for case in (*FORWARD, *TRAIN)]

# On a CPU the same program runs on models that are small in every way.
TINY = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8, "sample_size": 8}
TINY_SANA = {
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 16,
    "caption_channels": 16,
}


def stock_model(case: Case, device: torch.device, tiny: bool) -> torch.nn.Module:
    """The stock transformer with weights of one size everywhere: a fresh DiT would multiply zeros."""
    if case.family == "sana":
        cls, config = diffusers.SanaTransformer2DModel, sana_config(case.model, case.size)
        config |= TINY | TINY_SANA if tiny else {}
    else:
        cls, config = diffusers.DiTTransformer2DModel, dit_config(case.model, case.size)
        config |= TINY if tiny else {}
    with device:
        model = cls(**config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02)
    return model


def model_inputs(case: Case, config, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Arguments of one forward pass, drawn by a fixed seed."""
    draw = torch.Generator(device).manual_seed(0)
    side = config.sample_size

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device=device).to(dtype)

    inputs = {
        "hidden_states": random(case.batch, config.in_channels, side, side),
        "timestep": torch.linspace(20, 980, case.batch, device=device).long(),
    }
    if case.family == "dit":
        labels = torch.arange(case.batch, device=device) % config.num_embeds_ada_norm
        return inputs | {"class_labels": labels}
    return inputs | {
        "encoder_hidden_states": random(case.batch, CAPTION_TOKENS, config.caption_channels),
        "encoder_attention_mask": torch.ones(case.batch, CAPTION_TOKENS, device=device),
    }


def floor_of(model: torch.nn.Module) -> torch.nn.Module:
    """The converted model itself, with q + k + v in the place of MHLA in every layer that has it."""

    def sum_of_projections(processor, attn, hidden_states: torch.Tensor, *grid, **options) -> torch.Tensor:
        query, key, value = attn.project(hidden_states)
        return attn.project_out(query + key + value)

    for module in model.modules():
        if isinstance(module, Attention) and hasattr(module, "mixing"):
            kind = type(module.processor)
            summing = type(f"Summing{kind.__name__}", (kind,), {"__call__": sum_of_projections})
            module.set_processor(summing())
    return model


def variant_of(stock: torch.nn.Module, variant: str, case: Case, fuse_qkv: bool) -> torch.nn.Module:
    if variant == "stock":
        return stock
    ours = convert(stock, block_grid=case.block_grid)
    if fuse_qkv and case.direction == "forward":  # training would not reach the fused copies
        ours.fuse_qkv_projections()
    return floor_of(ours) if variant == "floor" else ours


class Step:
    """One forward pass, or one training step (AdamW, float32 weights under autocast), of a model."""

    def __init__(self, model, case: Case, inputs: dict, dtype: torch.dtype, compile_mode: str):
        self.inputs, self.dtype = inputs, dtype
        self.training = case.direction == "train"
        model.train(self.training).requires_grad_(self.training)
        self.mixings = learnable_mixings(model)
        self.model = model
        if case.mode == "compiled":
            self.model = torch.compile(model, mode=compile_mode, dynamic=False)
        if self.training:
            fused = next(model.parameters()).is_cuda
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=fused)

    def __call__(self) -> None:
        if not self.training:
            with torch.no_grad():
                self.model(**self.inputs)
            return
        self.optimizer.zero_grad(set_to_none=True)
        kind = self.inputs["hidden_states"].device.type
        with torch.autocast(kind, self.dtype, enabled=self.dtype != torch.float32):
            sample = self.model(**self.inputs).sample
        sample.float().square().mean().backward()
        self.optimizer.step()
        clip_mixings(self.mixings)


def step_milliseconds(call: Callable[[], object], device: torch.device, seconds: float = 2.0) -> float:
    """Median over groups of calls, one behind another as in a sampling loop: the host's time counts, too."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(3):
        call()
    wait()
    start = time.perf_counter()
    call()
    wait()
    group = max(1, min(10, math.ceil(seconds / 10 / (time.perf_counter() - start))))
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(group):
            call()
        wait()
        times.append(1e3 * (time.perf_counter() - start) / group)
    return statistics.median(times)


def peak_gigabytes(call: Callable[[], object], device: torch.device) -> float | None:
    """Most memory held at once during a call, weights included; None where the device keeps no count."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) / 1e9


def released(device: torch.device) -> None:
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def steps(
    case: Case,
    variants: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    compile_mode: str,
    fuse_qkv: bool,
) -> Iterator[tuple]:
    """(variant, step) of each variant on the same weights; a step is freed before the next one is built."""
    tiny = device.type == "cpu"
    case = case._replace(batch=min(case.batch, 2)) if tiny else case
    stock = stock_model(case, device, tiny)
    if case.direction == "forward":
        torch.nn.Module.to(stock, dtype)  # without the notice of ModelMixin.to about modules kept in float32
    inputs = model_inputs(case, stock.config, device, dtype)
    for variant in variants:
        step = Step(variant_of(stock, variant, case, fuse_qkv), case, inputs, dtype, compile_mode)
        yield variant, step
        del step
        stock.zero_grad(set_to_none=True)
        released(device)


PEAKS = {"stock": "stock_peak_gb", "ours": "peak_gb"}


def new_row(case: Case) -> dict:
    times = {f"{variant}_ms": None for variant in ("ours", "stock", "floor")}
    return row_head(case) | times | {"peak_gb": None, "stock_peak_gb": None}


def missing(row: dict) -> list[str]:
    return [variant for variant in VARIANTS if row[f"{variant}_ms"] is None]


def measure(case: Case, row: dict, write: Callable[[], None], seconds: float, **where) -> None:
    """Fill in what the row lacks; `write` is called after each variant, since compiling one takes minutes."""
    for variant, step in steps(case, missing(row), **where):
        row[f"{variant}_ms"] = step_milliseconds(step, where["device"], seconds)
        if variant in PEAKS:
            row[PEAKS[variant]] = peak_gigabytes(step, where["device"])
        write()
        del step


def row_head(case: Case) -> dict:
    return {
        "name": case.name,
        "model": case.title,
        "size": case.size,
        "batch": case.batch,
        "mode": case.mode,
        "direction": case.direction,
    }


def as_line(row: dict, target: float | None) -> str:
    if "error" in row:
        return f"{row['name']}: {row['error']}"
    line = f"{row['name']}: ours {row['ours_ms']:.2f} ms, stock {row['stock_ms']:.2f}, floor {row['floor_ms']:.2f}, "
    line += f"ratio {row['ours_ms'] / row['stock_ms']:.3f}"
    line += f" (target {target})" if target is not None and row["mode"] == "compiled" else ""
    if row["peak_gb"] is not None:
        line += f", peak {row['peak_gb']:.2f} GB, stock {row['stock_peak_gb']:.2f}"
    return line


def settings_of(device: torch.device, dtype: torch.dtype, compile_mode: str, fuse_qkv: bool) -> dict:
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "training": "AdamW, float32 weights, autocast to dtype, no gradient checkpointing",
        "compile": f"whole model, mode {compile_mode}",
        "ours": "fuse_qkv_projections() in forward passes" if fuse_qkv else "as converted",
        "block_grids": {f"{case.title} {case.size}": list(case.block_grid) for case in CASES},
        "tiny": device.type == "cpu",
    }


def kept_of(out: Path, start: dict) -> dict:
    """`start`, with what an earlier run with the same device, versions and settings measured."""
    if not out.is_file():
        return start
    found = json.loads(out.read_text(encoding="utf-8"))
    if any(found.get(name) != start[name] for name in ("device", "versions", "settings")):
        raise ValueError(f"{out} holds rows of another device, version or setting: give another file")
    rows = [{name: value for name, value in row.items() if name != "error"} for row in found["rows"]]
    return start | {"rows": rows, "profiles": [row for row in found["profiles"] if "error" not in row]}


def chosen(texts: Sequence[str]) -> list[Case]:
    """The cases whose name holds one of the texts; ValueError when a text is in none."""
    for text in texts:
        if not any(text in case.name for case in CASES):
            raise ValueError(
                f"no row's name holds {text!r}: they are {', '.join(case.name for case in CASES)}"
            )
    return [case for case in CASES if not texts or any(text in case.name for text in texts)]


def run(
    out: Path,
    *,
    rows: Sequence[str] = (),
    minutes: float = 9.0,
    device: str = "auto",
    compile_mode: str = "default",
    fuse_qkv: bool = False,
    profile: bool = False,
    seconds: float = 2.0,
) -> dict:
    """Measure what fits into the time, writing the JSON file `out` after every row.

    Args:
        rows: texts of which a row's name must hold one; none: all rows.
        minutes: no row begins after this time.
        device: "auto", "cuda", "cuda:N", or "cpu", which tries the program on tiny models.
        compile_mode: `mode` of `torch.compile`.
        fuse_qkv: call `fuse_qkv_projections()` on ours (and the floor) before a forward pass.
        profile: in place of times, say where an eager forward pass spends its time (see `profile_step`).
        seconds: how long a variant is measured.

    Raises ValueError when no row is meant, or when `out` holds rows of another device, version or setting.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
    cases = chosen(rows)
    if profile:
        cases = [case for case in cases if case.mode == "eager" and case.direction == "forward"]
    end = time.monotonic() + 60 * minutes
    start = {**about(where), "settings": settings_of(where, dtype, compile_mode, fuse_qkv)}
    start["versions"] = start["versions"] | {"diffusers": diffusers.__version__}
    result = kept_of(out, start | {"rows": [], "profiles": [], "left_out": []})
    out.parent.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        out.write_text(json.dumps(result, indent=1), encoding="utf-8")

    kind = "profiles" if profile else "rows"
    done = {row["name"]: row for row in result[kind]}
    for case in cases:
        row = done.get(case.name)
        if row is not None and (profile or not missing(row)):
            continue
        if time.monotonic() > end:
            result["left_out"].append(case.name)
            continue
        if row is None:
            row = row_head(case) if profile else new_row(case)
            result[kind].append(row)
        how = {"device": where, "dtype": dtype, "compile_mode": compile_mode, "fuse_qkv": fuse_qkv}
        try:
            if profile:
                profiled(case, row, seconds, **how)
            else:
                measure(case, row, write, seconds, **how)
        except Exception as error:  # a row that fails must not cost the others' measurements
            row["error"] = f"{type(error).__name__}: {error}"[:500]
        if "error" in row or not profile:
            print(as_line(row, case.target), flush=True)
        released(where)
        write()
    write()
    return result


def profiled(case: Case, row: dict, seconds: float, **where) -> None:
    """The eager forward pass of ours and of stock taken apart."""
    device = where["device"]
    for variant, step in steps(case, ("stock", "ours"), **where):
        wall_ms = step_milliseconds(step, device, seconds)
        row[variant] = profile_step(step, step.model, device, wall_ms=wall_ms)
        print(f"{case.name}, {variant}: {row[variant]['summary']}", flush=True)
        del step
