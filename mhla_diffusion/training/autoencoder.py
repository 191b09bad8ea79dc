"""Train a small autoencoder on the emoji set: the latent space in which the toy pipelines diffuse.

Here is what all of them share, and the one for pictures, Diffusers' deep-compression autoencoder (DC-AE, arXiv
2410.10733) at toy size; the one for clips is in `video_autoencoder.py`, and `autoencoder_kinds.py` runs a recipe.
There is no KL term, so two mild pressures keep latents easy to diffuse: noise of a fixed size is added to the latent
before decoding, which makes nearby latents decode alike, and a small L2 penalty stops the encoder from escaping that
noise by growing.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from diffusers import AutoencoderDC
from diffusers.training_utils import EMAModel
from torch import Tensor, nn


@dataclass
class AutoencoderRecipe:
    """Everything that decides an autoencoder run; one TOML file holds one of these."""

    data: str  # sprite file written by train/build_emoji.py
    out: str  # folder that receives config.json and the weights (EMA), in Diffusers' layout
    kind: Literal["pictures", "clips"] = "pictures"  # pictures: an AutoencoderDC; clips: an AutoencoderKLWan
    model: dict = field(default_factory=dict)  # arguments of that class
    size: list[int] = field(default_factory=lambda: [17, 64, 64])  # clips: frames, height, width
    styles: list[str] = field(default_factory=lambda: ["flat"])  # clips: of the sprites
    steps: int = 20000
    batch_size: int = 256
    lr: float = 1e-3
    warmup: int = 500  # steps; at most half of all
    ema_decay: float = 0.999  # per step
    ema_every: int = 1  # steps between two updates of the averages
    latent_noise: float = 0.1  # standard deviation of the noise added to latents while training
    latent_penalty: float = 1e-3  # weight of mean(z^2)
    l1_weight: float = 0.5  # beside a mean squared error of weight 1
    edge_weight: float = 0.5  # L1 between image gradients: keeps outlines sharp
    object_weight: float = 0.0  # clips: how much more a pixel of the object counts than one of the background
    pool: int = 0  # clips: drawn ahead, and each step takes some, mirrored; 0: every step draws new ones
    start_from: str = ""  # folder with weights of the same [model] to go on from
    seed: int = 0
    compile: bool = False
    log_every: int = 200
    # 0: no limit; else stop in time and save, the rate falling as if that were the last step
    max_minutes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "ema_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"recipe: {name} is {getattr(self, name)}; give 1 or more")
        for name in ("warmup", "object_weight", "pool", "max_minutes"):
            if getattr(self, name) < 0:
                raise ValueError(f"recipe: {name} is {getattr(self, name)}; give 0 or more")


def augment(rgba: Tensor, generator: torch.Generator) -> Tensor:
    """Sprites on random backgrounds, flipped, scaled, shifted: ``(B, 4, S, S)`` uint8 -> ``(B, 3, S, S)`` in [-1, 1].

    Half of the canvases carry a second, smaller sprite (the neighbour in the batch), so that the autoencoder also sees
    the composed pictures. Colours are premultiplied before resampling: straight alpha would bleed at the edges.
    """
    batch, device = rgba.shape[0], rgba.device

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, device=device, generator=generator)

    pixels = rgba.float() / 255
    pixels = torch.cat([pixels[:, :3] * pixels[:, 3:], pixels[:, 3:]], 1)

    def place(images: Tensor, scale: Tensor, shift: Tensor, flip: Tensor) -> Tensor:
        theta = torch.zeros(batch, 2, 3, device=device)
        theta[:, 0, 0], theta[:, 1, 1] = flip / scale, 1 / scale
        theta[:, :, 2] = -shift / scale[:, None] * torch.stack([flip, torch.ones_like(flip)], 1)
        grid = F.affine_grid(theta, list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, align_corners=False, padding_mode="zeros")

    # a third untouched, so that the exact pixel grid of the originals is seen too
    untouched = rand(batch) < 0.34
    one = torch.ones(batch, device=device)
    scale = torch.where(untouched, one, 0.4 + 0.7 * rand(batch))
    room = (1 - scale).abs()[:, None]
    shift = torch.where(untouched[:, None], torch.zeros(1, device=device), (rand(batch, 2) * 2 - 1) * room)
    flip = torch.where(rand(batch) < 0.5, one, -one)
    canvas = place(pixels, scale, shift, flip)

    second = place(pixels.roll(1, 0), 0.35 + 0.25 * rand(batch), (rand(batch, 2) * 2 - 1) * 0.5, flip)
    second = second * ((rand(batch) < 0.5) & ~untouched)[:, None, None, None]
    canvas = second + canvas * (1 - second[:, 3:])

    white = rand(batch) < 0.3
    background = torch.where(white[:, None], torch.ones(1, device=device), rand(batch, 3))[:, :, None, None]
    return (canvas[:, :3] + background * (1 - canvas[:, 3:])) * 2 - 1


def on_white(rgba: Tensor) -> Tensor:
    """``(N, 4, S, S)`` uint8 with straight alpha -> ``(N, 3, S, S)`` uint8 on white."""
    alpha = rgba[:, 3:].float() / 255
    return (rgba[:, :3] * alpha + 255 * (1 - alpha)).round().to(torch.uint8)


def reconstruction_loss(
    output: Tensor, target: Tensor, recipe: AutoencoderRecipe, weight: Tensor | None = None
) -> Tensor:
    """Squared, absolute and edge error (of clips also between frames), each a mean over everything, in fp32.

    `weight`: how much each pixel counts, of mean 1, `(B, 1, [F,] H, W)`; an edge counts as its second pixel.
    """
    error = output.float() - target.float()
    weight = torch.ones_like(error[:, :1]) if weight is None else weight
    edges = sum(
        (error.diff(dim=d).abs() * weight.narrow(d, 1, weight.shape[d] - 1)).mean()
        for d in range(2, error.ndim)
    )
    return (
        (error.square() * weight).mean()
        + recipe.l1_weight * (error.abs() * weight).mean()
        + recipe.edge_weight * edges
    )


def load_start(autoencoder: nn.Module, folder: str) -> None:
    """Loads the weights of a folder in place.

    Raises ValueError when there is no such folder, or its autoencoder has other weights.
    """
    if not Path(folder, "config.json").is_file():
        raise ValueError(
            f"start_from is {folder!r}, where no config.json lies; give a folder that a run has saved"
        )
    stored = type(autoencoder).from_pretrained(folder, local_files_only=True).state_dict()
    shapes, others = ({k: list(v.shape) for k, v in s.items()} for s in (autoencoder.state_dict(), stored))
    differing = [key for key in sorted({*shapes, *others}) if shapes.get(key) != others.get(key)]
    if differing:
        key = differing[0]
        raise ValueError(
            f"start_from is {folder!r}, whose {key} is of shape {others.get(key)}, not {shapes.get(key)} "
            f"({len(differing)} differ): give the same [model] as in its config.json"
        )
    autoencoder.load_state_dict(stored)


@torch.no_grad()
def psnr(autoencoder: AutoencoderDC, images: Tensor, batch_size: int = 256) -> Tensor:
    """Peak signal-to-noise ratio in dB of each picture, peak 255: ``(N, 3, S, S)`` uint8 -> ``(N,)`` fp32."""
    scores = []
    for chunk in images.split(batch_size):
        target = chunk.float() / 127.5 - 1
        decoded = autoencoder.decode(autoencoder.encode(target.to(autoencoder.dtype)).latent).sample
        error = (decoded.float().clamp(-1, 1) - target).square().mean((1, 2, 3)) / 4  # range 2, so peak^2 = 4
        scores.append(-10 * error.clamp_min(1e-10).log10())
    return torch.cat(scores)


@torch.no_grad()
def latent_std(autoencoder: AutoencoderDC, images: Tensor, batch_size: int = 256) -> float:
    """Standard deviation over all latents of ``(N, 3, S, S)`` uint8 pictures; 1 / it is the scaling factor."""
    parts = [
        autoencoder.encode((c.float() / 127.5 - 1).to(autoencoder.dtype)).latent.float()
        for c in images.split(batch_size)
    ]
    return torch.cat(parts).std().item()


def rate_at(step: int, recipe: AutoencoderRecipe) -> float:
    """Share of the learning rate at a step counted from 0: a linear warmup, then half a cosine down to 0."""
    warmup = min(recipe.warmup, recipe.steps // 2)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / (recipe.steps - warmup))


def fit(
    recipe: AutoencoderRecipe,
    autoencoder: nn.Module,
    encode: Callable[[Tensor], Tensor],
    decode: Callable[[Tensor], Tensor],
    batch: Callable[[int, torch.Generator], Tensor],
    device: str,
    loss_of: Callable[[Tensor, Tensor, AutoencoderRecipe], Tensor] | None = None,
) -> dict:
    """Trains `autoencoder` in place and leaves the averaged weights in it, in evaluation mode.

    Args:
        encode, decode: pixels to latents and back, both differentiable; they may be compiled.
        batch: float pixels in [-1, 1] for a step, counted from 0; may draw from the generator.
        loss_of: what comes back, what should, and the recipe to the loss; `reconstruction_loss` unless given.

    Returns the steps done, the minutes and the losses.
    """
    start, loss_of = time.monotonic(), loss_of or reconstruction_loss
    generator = torch.Generator(device).manual_seed(recipe.seed)
    ema = EMAModel(
        autoencoder.parameters(),
        decay=recipe.ema_decay**recipe.ema_every,
        use_ema_warmup=True,
        power=0.75,
        foreach=True,
    )
    optimizer = torch.optim.AdamW(
        autoencoder.parameters(), lr=recipe.lr, betas=(0.9, 0.99), weight_decay=0.0, fused=device != "cpu"
    )
    autocast = torch.autocast(device, torch.bfloat16, enabled=device != "cpu")
    step, history, logged, done, prepared = 0, [], (0, 0.0), 0.0, 0.0
    for step in range(1, recipe.steps + 1):
        for group in optimizer.param_groups:  # where the schedule is, by step or by time
            group["lr"] = recipe.lr * rate_at(max(step - 1, int(done * recipe.steps)), recipe)
        target = batch(step - 1, generator)
        with autocast:
            latent = encode(target)
            noise = torch.randn(latent.shape, device=device, generator=generator)
            output = decode(latent + recipe.latent_noise * noise)
        loss = loss_of(output, target, recipe) + recipe.latent_penalty * latent.float().square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(autoencoder.parameters(), 1.0)
        optimizer.step()
        minutes = (time.monotonic() - start) / 60
        if step == 1:
            prepared = minutes  # compiling takes part of the time, but not of the schedule
        done = step / recipe.steps
        if recipe.max_minutes:
            left = max(1e-9, recipe.max_minutes - prepared)
            done = min(1.0, max(done, (minutes - prepared) / left))
        if step % recipe.ema_every == 0 or done == 1:
            ema.step(autoencoder.parameters())
        if step % recipe.log_every == 0 or done == 1:
            history.append({"step": step, "loss": loss.item(), "minutes": round(minutes, 3)})
            rate = (step - logged[0]) / max(1e-9, 60 * (minutes - logged[1]))
            logged = step, minutes
            print(
                f"step {step}/{recipe.steps} loss {history[-1]['loss']:.4f} {minutes:.1f} min {rate:.1f} steps/s",
                flush=True,
            )
            if not torch.isfinite(loss):
                raise FloatingPointError(
                    f"autoencoder loss is not finite at step {step}; lower lr and start again"
                )
        if done == 1:
            break
    ema.copy_to(autoencoder.parameters())
    autoencoder.eval()
    return {"steps_run": step, "minutes": round((time.monotonic() - start) / 60, 2), "history": history}


def save(recipe: AutoencoderRecipe, autoencoder: nn.Module, done: dict, facts: dict, device: str) -> dict:
    """Saves the autoencoder and, beside it, what `fit` did and what was measured; returns these figures."""
    history = done["history"]
    figures = {
        "recipe": asdict(recipe),
        "steps_run": done["steps_run"],
        "minutes": done["minutes"],
        "parameters": sum(p.numel() for p in autoencoder.parameters()),
        **facts,
        "device": torch.cuda.get_device_name() if device != "cpu" else "cpu",
        "torch": torch.__version__,
        "history": history[:: max(1, len(history) // 50)],
    }
    # fp16 keeps three more mantissa bits than bf16, at the same size; the weights are of order 1, so range is no issue
    nn.Module.to(autoencoder, torch.float16).save_pretrained(recipe.out)  # not ModelMixin.to, which warns
    Path(recipe.out, "training.json").write_text(json.dumps(figures, indent=1))
    return figures


def train_autoencoder(recipe: AutoencoderRecipe, sprites: Tensor, validation: Tensor, device: str) -> dict:
    """Train, keep the EMA weights, set ``scaling_factor``, save; returns and writes the figures.

    Args:
        sprites: ``(N, 4, S, S)`` uint8 RGBA training sprites.
        validation: ``(V, 3, S, S)`` uint8 pictures never trained on, for PSNR.
    """
    torch.manual_seed(recipe.seed)
    autoencoder = AutoencoderDC(**recipe.model)
    if recipe.start_from:
        load_start(autoencoder, recipe.start_from)
    autoencoder.to(device)
    encode, decode = autoencoder.encoder, autoencoder.decoder
    if recipe.compile:
        encode, decode = torch.compile(encode), torch.compile(decode)
    sprites, validation = sprites.to(device), validation.to(device)

    def batch(step: int, generator: torch.Generator) -> Tensor:
        rows = torch.randint(len(sprites), (recipe.batch_size,), device=device, generator=generator)
        return augment(sprites[rows], generator)

    done = fit(recipe, autoencoder, encode, decode, batch, device)
    scores = psnr(autoencoder, validation)
    autoencoder.register_to_config(scaling_factor=round(1 / latent_std(autoencoder, validation), 4))
    facts = {
        "val_psnr_db": {"mean": scores.mean().item(), "min": scores.min().item(), "images": len(scores)},
        "scaling_factor": autoencoder.config.scaling_factor,
    }
    return save(recipe, autoencoder, done, facts, device)
