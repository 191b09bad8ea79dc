"""Builds the parts of a pipeline for training: from a base folder, fresh from the recipe, or from an earlier run."""

from __future__ import annotations

import copy
import inspect
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from mhla_diffusion.weights import check_files

from .config import ConvertConfig, ModelConfig, Recipe
from .losses import makes_videos
from .parameters import LORA
from .parts import (
    base_folder,
    diffusers_class,
    fresh_text_encoder,
    fresh_transformer,
    load_part,
    load_vae,
)
from .randomness import derived_seed
from .recipe import check_model_table, constructor_fields


@dataclass
class Components:
    """What a run trains and what it needs around it. `vae` is loaded when first used.

    A DiT has neither tokenizer nor text encoder, but `class_numbers`: the number of each of the data's classes.
    """

    pipeline_class: type
    base: Path
    tokenizer: object | None
    scheduler: object
    transformer: nn.Module
    text_encoder: nn.Module | None
    defaults: dict = field(default_factory=dict)
    class_numbers: dict[str, int] | None = None
    _vae: nn.Module | None = None

    @property
    def vae(self) -> nn.Module:
        if self._vae is None:
            self._vae = load_vae(self.base)
        return self._vae

    @property
    def instruction(self) -> list[str] | None:
        """The text put before every prompt: what the pipeline stores, else what its call does by default."""
        if "complex_human_instruction" in self.defaults:
            stored = self.defaults["complex_human_instruction"]
            return [stored] if isinstance(stored, str) and stored else None
        parameter = inspect.signature(self.pipeline_class.__call__).parameters.get(
            "complex_human_instruction"
        )
        return parameter.default if parameter is not None and isinstance(parameter.default, list) else None

    @property
    def max_sequence_length(self) -> int:
        return int(
            self.defaults.get("max_sequence_length") or (512 if makes_videos(self.transformer) else 300)
        )

    @property
    def _vae_config(self) -> dict:
        return json.loads((self.base / "vae" / "config.json").read_text())

    @property
    def latent_factor(self) -> int:
        """Pixels per latent token along one axis of a picture: autoencoder factor times patch size."""
        config, patch = self._vae_config, self.transformer.config.patch_size
        if makes_videos(self.transformer):
            return config.get("scale_factor_spatial", 8) * patch[-1]
        stages = config.get("encoder_block_out_channels") or config["block_out_channels"]
        return 2 ** (len(stages) - 1) * patch

    @property
    def frame_factor(self) -> int | None:
        """Frames of a video per frame of latents; None for models of pictures."""
        return self._vae_config.get("scale_factor_temporal", 4) if makes_videos(self.transformer) else None

    def pipeline(self, transformer: nn.Module | None = None, text_encoder: nn.Module | None = None):
        """A pipeline object around these parts, or around the given stand-ins."""
        text = {"tokenizer": self.tokenizer, "text_encoder": text_encoder or self.text_encoder}
        return self.pipeline_class(
            **(text if self.class_numbers is None else {}),
            vae=self.vae,
            transformer=transformer or self.transformer,
            scheduler=copy.deepcopy(self.scheduler),
            **self.defaults,
        )


def transformer_class(model: ModelConfig, base: Path) -> str:
    """Class name of the recipe's transformer; empty when neither the recipe nor the base has one."""
    if model.transformer is not None:
        return model.transformer_class
    config = base / "transformer" / "config.json"
    return json.loads(config.read_text()).get("_class_name", "") if config.is_file() else ""


def has_classes(model: ModelConfig, base: Path) -> bool:
    """Whether the recipe's transformer is a DiT, which is told classes and not captions."""
    return "DiT" in transformer_class(model, base)


# Of text: any other would fail late, or train on inputs that it does not expect. DiTs are told apart before.
TRAINED = (
    "SanaTransformer2DModel",
    "MHLASanaTransformer2DModel",
    "WanTransformer3DModel",
    "MHLAWanTransformer3DModel",
)


def _check_kind(model: ModelConfig, base: Path, facts: dict) -> None:
    """ValueError unless recipes train a base of this kind: SANA, or Wan 2.1 for text to video."""
    name = transformer_class(model, base)
    if name and name not in TRAINED:
        raise ValueError(
            f"recipe: the transformer of {base} is a {name}; recipes train DiT, SANA, and Wan 2.1 for text to video"
        )
    if facts.get("_class_name") == "WanImageToVideoPipeline":
        raise ValueError(f"recipe: {base} is Wan for image to video; recipes train Wan 2.1, text to video")
    per_token = facts.get("expand_timesteps")
    if per_token or (facts.get("transformer_2") or [None])[0] is not None:
        raise ValueError(
            f"recipe: {base} is Wan 2.2 with {'a timestep per token' if per_token else 'two experts'}; recipes train "
            "Wan 2.1, text to video"
        )


def _pipeline_class_and_defaults(base: Path, recipe: Recipe, by_class: bool) -> tuple[type, dict]:
    """The class named by model_index.json (ours when there is none), and the values it stores besides components."""
    model, length = recipe.model, recipe.data.max_sequence_length
    index = base / "model_index.json"
    facts = json.loads(index.read_text()) if index.is_file() else {}
    if not by_class:
        _check_kind(model, base, facts)
    ours = "MHLAWanPipeline" if "Wan" in transformer_class(model, base) else "MHLASanaPipeline"
    # Any number of classes is only drawn by our pipeline for DiT.
    name = "MHLADiTPipeline" if by_class else facts.get("_class_name", ours)
    cls = diffusers_class(name)
    allowed = inspect.signature(cls.__init__).parameters.keys() - {"self"}
    parts = {"tokenizer", "text_encoder", "vae", "transformer", "transformer_2", "scheduler"}
    check_model_table(model.defaults, allowed - parts, "model.defaults")
    if by_class and "DiT" not in facts.get("_class_name", ""):
        facts = {}  # values of another kind of pipeline
    stored = {k: v for k, v in facts.items() if k in allowed - parts and not k.startswith("_")}
    trained = {"max_sequence_length": length} if length and "max_sequence_length" in allowed else {}
    return cls, {**stored, **model.defaults, **trained}


def converted(transformer: nn.Module, options: ConvertConfig) -> nn.Module:
    """A stock transformer as [model.convert] says; ValueError when it is an MHLA model already."""
    from mhla_diffusion import convert
    from mhla_diffusion.models.convert import restore

    config = transformer.config
    if (
        config.get("mhla_layers", None) == [] and config.mhla_other_layers == "stock"
    ):  # ours, but for the name stock
        transformer = restore(transformer)
    if "mhla_layers" in transformer.config:
        axes = ("FRAMES," if len(transformer.config.mhla_block_grid) == 3 else "") + "ROWS,COLUMNS"
        raise ValueError(
            f"recipe: [model.convert], but the transformer of the base is an {type(transformer).__name__} already; "
            f"take that section out, and change its blocks with `mhla convert BASE OUT --block-grid {axes}`"
        )
    layers = "all" if options.layers is None else options.layers
    return convert(
        transformer,
        block_grid=options.block_grid,
        layers=layers,
        gate=options.gate,
        local_conv=options.local_conv,
    )


def loss_kind(recipe: Recipe, by_class: bool) -> str:
    """What `loss.kind` means for this model, "flow" or "diffusion"; ValueError for a diffusion loss of SANA."""
    kind = recipe.loss.kind
    if kind == "diffusion" and not by_class:
        raise ValueError(
            'recipe: loss.kind = "diffusion" trains a DiT; SANA and Wan learn flow matching: write "flow" or "auto"'
        )
    return kind if kind != "auto" else "diffusion" if by_class else "flow"


def _check_class_recipe(recipe: Recipe) -> None:
    """ValueError for what a DiT has no use for, or a transformer that is told captions."""
    model = recipe.model
    if model.train_text_encoder or model.text_encoder is not None:
        raise ValueError(
            "recipe: a DiT has no text encoder; take out [model.text_encoder] and model.train_text_encoder"
        )
    if model.new_classes and model.transformer is not None:
        raise ValueError(
            "recipe: a fresh [model.transformer] has the data's classes anyway; take out model.new_classes"
        )
    if model.new_classes and model.train != "all":
        raise ValueError(
            f'recipe: model.train = "{model.train}" would leave the label embeddings of model.new_classes as they '
            'start; write model.train = "all"'
        )


def build_components(recipe: Recipe) -> Components:
    """Loads and builds everything but the autoencoder. Fresh weights are a function of `run.seed`.

    Raises:
        ValueError: a part is neither in the base folder nor built by the recipe; a config key is unknown.
    """
    model = recipe.model
    base = base_folder(model)
    source = Path(recipe.run.init_from) if recipe.run.init_from else None
    if source is not None and not (source / "transformer" / "config.json").is_file():
        raise ValueError(
            f"recipe: run.init_from = {str(source)!r} has no transformer/; give a pipeline folder, or the "
            "continue/ folder of an earlier run"
        )
    by_class = has_classes(model, base)
    kind = loss_kind(recipe, by_class)
    cls, defaults = _pipeline_class_and_defaults(base, recipe, by_class)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(recipe.run.seed, "weights"))
        if by_class:
            parts = _class_components(recipe, base, kind, cls, defaults)
        else:
            parts = _text_components(recipe, base, cls, defaults)
    if source is not None:
        _take_run(parts, recipe, source)
    if by_class:
        from .class_models import prepare_for_training

        prepare_for_training(parts.transformer)
    add_adapters(parts.transformer, recipe)
    if model.train_text_encoder and parts.instruction:
        raise ValueError(
            f"recipe: {base} puts an instruction before every prompt, which is supported with a frozen text encoder "
            "only; write model.train_text_encoder = false"
        )
    return parts


def add_adapters(transformer: nn.Module, recipe: Recipe) -> None:
    """Fresh LoRA pairs, a function of `run.seed`, where the recipe trains some."""
    if recipe.model.train not in LORA:
        return
    from peft import LoraConfig as PeftConfig

    lora = recipe.model.lora
    settings = PeftConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(recipe.run.seed, "adapters"))
        transformer.add_adapter(settings)


def _loaded_transformer(base: Path) -> nn.Module:
    return load_part(base, "transformer", "; to train a new one, write [model.transformer]")


def _text_components(recipe: Recipe, base: Path, cls: type, defaults: dict) -> Components:
    model = recipe.model
    tokenizer = load_part(base, "tokenizer")
    if model.transformer is not None:
        transformer = fresh_transformer(model)
    else:
        transformer = _loaded_transformer(base)
    if model.new_classes:
        raise ValueError("recipe: model.new_classes is for DiT, which is told classes; take it out")
    if model.convert is not None:
        transformer = converted(transformer, model.convert)
    if model.text_encoder is not None:
        text_encoder = fresh_text_encoder(model, len(tokenizer), makes_videos(transformer))
    else:
        text_encoder = load_part(base, "text_encoder", "; to train a new one, write [model.text_encoder]")
    return Components(cls, base, tokenizer, load_part(base, "scheduler"), transformer, text_encoder, defaults)


def _class_components(recipe: Recipe, base: Path, kind: str, cls: type, defaults: dict) -> Components:
    from .class_models import fresh_classes, fresh_dit, held_in_ours, known_classes, scheduler_for

    model, fresh = recipe.model, recipe.model.transformer is not None
    _check_class_recipe(recipe)
    there = (base / "scheduler" / "scheduler_config.json").is_file()
    scheduler = scheduler_for(kind, load_part(base, "scheduler") if there else None, fresh)
    if fresh:
        transformer_class = diffusers_class(model.transformer_class)
        check_model_table(model.transformer, constructor_fields(transformer_class), "model.transformer")
        classes = fresh_classes(recipe)
        transformer = fresh_dit(transformer_class, model.transformer, classes)
    else:
        transformer = _loaded_transformer(base)
        classes = known_classes(transformer, recipe, defaults.get("id2label"))
        if model.convert is not None:
            transformer = converted(transformer, model.convert)
        transformer = held_in_ours(transformer)
    if recipe.sample.every:
        classes.check_labels(recipe.sample.prompts)
    defaults = {**defaults, "id2label": classes.id2label}
    return Components(cls, base, None, scheduler, transformer, None, defaults, classes.numbers)


def _take_run(parts: Components, recipe: Recipe, source: Path) -> None:
    """The weights of an earlier run, or of a pipeline with the same models."""
    model = recipe.model
    _take_weights(parts.transformer, source / "transformer")
    if parts.text_encoder is None:
        return
    if (source / "text_encoder").is_dir():
        _take_weights(parts.text_encoder, source / "text_encoder")
    elif model.text_encoder is not None and not model.train_text_encoder:
        raise ValueError(
            f"recipe: run.init_from = {str(source)!r} has no text_encoder/ and [model.text_encoder] is "
            "fresh and not trained; write model.train_text_encoder = true"
        )


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model folder's safetensors files, as float32 on the CPU."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no .safetensors file")
    check_files(folder)
    return {name: value.float() for file in files for name, value in load_file(file).items()}


def _take_weights(module: nn.Module, folder: Path) -> None:
    """Copies an earlier run's weights into a module of the same shape; ValueError naming what does not fit."""
    weights, own = read_weights(folder), module.state_dict()
    # A tensor with two names, as UMT5's table of words, is stored under one of them.
    stored = {own[n].data_ptr(): weights[n] for n in own.keys() & weights.keys()}
    weights |= {
        n: stored[x.data_ptr()] for n, x in own.items() if n not in weights and x.data_ptr() in stored
    }
    wrong = [
        n
        for n in sorted(weights.keys() | own.keys())
        if n not in own or n not in weights or own[n].shape != weights[n].shape
    ]
    if wrong:
        raise ValueError(
            f"recipe: the weights in {folder} do not fit the model of this recipe; {len(wrong)} tensors "
            f"differ, first {wrong[0]} (a model that is to be converted is a model.base with [model.convert])"
        )
    module.load_state_dict(weights)
