"""Teaches each MHLA layer what the attention that it replaced gave, layer by layer.

A converted softmax attention computes something else at first, and in fine-tuning all layers have to find back at once,
each on inputs that the others keep changing. Here every layer learns by itself: the teachers' outputs are what goes on
through the model, so each layer sees the inputs that it had in the original, and its output is compared with the
original's on them. `warm_start.py` runs the steps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import init_empty_weights
from torch import nn

from mhla_diffusion.attention import MHLASelfAttention
from mhla_diffusion.building import BUILDING
from mhla_diffusion.models.convert import family_of, ours
from mhla_diffusion.wan_attention import WanPositions

from .config import Recipe
from .recipe import constructor_fields

OFF = "or write distill.steps = 0"


def relative_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean over samples of mean squared error / mean square of the target, 0-dim float32; both `(B, N, C)`.

    Relative, so that layers and noise levels whose outputs are small count like the others; for each sample by itself,
    so that parts of a batch average to the whole.
    """
    target = target.float()
    error = (output.float() - target).square().flatten(1).mean(1)
    power = target.square().flatten(1).mean(1)
    return (error / power.clamp_min(torch.finfo(torch.float32).tiny)).mean()


class LayerPair:
    """An MHLA attention of a model, the student, and a frozen copy of the stock attention that it replaced.

    Args:
        name: of the attention in the model.
        share: what the loss is multiplied by before backward: one over the number of micro-batches.

    `loss` holds the last forward pass's `relative_error`, detached.
    """

    def __init__(self, name: str, student: MHLASelfAttention, teacher: nn.Module, share: float = 1.0):
        self.name, self.student, self.teacher, self.share = name, student, teacher, share
        self.loss: torch.Tensor | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What trains in the student."""
        return [parameter for parameter in self.student.parameters() if parameter.requires_grad]

    def run(self, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """In the place of the student's `forward`: adds the gradients of its loss, returns the teacher's output.

        Backward runs at once, so that no more than one layer's activations are ever held.
        """
        named = {name: without_grid(value) for name, value in kwargs.items() if name != "grid"}
        target = self.teacher(hidden_states, *map(without_grid, args), **named)
        with torch.enable_grad():
            output = type(self.student).forward(self.student, hidden_states.detach(), *args, **kwargs)
            loss = relative_error(output, target)
            scaled = loss * self.share
        with torch.autocast(target.device.type, enabled=False):  # it is for forward passes
            scaled.backward()
        self.loss = loss.detach()
        return target


def without_grid(value):
    """Positions as a stock attention takes them; any other argument as it is."""
    return tuple(value[:2]) if isinstance(value, WanPositions) else value


def mhla_layers(transformer: nn.Module) -> dict[str, MHLASelfAttention]:
    return {
        name: module for name, module in transformer.named_modules() if isinstance(module, MHLASelfAttention)
    }


def changed_part(attention: MHLASelfAttention) -> str | None:
    """Name of a part that MHLA added and that no longer has its documented start; None in a fresh conversion."""
    for name, module in attention.new_modules():
        start = copy.deepcopy(module)
        start.reset_parameters()
        pairs = zip(module.parameters(), start.parameters(), strict=True)
        if not all(torch.allclose(now, then, rtol=1e-5, atol=1e-7) for now, then in pairs):
            return name
    return None


def check_distillable(transformer: nn.Module, recipe: Recipe) -> None:
    """ValueError unless the model has MHLA layers, fresh from a conversion."""
    asked = f"recipe: distill.steps = {recipe.distill.steps}, but"
    layers = mhla_layers(transformer)
    if not layers:
        raise ValueError(
            f"{asked} no layer of this {type(transformer).__name__} is MHLA, so there is nothing to distil: add "
            f"[model.convert], {OFF}"
        )
    if not isinstance(transformer, ours()):
        raise ValueError(
            f"{asked} it is not known which stock attention a {type(transformer).__name__} stands for; give a model "
            f"made by mhla_diffusion.convert, {OFF}"
        )
    for name, attention in layers.items():
        part = changed_part(attention)
        if part is not None:
            raise ValueError(
                f"{asked} {name}.{part} has been trained already, so the attention that it replaced is not known any "
                f"more: start from the stock model with [model.convert], {OFF}"
            )


def layer_pairs(transformer: nn.Module) -> list[LayerPair]:
    """A pair for each MHLA layer of a freshly converted model; the teachers are copies of its weights as they are now.

    Adapters that are not merged stay out of the teachers.

    Raises ValueError when a layer lacks weights of the stock attention.
    """
    stock = family_of(transformer).stock
    known = set(constructor_fields(stock))
    arguments = {name: value for name, value in transformer.config.items() if name in known}
    with BUILDING, init_empty_weights():
        template = stock(**{**arguments, "num_layers": 1})
    template = getattr(template, transformer._layers_in)[0].attn1
    pairs = []
    for name, student in mhla_layers(transformer).items():
        state = {key.replace(".base_layer.", "."): value for key, value in student.state_dict().items()}
        teacher = copy.deepcopy(template)
        wanted = teacher.state_dict().keys()
        lost = [key for key in wanted if key not in state]
        if lost:
            raise ValueError(
                f"{name} lacks {lost[0]} of the attention of a {stock.__name__}: it is no such attention, {OFF}"
            )
        teacher.load_state_dict({key: state[key].detach().clone() for key in wanted}, assign=True)
        pairs.append(LayerPair(name, student, teacher.eval().requires_grad_(False)))
    return pairs


@contextmanager
def distilling(model: nn.Module, pairs: list[LayerPair]) -> Iterator[None]:
    """Inside, a forward pass of `model` under `torch.no_grad()` runs the pairs; afterwards all is as before.

    Args:
        model: holds the students' transformer; what is compiled in it runs uncompiled, for a layer's backward is in
            the middle of the model's forward.
    """
    ropes = [module for module in model.modules() if getattr(module, "tabulated", None) is False]
    compiled = [
        (module, module._compiled_call_impl) for module in model.modules() if module._compiled_call_impl
    ]
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        for rope in ropes:  # of Wan and SANA-Video: a stock attention reads the table
            rope.tabulated = True
        for pair in pairs:
            pair.student.forward = pair.run
        yield
    finally:
        for pair in pairs:
            pair.student.__dict__.pop("forward", None)
        for rope in ropes:
            rope.tabulated = False
        for module, call in compiled:
            module._compiled_call_impl = call
