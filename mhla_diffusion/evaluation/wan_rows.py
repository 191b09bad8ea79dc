"""Rows of Wan 2.1 1.3B: stock with two kernels of softmax, linear attention, MHLA, the hybrid and the floor, in turns.

All variants of a row stand on the same weights and are timed in the same rounds. What is compared with what, and the
goals, stand in `targets_of`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..models.convert import convert, restore
from ..models.wan_presets import wan_config
from ..wan_attention import SoftmaxWanAttention, SoftmaxWanAttnProcessor, WanPositions
from .model_steps import How, Step, held_bytes, in_turns, released, time_and_peak, wait

__all__ = ["CASES", "Case", "floor_of", "targets_of"]

VARIANTS = ("stock_cudnn", "stock_flash", "linear", "full", "hybrid", "floor")
PROFILED = ("stock_cudnn", "full")
BLOCK_GRID = (3, 5, 10)
CAPTION_TOKENS = 512
HYBRID = "2/3"
# How much faster than stock with cuDNN's softmax MHLA is to be, by pixels of a frame.
FASTER = {480 * 800: 3.05, 480 * 832: 3.05, 720 * 1280: 5.5}
FASTER_TRAINING = 2.3

# On a CPU the same program runs on a model that is small in every way, by other kernels of softmax.
TINY = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 3,
}
TINY_BLOCK_GRID = (2, 2, 3)


class Case(NamedTuple):
    """One row. size: frames, height and width of the video in pixels. mode: eager, compiled (each layer), whole."""

    size: tuple[int, int, int]
    direction: str = "forward"
    mode: str = "compiled"
    variants: tuple[str, ...] = VARIANTS

    @property
    def pixels(self) -> str:
        frames, height, width = self.size
        return f"{height}x{width}x{frames}"

    @property
    def name(self) -> str:
        return f"wan-1.3b-{self.pixels}/{self.direction}/{self.mode}"

    def latents(self, tiny: bool) -> tuple[int, int, int]:
        frames, height, width = self.size
        if tiny:
            return (5, 2 * (height // 120), 2 * (width // 128))
        return ((frames - 1) // 4 + 1, height // 8, width // 8)


SIZES = [(81, 480, 800), (81, 480, 832), (81, 720, 1280)]
TRAINED = ("stock_cudnn", "full")
# What there is a target for comes first: a run that is cut short leaves the others out.
CASES = [
    *(Case(size) for size in SIZES),
    Case(SIZES[0], "train", "eager", TRAINED),
    *(Case(size, mode="eager") for size in SIZES),
    Case(SIZES[0], "train", "compiled", TRAINED),
    Case(SIZES[0], mode="whole", variants=("full",)),
]


class PinnedWanAttnProcessor(WanAttnProcessor):
    """Stock Wan's processor with one kernel of softmax. Compiled code of one is never taken for another's."""

    def __init__(self, backend: SDPBackend):
        super().__init__()
        self.backend = backend

    def __call__(self, attn, hidden_states: torch.Tensor, *arguments) -> torch.Tensor:
        with sdpa_kernel(self.backend):
            return super().__call__(attn, hidden_states, *arguments)


class SummingWanAttnProcessor(SoftmaxWanAttnProcessor):
    """q + k + v, behind stock Wan's norms and rotation, in the place of softmax."""

    def __call__(
        self, attn: SoftmaxWanAttention, hidden_states: torch.Tensor, positions: WanPositions
    ) -> torch.Tensor:
        query, key, value = attn.project(hidden_states)
        query, key = (
            rotated_as_stock(norm(x.flatten(2)).unflatten(-1, (attn.heads, -1)), positions)
            for norm, x in ((attn.norm_q, query), (attn.norm_k, key))
        )
        return attn.project_out(query + key + value)


def rotated_as_stock(x: torch.Tensor, positions: WanPositions) -> torch.Tensor:
    """Channel pairs of `(B, N, H, D)` turned, written in x's dtype with the memory traffic that stock Wan has."""
    cos, sin = positions.cos[..., 0::2], positions.sin[..., 1::2]
    turned = torch.empty_like(x)
    turned[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    turned[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
    return turned


def floor_of(stock: torch.nn.Module) -> torch.nn.Module:
    """The stock model on the same tensors, with q + k + v in the place of every softmax over the video's tokens."""
    model = convert(stock, layers=[], other_layers="softmax")
    for module in model.modules():
        if isinstance(module, SoftmaxWanAttention):
            module.set_processor(SummingWanAttnProcessor())
    return model


def pinned(model: torch.nn.Module, backend: SDPBackend) -> torch.nn.Module:
    for module in model.modules():
        if isinstance(module, WanAttention):
            module.set_processor(PinnedWanAttnProcessor(backend))
    return model


def softmax_kernel(variant: str, tiny: bool) -> SDPBackend:
    """cuDNN's but for one variant; cross-attention and the hybrid's softmax layers use it as well."""
    if variant == "stock_flash":
        return SDPBackend.FLASH_ATTENTION
    return SDPBackend.MATH if tiny else SDPBackend.CUDNN_ATTENTION


def variant_of(stock: torch.nn.Module, variant: str, how: How) -> torch.nn.Module:
    if variant.startswith("stock"):
        model = restore(convert(stock, layers=[]))  # processors of its own, on the same tensors
    elif variant == "floor":
        model = floor_of(stock)
    else:
        block_grid = TINY_BLOCK_GRID if how.tiny else BLOCK_GRID
        model = convert(
            stock,
            block_grid=(1, 1, 1) if variant == "linear" else block_grid,
            layers=HYBRID if variant == "hybrid" else "all",
        )
    return pinned(model, softmax_kernel(variant, how.tiny))


def stock_model(case: Case, how: How) -> WanTransformer3DModel:
    """Random weights; for a forward pass in the dtypes that `from_pretrained(torch_dtype=...)` gives."""
    with how.device:
        model = WanTransformer3DModel(**(wan_config("2.1-t2v-1.3B") | (TINY if how.tiny else {})))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02)
            exact = set(name.split(".")) & set(model._keep_in_fp32_modules)
            if case.direction == "forward" and not exact:
                parameter.data = parameter.data.to(how.dtype)
    return model


def model_inputs(case: Case, config, how: How) -> dict[str, torch.Tensor]:
    """Arguments of one forward pass of one video, drawn by a fixed seed."""
    draw = torch.Generator(how.device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device=how.device).to(how.dtype)

    return {
        "hidden_states": random(1, config.in_channels, *case.latents(how.tiny)),
        "timestep": torch.full((1,), 500, device=how.device),
        "encoder_hidden_states": random(1, CAPTION_TOKENS, config.text_dim),
    }


def step_of(stock: torch.nn.Module, variant: str, case: Case, inputs: dict, how: How) -> Step:
    training = case.direction == "train"
    model = variant_of(stock, variant, how)
    if how.fuse_qkv and not training and variant in ("linear", "full", "hybrid"):
        model.fuse_qkv_projections()
    if training:
        model.enable_gradient_checkpointing()
    compiled = {"eager": None, "compiled": "layers", "whole": "whole"}[case.mode]
    return Step(model, inputs, how.dtype, training=training, compiled=compiled, mode=how.compile_mode)


def steps(case: Case, variants: Sequence[str], how: How) -> Iterator[tuple]:
    """(variant, step) of each variant on the same weights, one after another."""
    stock = stock_model(case, how)
    inputs = model_inputs(case, stock.config, how)
    for variant in variants:
        step = step_of(stock, variant, case, inputs, how)
        yield variant, step
        del step
        released(how.device)


def row_head(case: Case) -> dict:
    grid = [size // patch for size, patch in zip(case.latents(False), (1, 2, 2), strict=True)]
    return {
        "name": case.name,
        "model": "Wan2.1-T2V-1.3B",
        "size": case.pixels,
        "grid": grid,
        "tokens": grid[0] * grid[1] * grid[2],
        "batch": 1,
        "mode": case.mode,
        "direction": case.direction,
    }


def new_row(case: Case) -> dict:
    empty = {"ms": None, "all_ms": [], "peak_gb": None, "first_call_s": None}
    variants = {variant: dict(empty) for variant in case.variants}
    return row_head(case) | {"variants": variants, "hybrid_expected_ms": None, "targets": []}


def missing(row: dict) -> list[str]:
    return [variant for variant, cell in row["variants"].items() if cell["ms"] is None]


def measure(case: Case, row: dict, write: Callable[[], None], how: How) -> None:
    """Measure the whole row, since all of it has to run in the same rounds."""
    row |= new_row(case)
    device = how.device
    stock = stock_model(case, how)
    inputs = model_inputs(case, stock.config, how)
    base, ready, once = held_bytes(device), {}, {}
    for variant, cell in row["variants"].items():
        if time.monotonic() > how.end:
            cell["error"] = "not measured: the time was over"
            continue
        before = held_bytes(device)  # by the other variants, beyond the weights
        try:
            step = step_of(stock, variant, case, inputs, how)
            start = time.perf_counter()
            step()
            wait(device)
            cell["first_call_s"] = time.perf_counter() - start
            once[variant], peak = time_and_peak(step, device)
            cell["peak_gb"] = None if peak is None else peak - (before - base) / 1e9
            ready[variant] = step
        except Exception as error:  # one kernel that does not run must not cost the row
            cell["error"] = f"{type(error).__name__}: {error}"[:500]
    write()
    for variant, times in in_turns(ready, once, device, how.seconds).items():
        row["variants"][variant] |= {"ms": statistics.median(times), "all_ms": times}
    if "hybrid" in ready:
        config = ready["hybrid"].model.config
        row["hybrid_expected_ms"] = amdahl(row["variants"], len(config.mhla_layers) / config.num_layers)
    row["targets"] = targets_of(case, row)


def amdahl(cells: dict, share: float) -> float | None:
    """Milliseconds of the hybrid when the share of layers with MHLA takes its part of the full model's time."""
    stock, full = cells["stock_cudnn"]["ms"], cells["full"]["ms"]
    return None if stock is None or full is None else stock + share * (full - stock)


def targets_of(case: Case, row: dict) -> list[dict]:
    """What the row is to reach, each with what it reached; only what was measured."""
    cells, expected = row["variants"], row["hybrid_expected_ms"]

    def of(variant: str, field: str = "ms") -> float | None:
        return cells.get(variant, {}).get(field)

    def ratio(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a / b

    faster = ratio(of("stock_cudnn"), of("full"))
    found = [
        ("peak memory, full / stock", ratio(of("full", "peak_gb"), of("stock_cudnn", "peak_gb")), "<", 1.0)
    ]
    if case.direction == "train":
        found.insert(0, ("stock / full", faster, ">=", FASTER_TRAINING))
    elif case.mode == "compiled":
        found = [
            ("full / floor", ratio(of("full"), of("floor")), "<=", 1.05),
            ("stock / full", faster, ">=", FASTER[case.size[1] * case.size[2]]),
            *found,
        ]
    if case.direction == "forward":
        found.append(("hybrid / Amdahl's expectation", ratio(of("hybrid"), expected), "<=", 1.05))
    return [
        {"what": what, "value": value, "target": f"{sign} {bound:g}", "met": met(value, sign, bound)}
        for what, value, sign, bound in found
        if value is not None
    ]


def met(value: float, sign: str, bound: float) -> bool:
    return {"<": value < bound, "<=": value <= bound, ">=": value >= bound}[sign]


def as_line(row: dict, case: Case) -> str:
    parts = []
    for variant, cell in row["variants"].items():
        text = f"{cell['ms']:.1f} ms" if cell["ms"] is not None else cell["error"]
        text += f" ({cell['peak_gb']:.2f} GB)" if cell["peak_gb"] is not None else ""
        parts.append(f"{variant} {text}")
    if row["hybrid_expected_ms"] is not None:
        parts.append(f"Amdahl for the hybrid {row['hybrid_expected_ms']:.1f} ms")
    lines = [f"{row['name']}: {', '.join(parts)}"]
    for target in row["targets"]:
        verdict = "met" if target["met"] else "missed"
        lines.append(f"  {target['what']} {target['value']:.3f} (target {target['target']}: {verdict})")
    return "\n".join(lines)


def settings_of(how: How) -> dict:
    return {
        "dtype": str(how.dtype).removeprefix("torch."),
        "forward": "no gradients; float32: norms, modulation tables and the timestep's embedder, as in from_pretrained",
        "training": "AdamW, float32 weights, autocast to dtype, gradient checkpointing",
        "compiled": f"each layer: compile_repeated_blocks(mode={how.compile_mode!r}, fullgraph=True)",
        "whole": f"torch.compile of the whole model, mode {how.compile_mode!r}",
        "softmax": "a kernel of scaled_dot_product_attention; cuDNN's also in cross-attention and the hybrid's layers",
        "ours": "fuse_qkv_projections() in forward passes" if how.fuse_qkv else "as converted",
        "block_grid": list(TINY_BLOCK_GRID if how.tiny else BLOCK_GRID),
        "hybrid": HYBRID,
        "floor": "q + k + v behind norms and rotation",
        "time": "median of rounds in which all variants of a row take turns",
        "peak_gb": "most memory held during a step, weights included, the other variants' own not",
        "tiny": how.tiny,
    }
