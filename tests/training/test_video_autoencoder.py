"""The autoencoder of clips: what is stored, figures by their definitions, and a short run on the sample set."""

import json

import pytest
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file

from mhla_diffusion.training import autoencoder
from mhla_diffusion.training.autoencoder import AutoencoderRecipe, reconstruction_loss
from mhla_diffusion.training.autoencoder_kinds import run
from mhla_diffusion.training.moving_emoji import MovingEmoji
from mhla_diffusion.training.recipe import read_table
from mhla_diffusion.training.video_autoencoder import (
    Pool,
    as_input,
    build,
    check_clip_size,
    clip_loss,
    mean_of,
    quality,
    spread,
)

RECIPE = "train/recipes/autoencoder-wan-emoji.toml"
SMALL = [
    "data=assets/emoji_sample.tar",
    "size=[5, 16, 16]",
    "compile=false",
    "pool=0",
    "start_from=",
    "steps=12",
    "batch_size=2",
    "warmup=3",
    "log_every=3",
    "model.base_dim=4",
    "model.decoder_base_dim=4",
    "model.z_dim=2",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vae")
    return folder, run(RECIPE, [*SMALL, f"out={folder}"], device="cpu")


def test_the_recipe_compresses_as_the_pipeline_needs():
    recipe = read_table(RECIPE, AutoencoderRecipe)
    vae = build(recipe)
    with torch.no_grad():
        latents = vae.encode(torch.zeros(1, 3, 5, 16, 16)).latent_dist
        assert latents.mode().shape == (1, recipe.model["z_dim"], 2, 4, 4)
        assert torch.allclose(latents.std, torch.full_like(latents.std, recipe.latent_noise))
        assert vae.decode(latents.mode()).sample.shape == (1, 3, 5, 16, 16)
    bytes_ = 2 * sum(parameter.numel() for parameter in vae.parameters())
    assert bytes_ < 2.5 * 2**20  # of the ten that the whole pipeline may have


def test_a_short_run_learns_saves_and_reports(trained):
    folder, figures = trained
    losses = [entry["loss"] for entry in figures["history"]]
    assert losses[-1] < losses[0]
    stored = json.loads((folder / "training.json").read_text())
    assert stored["steps_run"] == 12 and stored["val"]["clips"] == 192
    assert set(stored["heldout"]) == {"psnr_db", "object_psnr_db", "flicker", "flicker_of_the_clips", "clips"}
    saved = AutoencoderKLWan.from_pretrained(folder, local_files_only=True)
    assert saved.config.latents_mean == figures["latents_mean"] and len(saved.config.latents_std) == 2
    assert all(value > 0 for value in saved.config.latents_std)
    stored = load_file(next(folder.glob("*.safetensors")))
    assert {value.dtype for value in stored.values()} == {torch.float16}


@torch.no_grad()
def test_figures_by_their_definitions():
    torch.manual_seed(0)
    recipe = read_table(RECIPE, AutoencoderRecipe, SMALL)
    vae = build(recipe)
    clips = torch.zeros(3, 3, 5, 16, 16, dtype=torch.uint8)
    clips[:, 0] = 90
    clips[:, :, :, 4:9, 4:9] = torch.randint(0, 256, (3, 3, 5, 5, 5), dtype=torch.uint8)
    decoded = (vae.decode(mean_of(vae, as_input(clips))).sample + 1) * 127.5
    error = (decoded - clips).double().square()
    whole = 10 * torch.log10(255**2 / error.mean((1, 2, 3, 4)))
    found = quality(vae, clips, batch_size=2)
    assert found["psnr_db"]["mean"] == pytest.approx(whole.mean().item(), rel=1e-4)
    assert found["psnr_db"]["min"] == pytest.approx(whole.min().item(), rel=1e-4)
    object_ = 10 * torch.log10(255**2 / error[..., 4:9, 4:9].mean((1, 2, 3, 4)))
    assert found["object_psnr_db"] == pytest.approx(
        object_.mean().item(), abs=0.2
    )  # a pixel may look like the corner
    assert found["flicker_of_the_clips"] == pytest.approx(
        clips.float().diff(dim=2).abs().mean().item(), rel=1e-4
    )
    mean, std = spread(vae, clips, batch_size=2)
    latents = mean_of(vae, as_input(clips)).transpose(0, 1).flatten(1)
    assert mean == pytest.approx(latents.mean(1).tolist(), abs=1e-3)
    assert std == pytest.approx(latents.std(1).tolist(), abs=1e-3)


def test_edges_between_frames_count():
    recipe = AutoencoderRecipe(data="", out="", l1_weight=0, edge_weight=1)
    target = torch.zeros(1, 3, 3, 4, 4)
    still, moving = target + 0.5, target.clone()
    moving[:, :, 1] = 0.5
    square = still.square().mean()
    assert torch.isclose(reconstruction_loss(still, target, recipe), square)
    assert torch.isclose(reconstruction_loss(moving, target, recipe), moving.square().mean() + 0.5)


def test_a_limit_of_time_ends_the_run_with_a_small_rate(tmp_path, monkeypatch):
    clock = iter(range(0, 10**6, 10))  # ten seconds a look
    monkeypatch.setattr(autoencoder.time, "monotonic", lambda: float(next(clock)))
    rates = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW,
        "step",
        lambda self, *rest: (rates.append(self.param_groups[0]["lr"]), step(self, *rest))[1],
    )
    options = [*SMALL, f"out={tmp_path}", "steps=1000", "warmup=100", "max_minutes=1.5", "log_every=100"]
    figures = run(RECIPE, options, device="cpu")
    assert figures["steps_run"] == 9 and figures["history"][-1]["step"] == 9
    assert max(rates) == pytest.approx(1e-3, rel=0.05) and rates[-1] < 0.1 * max(rates)


def test_pixels_of_the_object_count_more():
    target = torch.zeros(1, 3, 2, 4, 4)
    target[..., 0:2, 2:4] = 1  # a quarter; the corner is background
    inside, outside = target.clone(), target.clone()
    inside[..., 0, 3] += 0.5
    outside[..., 3, 0] += 0.5
    recipe = AutoencoderRecipe(data="", out="", l1_weight=0, edge_weight=0, object_weight=3)
    mean = 1 + 3 / 4
    plain = 0.25 / 16
    assert torch.isclose(clip_loss(inside, target, recipe), torch.tensor(plain * 4 / mean))
    assert torch.isclose(clip_loss(outside, target, recipe), torch.tensor(plain / mean))
    recipe = AutoencoderRecipe(data="", out="")
    assert torch.isclose(clip_loss(inside, target, recipe), reconstruction_loss(inside, target, recipe))


def test_a_pool_draws_its_clips_mirrored():
    source = MovingEmoji("assets/emoji_sample.tar")
    pool = Pool(source, 5, (5, 16, 16), at_once=2)
    assert torch.equal(pool.clips, source.clips(range(5), (5, 16, 16))[0])
    drawn = pool.draw(40, torch.Generator().manual_seed(0))
    assert torch.equal(drawn, pool.draw(40, torch.Generator().manual_seed(0)))
    ways = [(), (-1,), (-2,), (-1, -2)]
    expected = torch.stack([pool.clips.flip(way) if way else pool.clips for way in ways])
    found = [
        (expected == clip).flatten(2).all(-1).nonzero().tolist() for clip in drawn
    ]  # (way, clip) of each
    assert all(found) and {way for places in found for way, _ in places} == {0, 1, 2, 3}
    assert {clip for places in found for _, clip in places} == {0, 1, 2, 3, 4}


def test_training_goes_on_from_a_folder(trained, tmp_path):
    folder, before = trained
    options = [*SMALL, f"out={tmp_path}", f"start_from={folder}", "steps=2", "log_every=1"]
    figures = run(RECIPE, options, device="cpu")
    assert figures["history"][0]["loss"] < before["history"][0]["loss"]
    recipe = read_table(RECIPE, AutoencoderRecipe, options)
    stored = load_file(next(folder.glob("*.safetensors")))
    for key, value in build(recipe).state_dict().items():
        assert torch.equal(value.half(), stored[key]), key


def test_another_model_is_no_start(trained, tmp_path):
    folder, _ = trained
    with pytest.raises(ValueError, match="decoder.conv_in.weight is of shape.*config.json"):
        run(RECIPE, [*SMALL, f"out={tmp_path}", f"start_from={folder}", "model.z_dim=3"], device="cpu")
    with pytest.raises(ValueError, match="start_from is .*nowhere"):
        run(RECIPE, [*SMALL, f"out={tmp_path}", "start_from=nowhere"], device="cpu")


@torch.no_grad()
def test_a_fresh_autoencoder_passes_signals_at_their_size():
    torch.manual_seed(0)
    vae = build(read_table(RECIPE, AutoencoderRecipe))
    clips = MovingEmoji("assets/emoji_sample.tar").clips(range(4), (5, 32, 32))[0]
    latents = mean_of(vae, as_input(clips))
    assert 0.5 < latents.std() < 2
    assert 0.3 < vae.decode(latents).sample.std() < 2
    block, x = vae.decoder.mid_block.resnets[0], torch.randn(1, 48, 2, 4, 4)
    assert torch.equal(block(x), x)


def test_a_run_shorter_than_the_warmup(tmp_path):
    options = [*SMALL, f"out={tmp_path}", "steps=2", "warmup=200", "ema_every=2", "pool=3", "batch_size=1"]
    assert run(RECIPE, options, device="cpu")["steps_run"] == 2


@pytest.mark.parametrize("size", [(18, 64, 64), (17, 62, 64), (17, 64, 66)])
def test_sizes_that_no_stage_divides_are_refused_before_anything_is_drawn(size):
    with pytest.raises(ValueError, match=r"multiples of 4; write \[17, 64, 64\]") as caught:
        check_clip_size(build(read_table(RECIPE, AutoencoderRecipe)), size)
    assert "\n" not in str(caught.value)
