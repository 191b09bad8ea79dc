"""The batch of a step: indices and random draws by (seed, step), rows of resident tensors by process."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .config import Recipe
from .latents import CaptionTable, LatentSet
from .losses import draw_sigma
from .randomness import DataOrder, generator


@dataclass
class Draw:
    """Everything random about one global batch of B samples."""

    bucket: int
    index: torch.Tensor  # (B,) int64 rows of the bucket, on the store's device
    caption: torch.Tensor  # (B,) int64 rows of the caption table, 0 where the caption is dropped
    time: torch.Tensor  # (B,) on the training device: sigma, float32; or a diffusion step, int64
    noise: torch.Tensor  # (B, C, h, w) or (B, C, frames, h, w) float32, on the training device


class Feed:
    """Serves batches without a data loader: latents and captions stay as tensors where `data.keep_on` says."""

    def __init__(
        self,
        encoded: LatentSet,
        captions: CaptionTable,
        recipe: Recipe,
        device: torch.device,
        diffusion_steps: int | None = None,
    ):
        """`diffusion_steps`: of a diffusion; None with flow matching."""
        self.recipe, self.device, self.diffusion_steps = recipe, device, diffusion_steps
        self.store = device if recipe.data.keep_on == "device" else torch.device("cpu")
        pin = self.store.type == "cpu" and device.type == "cuda"

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.pin_memory() if pin else tensor.to(self.store)

        self.latents = [keep(bucket) for bucket in encoded.latents]
        self.values = keep(captions.values)
        self.mask = None if captions.mask is None else keep(captions.mask)
        self.choice = [rows.to(self.store) for rows in captions.choice]
        self.count = [rows.to(self.store) for rows in captions.count]
        self.order = DataOrder(encoded.sizes, recipe.run.batch_size, recipe.run.seed, self.store)

    def draw(self, step: int) -> Draw:
        """The random choices of global step `step`, for the whole batch over all processes."""
        run, data = self.recipe.run, self.recipe.data
        bucket, index = self.order(step)
        chance = torch.rand(
            2, run.batch_size, generator=generator(self.store, run.seed, "caption", step), device=self.store
        )
        variant = (chance[0] * self.count[bucket][index]).long()
        caption = self.choice[bucket][index, variant]
        caption = torch.where(chance[1] < data.caption_dropout, 0, caption)
        if self.diffusion_steps is None:
            time = draw_sigma(
                run.batch_size, self.recipe.flow, generator(self.device, run.seed, "sigma", step)
            )
        else:
            draws = generator(self.device, run.seed, "time", step)
            time = torch.randint(self.diffusion_steps, (run.batch_size,), generator=draws, device=self.device)
        noise = torch.randn(
            run.batch_size,
            *self.latents[bucket].shape[1:],
            device=self.device,
            generator=generator(self.device, run.seed, "noise", step),
        )
        return Draw(bucket, index, caption, time, noise)

    def rows(self, draw: Draw, rows: slice) -> tuple[torch.Tensor, ...]:
        """Arguments of the loss's `forward` for some rows of a batch, on the training device."""
        index, caption = draw.index[rows], draw.caption[rows]

        def fetch(tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return tensor[at].to(self.device, non_blocking=True)

        return (
            fetch(self.latents[draw.bucket], index),
            draw.noise[rows],
            draw.time[rows],
            fetch(self.values, caption),
            None if self.mask is None else fetch(self.mask, caption),
        )
