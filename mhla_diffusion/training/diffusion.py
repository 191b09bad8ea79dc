"""The loss of a DDPM with a learned variance, as DiT is trained (arXiv 2212.09748, Sec. 4; 2102.09672, Sec. 3.1).

Names follow the papers: alpha-bar_t = prod (1 - beta_s), x_t = sqrt(alpha-bar_t) x_0 + sqrt(1 - alpha-bar_t) noise.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from .losses import Denoiser

# The last term of the bound is a likelihood of values on a grid of this half step, that of 8-bit pixels in [-1, 1]. The
# published DiT code applies it to latents as well.
HALF_STEP = 1 / 255
LEAST_LIKELIHOOD = 1e-12


class DiffusionLoss(Denoiser):
    """Squared error of the predicted noise, and the variational bound for the predicted variance.

    The transformer's first C output channels are the noise, the next C, if it has them, say where between its two
    bounds the log-variance of a step lies (2102.09672, Eq. 15). The bound does not teach the noise: its mean is
    detached (Sec. 3.1), and it is weighted by `variational_weight` times the number of steps T, since one step of T is
    drawn.

    Args:
        betas: `(T,)`, of the scheduler.

    Raises ValueError when the output channels are neither C nor 2 C.
    """

    def __init__(
        self,
        transformer: nn.Module,
        betas: torch.Tensor,
        variational_weight: float = 0.001,
    ):
        super().__init__(transformer)
        channels = transformer.config.in_channels
        out = transformer.config.out_channels or channels
        if out not in (channels, 2 * channels):
            raise ValueError(
                f"the transformer has {out} output channels for {channels} of the latents: give {channels}, or "
                f"{2 * channels} to learn variances"
            )
        self.learns_variance = out == 2 * channels
        self.steps = len(betas)
        self.weight = variational_weight * self.steps
        betas = betas.detach().double().cpu()
        cumulative = torch.cumprod(1 - betas, 0)  # alpha-bar_t
        before = torch.cat([cumulative.new_ones(1), cumulative[:-1]])  # alpha-bar_{t-1}
        posterior = betas * (1 - before) / (1 - cumulative)  # beta-tilde_t
        posterior[0] = posterior[min(1, self.steps - 1)]  # is 0, and its logarithm is needed
        tables = {
            "signal": cumulative.sqrt(),
            "spread": (1 - cumulative).sqrt(),
            "of_start": betas * before.sqrt() / (1 - cumulative),  # posterior mean: this x_0 + that x_t
            "of_noisy": (1 - before) * (1 - betas).sqrt() / (1 - cumulative),
            "least": posterior.log(),
            "most": betas.log(),
        }
        for name, table in tables.items():
            self.register_buffer(name, table.float(), persistent=False)

    def at(self, table: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return table[time].view(-1, 1, 1, 1)

    def time_at(self, share: float) -> int:
        """The step at a share from 0 to 1 of all of them, for validation."""
        return min(int(share * self.steps), self.steps - 1)

    def forward(
        self,
        latents: torch.Tensor,
        noise: torch.Tensor,
        time: torch.Tensor,
        condition: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Loss of each sample, `(B,)` float32.

        Args:
            latents, noise: `(B, C, h, w)` float32.
            time: `(B,)` int64, 0 to T - 1.
            condition, mask: as in `predict`.
        """
        noisy = self.at(self.signal, time) * latents + self.at(self.spread, time) * noise
        output = self.predict(noisy, time, condition, mask)
        predicted, position = output[:, : latents.shape[1]], output[:, latents.shape[1] :]
        loss = (predicted - noise).square().flatten(1).mean(1)
        if self.learns_variance:
            loss = loss + self.weight * self.bound(latents, noisy, predicted.detach(), position, time)
        return loss

    def bound(self, latents, noisy, predicted, position, time) -> torch.Tensor:
        """L_t of each sample in bits per number (2102.09672, Eq. 4 to 7), `(B,)`."""
        least, most = self.at(self.least, time), self.at(self.most, time)
        of_start, of_noisy = self.at(self.of_start, time), self.at(self.of_noisy, time)
        share = (position + 1) / 2
        log_variance = share * most + (1 - share) * least
        start = (noisy - self.at(self.spread, time) * predicted) / self.at(self.signal, time)
        mean = of_start * start + of_noisy * noisy
        true_mean = of_start * latents + of_noisy * noisy
        divergence = gaussian_divergence(true_mean, least, mean, log_variance)
        last = -grid_log_likelihood(latents, mean, log_variance)
        terms = torch.where(time.view(-1, 1, 1, 1) == 0, last, divergence)
        return terms.flatten(1).mean(1) / math.log(2)


def gaussian_divergence(mean, log_variance, other_mean, other_log_variance) -> torch.Tensor:
    """KL divergence of N(mean, exp(log_variance)) from the other normal distribution, elementwise, in nats."""
    return 0.5 * (
        other_log_variance
        - log_variance
        - 1
        + (log_variance - other_log_variance).exp()
        + (mean - other_mean).square() * (-other_log_variance).exp()
    )


def grid_log_likelihood(values, mean, log_variance) -> torch.Tensor:
    """Log-likelihood of values rounded to a grid of `2 HALF_STEP`, whose outermost cells are unbounded; elementwise."""
    inverse = (-0.5 * log_variance).exp()
    upper = torch.special.ndtr((values - mean + HALF_STEP) * inverse)
    lower = torch.special.ndtr((values - mean - HALF_STEP) * inverse)
    upper = torch.where(values > 1 - HALF_STEP / 2, 1.0, upper)
    lower = torch.where(values < -1 + HALF_STEP / 2, 0.0, lower)
    return (upper - lower).clamp_min(LEAST_LIKELIHOOD).log()
