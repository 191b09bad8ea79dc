"""Rows of image models: ours beside stock and the floor, on the same weights, in turns."""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import diffusers
import torch
from diffusers.models.attention_processor import Attention

from ..models.convert import convert
from ..models.dit_presets import dit_config
from ..models.sana_presets import sana_config
from .model_steps import How, Step, held_bytes, in_turns, released, step_milliseconds, time_and_peak
from .timing import graphed, host_milliseconds

__all__ = ["CASES", "Case", "floor_of"]

FUSED = "fuse_qkv_projections(), for DiT share_embedders() as well,"
VARIANTS = ("stock", "ours", "floor")
PROFILED = ("stock", "ours")
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
CASES = [
    *FORWARD,
    TRAIN[0],
    *(case._replace(mode="eager") for case in FORWARD),
    TRAIN[1],
    *(case._replace(mode="eager") for case in TRAIN),
]

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
    if case.family == "dit":  # released weights hold one embedder, copied into every layer
        first, *others = (layer.norm1.emb for layer in model.transformer_blocks)
        for embedder in others:
            embedder.load_state_dict(first.state_dict())
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


@functools.cache
def summing(kind: type) -> type:
    """A processor like `kind` that adds q, k and v up. One class for all layers: compiled code is kept by class."""

    def sum_of_projections(processor, attn, hidden_states: torch.Tensor, *grid, **options) -> torch.Tensor:
        query, key, value = attn.project(hidden_states)
        return attn.project_out(query + key + value)

    return type(f"Summing{kind.__name__}", (kind,), {"__call__": sum_of_projections})


def floor_of(model: torch.nn.Module) -> torch.nn.Module:
    """The converted model itself, with q + k + v in the place of MHLA in every layer that has it."""
    for module in model.modules():
        if isinstance(module, Attention) and hasattr(module, "mixing"):
            module.set_processor(summing(type(module.processor))())
    return model


def share_embedders(ours: torch.nn.Module) -> None:
    """As the method of this name, but for the stock model, which stands on the same modules: it keeps its copies."""
    for layer in ours.transformer_blocks:
        layer.norm1 = copy.copy(layer.norm1)
        layer.norm1._modules = dict(layer.norm1._modules)
    ours.share_embedders()


def variant_of(stock: torch.nn.Module, variant: str, case: Case, fuse_qkv: bool) -> torch.nn.Module:
    if variant == "stock":
        return stock
    ours = convert(stock, block_grid=case.block_grid)
    if fuse_qkv and case.direction == "forward":  # training would not reach the fused copies
        ours.fuse_qkv_projections()
        if case.family == "dit":
            share_embedders(ours)
    return floor_of(ours) if variant == "floor" else ours


def prepared(case: Case, how: How) -> tuple[Case, torch.nn.Module, dict]:
    """The case as it runs here, the stock model and the inputs that all its variants take."""
    case = case._replace(batch=min(case.batch, 2)) if how.tiny else case
    stock = stock_model(case, how.device, how.tiny)
    if case.direction == "forward":
        # Without the notice of ModelMixin.to about modules kept in float32.
        torch.nn.Module.to(stock, how.dtype)
    return case, stock, model_inputs(case, stock.config, how.device, how.dtype)


def lay_out_tokens(model: torch.nn.Module) -> None:
    """Tokens reach the first layer in the memory layout in which it hands them on.

    From the patches' convolution they come with channels outermost, and that alone costs a second compilation.
    """
    embedder = model.patch_embed if hasattr(model, "patch_embed") else model.pos_embed
    embedder.register_forward_hook(lambda module, arguments, tokens: tokens.contiguous())


def step_of(stock: torch.nn.Module, variant: str, case: Case, inputs: dict, how: How) -> Step:
    model = variant_of(stock, variant, case, how.fuse_qkv)
    compiled = None
    if case.mode == "compiled":
        compiled = "layers"
        lay_out_tokens(model)
    training = case.direction == "train"
    return Step(model, inputs, how.dtype, training=training, compiled=compiled, mode=how.compile_mode)


def steps(case: Case, variants: Sequence[str], how: How) -> Iterator[tuple]:
    """(variant, step) of each variant on the same weights; a step is freed before the next one is built."""
    case, stock, inputs = prepared(case, how)
    for variant in variants:
        step = step_of(stock, variant, case, inputs, how)
        yield variant, step
        del step
        stock.zero_grad(set_to_none=True)
        released(how.device)


PEAKS = {"stock": "stock_peak_gb", "ours": "peak_gb"}


def new_row(case: Case) -> dict:
    times = {f"{variant}_ms": None for variant in ("ours", "stock", "floor")}
    peaks = {"peak_gb": None, "stock_peak_gb": None}
    row = row_head(case) | times | peaks | {"host_ms": dict.fromkeys(VARIANTS), "in_turns": False}
    return row | ({"without_graph_ms": dict.fromkeys(VARIANTS)} if can_be_captured(case) else {})


def can_be_captured(case: Case) -> bool:
    return case.mode == "compiled"


def captured(case: Case, how: How) -> bool:
    """Whether the row's own times are those of a CUDA graph."""
    return how.graph and how.device.type == "cuda" and can_be_captured(case)


def missing(row: dict) -> list[str]:
    return [variant for variant in VARIANTS if row[f"{variant}_ms"] is None]


def measure(case: Case, row: dict, write: Callable[[], None], how: How) -> None:
    """Fill in what the row lacks; `write` is called after each variant. One that fails is named in the row's error.

    Where all variants are here they are timed once more, in turns: what else runs on the machine meets them alike.
    """
    device = how.device
    case, stock, inputs = prepared(case, how)
    with torch.no_grad(), torch.autocast(device.type, how.dtype, enabled=how.dtype != torch.float32):
        stock.eval()(**inputs)  # for the workspace of matrix products, which is no variant's own
    base, ready, faults = held_bytes(device), {}, []
    for variant in missing(row):
        try:
            ready[variant] = measured(stock, variant, case, inputs, row, how, base)
        except Exception as error:  # one that does not fit, or cannot be captured, must not cost the others
            faults.append(f"{variant}: {type(error).__name__}: {error}"[:400])
            row["error"] = "; ".join(faults)
        stock.zero_grad(set_to_none=True)
        released(device, keep_compiled=True)
        write()
    if len(ready) == len(VARIANTS):
        times = in_turns(ready, {v: row[f"{v}_ms"] for v in ready}, device, how.seconds)
        row |= {f"{variant}_ms": statistics.median(each) for variant, each in times.items()}
        row["in_turns"] = True


def measured(
    stock: torch.nn.Module, variant: str, case: Case, inputs: dict, row: dict, how: How, base: int
) -> Callable[[], object]:
    """Write one variant's figures into the row; gives the call that its time is of: the step, or its CUDA graph.

    base: bytes held when there were only the weights.
    """
    device = how.device
    before = held_bytes(device)  # by the other variants, beyond the weights
    step = step_of(stock, variant, case, inputs, how)
    first = step_milliseconds(step, device, how.seconds / 4)
    row["host_ms"][variant] = host_milliseconds(step, device, 10)
    if variant in PEAKS:
        peak = time_and_peak(step, device)[1]
        row[PEAKS[variant]] = None if peak is None else peak - (before - base) / 1e9
    if not captured(case, how):
        row[f"{variant}_ms"] = first
        return step
    row["without_graph_ms"][variant] = first
    graph = graphed(step, device)
    row[f"{variant}_ms"] = step_milliseconds(graph, device, how.seconds / 4)
    return graph


def row_head(case: Case) -> dict:
    return {
        "name": case.name,
        "model": case.title,
        "size": case.size,
        "batch": case.batch,
        "mode": case.mode,
        "direction": case.direction,
    }


def as_line(row: dict, case: Case) -> str:
    line = f"{row['name']}: ours {row['ours_ms']:.2f} ms, stock {row['stock_ms']:.2f}, floor {row['floor_ms']:.2f}, "
    line += f"ratio {row['ours_ms'] / row['stock_ms']:.3f}"
    line += f" (target {case.target})" if case.target is not None and row["mode"] == "compiled" else ""
    for label, field in (("without a graph", "without_graph_ms"), ("host", "host_ms")):
        each = [row.get(field, {}).get(variant) for variant in ("ours", "stock", "floor")]
        line += f", {label} " + " / ".join(f"{ms:.2f}" for ms in each) if None not in each else ""
    if row["peak_gb"] is not None:
        line += f", peak {row['peak_gb']:.2f} GB, stock {row['stock_peak_gb']:.2f}"
    return line


def settings_of(how: How) -> dict:
    graph = captured(FORWARD[0], how)
    if how.graph and how.compile_mode in ("reduce-overhead", "max-autotune"):
        raise ValueError(
            f"compile mode {how.compile_mode!r} makes CUDA graphs of its own, which cannot be captured in another: "
            "add --no-graph, or choose default or max-autotune-no-cudagraphs"
        )
    return {
        "dtype": str(how.dtype).removeprefix("torch."),
        "training": "AdamW, float32 weights, autocast to dtype, no gradient checkpointing",
        "compile": f"each layer: torch.compile(mode={how.compile_mode!r}, dynamic=False, fullgraph=True), tokens made "
        "contiguous before the first; the rest eager",
        "graph": "compiled rows: the whole pass or training step is one CUDA graph's replay"
        if graph
        else "none",
        "without_graph_ms": "the same step issued kernel by kernel, as host_ms and peak memory are measured",
        "ours": f"{FUSED} in forward passes" if how.fuse_qkv else "as converted",
        "block_grids": {f"{case.title} {case.size}": list(case.block_grid) for case in CASES},
        "time": "median of rounds in which the variants of a row take turns, where in_turns says so",
        "host_ms": "time until a step is issued, without waiting for the device",
        "tiny": how.tiny,
    }
