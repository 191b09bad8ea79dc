"""Writes pipelines and continuation folders, and draws sample grids, with the averaged weights."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from mhla_diffusion.loading import no_library_bars

from .checkpoint import write_folder
from .components import Components
from .config import Recipe, SampleConfig
from .ema import EMA
from .losses import makes_videos
from .randomness import generator


def export_copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A CPU copy of a model in `dtype`, coefficient matrices in float32, adapters merged."""
    clone = copy.deepcopy(module).to("cpu")
    if getattr(clone, "peft_config", None):
        clone.fuse_lora()
        clone.unload_lora()
    if dtype != torch.float32:
        nn.Module.to(clone, dtype)  # not ModelMixin.to, which warns; BlockMixing itself stays in float32
    return clone


def export_pipeline(target: Path, parts: Components, ema: EMA, recipe: Recipe) -> None:
    """Replaces the folder `target` by a whole pipeline with the EMA weights and the pipeline's own defaults."""
    dtype = getattr(torch, recipe.checkpoint.export_dtype)
    with ema.applied():
        transformer = export_copy(parts.transformer, dtype)
        text_encoder = (
            export_copy(parts.text_encoder, dtype) if recipe.model.train_text_encoder else parts.text_encoder
        )
    pipeline = parts.pipeline(transformer, text_encoder)
    from_base = ["vae"]
    replaced = (
        recipe.model.train_text_encoder or recipe.model.text_encoder is not None or recipe.run.init_from
    )
    if parts.text_encoder is not None and not replaced:
        from_base.append("text_encoder")

    def fill(folder: Path) -> None:
        pipeline.save_pretrained(folder)
        for part in from_base:  # their own files, in their own dtype: here they were loaded as float32
            shutil.rmtree(folder / part)
            shutil.copytree(parts.base / part, folder / part)

    with no_library_bars():
        write_folder(target, fill)


def export_continue(target: Path, parts: Components, ema: EMA, recipe: Recipe, step: int) -> None:
    """Writes a folder that `run.init_from` reads: raw weights, and under ema/ the averaged ones."""
    dtype = getattr(torch, recipe.checkpoint.export_dtype)

    def save(folder: Path) -> None:
        export_copy(parts.transformer, dtype).save_pretrained(folder / "transformer")
        if recipe.model.train_text_encoder:
            export_copy(parts.text_encoder, dtype).save_pretrained(folder / "text_encoder")

    def fill(folder: Path) -> None:
        save(folder)
        with ema.applied():
            save(folder / "ema")
        (folder / "continue.json").write_text(json.dumps({"step": step, "run": recipe.run.name}))

    with no_library_bars():
        write_folder(target, fill)


def export_adapter(target: Path, parts: Components, ema: EMA) -> None:
    """Writes what a run on a frozen base trained, as one file that `load_adapter` loads into the converted base."""
    from mhla_diffusion.models.adapters import save_adapter

    with ema.applied():
        write_folder(target, lambda folder: save_adapter(parts.transformer, folder))


def contact_sheet(images: list[Image.Image], columns: int, gap: int = 2) -> Image.Image:
    """Pictures of one size in rows on white, `gap` pixels between them."""
    width, height = images[0].size
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * (width + gap) - gap, rows * (height + gap) - gap), "white")
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        sheet.paste(image, (column * (width + gap), row * (height + gap)))
    return sheet


@contextlib.contextmanager
def undisturbed(*modules: nn.Module, device: torch.device):
    """Evaluation mode, uncompiled; random state, gradient mode and training mode are as before afterwards."""
    modes = [module.training for module in modules]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for module in modules:
            module.eval()
        try:
            yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.train(mode)


def draw_pictures(
    parts: Components,
    prompts: list[str],
    sample: SampleConfig,
    size: int | tuple[int, int, int],
    device: torch.device,
) -> list[Image.Image] | np.ndarray:
    """One picture a prompt with the weights as they are; picture i starts from noise seeded (sample.seed, i).

    The prompts of a DiT are names or numbers of classes. `size` is the side of a picture; of videos it is (frames,
    height, width), and their frames come as one array `(prompts, F, H, W, 3)` in [0, 1].
    """
    models = [m for m in (parts.vae, parts.text_encoder) if m is not None]
    visitors = [m for m in models if next(m.parameters()).device.type != device.type]
    for module in visitors:
        module.to(device)
    pipeline = parts.pipeline()
    pipeline.set_progress_bar_config(disable=True)
    height, width = (size, size) if isinstance(size, int) else size[1:]
    if parts.class_numbers is not None:
        request = {"class_labels": pipeline.typed_labels(prompts)}
    elif makes_videos(parts.transformer):
        request = {"prompt": list(prompts), "negative_prompt": "", "num_frames": size[0], "output_type": "np"}
    else:
        request = {
            "prompt": list(prompts),
            "use_resolution_binning": False,
            "complex_human_instruction": parts.instruction,
        }
    trained = [m for m in (parts.transformer, parts.text_encoder) if m is not None]
    try:
        with undisturbed(*trained, device=device):
            drawn = pipeline(
                num_inference_steps=sample.steps,
                guidance_scale=sample.guidance,
                generator=[generator("cpu", sample.seed, i) for i in range(len(prompts))],
                height=height,
                width=width,
                **request,
            )
            return drawn.frames if makes_videos(parts.transformer) else drawn.images
    finally:
        for module in visitors:
            module.to("cpu")


def draw_grid(target: Path, parts: Components, ema: EMA, recipe: Recipe, device: torch.device) -> None:
    """Draws the recipe's sample prompts with the EMA weights into `target` and .png, or of videos .mp4 or .gif."""
    videos = makes_videos(parts.transformer)
    size = tuple(recipe.data.sizes[0]) if videos else recipe.data.size
    with ema.applied():
        images = draw_pictures(parts, recipe.sample.prompts, recipe.sample, size, device)
    target.parent.mkdir(parents=True, exist_ok=True)
    columns = math.ceil(math.sqrt(len(images)))
    if not videos:
        contact_sheet(images, columns).save(target.with_suffix(".png"))
        return
    from mhla_diffusion.pipelines.videos import as_frames, is_installed, save_video

    clips = [[Image.fromarray(frame) for frame in as_frames(clip)] for clip in images]
    frames = [contact_sheet(list(shown), columns) for shown in zip(*clips, strict=True)]
    settings = {
        "prompts": recipe.sample.prompts,
        "steps": recipe.sample.steps,
        "guidance": recipe.sample.guidance,
    }
    suffix = ".mp4" if is_installed("av") else ".gif"
    save_video(frames, target.with_suffix(suffix), fps=recipe.data.fps or 16, settings=settings)
