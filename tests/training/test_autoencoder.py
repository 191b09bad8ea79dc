"""The autoencoder recipe: augmentation, quality figures, and a short run on the sample set."""

import json

import pytest
import torch
from diffusers import AutoencoderDC

from mhla_diffusion.training import autoencoder
from mhla_diffusion.training.autoencoder import AutoencoderRecipe, augment, on_white, psnr
from mhla_diffusion.training.autoencoder_kinds import run
from mhla_diffusion.training.recipe import read_table

RECIPE = "train/recipes/autoencoder-emoji.toml"
SMALL = [
    "data=assets/emoji_sample.tar",
    "steps=80",
    "batch_size=8",
    "warmup=2",
    "log_every=20",
    "compile=false",
    "model.encoder_block_out_channels=[8, 16]",
    "model.decoder_block_out_channels=[8, 16]",
    "model.encoder_layers_per_block=[1, 1]",
    "model.decoder_layers_per_block=[1, 1]",
    "model.encoder_qkv_multiscales=[[], []]",
    "model.decoder_qkv_multiscales=[[], []]",
]


@pytest.fixture
def sprites():
    """A red disc on nothing, whose hidden colour is green: it must never bleed out."""
    rgba = torch.zeros(4, 4, 16, 16, dtype=torch.uint8)
    rgba[:, 1] = 255
    inside = ((torch.arange(16) - 7.5) ** 2)[:, None] + ((torch.arange(16) - 7.5) ** 2)[None] < 25
    for channel, value in ((0, 255), (1, 0), (3, 255)):
        rgba[:, channel, inside] = value
    return rgba


def test_on_white_composites_straight_alpha(sprites):
    pictures = on_white(sprites)
    assert pictures[0, :, 0, 0].tolist() == [255, 255, 255]
    assert pictures[0, :, 8, 8].tolist() == [255, 0, 0]


def test_augment_is_a_function_of_the_generator_and_stays_in_range(sprites):
    first, again = (augment(sprites, torch.Generator().manual_seed(3)) for _ in range(2))
    other = augment(sprites, torch.Generator().manual_seed(4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.shape == (4, 3, 16, 16) and first.min() >= -1 and first.max() <= 1


@torch.no_grad()
def test_psnr_of_each_picture_by_its_definition():
    torch.manual_seed(0)
    vae = AutoencoderDC(
        latent_channels=4,
        encoder_block_types="ResBlock",
        decoder_block_types="ResBlock",
        encoder_block_out_channels=(8, 16),
        decoder_block_out_channels=(8, 16),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), ()),
        decoder_qkv_multiscales=((), ()),
    )
    pictures = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    decoded = vae.decode(vae.encode(pictures / 127.5 - 1).latent).sample.clamp(-1, 1)
    error = ((decoded + 1) * 127.5 - pictures).double().square().mean((1, 2, 3))
    expected = 10 * torch.log10(255**2 / error)  # peak 255
    torch.testing.assert_close(psnr(vae, pictures, batch_size=2).double(), expected, rtol=1e-4, atol=0)


def test_a_short_run_learns_saves_and_reports(tmp_path):
    figures = run(RECIPE, [*SMALL, f"out={tmp_path / 'vae'}"], device="cpu")
    saved = AutoencoderDC.from_pretrained(tmp_path / "vae", local_files_only=True)
    assert saved.config.scaling_factor == figures["scaling_factor"] > 0
    assert json.loads((tmp_path / "vae" / "training.json").read_text())["steps_run"] == 80
    losses = [entry["loss"] for entry in figures["history"]]
    assert losses[-1] < losses[0]
    assert figures["val_psnr_db"]["images"] == 10  # the sample's val drawings


def test_a_loss_that_is_not_finite_stops_the_run_and_saves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(
        autoencoder, "reconstruction_loss", lambda *_: torch.tensor(float("nan"), requires_grad=True)
    )
    with pytest.raises(FloatingPointError, match="step 20"):
        run(RECIPE, [*SMALL, f"out={tmp_path / 'vae'}"], device="cpu")
    assert not (tmp_path / "vae").exists()


def test_mistakes_in_the_recipe_are_named(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'latent_noise'"):
        read_table(RECIPE, AutoencoderRecipe, ["latent_nose=0.2"])
    with pytest.raises(ValueError, match="ema_every is 0; give 1 or more"):
        read_table(RECIPE, AutoencoderRecipe, ["ema_every=0"])
    with pytest.raises(ValueError, match="no emoji set at"):
        run(RECIPE, ["data=nowhere.tar", f"out={tmp_path}"], device="cpu")
