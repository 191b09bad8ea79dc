"""A DiT for training: fresh, from a pipeline, converted, with the classes of the data."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import torch
from diffusers import DPMSolverMultistepScheduler, SchedulerMixin
from torch import nn

from mhla_diffusion.models.convert import convert
from mhla_diffusion.models.dit import MHLADiTTransformer2DModel
from mhla_diffusion.models.dit_presets import start_as_published
from mhla_diffusion.pipelines.dit import dit_scheduler

from .classes import class_names, class_numbers, named_classes
from .config import Recipe

LABEL_STD = 0.02  # of new label embeddings, as the published models' were


@dataclass
class Classes:
    """The data's classes in the model: numbers by name, and the names that the exported pipeline has."""

    numbers: dict[str, int]
    id2label: dict[str, str] | None
    count: int

    @classmethod
    def new(cls, names: list[str]) -> Classes:
        """Classes numbered in the order of `names`."""
        numbers = {name: number for number, name in enumerate(names)}
        return cls(numbers, {str(number): name for name, number in numbers.items()}, len(names))

    def check_labels(self, prompts: list[str]) -> None:
        """ValueError for a sample prompt that is no class: found now, and not when the first grid is drawn."""
        known = named_classes(self.id2label)
        for label in prompts:
            if label not in known and not (label.isdecimal() and int(label) <= self.count):
                near = difflib.get_close_matches(label, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"a number goes up to {self.count - 1}"
                raise ValueError(f"recipe: sample.prompts: {label!r} is no class of this model; {hint}")


def fresh_classes(recipe: Recipe) -> Classes:
    """The data's classes for a new DiT; ValueError when [model.transformer] counts others."""
    classes = Classes.new(class_names(recipe.data))
    asked = recipe.model.transformer.get("num_embeds_ada_norm", classes.count)
    if asked != classes.count:
        raise ValueError(
            f"recipe: model.transformer.num_embeds_ada_norm = {asked!r}, but the data has {classes.count} classes; "
            f"write {classes.count}, or leave it out"
        )
    return classes


def fresh_dit(cls: type, table: dict, classes: Classes) -> nn.Module:
    """A new DiT with the published start (adaLN-Zero), from PyTorch's random state."""
    model = cls(**{**table, "num_embeds_ada_norm": classes.count})
    start_as_published(model)
    return model


def known_classes(model: nn.Module, recipe: Recipe, id2label: dict | None) -> Classes:
    """The data's classes in a trained DiT; with `model.new_classes` it gets new label embeddings for them."""
    names, count = class_names(recipe.data), model.config.num_embeds_ada_norm
    if recipe.model.new_classes:
        classes = Classes.new(names)
        learn_new_classes(model, classes.count)
        return classes
    return Classes(class_numbers(names, count, id2label, recipe.data.classes), id2label, count)


def learn_new_classes(model: nn.Module, count: int) -> None:
    """Puts new label embeddings for `count` classes into a DiT, the same in all layers; the null class keeps its."""
    new = None
    for layer in model.transformer_blocks:
        embedder = layer.norm1.emb.class_embedder
        old = embedder.embedding_table.weight.detach()
        if new is None:
            new = LABEL_STD * torch.randn(count + 1, old.shape[1])
        table = nn.Embedding(count + 1, old.shape[1], _weight=new.clone())
        with torch.no_grad():
            table.weight[count] = old[-1]
        embedder.embedding_table, embedder.num_classes = table, count
    model.register_to_config(num_embeds_ada_norm=count)


def held_in_ours(model: nn.Module) -> MHLADiTTransformer2DModel:
    """A stock DiT in our class without MHLA, which is equal bit for bit; one of ours as it is."""
    return model if isinstance(model, MHLADiTTransformer2DModel) else convert(model, layers=[])


def prepare_for_training(model: MHLADiTTransformer2DModel) -> None:
    """Leaves the dropout of labels to the data, and lets all layers share one embedder where their copies are equal."""
    model.label_dropout = 0.0
    try:
        model.share_embedders()
    except ValueError:
        return  # trained apart: each layer keeps its own


def scheduler_for(kind: str, base: SchedulerMixin | None, fresh: bool) -> SchedulerMixin:
    """The scheduler that draws what `kind` of loss trains: the base's where it fits, for a new DiT else a usual one.

    Raises:
        ValueError: the base's scheduler draws something else.
    """
    wanted = {"flow": "flow_prediction", "diffusion": "epsilon"}[kind]
    if base is not None:
        flow = type(base).__name__.startswith("FlowMatch")
        predicts = "flow_prediction" if flow else base.config.get("prediction_type", "epsilon")
        if predicts == wanted:
            return base
        if not fresh:
            raise ValueError(
                f'recipe: loss.kind = "{kind}" trains {wanted}, but the scheduler of the base, {type(base).__name__}, '
                f"draws with {predicts}; write the other loss.kind"
            )
    if kind == "diffusion":
        return dit_scheduler("ddim")
    return DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0
    )
