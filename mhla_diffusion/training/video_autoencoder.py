"""Train a small AutoencoderKLWan on clips of moving emoji.

Stock Wan's causal autoencoder (arXiv 2503.20314) at toy size: the first frame becomes one frame of latents, every four
that follow one more. As for pictures, noise of a fixed size on the latents and a small penalty take the place of the KL
term; the posterior's standard deviation is stored as that size.
"""

from __future__ import annotations

import math

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from torch import Tensor

from .autoencoder import AutoencoderRecipe, fit, save
from .moving_emoji import MovingEmoji

VALIDATION_CLIPS = 192  # of each split


def build(recipe: AutoencoderRecipe) -> AutoencoderKLWan:
    """A fresh autoencoder whose posterior has the standard deviation `latent_noise` everywhere, and keeps it."""
    channels = recipe.model.get("z_dim", 16)
    # Latents are normalised by their own mean and spread once these are known.
    neutral = {"latents_mean": [0.0] * channels, "latents_std": [1.0] * channels}
    autoencoder = AutoencoderKLWan(**{**neutral, **recipe.model})
    with torch.no_grad():  # no gradient ever reaches these rows: only the mean is decoded
        autoencoder.quant_conv.weight[channels:] = 0
        autoencoder.quant_conv.bias[channels:] = 2 * math.log(recipe.latent_noise or 1e-3)
    return autoencoder


def lay_channels_last(module: torch.nn.Module) -> None:
    """Kernels of convolutions with channels last in memory, in place; what they compute then is laid out so, too."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    for parameter in module.parameters():
        if parameter.ndim in layouts:
            parameter.data = parameter.data.contiguous(memory_format=layouts[parameter.ndim])


def mean_of(autoencoder: AutoencoderKLWan, pixels: Tensor) -> Tensor:
    """Latents `(B, C, frames, h, w)` of pixels `(B, 3, F, H, W)` in [-1, 1]."""
    return autoencoder.encode(pixels).latent_dist.mode()


def unclamped(autoencoder: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """`autoencoder.decode(latents).sample` before it is cut to [-1, 1].

    Nothing is learned from what is cut: a pixel that is far too bright would stay so.
    """
    x = autoencoder.post_quant_conv(latents)
    memory = [None] * sum(isinstance(module, WanCausalConv3d) for module in autoencoder.decoder.modules())
    frames = [
        autoencoder.decoder(frame, feat_cache=memory, feat_idx=[0], first_chunk=index == 0)
        for index, frame in enumerate(x.split(1, dim=2))
    ]
    return torch.cat(frames, 2)


def as_input(clips: Tensor) -> Tensor:
    """uint8 -> float in [-1, 1]."""
    return clips.float() / 127.5 - 1


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
        corner = chunk[:, :, :1, :1, :1].float()
        object_ = ((chunk.float() - corner).abs().sum(1, keepdim=True) > 24).expand_as(error)
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


def train_video_autoencoder(recipe: AutoencoderRecipe, device: str) -> dict:
    """Trains on clips made on the fly, stores the latents' mean and spread, saves; returns and writes the figures.

    Every step sees clips that were never seen before: clip numbers go on from step to step.
    """
    torch.manual_seed(recipe.seed)
    autoencoder = build(recipe).to(device)
    if recipe.channels_last:
        lay_channels_last(autoencoder)
    if recipe.compile:
        autoencoder.encoder.compile()
        autoencoder.decoder.compile()
    frames, height, width = recipe.size

    def source(split: str) -> MovingEmoji:
        return MovingEmoji(recipe.data, split, seed=recipe.seed, styles=recipe.styles, device=device)

    clips = source("train")

    def batch(step: int, generator: torch.Generator) -> Tensor:
        numbers = range(step * recipe.batch_size, (step + 1) * recipe.batch_size)
        return as_input(clips.clips(numbers, (frames, height, width))[0])

    def encode(pixels: Tensor) -> Tensor:
        return mean_of(autoencoder, pixels)

    def decode(latents: Tensor) -> Tensor:
        return unclamped(autoencoder, latents)

    with torch.backends.cudnn.flags(enabled=True, benchmark=True):  # few shapes, each met at every step
        done = fit(recipe, autoencoder, encode, decode, batch, device)
    with torch.compiler.set_stance("force_eager"):  # other batch sizes are not worth a compilation
        ahead = range(recipe.steps * recipe.batch_size, recipe.steps * recipe.batch_size + VALIDATION_CLIPS)
        mean, std = spread(autoencoder, clips.clips(ahead, (frames, height, width))[0])
        autoencoder.register_to_config(latents_mean=mean, latents_std=std)
        scores = {
            split: quality(
                autoencoder, source(split).clips(range(VALIDATION_CLIPS), (frames, height, width))[0]
            )
            for split in ("heldout", "val")
        }
    return save(recipe, autoencoder, done, {**scores, "latents_mean": mean, "latents_std": std}, device)
