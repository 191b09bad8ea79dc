"""Train a small AutoencoderKLWan on clips of moving emoji.

Stock Wan's causal autoencoder (arXiv 2503.20314) at toy size: the first frame becomes one frame of latents, every four
that follow one more. As for pictures, noise of a fixed size on the latents and a small penalty take the place of the KL
term; the posterior's standard deviation is stored as that size.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResidualBlock
from torch import Tensor, nn

from .autoencoder import AutoencoderRecipe, fit, load_start, reconstruction_loss, save
from .moving_emoji import MovingEmoji
from .wan_one_pass import latents_of, pixels_of

VALIDATION_CLIPS = 192  # of each split
VISIBLE = 24  # sum over colours, of 255, by which a pixel of the object differs from the background


def build(recipe: AutoencoderRecipe) -> AutoencoderKLWan:
    """An autoencoder, fresh or from `start_from`, whose posterior's standard deviation is `latent_noise`, and stays."""
    channels = recipe.model.get("z_dim", 16)
    # Latents are normalised by their own mean and spread once these are known.
    neutral = {"latents_mean": [0.0] * channels, "latents_std": [1.0] * channels}
    autoencoder = AutoencoderKLWan(**{**neutral, **recipe.model})
    if recipe.start_from:
        load_start(autoencoder, recipe.start_from)
    else:
        initialise(autoencoder)
    with torch.no_grad():  # no gradient ever reaches these rows: only the mean is decoded
        autoencoder.quant_conv.weight[channels:] = 0
        autoencoder.quant_conv.bias[channels:] = 2 * math.log(recipe.latent_noise or 1e-3)
    return autoencoder


@torch.no_grad()
def initialise(autoencoder: AutoencoderKLWan) -> None:
    """Weights that signals pass at their size, in place: 300 small steps on a CPU gave 21.0 dB then, 18.8 dB before.

    torch's own make every convolution shrink what it is given, the latents most of all, beside noise of a fixed size.
    Here convolutions keep it, residual blocks begin as their shortcut, and latents with a spread of about one.
    """
    for module in autoencoder.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            module.weight.mul_(3**0.5)  # torch: a variance of 1/3 of the inputs' number
            module.bias.zero_()
    for module in autoencoder.modules():
        if isinstance(module, WanResidualBlock):
            module.conv2.weight.zero_()
    identity = torch.eye(autoencoder.z_dim)[:, :, None, None, None]
    autoencoder.post_quant_conv.weight.copy_(identity)
    autoencoder.quant_conv.weight.zero_()
    # What SiLU leaves of a spread of one is 0.6.
    autoencoder.quant_conv.weight[: autoencoder.z_dim, : autoencoder.z_dim] = identity / 0.6


def mean_of(autoencoder: AutoencoderKLWan, pixels: Tensor) -> Tensor:
    """Latents `(B, C, frames, h, w)` of pixels `(B, 3, F, H, W)` in [-1, 1]."""
    return autoencoder.encode(pixels).latent_dist.mode()


def as_input(clips: Tensor) -> Tensor:
    """uint8 -> float in [-1, 1]."""
    return clips.float() / 127.5 - 1


def shows_object(pixels: Tensor) -> Tensor:
    """bool `(B, 1, F, H, W)`: pixels in [-1, 1] that are not the colour of the first frame's corner."""
    return (pixels - pixels[:, :, :1, :1, :1]).abs().sum(1, keepdim=True) > VISIBLE / 127.5


def clip_loss(output: Tensor, target: Tensor, recipe: AutoencoderRecipe) -> Tensor:
    """`reconstruction_loss` in which the object's pixels count `1 + object_weight` times as much as the background's.

    Objects are small, and most of the background is right after a few hundred steps.
    """
    weight = 1 + recipe.object_weight * shows_object(target).float()
    return reconstruction_loss(output, target, recipe, weight / weight.mean())


class Pool:
    """Clips drawn ahead: a step then costs no planning and no drawing.

    They are kept as uint8 on the painter's device: 209 kB each at 17 x 64 x 64.
    """

    def __init__(self, source: MovingEmoji, count: int, size: tuple[int, int, int], at_once: int = 128):
        numbers = range(count)
        self.clips = torch.cat(
            [source.clips(numbers[i : i + at_once], size)[0] for i in range(0, count, at_once)]
        )

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """uint8 `(count, 3, F, H, W)`, half of them mirrored left to right, and half upside down."""
        device = self.clips.device
        rows = torch.randint(len(self.clips), (count,), device=device, generator=generator)
        mirrored = torch.rand(2, count, 1, 1, 1, 1, device=device, generator=generator) < 0.5
        clips = self.clips[rows]
        clips = torch.where(mirrored[0], clips.flip(-1), clips)
        return torch.where(mirrored[1], clips.flip(-2), clips)


@torch.no_grad()
def quality(autoencoder: AutoencoderKLWan, clips: Tensor, batch_size: int = 32) -> dict:
    """How well uint8 clips `(N, 3, F, H, W)` come back.

    PSNR in dB (peak 255) of each clip, and of its object alone: the pixels that are not the colour of the first frame's
    corner. `flicker` is the mean absolute change between frames of what comes back, of 255, beside that of the clips.
    """
    whole, moving, ours, theirs = [], [], [], []
    for chunk in clips.split(batch_size):
        target = as_input(chunk)
        dtype = next(autoencoder.parameters()).dtype
        decoded = autoencoder.decode(mean_of(autoencoder, target.to(dtype))).sample.float()
        error = (decoded - target).square() / 4  # range 2, so peak^2 = 4
        whole.append(error.mean((1, 2, 3, 4)))
        object_ = shows_object(target).expand_as(error)
        moving.append((error * object_).sum((1, 2, 3, 4)) / object_.sum((1, 2, 3, 4)).clamp_min(1))
        ours.append(decoded.diff(dim=2).abs().mean((1, 2, 3, 4)) * 127.5)
        theirs.append(target.diff(dim=2).abs().mean((1, 2, 3, 4)) * 127.5)

    def decibel(parts: list[Tensor]) -> Tensor:
        return -10 * torch.cat(parts).clamp_min(1e-10).log10()

    return {
        "psnr_db": {"mean": decibel(whole).mean().item(), "min": decibel(whole).min().item()},
        "object_psnr_db": decibel(moving).mean().item(),
        "flicker": torch.cat(ours).mean().item(),
        "flicker_of_the_clips": torch.cat(theirs).mean().item(),
        "clips": len(clips),
    }


@torch.no_grad()
def spread(
    autoencoder: AutoencoderKLWan, clips: Tensor, batch_size: int = 32
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel of the latents of uint8 clips."""
    dtype = next(autoencoder.parameters()).dtype
    parts = [mean_of(autoencoder, as_input(chunk).to(dtype)).float() for chunk in clips.split(batch_size)]
    latents = torch.cat(parts).transpose(0, 1).flatten(1)
    return (
        [round(value, 4) for value in latents.mean(1).tolist()],
        [round(value, 4) for value in latents.std(1).tolist()],
    )


def check_clip_size(autoencoder: AutoencoderKLWan, size: tuple[int, int, int]) -> None:
    """Raise ValueError unless frames are 4 n + 1 in number and both sides multiples of what the stages halve."""
    config = autoencoder.config
    multiple = 2 ** (len(config.dim_mult) - 1) * (config.patch_size or 1)
    frames, *sides = size
    if frames % 4 != 1 or any(side % multiple for side in sides):
        raise ValueError(
            f"size = {list(size)}: frames are a multiple of four and one, height and width multiples of {multiple}; "
            "write [17, 64, 64] or the like"
        )


def train_video_autoencoder(recipe: AutoencoderRecipe, device: str) -> dict:
    """Trains on clips made on the fly or drawn ahead, stores the latents' mean and spread, saves; returns the figures.

    Without a pool every step sees clips that were never seen before: clip numbers go on from step to step.
    """
    torch.manual_seed(recipe.seed)
    autoencoder = build(recipe).to(device)
    size = tuple(recipe.size)
    check_clip_size(autoencoder, size)

    def source(split: str) -> MovingEmoji:
        return MovingEmoji(recipe.data, split, seed=recipe.seed, styles=recipe.styles, device=device)

    clips = source("train")
    pool = Pool(clips, recipe.pool, size) if recipe.pool else None

    def batch(step: int, generator: torch.Generator) -> Tensor:
        if pool is not None:
            return as_input(pool.draw(recipe.batch_size, generator))
        numbers = range(step * recipe.batch_size, (step + 1) * recipe.batch_size)
        return as_input(clips.clips(numbers, size)[0])

    parts = [partial(latents_of, autoencoder), partial(pixels_of, autoencoder), clip_loss]
    if recipe.compile:
        parts = [torch.compile(part, dynamic=False) for part in parts]
    encode, decode, loss_of = parts
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):  # few shapes, each met at every step
        done = fit(recipe, autoencoder, encode, decode, batch, device, loss_of)
    ahead = max(recipe.pool, recipe.steps * recipe.batch_size)
    mean, std = spread(autoencoder, clips.clips(range(ahead, ahead + VALIDATION_CLIPS), size)[0])
    autoencoder.register_to_config(latents_mean=mean, latents_std=std)
    scores = {
        split: quality(autoencoder, source(split).clips(range(VALIDATION_CLIPS), size)[0])
        for split in ("heldout", "val")
    }
    return save(recipe, autoencoder, done, {**scores, "latents_mean": mean, "latents_std": std}, device)
