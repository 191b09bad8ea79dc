"""What tests of several video models ask of a model."""

import json

import torch
from tiny_wan import run


def public(config) -> dict:
    """A config as a file holds it, without Diffusers' own notes."""
    fields = {name: value for name, value in config.items() if not name.startswith("_")}
    return json.loads(json.dumps(fields))  # tuples come back from a file as lists


def gradients(target: torch.nn.Module, **inputs) -> dict[str, torch.Tensor]:
    """Of one forward and backward pass, by the parameters' names."""
    target.zero_grad()
    run(target, **inputs).square().sum().backward()
    return {name: p.grad.clone() for name, p in target.named_parameters() if p.grad is not None}
