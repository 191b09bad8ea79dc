"""A few steps of a recipe on random weights, latents and conditions: does it fit, how long does a step take.

Nothing is read but the recipe: neither its base nor its data need be there. The steps are the trainer's own.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from diffusers import (
    DiTTransformer2DModel,
    DPMSolverMultistepScheduler,
    SanaTransformer2DModel,
    WanTransformer3DModel,
)

from mhla_diffusion.models.dit_presets import start_as_published
from mhla_diffusion.pipelines.dit import dit_scheduler

from .class_models import held_in_ours, prepare_for_training
from .components import Components, add_adapters, converted, loss_kind
from .config import Recipe
from .feed import Feed
from .latents import CaptionTable, LatentSet
from .loop import Training
from .losses import draws_classes, makes_videos
from .parts import diffusers_class
from .provenance import environment
from .randomness import generator

SETTLING = 3  # steps that compile and choose kernels are not timed


def recipe_transformer(recipe: Recipe, base: dict | None, device: torch.device) -> torch.nn.Module:
    """The transformer that the recipe trains, with random weights.

    Args:
        base: arguments of the stock transformer that `model.base` holds, as `dit_config`, `sana_config` and
            `wan_config` give them; not used where the recipe builds a fresh one.
        device: where the base's weights are drawn; fresh ones come from the CPU.
    """
    model = recipe.model
    if model.transformer is not None:
        transformer = diffusers_class(model.transformer_class)(**model.transformer)
    else:
        cls = DiTTransformer2DModel if "num_embeds_ada_norm" in base else SanaTransformer2DModel
        cls = WanTransformer3DModel if "freq_dim" in base else cls
        with device:
            transformer = cls(**base)
    if draws_classes(transformer):
        start_as_published(transformer)
    if model.convert is not None:
        transformer = converted(transformer, model.convert)
    if draws_classes(transformer):
        transformer = held_in_ours(transformer)
        prepare_for_training(transformer)
    add_adapters(transformer, recipe)
    return transformer


def video_latents(recipe: Recipe, config) -> tuple[int, int, int]:
    """Latent frames, rows and columns of the recipe's first size, by the autoencoders of Wan 2.1 and 2.2."""
    frames, height, width = recipe.data.sizes[0]
    factor = 16 if config.in_channels == 48 else 8
    return (frames - 1) // 4 + 1, height // factor, width // factor


class Rehearsal(Training):
    """The trainer around random weights and data. `measure` runs the steps; nothing is written.

    Args:
        recipe: its `run.batch_size` and the like are what is measured.
        base: as in `recipe_transformer`.
        pictures: how many random latents there are, of pictures or videos.
    """

    def __init__(self, recipe: Recipe, base: dict | None = None, pictures: int = 64):
        self.base, self.pictures = base, pictures
        with tempfile.TemporaryDirectory() as folder:
            recipe.run.out, recipe.run.tracker = folder, "none"
            super().__init__(recipe, None)

    def _components(self) -> Components:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            transformer = recipe_transformer(self.recipe, self.base, self.device)
        by_class = draws_classes(transformer)
        if loss_kind(self.recipe, by_class) == "diffusion":
            scheduler = dit_scheduler("ddim")
        else:
            scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
        numbers = {"any": 0} if by_class else None
        return Components(None, Path(), None, scheduler, transformer, None, class_numbers=numbers)

    def _build_data(self) -> None:
        self.fingerprint = "random"
        config, count = self.parts.transformer.config, self.pictures
        draw = generator("cpu", self.recipe.run.seed, "rehearsal")
        videos = makes_videos(self.parts.transformer)
        size = video_latents(self.recipe, config) if videos else 2 * [config.sample_size]
        latents = torch.randn(count, config.in_channels, *size, generator=draw)
        if self.parts.class_numbers is not None:
            values = torch.randint(config.num_embeds_ada_norm, (count + 1,), generator=draw)
            mask = None
        else:
            length = self.recipe.data.max_sequence_length or self.parts.max_sequence_length
            width = config.text_dim if videos else config.caption_channels
            values = torch.randn(count + 1, length, width, generator=draw)
            mask = None if videos else torch.ones(count + 1, length, dtype=torch.int64)
        choice = torch.arange(1, count + 1)[:, None]
        table = CaptionTable(values, mask, [choice], [torch.ones(count, dtype=torch.int64)])
        encoded = LatentSet([latents], [])
        self.feed = Feed(encoded, table, self.recipe, self.device, self.diffusion_steps())

    def measure(self, steps: int = 20) -> dict:
        """Runs the steps; time, memory and losses of them."""
        self._reset_window()
        self.bad_step = torch.full((), -1.0, dtype=torch.float64, device=self.device)
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        settling = min(SETTLING, steps - 1)
        sums, began = [], time.perf_counter()
        for step in range(steps):
            if step == settling:
                self._synchronise()
                settled = time.perf_counter()
            self._step(step)
            sums.append(self.loss_sum.clone())
        self._synchronise()
        ended = time.perf_counter()
        losses = torch.stack(sums).diff(prepend=self.loss_sum.new_zeros(1)).tolist()
        run = self.recipe.run
        return {
            "name": run.name,
            "steps": steps,
            "batch_size": run.batch_size,
            "micro_batches": run.gradient_accumulation,
            "latents": list(self.feed.latents[0].shape[1:]),
            "mixed_precision": run.mixed_precision,
            "compiled": run.compile_scope if run.compile else False,
            "train": self.recipe.model.train,
            "parameters": sum(p.numel() for p in self.parts.transformer.parameters()),
            "trained_parameters": sum(p.numel() for p in self.parameters.values()),
            "step_ms": 1000 * (ended - settled) / (steps - settling),
            "settling_s": settled - began,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
            "losses": losses,
            "finite": bool(self.bad_step.item() < 0)
            and all(x == x and abs(x) < float("inf") for x in losses),
            "environment": environment(self.device),
        }

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
