"""A recipe of a small autoencoder, for pictures or for clips, and what trains it."""

from __future__ import annotations

import torch

from .autoencoder import AutoencoderRecipe, on_white, train_autoencoder
from .emoji import load_sprites
from .recipe import read_table
from .video_autoencoder import train_video_autoencoder


def run(recipe_path: str, overrides: list[str] | None = None, device: str | None = None) -> dict:
    """Read a recipe and train. ``device``: cuda when there is one, unless named."""
    recipe = read_table(recipe_path, AutoencoderRecipe, overrides or [])
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if recipe.kind == "clips":
        return train_video_autoencoder(recipe, device)
    train, val = (load_sprites(recipe.data, splits=[name]) for name in ("train", "val"))
    sprites, unseen = (torch.as_tensor(part.rgba).permute(0, 3, 1, 2).contiguous() for part in (train, val))
    return train_autoencoder(recipe, sprites, on_white(unseen), device)
