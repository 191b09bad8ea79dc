"""What tests of every model family ask of a model, and of what it makes."""

import json

import torch


def stirred(target: torch.nn.Module, seed: int = 5) -> torch.nn.Module:
    """The same module with every weight moved off its start, so that no part is neutral."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter += 0.05 * torch.rand(parameter.shape, generator=draw).to(parameter.device)
    return target


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """How far `a` is from `b`, as a share of the norm of `b`."""
    return ((a - b).norm() / b.norm()).item()


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Pictures equal up to the order of sums, which depends on where a weight lies in memory (mapped or not)."""
    return (a - b).abs().max() < 1e-5


def public(config) -> dict:
    """A config as a file holds it, without Diffusers' own notes."""
    fields = {name: value for name, value in config.items() if not name.startswith("_")}
    return json.loads(json.dumps(fields))  # tuples come back from a file as lists


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether both have the same weights under the same names, bit for bit."""
    theirs = other.state_dict()
    return one.state_dict().keys() == theirs.keys() and all(
        torch.equal(x, theirs[name]) for name, x in one.state_dict().items()
    )


def gradients(target: torch.nn.Module, **inputs) -> dict[str, torch.Tensor]:
    """Of one forward and backward pass, by the parameters' names."""
    target.zero_grad()
    torch.manual_seed(1)  # a DiT drops labels in training
    target(**inputs).sample.square().sum().backward()
    return {name: p.grad.clone() for name, p in target.named_parameters() if p.grad is not None}
