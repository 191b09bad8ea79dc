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
    sigma: torch.Tensor  # (B,) float32, on the training device
    noise: torch.Tensor  # (B, C, h, w) float32, on the training device


class Feed:
    """Serves batches without a data loader: latents and captions stay as tensors where `data.keep_on` says."""

    def __init__(self, encoded: LatentSet, captions: CaptionTable, recipe: Recipe, device: torch.device):
        self.recipe, self.device = recipe, device
        self.store = device if recipe.data.keep_on == "device" else torch.device("cpu")
        pin = self.store.type == "cpu" and device.type == "cuda"

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.pin_memory() if pin else tensor.to(self.store)

        self.latents = [keep(bucket) for bucket in encoded.latents]
        self.values, self.mask = keep(captions.values), keep(captions.mask)
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
        sigma = draw_sigma(run.batch_size, self.recipe.flow, generator(self.device, run.seed, "sigma", step))
        noise = torch.randn(
            run.batch_size,
            *self.latents[bucket].shape[1:],
            device=self.device,
            generator=generator(self.device, run.seed, "noise", step),
        )
        return Draw(bucket, index, caption, sigma, noise)

    def rows(self, draw: Draw, rows: slice) -> tuple[torch.Tensor, ...]:
        """Arguments of `FlowLoss.forward` for some rows of a batch, on the training device."""
        index, caption = draw.index[rows], draw.caption[rows]

        def fetch(tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return tensor[at].to(self.device, non_blocking=True)

        return (
            fetch(self.latents[draw.bucket], index),
            draw.noise[rows],
            draw.sigma[rows],
            fetch(self.values, caption),
            fetch(self.mask, caption),
        )
