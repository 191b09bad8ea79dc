"""Which parameters train, and in which optimizer group."""

from __future__ import annotations

import math
import re

import torch
from torch import nn

from .config import OptimizerConfig

# Values of model.train that put adapters in: the second is its older name.
LORA = ("lora+mixing", "lora")

# Embedding-like tables, and the gate, whose neutral start is all zeros around a constant.
_UNDECAYED = (
    "scale_shift_table",
    "embed_tokens",
    "embedding_table",
    "to_gate",
    ".norm",
    "norm_",
    "caption_norm",
    "layernorm",
)


def trainable(transformer: nn.Module, which: str) -> list[str]:
    """Marks what trains and freezes the rest; returns the names of the trained parameters.

    `which`:
        "all": every parameter.
        "attention": every parameter inside a self-attention module (`attn1.`): the projections, query/key norms, and
            where present the coefficient matrix, gate, output norm and local convolution.
        "mixing": the coefficient matrices alone (`attn1.mixing.weight`).
        "lora+mixing", or "lora": the adapters (`lora_`) that `add_adapter` put in before, and the coefficient matrices.

    A matrix built with `mhla_mixing_learnable=False` never trains.

    Raises:
        ValueError: an unknown set, or one that is empty in this model.
    """
    tests = {
        "all": lambda name: True,
        "attention": lambda name: ".attn1." in name,
        "mixing": lambda name: ".mixing." in name,
        **{which: lambda name: "lora_" in name or ".mixing." in name for which in LORA},
    }
    if which not in tests:
        raise ValueError(f"trainable set {which!r}; allowed: {', '.join(tests)}")
    fixed = transformer.config.get("mhla_mixing_learnable", True) is False
    chosen = []
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_(tests[which](name) and not (fixed and ".mixing." in name))
        if parameter.requires_grad:
            chosen.append(name)
    if not chosen:
        raise ValueError(
            f"trainable set {which!r} is empty in {type(transformer).__name__}: it has no such parameter"
        )
    return chosen


def listed(parameters: dict[str, nn.Parameter]) -> str:
    """The parameters in few words: each module once, with `*` for the layers' numbers, and how many tensors it has."""
    counts: dict[str, int] = {}
    for name in parameters:
        module = re.sub(r"\.\d+(?=\.|$)", ".*", name.rpartition(".")[0] or name, count=1)
        counts[module] = counts.get(module, 0) + 1
    return ", ".join(f"{module} ({count})" for module, count in counts.items())


def decays(name: str, parameter: torch.Tensor) -> bool:
    """True for matrices and kernels of linear layers and convolutions."""
    lowered = "." + name.lower()
    return parameter.ndim >= 2 and not any(part in lowered for part in _UNDECAYED)


def parameter_groups(parameters: dict[str, nn.Parameter], config: OptimizerConfig) -> list[dict]:
    """AdamW groups; each carries `base_lr`, which the schedule multiplies.

    The entries of a coefficient matrix are of order 1/M, so its rate is `mixing_lr / M` (M: key blocks) and it has no
    weight decay; everything else is split into decayed and not.
    """
    groups: dict[tuple, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        if ".mixing." in name:
            key = ("mixing", config.mixing_lr / parameter.shape[-1], 0.0)
        else:
            text = name.startswith("text_encoder.") and config.text_encoder_lr is not None
            rate = config.text_encoder_lr if text else config.lr
            key = ("weights", rate, config.weight_decay if decays(name, parameter) else 0.0)
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": members, "lr": rate, "base_lr": rate, "weight_decay": decay, "kind": kind}
        for (kind, rate, decay), members in groups.items()
    ]


def build_optimizer(parameters: dict[str, nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW over `parameter_groups`."""
    groups = parameter_groups(parameters, config)
    return torch.optim.AdamW(groups, lr=config.lr, betas=tuple(config.betas), eps=config.eps, fused=True)


def schedule_factor(config: OptimizerConfig, step: int, first_step: int, last_step: int) -> float:
    """Share of the rate at `step`: linear warm-up from `first_step`, then constant or cosine to `last_step`."""
    factor = 1.0
    if config.schedule == "cosine":
        progress = min(1.0, step / max(1, last_step))
        factor = config.lr_min + (1 - config.lr_min) * 0.5 * (1 + math.cos(math.pi * progress))
    if config.warmup:
        factor *= min(1.0, (step - first_step + 1) / config.warmup)
    return factor
