"""Exponential moving average of the trained parameters, one fused call per step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .config import EMAConfig


class EMA:
    """Keeps `{name: averaged tensor}` beside the live parameters."""

    def __init__(self, parameters: dict[str, nn.Parameter], config: EMAConfig):
        self.config = config
        self.live = parameters
        self.average = {name: p.detach().clone() for name, p in parameters.items()}

    def decay(self, step: int) -> float:
        """Decay at step number `step` (0 first): short at the start, so that the initial weights are soon forgotten."""
        if self.config.warmup <= 0:
            return self.config.decay
        return min(self.config.decay, (1 + step) / (self.config.warmup + step))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """average <- decay average + (1 - decay) live, without a host synchronisation."""
        torch._foreach_lerp_(list(self.average.values()), list(self.live.values()), 1 - self.decay(step))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the live parameters hold the averages; afterwards exactly what they held before."""
        with torch.no_grad():
            kept = [p.detach().clone() for p in self.live.values()]
            torch._foreach_copy_(list(self.live.values()), list(self.average.values()))
            try:
                yield
            finally:
                torch._foreach_copy_(list(self.live.values()), kept)
