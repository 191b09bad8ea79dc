"""Builds the parts of a pipeline for training: from a base folder, fresh from the recipe, or from an earlier run."""

from __future__ import annotations

import copy
import inspect
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from mhla_diffusion.loading import no_library_bars

from .config import ModelConfig, Recipe
from .randomness import derived_seed
from .recipe import check_model_table, constructor_fields


def diffusers_class(name: str):
    """A class by its recorded name: ours first, else Diffusers'."""
    import diffusers

    import mhla_diffusion

    if name.startswith("MHLA"):
        return getattr(mhla_diffusion, name)
    if not hasattr(diffusers, name):
        raise ValueError(
            f"neither mhla_diffusion nor diffusers has a class {name!r}; is the folder made by another version?"
        )
    return getattr(diffusers, name)


def _load(folder: Path, part: str, hint: str = ""):
    """One component of a pipeline folder, in float32."""
    path = folder / part
    config = next((path / n for n in ("config.json", "scheduler_config.json") if (path / n).is_file()), None)
    if part == "tokenizer" and path.is_dir():
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path)
    if config is None:
        raise ValueError(f"{folder} has no {part}/{hint}")
    facts = json.loads(config.read_text())
    if part == "text_encoder":
        import transformers

        cls = getattr(transformers, facts["architectures"][0])
        with no_library_bars():
            return cls.from_pretrained(path, dtype=torch.float32)
    cls = diffusers_class(facts["_class_name"])
    if part == "scheduler":
        return cls.from_pretrained(path)
    return cls.from_pretrained(path, torch_dtype=torch.float32)


def base_folder(model: ModelConfig) -> Path:
    """The recipe's base as a folder; a bare name is looked for where pipelines are kept."""
    path = Path(model.base)
    if path.is_dir():
        return path
    from mhla_diffusion.weights import find_pipeline

    return find_pipeline(model.base)


def load_vae(base: Path):
    """The base pipeline's autoencoder, float32, frozen."""
    return _load(base, "vae").requires_grad_(False).eval()


def fresh_transformer(model: ModelConfig) -> nn.Module:
    """A new transformer from [model.transformer]; unknown fields name the nearest."""
    cls = diffusers_class(model.transformer_class)
    check_model_table(model.transformer, constructor_fields(cls), "model.transformer")
    return cls(**model.transformer)


def fresh_text_encoder(model: ModelConfig, vocabulary: int) -> nn.Module:
    """A new Gemma-2 text encoder from [model.text_encoder], at least as many entries as the tokenizer has tokens."""
    from transformers import Gemma2Config, Gemma2Model

    allowed = Gemma2Config().to_dict().keys() | {"attn_implementation"}
    check_model_table(model.text_encoder, allowed, "model.text_encoder")
    config = Gemma2Config(**model.text_encoder)
    if config.vocab_size < vocabulary:
        raise ValueError(
            f"recipe: model.text_encoder.vocab_size = {config.vocab_size} is below the tokenizer's "
            f"{vocabulary} tokens; write {vocabulary}"
        )
    return Gemma2Model(config)


@dataclass
class Components:
    """What a run trains and what it needs around it. `vae` is loaded when first used."""

    pipeline_class: type
    base: Path
    tokenizer: object
    scheduler: object
    transformer: nn.Module
    text_encoder: nn.Module
    defaults: dict = field(default_factory=dict)
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
        return int(self.defaults.get("max_sequence_length") or 300)

    @property
    def latent_factor(self) -> int:
        """Pixels per latent token along one axis: autoencoder factor times patch size."""
        config = json.loads((self.base / "vae" / "config.json").read_text())
        stages = config.get("encoder_block_out_channels") or config["block_out_channels"]
        return 2 ** (len(stages) - 1) * self.transformer.config.patch_size

    def pipeline(self, transformer: nn.Module | None = None, text_encoder: nn.Module | None = None):
        """A pipeline object around these parts, or around the given stand-ins."""
        return self.pipeline_class(
            tokenizer=self.tokenizer,
            text_encoder=text_encoder or self.text_encoder,
            vae=self.vae,
            transformer=transformer or self.transformer,
            scheduler=copy.deepcopy(self.scheduler),
            **self.defaults,
        )


def _pipeline_class_and_defaults(base: Path, recipe: Recipe) -> tuple[type, dict]:
    """The class named by model_index.json (ours when there is none), and the values it stores besides components."""
    model, length = recipe.model, recipe.data.max_sequence_length
    index = base / "model_index.json"
    facts = json.loads(index.read_text()) if index.is_file() else {}
    cls = diffusers_class(facts.get("_class_name", "MHLASanaPipeline"))
    allowed = inspect.signature(cls.__init__).parameters.keys() - {"self"}
    parts = {"tokenizer", "text_encoder", "vae", "transformer", "scheduler"}
    check_model_table(model.defaults, allowed - parts, "model.defaults")
    stored = {k: v for k, v in facts.items() if k in allowed - parts and not k.startswith("_")}
    trained = {"max_sequence_length": length} if length and "max_sequence_length" in allowed else {}
    return cls, {**stored, **model.defaults, **trained}


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
    cls, defaults = _pipeline_class_and_defaults(base, recipe)
    tokenizer = _load(base, "tokenizer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(recipe.run.seed, "weights"))
        if model.transformer is not None:
            transformer = fresh_transformer(model)
        else:
            transformer = _load(base, "transformer", "; to train a new one, write [model.transformer]")
        if model.convert is not None:
            from mhla_diffusion import convert

            options = model.convert
            layers = "all" if options.layers is None else options.layers
            transformer = convert(
                transformer,
                block_grid=options.block_grid,
                layers=layers,
                gate=options.gate,
                local_conv=options.local_conv,
            )
        if model.text_encoder is not None:
            text_encoder = fresh_text_encoder(model, len(tokenizer))
        else:
            text_encoder = _load(base, "text_encoder", "; to train a new one, write [model.text_encoder]")
    if source is not None:
        _take_weights(transformer, source / "transformer")
        if (source / "text_encoder").is_dir():
            _take_weights(text_encoder, source / "text_encoder")
        elif model.text_encoder is not None and not model.train_text_encoder:
            raise ValueError(
                f"recipe: run.init_from = {str(source)!r} has no text_encoder/ and [model.text_encoder] is "
                "fresh and not trained; write model.train_text_encoder = true"
            )
    if model.train == "lora":
        from peft import LoraConfig as PeftConfig

        settings = PeftConfig(
            r=model.lora.rank, lora_alpha=model.lora.alpha, target_modules=model.lora.targets
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(recipe.run.seed, "adapters"))
            transformer.add_adapter(settings)
    parts = Components(cls, base, tokenizer, _load(base, "scheduler"), transformer, text_encoder, defaults)
    if model.train_text_encoder and parts.instruction:
        raise ValueError(
            f"recipe: {base} puts an instruction before every prompt, which is supported with a frozen text encoder "
            "only; write model.train_text_encoder = false"
        )
    return parts


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model folder's safetensors files, as float32 on the CPU."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no .safetensors file")
    return {name: value.float() for file in files for name, value in load_file(file).items()}


def _take_weights(module: nn.Module, folder: Path) -> None:
    """Copies an earlier run's weights into a module of the same shape; ValueError naming what does not fit."""
    weights, own = read_weights(folder), module.state_dict()
    wrong = [
        n
        for n in sorted(weights.keys() | own.keys())
        if n not in own or n not in weights or own[n].shape != weights[n].shape
    ]
    if wrong:
        raise ValueError(
            f"recipe: the weights in {folder} do not fit the model of this recipe; {len(wrong)} tensors "
            f"differ, first {wrong[0]}"
        )
    module.load_state_dict(weights)
