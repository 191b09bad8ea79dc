"""One part of a pipeline: loaded from a folder, or built fresh as the recipe says."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from mhla_diffusion.loading import no_library_bars
from mhla_diffusion.weights import check_files, find_pipeline, what_is_lacking

from .config import ModelConfig
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


def load_part(folder: Path, part: str, hint: str = ""):
    """One component of a pipeline folder, in float32. ValueError when it is not there, not whole, or cut short."""
    path = folder / part
    config = next((path / n for n in ("config.json", "scheduler_config.json") if (path / n).is_file()), None)
    if part == "tokenizer" and path.is_dir():
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path)
    if config is None:
        raise ValueError(f"{folder} has no {part}/{hint}")
    facts = json.loads(config.read_text())
    name = facts["architectures"][0] if part == "text_encoder" else facts["_class_name"]
    lacking = what_is_lacking(path, name)
    if lacking:
        raise ValueError(f"{folder} lacks {lacking}: copy the pipeline folder again")
    check_files(path)
    if part == "text_encoder":
        import transformers

        cls = getattr(transformers, name)
        with no_library_bars():
            return cls.from_pretrained(path, dtype=torch.float32)
    cls = diffusers_class(name)
    if part == "scheduler":
        return cls.from_pretrained(path)
    return cls.from_pretrained(path, torch_dtype=torch.float32)


def base_folder(model: ModelConfig) -> Path:
    """The recipe's base as a folder; a bare name is looked for where pipelines are kept."""
    path = Path(model.base)
    if path.is_dir():
        return path
    return find_pipeline(model.base)


def load_vae(base: Path):
    """The base pipeline's autoencoder, float32, frozen."""
    return load_part(base, "vae").requires_grad_(False).eval()


def fresh_transformer(model: ModelConfig) -> nn.Module:
    """A new transformer from [model.transformer]; unknown fields name the nearest."""
    cls = diffusers_class(model.transformer_class)
    check_model_table(model.transformer, constructor_fields(cls), "model.transformer")
    return cls(**model.transformer)


def fresh_text_encoder(model: ModelConfig, vocabulary: int, videos: bool = False) -> nn.Module:
    """A new text encoder from [model.text_encoder], at least as many entries as the tokenizer has tokens.

    `videos`: UMT5, as Wan has it, in place of Gemma-2.
    """
    from transformers import Gemma2Config, Gemma2Model, UMT5Config, UMT5EncoderModel

    kind, cls = (UMT5Config, UMT5EncoderModel) if videos else (Gemma2Config, Gemma2Model)
    allowed = kind().to_dict().keys() | {"attn_implementation"}
    check_model_table(model.text_encoder, allowed, "model.text_encoder")
    config = kind(**model.text_encoder)
    if config.vocab_size < vocabulary:
        raise ValueError(
            f"recipe: model.text_encoder.vocab_size = {config.vocab_size} is below the tokenizer's "
            f"{vocabulary} tokens; write {vocabulary}"
        )
    return cls(config)
