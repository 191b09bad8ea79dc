"""Loss of a finished model over a whole set, at fixed times with fixed noise: one number to compare twins by."""

from __future__ import annotations

import contextlib

import torch

from .export import undisturbed
from .latents import CaptionTable, LatentSet
from .losses import Denoiser
from .randomness import generator


def fixed_noise(index: int, shape: torch.Size, seed: int) -> torch.Tensor:
    """Noise of picture number `index`, float32 `shape` on the CPU; the same on every machine and for every model."""
    return torch.randn(shape, generator=generator("cpu", seed, "validation", index))


@torch.no_grad()
def flow_losses(
    module: Denoiser,
    encoded: LatentSet,
    captions: CaptionTable,
    *,
    device: torch.device | str,
    levels: int = 16,
    seed: int = 0,
    batch_size: int = 512,
    bf16: bool = False,
) -> dict:
    """Mean loss of every picture at `levels` noise levels, (k + 1/2) / levels of all there are.

    `module` is a `FlowLoss` or a `DiffusionLoss`; a level is a sigma, or a share of the diffusion's steps.

    Each picture is seen at every level, with its first caption, no caption dropout, and noise that is a function of
    (seed, number of the picture) alone.

    Returns:
        `{"sigma": [levels], "loss": [levels], "mean": float, "pictures": int, "noise_seed": int}`.
    """
    device = torch.device(device)
    sigmas = [(k + 0.5) / levels for k in range(levels)]
    totals = torch.zeros(levels, dtype=torch.float64, device=device)
    autocast = torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()
    first = 0
    module.to(device)
    with undisturbed(module, device=device), autocast:
        for bucket, latents in enumerate(encoded.latents):
            entries = captions.choice[bucket][:, 0]
            for start in range(0, len(latents), batch_size):
                clean = latents[start : start + batch_size]
                noise = torch.stack(
                    [fixed_noise(first + start + i, clean.shape[1:], seed) for i in range(len(clean))]
                )
                entry = entries[start : start + batch_size]
                clean, noise = clean.to(device), noise.to(device)
                values = captions.values[entry].to(device)
                mask = None if captions.mask is None else captions.mask[entry].to(device)
                for level, sigma in enumerate(sigmas):
                    times = torch.full((len(clean),), module.time_at(sigma), device=device)
                    totals[level] += module(clean, noise, times, values, mask).double().sum()
            first += len(latents)
    losses = (totals / first).tolist()
    return {
        "sigma": sigmas,
        "loss": losses,
        "mean": sum(losses) / levels,
        "pictures": first,
        "noise_seed": seed,
    }
