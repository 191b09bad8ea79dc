"""A whole call of Wan's pipeline, stock beside MHLA: seconds in the transformer, in the autoencoder, and in the rest.

`mhla bench pipeline --out outputs/wan_pipeline.json` builds full-size models with random weights. Captions are given as
embeddings, as if UMT5-XXL had run: it is not part of the time. A few steps are measured and one decoding; what all
steps would take is extrapolated from them, and called so.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import NamedTuple

import diffusers
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline

from ..pipelines.painter import choose_device
from ..pipelines.wan import MHLAWanPipeline
from .model_steps import How, released, wait
from .timing import about, earlier_result
from .wan_rows import BLOCK_GRID, CAPTION_TOKENS, HYBRID, TINY_BLOCK_GRID, Case, stock_model, variant_of

__all__ = ["ROWS", "Row", "run"]

STEPS = 50
TINY_VAE = {
    "base_dim": 3, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}  # fmt: skip


class Row(NamedTuple):
    """One call. variant: of the transformer, as in `wan_rows`."""

    variant: str
    tiling: bool = False
    offload: bool = False

    @property
    def name(self) -> str:
        kind = self.variant.removesuffix("_cudnn")
        return kind + ", VAE tiling" * self.tiling + ", model offload" * self.offload


ROWS = [
    Row("stock_cudnn"),
    Row("full"),
    Row("hybrid"),
    Row("full", tiling=True),
    Row("full", tiling=True, offload=True),
]


class Stopwatch:
    """Seconds of each span between `begin` and `end`, by the device's own clock: it is never waited for."""

    def __init__(self, device: torch.device):
        self.device = device
        self.spans: list[list] = []

    def mark(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self, *_) -> None:
        self.spans.append([self.mark()])

    def end(self, *_) -> None:
        self.spans[-1].append(self.mark())

    def seconds(self) -> list[float]:
        wait(self.device)
        if self.device.type != "cuda":
            return [end - start for start, end in self.spans]
        return [start.elapsed_time(end) / 1e3 for start, end in self.spans]


@contextmanager
def watched(pipe: WanPipeline, device: torch.device) -> Iterator[tuple[Stopwatch, Stopwatch]]:
    """Stopwatches of the transformer's calls and of the decodings inside."""
    denoising, decoding = Stopwatch(device), Stopwatch(device)
    hooks = [
        pipe.transformer.register_forward_pre_hook(denoising.begin),
        pipe.transformer.register_forward_hook(denoising.end),
    ]
    decode = pipe.vae.decode

    @wraps(decode)
    def timed(*args, **kwargs):
        decoding.begin()
        decoded = decode(*args, **kwargs)
        decoding.end()
        return decoded

    pipe.vae.decode = timed
    try:
        yield denoising, decoding
    finally:
        del pipe.vae.decode
        for hook in hooks:
            hook.remove()


def pipeline_of(row: Row, size: tuple[int, int, int], how: How, compiled: bool) -> WanPipeline:
    """A pipeline with random weights and no text encoder, on the device, or offloaded to the host."""
    transformer = variant_of(stock_model(Case(size), how), row.variant, how).eval()
    if compiled:
        transformer.compile_repeated_blocks(mode=how.compile_mode, dynamic=False, fullgraph=True)
    torch.manual_seed(0)
    with how.device:
        vae = AutoencoderKLWan(**(TINY_VAE if how.tiny else {})).eval()
    torch.nn.Module.to(vae, how.dtype)  # without the notice of ModelMixin.to
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, num_train_timesteps=1000
    )
    cls = WanPipeline if row.variant.startswith("stock") else MHLAWanPipeline
    pipe = cls(tokenizer=None, text_encoder=None, vae=vae, scheduler=scheduler, transformer=transformer)
    pipe.set_progress_bar_config(disable=True)
    if row.tiling:
        vae.enable_tiling()
    if row.offload and not how.tiny:
        pipe.enable_model_cpu_offload(device=how.device)
    return pipe


def request_of(pipe: WanPipeline, size: tuple[int, int, int], guidance: float, how: How) -> dict:
    """Arguments of a call: captions as embeddings, noise by a fixed seed."""
    draw = torch.Generator(how.device).manual_seed(0)
    frames, height, width = (9, 32, 48) if how.tiny else size
    shape = (1, CAPTION_TOKENS, pipe.transformer.config.text_dim)
    captions = [torch.randn(shape, generator=draw, device=how.device).to(how.dtype) for _ in range(2)]
    return {
        "prompt_embeds": captions[0],
        "negative_prompt_embeds": captions[1],
        "num_frames": frames,
        "height": height,
        "width": width,
        "guidance_scale": guidance,
        "generator": torch.Generator("cpu").manual_seed(0),
    }


def measure(
    row: Row, size: tuple[int, int, int], steps: int, guidance: float, how: How, compiled: bool
) -> dict:
    """One warm call, taken apart."""
    device = how.device
    pipe = pipeline_of(row, size, how, compiled)
    request = request_of(pipe, size, guidance, how)
    # Kernels are compiled and loaded here: of the transformer at its size, of the autoencoder by a few frames.
    latents = pipe(**request, num_inference_steps=2, output_type="latent").frames[:, :, :2]
    with torch.no_grad():
        pipe.vae.decode(latents.to(device, pipe.vae.dtype))
    ends: list[float] = []

    def note(pipe, step: int, timestep, tensors: dict) -> dict:
        wait(device)
        ends.append(time.perf_counter())
        return {}

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with watched(pipe, device) as (denoising, decoding):
        wait(device)
        start = time.perf_counter()
        pipe(**request, num_inference_steps=steps, callback_on_step_end=note)
        wait(device)
        wall = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
        facts = facts_of(wall, denoising.seconds(), decoding.seconds(), ends)
    return {"pipeline": type(pipe).__name__, **facts, "peak_gb": peak}


def facts_of(wall: float, calls: list[float], decodings: list[float], ends: list[float]) -> dict:
    """What was measured, and what `STEPS` steps would take by the median step.

    Args:
        wall: seconds of the whole call. calls, decodings: seconds of each call of the transformer and the decoder.
        ends: when each step was over.
    """
    steps = len(ends)
    step = statistics.median(later - earlier for earlier, later in zip(ends, ends[1:], strict=False))
    per_step = len(calls) // steps
    in_transformer = statistics.median(
        sum(calls[first : first + per_step]) for first in range(per_step, len(calls), per_step)
    )
    further = STEPS - steps
    measured = shares(wall, sum(calls), sum(decodings))
    whole = shares(wall + further * step, sum(calls) + further * in_transformer, sum(decodings))
    return {
        "measured": {"steps": steps, "transformer_calls": len(calls), **measured},
        "step_s": step,
        "extrapolated": {"steps": STEPS, **whole},
    }


def shares(total: float, transformer: float, vae: float) -> dict:
    rest = total - transformer - vae
    return {
        "total_s": total,
        "transformer_s": transformer,
        "vae_decode_s": vae,
        "rest_s": rest,
        "transformer_share": transformer / total,
    }


def as_line(row: dict) -> str:
    if "error" in row:
        return f"{row['name']}: {row['error']}"
    text = f"{row['name']}:"
    for kind in ("measured", "extrapolated"):
        part = row[kind]
        text += (
            f" {kind}, {part['steps']} steps: {part['total_s']:.2f} s = transformer {part['transformer_s']:.2f} "
            f"({100 * part['transformer_share']:.0f} %) + VAE {part['vae_decode_s']:.2f} + rest {part['rest_s']:.2f};"
        )
    text += f" a step {row['step_s']:.3f} s"
    return text + (f", peak {row['peak_gb']:.1f} GB" if row["peak_gb"] is not None else "")


def speedups(rows: list[dict]) -> dict:
    """How many times faster than stock each other plain row is: a step, and the extrapolated whole."""
    done = {row["name"]: row for row in rows if "error" not in row}
    stock = done.get("stock")
    return {
        name: {
            "step": stock["step_s"] / row["step_s"],
            "whole": stock["extrapolated"]["total_s"] / row["extrapolated"]["total_s"],
        }
        for name, row in done.items()
        if stock is not None and "," not in name and name != "stock"
    }


def run(
    out: Path,
    *,
    size: tuple[int, int, int] = (81, 480, 800),
    steps: int = 5,
    guidance: float = 5.0,
    eager: bool = False,
    rows: tuple[str, ...] = (),
    minutes: float = 3.0,
    device: str = "auto",
    progress: Callable[[str], None] = print,
) -> dict:
    """Measure what fits into the time, writing the JSON file `out` after every row; rows that it holds already stay.

    Args:
        size: frames, height and width of the video in pixels.
        steps: denoising steps that are measured, at least 3.
        guidance: scale; above 1 each step calls the transformer twice.
        eager: without compiling the transformer's layers.
        rows: names in `ROWS`; none: all.
        minutes: no row begins after this time.
        device: "auto", "cuda", "cuda:N", or "cpu", which tries the program on tiny models.

    Raises ValueError for a row or device that does not exist, too few steps, or a file with rows of another device,
    version or setting.
    """
    names = [row.name for row in ROWS]
    for name in rows:
        if name not in names:
            raise ValueError(f"no row {name!r}: they are {'; '.join(names)}")
    if not 3 <= steps <= STEPS:
        raise ValueError(f"steps={steps}: give 3 to {STEPS}, the median step counts for those not measured")
    where = choose_device(device)
    how = How(where, torch.float32 if where.type == "cpu" else torch.bfloat16)
    end = time.monotonic() + 60 * minutes
    result = {**about(where), "settings": settings_of(size, steps, guidance, eager, how)}
    result["versions"] = result["versions"] | {"diffusers": diffusers.__version__}
    earlier = earlier_result(out, result) or {"rows": []}
    kept = [row for row in earlier["rows"] if "error" not in row]
    result |= {"rows": kept, "left_out": [], "times_faster_than_stock": {}}
    out.parent.mkdir(parents=True, exist_ok=True)
    for row in ROWS:
        if (rows and row.name not in rows) or any(row.name == done["name"] for done in result["rows"]):
            continue
        if time.monotonic() > end:
            result["left_out"].append(row.name)
            progress(f"{row.name}: not measured, {minutes:g} minutes are over")
            continue
        facts = {"name": row.name}
        try:
            facts |= measure(row, size, steps, guidance, how, not eager)
        except Exception as error:  # a row that fails must not cost the others' measurements
            facts["error"] = f"{type(error).__name__}: {error}"[:500]
        result["rows"] = sorted([*result["rows"], facts], key=lambda each: names.index(each["name"]))
        progress(as_line(facts))
        released(where, keep_compiled=True)  # rows share it
        result["times_faster_than_stock"] = speedups(result["rows"])
        out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    for name, times in result["times_faster_than_stock"].items():
        progress(f"{name}: {times['step']:.2f} times faster than stock a step, {times['whole']:.2f} a video")
    out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    released(where)
    return result


def settings_of(size: tuple[int, int, int], steps: int, guidance: float, eager: bool, how: How) -> dict:
    frames, height, width = size
    return {
        "model": "Wan2.1-T2V-1.3B and its autoencoder, random weights",
        "text encoder": "none: embeddings of 512 tokens are given in the place of UMT5-XXL, whose time is not counted",
        "size": f"{height}x{width}x{frames}",
        "guidance": guidance,
        "scheduler": "UniPC, flow_shift 3",
        "dtype": str(how.dtype).removeprefix("torch."),
        "transformer": "eager" if eager else "compile_repeated_blocks(fullgraph=True)",
        "softmax": "cuDNN's kernel, in cross-attention and the hybrid's layers too",
        "block_grid": list(TINY_BLOCK_GRID if how.tiny else BLOCK_GRID),
        "hybrid": HYBRID,
        "measured": f"one call of {steps} steps with one decoding, after a shorter one",
        "extrapolated": f"measured + ({STEPS} - {steps}) times the median step; not measured",
        "model offload": "moving weights counts to the part that is moved",
        "tiny": how.tiny,
    }
