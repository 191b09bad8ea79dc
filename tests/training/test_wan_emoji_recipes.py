"""The recipes of the small video pipeline: what issues from them has the promised size, tokens and blocks."""

from pathlib import Path

import torch

from mhla_diffusion.training.autoencoder import AutoencoderRecipe
from mhla_diffusion.training.parts import fresh_text_encoder, fresh_transformer
from mhla_diffusion.training.recipe import flat, load_recipe, read_table
from mhla_diffusion.training.video_autoencoder import build

RECIPES = Path(__file__).resolve().parents[2] / "train" / "recipes"
MIB = 2**20


def numbers(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_pipeline_fits_into_ten_mib():
    recipe = load_recipe(RECIPES / "wan-mhla-emoji.toml")
    autoencoder = build(read_table(RECIPES / "autoencoder-wan-emoji.toml", AutoencoderRecipe))
    transformer = fresh_transformer(recipe.model)
    text_encoder = fresh_text_encoder(recipe.model, vocabulary=885, videos=True)
    mixing = sum(p.numel() for name, p in transformer.named_parameters() if "mixing" in name)
    stored = 2 * (numbers(autoencoder) + numbers(transformer) + numbers(text_encoder)) + 2 * mixing  # float32
    assert stored < 10 * MIB - 250_000  # tokenizer, configurations, names of tensors, model card


def test_tokens_and_blocks():
    recipe = load_recipe(RECIPES / "wan-mhla-emoji.toml")
    vae = read_table(RECIPES / "autoencoder-wan-emoji.toml", AutoencoderRecipe)
    transformer = fresh_transformer(recipe.model)
    ((frames, height, width),) = recipe.data.sizes
    factor = vae.model["scale_factor_spatial"]
    grid = ((frames - 1) // vae.model["scale_factor_temporal"] + 1, height // factor, width // factor)
    assert vae.size == [frames, height, width] and vae.styles == recipe.data.styles
    assert transformer.config.patch_size == (1, 1, 1) or list(transformer.config.patch_size) == [1, 1, 1]
    assert grid == (5, 16, 16) and grid[0] * grid[1] * grid[2] >= 1024
    blocks = transformer.config.mhla_block_grid
    assert all(count >= least for count, least in zip(blocks, (3, 4, 4), strict=True))
    assert all(size % count for size, count in zip(grid, blocks, strict=True))  # no axis divides evenly
    assert transformer.config.mhla_layers == [1, 2, 4, 5]
    assert transformer.config.in_channels == vae.model["z_dim"]
    defaults = recipe.model.defaults
    assert [defaults[f"default_{name}"] for name in ("frames", "height", "width")] == recipe.data.sizes[0]


def test_twins_see_the_data_of_the_pipeline():
    ours, twins = (
        flat(load_recipe(RECIPES / f"{name}.toml")) for name in ("wan-mhla-emoji", "twins-wan-emoji")
    )
    different = {key for key in ours.keys() | twins.keys() if ours.get(key) != twins.get(key)}
    allowed = ("run.name", "run.out", "run.steps", "run.batch_size", "optimizer.warmup", "model.transformer.mhla_",
               "checkpoint.", "sample.")  # fmt: skip
    assert {key for key in different if not key.startswith(allowed)} == set()
