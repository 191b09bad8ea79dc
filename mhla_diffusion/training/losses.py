"""What a transformer learns on latents: times, noisy latents and the loss, as modules that DDP can wrap.

`FlowLoss` is flow matching (see `diffusion.py` for a DDPM's). One module so that DDP sees every trained parameter in
one forward, and autocast covers all of it.
"""

from __future__ import annotations

import torch
from diffusers import DiTTransformer2DModel, WanTransformer3DModel
from torch import nn

from .config import FlowConfig


class NonFiniteLoss(ValueError):
    """The loss or the gradient became infinite or NaN; the message names the first such step."""


def shift_sigma(sigma: torch.Tensor, shift: float) -> torch.Tensor:
    """sigma' = shift sigma / (1 + (shift - 1) sigma); keeps 0 and 1 in place."""
    return shift * sigma / (1 + (shift - 1) * sigma)


def draw_sigma(count: int, flow: FlowConfig, generator: torch.Generator) -> torch.Tensor:
    """`(count,)` float32 noise levels in (0, 1) on the generator's device, by the recipe's density."""
    if flow.weighting == "uniform":
        sigma = torch.rand(count, generator=generator, device=generator.device)
    else:
        normal = torch.randn(count, generator=generator, device=generator.device)
        sigma = torch.sigmoid(flow.logit_mean + flow.logit_std * normal)
    return shift_sigma(sigma, flow.shift)


def draws_classes(transformer: nn.Module) -> bool:
    """Whether the transformer is told a class, and not a caption."""
    return isinstance(transformer, DiTTransformer2DModel)


def makes_videos(transformer: nn.Module) -> bool:
    """Whether latents have frames, and captions come without a mask: their padding is zeros that count as tokens."""
    return isinstance(transformer, WanTransformer3DModel)


class Denoiser(nn.Module):
    """A transformer, and the text encoder when it is trained, behind one call for captions and for classes."""

    def __init__(self, transformer: nn.Module, text_encoder: nn.Module | None = None):
        super().__init__()
        self.transformer = transformer
        self.text_encoder = text_encoder

    def predict(
        self, noisy: torch.Tensor, time: torch.Tensor, condition: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """The transformer's output, float32 `(B, C', h, w)`, of a video `(B, C', frames, h, w)`.

        Args:
            noisy: `(B, C, h, w)` or `(B, C, frames, h, w)` float32. time: `(B,)`, as the transformer takes it.
            condition: class numbers `(B,)`; or of captions token ids `(B, L)` where the text encoder is trained, else
                embeddings `(B, L, D)`.
            mask: `(B, L)` int64, 1 for real tokens; None with classes, and with embeddings for Wan.
        """
        if draws_classes(self.transformer):
            arguments = {"class_labels": condition}
        elif makes_videos(self.transformer):
            if self.text_encoder is not None:
                condition = self.text_encoder(condition, attention_mask=mask)[0] * mask[..., None]
            arguments = {"encoder_hidden_states": condition}
        else:
            if self.text_encoder is not None:
                condition = self.text_encoder(condition, attention_mask=mask, use_cache=False)[0]
            arguments = {"encoder_hidden_states": condition, "encoder_attention_mask": mask}
        return self.transformer(noisy, timestep=time, return_dict=False, **arguments)[0].float()


class FlowLoss(Denoiser):
    """Flow matching: x_t = (1 - sigma) x_0 + sigma noise, target noise - x_0.

    Raises ValueError for a transformer that also predicts variances.
    """

    def __init__(self, transformer: nn.Module, text_encoder: nn.Module | None = None):
        super().__init__(transformer, text_encoder)
        # Sigma is fed on the scheduler's 0..1000 scale, times a model constant of SANA's.
        self.time_scale = 1000.0 * getattr(transformer.config, "timestep_scale", 1.0)
        channels, out = transformer.config.in_channels, transformer.config.out_channels
        if out not in (None, channels):
            raise ValueError(
                f'recipe: loss.kind = "flow" predicts as many channels as the latents have, {channels}, and this '
                f'transformer has out_channels = {out}; write {channels}, or loss.kind = "diffusion"'
            )

    def time_at(self, share: float) -> float:
        """The level at a share from 0 (clean) to 1 (noise) of all of them, for validation."""
        return share

    def forward(
        self,
        latents: torch.Tensor,
        noise: torch.Tensor,
        sigma: torch.Tensor,
        condition: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Mean squared error of each sample, `(B,)` float32.

        Args:
            latents, noise: `(B, C, h, w)` or `(B, C, frames, h, w)` float32.
            sigma: `(B,)` float32 in [0, 1].
            condition, mask: as in `predict`.
        """
        level = sigma.view(-1, *[1] * (latents.ndim - 1))
        noisy = (1 - level) * latents + level * noise  # x_t
        target = noise - latents  # dx_t / dt
        velocity = self.predict(noisy, sigma * self.time_scale, condition, mask)
        return (velocity - target).square().flatten(1).mean(1)
