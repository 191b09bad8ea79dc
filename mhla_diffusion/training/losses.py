"""Flow matching on latents: times, the interpolant, and the loss as one module that can be wrapped by DDP."""

from __future__ import annotations

import torch
from torch import nn

from .config import FlowConfig


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


class FlowLoss(nn.Module):
    """Transformer, and the text encoder when it is trained, with the flow-matching loss as the forward.

    One module so that DDP sees every trained parameter in one forward, and autocast covers all of it.
    """

    def __init__(self, transformer: nn.Module, text_encoder: nn.Module | None = None):
        super().__init__()
        self.transformer = transformer
        self.text_encoder = text_encoder
        # SANA feeds sigma on the scheduler's 0..1000 scale, times a model constant.
        self.time_scale = 1000.0 * getattr(transformer.config, "timestep_scale", 1.0)

    def forward(
        self,
        latents: torch.Tensor,
        noise: torch.Tensor,
        sigma: torch.Tensor,
        caption: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Mean squared error of each sample.

        Args:
            latents, noise: `(B, C, h, w)` float32.
            sigma: `(B,)` float32 in [0, 1].
            caption: token ids `(B, L)` where the text encoder is trained, else embeddings `(B, L, D)`.
            mask: `(B, L)` int64, 1 for real tokens.

        Returns:
            `(B,)` float32.
        """
        level = sigma.view(-1, 1, 1, 1)
        noisy = (1 - level) * latents + level * noise  # x_t
        target = noise - latents  # dx_t / dt
        if self.text_encoder is not None:
            caption = self.text_encoder(caption, attention_mask=mask, use_cache=False)[0]
        velocity = self.transformer(
            noisy,
            encoder_hidden_states=caption,
            encoder_attention_mask=mask,
            timestep=sigma * self.time_scale,
            return_dict=False,
        )[0]
        return (velocity.float() - target).square().flatten(1).mean(1)
