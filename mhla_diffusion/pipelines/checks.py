"""What our pipelines check before they draw, and while."""

import math
import numbers
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
from diffusers import DiffusionPipeline
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback

from ..building import BUILDING
from ..loading import check_layout, check_models
from ..models.adapters import AdapterMixin, load_adapter
from ..models.model_card import CardWithImportLine
from ..models.options import check_choice
from ..models.wan import AXES
from ..weights import check_files

__all__ = [
    "OUTPUT_TYPES",
    "CheckedLoading",
    "FiniteWatch",
    "check_attention_kwargs",
    "check_choice",
    "check_defaults",
    "check_frames",
    "check_generators",
    "check_latents",
    "check_multiple",
    "check_number",
    "check_positions",
    "check_prompts",
    "check_tensor_inputs",
    "check_text_encoder",
    "check_texts",
    "forget_broken_off",
    "number_of_prompts",
    "round_size",
    "wanted_tensors",
]

OUTPUT_TYPES = ("pil", "np", "pt", "latent")


class CheckedLoading(CardWithImportLine):
    """Comes before the stock pipeline among the bases."""

    _card_is_of_pipeline = True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        """As in Diffusers; a folder in another layout, with a wrong index or with a weight file cut short raises a
        one-line ValueError."""
        folder = Path(pretrained_model_name_or_path)
        check_layout(folder)
        if (folder / "model_index.json").is_file():
            check_models(folder)
        try:
            with BUILDING:
                return super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        except Exception:
            check_files(folder)  # the libraries do not say which file is at fault, or why
            raise

    def load_lora_weights(
        self,
        pretrained_model_name_or_path_or_dict,
        adapter_name: str | None = None,
        hotswap: bool = False,
        **where,
    ) -> None:
        """As in Diffusers; a mixing and the like may come with the LoRA, see `load_adapter`."""
        source = pretrained_model_name_or_path_or_dict
        if isinstance(self.transformer, AdapterMixin):
            load_adapter(self, source, adapter_name=adapter_name, hotswap=hotswap, **where)
        else:
            super().load_lora_weights(source, adapter_name=adapter_name, hotswap=hotswap, **where)


def forget_broken_off(pipe: DiffusionPipeline) -> None:
    """Let caches drop what a call left that was broken off; one that ends does it by itself."""
    for component in pipe.components.values():
        if hasattr(component, "_reset_stateful_cache"):
            component._reset_stateful_cache()


class FiniteWatch:
    """Step callback that notes whether the latents are finite, then calls the user's own callback.

    The notes stay on the device until the last step, so no step waits for it.
    """

    def __init__(self, callback: Callable | None, tensor_inputs: list[str]):
        if callback is not None and not callable(callback):
            raise ValueError(
                f"callback_on_step_end={callback!r}: give a function of pipe, step, timestep and tensors"
            )
        self.callback = callback
        self.callback_inputs = list(tensor_inputs)
        self.tensor_inputs = [*self.callback_inputs, *({"latents"} - set(self.callback_inputs))]
        self.finite: list[torch.Tensor] = []

    def __call__(self, pipe: DiffusionPipeline, step: int, timestep, tensors: dict) -> dict:
        finite, changed = tensors["latents"].isfinite().all(), {}
        if self.callback is not None:
            given = {name: tensors[name] for name in self.callback_inputs}
            changed = self.callback(pipe, step, timestep, given) or {}
        if "latents" in changed:
            finite = finite & changed["latents"].isfinite().all()
        self.finite.append(finite)
        if step == pipe.num_timesteps - 1:
            self.check(pipe)  # before the decoder turns them into a black picture
        return changed

    def check(self, pipe: DiffusionPipeline) -> None:
        """Raise FloatingPointError naming the first step after which the latents were not finite."""
        finite = torch.stack(self.finite).tolist() if self.finite else []
        self.finite = []
        if not all(finite):
            self.fail(pipe, finite.index(False))

    @staticmethod
    def fail(pipe: DiffusionPipeline, step: int, where: str = "", advice: str | None = None) -> NoReturn:
        """Raise the FloatingPointError for this step, with words that say `where` in it the values arose."""
        pipe.maybe_free_model_hooks()
        if advice is None:
            # The second of Wan 2.2's experts may do all steps.
            dtype = (pipe.transformer or pipe.transformer_2).dtype
            advice = (
                f"load the pipeline in torch.float32 or torch.bfloat16 (the transformer is {dtype}), or check its "
                "weights"
            )
        raise FloatingPointError(
            f"the latents are infinite or NaN after step {step + 1} of {pipe.num_timesteps}{where}: {advice}"
        )


def check_number(name: str, value, minimum: float, whole: bool = False) -> None:
    """Raise ValueError unless `value` is a finite number (an int when `whole`) of at least `minimum`."""
    kind = numbers.Integral if whole else numbers.Real
    if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value) or value < minimum:
        what = "an integer" if whole else "a finite number"
        raise ValueError(f"{name}={value!r}: give {what} of at least {minimum}")


def check_multiple(name: str, size, multiple: int) -> None:
    """Raise ValueError unless `size` is a multiple of `multiple`; names the nearest ones."""
    if size % multiple:
        below, above = int(size // multiple * multiple), int((size // multiple + 1) * multiple)
        near = f"{below} or {above}" if below else f"{above}"
        raise ValueError(f"{name}={size} is not a multiple of {multiple}: use {near}")


def check_generators(generator, pictures: int, what: str = "picture") -> None:
    """Raise ValueError unless `generator` is None, one generator, or a list of one for each picture (or video)."""
    listed = generator if isinstance(generator, list) else [generator]
    if any(one is not None and not isinstance(one, torch.Generator) for one in listed):
        raise ValueError(
            "generator: give a torch.Generator or a list of them, e.g. torch.Generator().manual_seed(0)"
        )
    if isinstance(generator, list) and (len(generator) != pictures or None in generator):
        raise ValueError(
            f"generator has {len(generator)} entries for {pictures} {what}(s): "
            f"give one generator for all, or one for each {what}"
        )


def check_latents(latents, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `latents` is None or a finite tensor of this shape."""
    if latents is None:
        return
    if isinstance(latents, torch.Tensor) and tuple(latents.shape) == shape:
        if not latents.isfinite().all():
            raise ValueError("latents hold infinite values or NaN: give finite ones, such as normal noise")
        return
    given = (
        f"shape {tuple(latents.shape)}"
        if isinstance(latents, torch.Tensor)
        else f"the type {type(latents).__name__}"
    )
    raise ValueError(f"latents have {given}, this call needs {shape}")


def check_defaults(steps, guidance_scale) -> None:
    """Raise ValueError unless these can be the saved defaults of a pipeline."""
    check_number("default_steps", steps, minimum=1, whole=True)
    check_number("default_guidance_scale", guidance_scale, minimum=0)


def check_attention_kwargs(given) -> None:
    """Raise ValueError unless arguments for attention layers are a dict, or None."""
    if given is not None and not isinstance(given, dict):
        raise ValueError(f'attention_kwargs={given!r}: give a dict such as {{"scale": 0.5}}, or None')


def check_texts(name: str, texts) -> None:
    """Raise ValueError unless `texts` is a string or a non-empty list of strings."""
    if isinstance(texts, str):
        return
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name}={texts!r}: give a string or a non-empty list of strings")


def number_of_prompts(prompt: str | list[str] | None, prompt_embeds: torch.Tensor | None) -> int:
    """How many captions a call was given, as texts or as their embeddings."""
    if prompt is None:
        return prompt_embeds.shape[0]
    return 1 if isinstance(prompt, str) else len(prompt)


def check_prompts(prompt, negative_prompt, prompt_embeds, negative_prompt_embeds) -> None:
    """Raise ValueError unless there are captions in one form, and as many to lead away from, if any."""
    if (prompt is None) == (prompt_embeds is None):
        raise ValueError("give either prompt or prompt_embeds, one of the two")
    given = {"prompt_embeds": prompt_embeds, "negative_prompt_embeds": negative_prompt_embeds}
    for name, embeds in given.items():
        if embeds is not None and not isinstance(embeds, torch.Tensor):
            raise ValueError(f"{name} have the type {type(embeds).__name__}: give a tensor")
    if prompt is not None:
        check_texts("prompt", prompt)
    if negative_prompt is None:
        return
    check_texts("negative_prompt", negative_prompt)
    prompts = number_of_prompts(prompt, prompt_embeds)
    if isinstance(negative_prompt, list) and len(negative_prompt) != prompts:
        raise ValueError(
            f"negative_prompt has {len(negative_prompt)} entries for {prompts} prompt(s): "
            "give one string for all, or one for each prompt"
        )
    if negative_prompt_embeds is not None:
        raise ValueError("give either negative_prompt or negative_prompt_embeds, not both")


def check_text_encoder(text_encoder, prompt, guided: bool, negative_prompt_embeds) -> None:
    """Raise ValueError when a text has to be encoded and the pipeline was loaded without what does it."""
    if text_encoder is not None:
        return
    if prompt is not None:
        raise ValueError("prompt: this pipeline has no text encoder, give prompt_embeds in its place")
    if guided and negative_prompt_embeds is None:
        raise ValueError(
            "guidance needs negative_prompt_embeds, for this pipeline has no text encoder: give them, or "
            "guidance_scale=1.0"
        )


def wanted_tensors(callback: Callable | None, names: list[str] | None) -> list[str]:
    """Names of the tensors that a step callback is called with: its own, those that were given, or the latents."""
    if isinstance(callback, (PipelineCallback, MultiPipelineCallbacks)):
        return callback.tensor_inputs
    return ["latents"] if names is None else names


def check_tensor_inputs(names: list[str] | None, known: list[str]) -> None:
    """Raise ValueError unless a callback may ask for the tensors of these names."""
    unknown = set(names or ()) - set(known)
    if unknown:
        raise ValueError(f"callback_on_step_end_tensor_inputs={sorted(unknown)}: choose among {known}")


def check_frames(frames: int, factor: int, name: str = "num_frames") -> None:
    """Raise ValueError, naming the nearest counts, unless `frames` is a multiple of `factor` and one."""
    if (frames - 1) % factor:
        below = (frames - 1) // factor * factor + 1
        raise ValueError(
            f"{name}={frames} is not a multiple of {factor} and one: use {below} or {below + factor}"
        )


def check_positions(shape: tuple[int, ...], config) -> None:
    """Raise ValueError when latents of this shape have more tokens on an axis than a transformer has positions.

    Args:
        shape: (B, C, frames, h, w).
        config: of the transformer; its rotary table serves all three axes.
    """
    for axis, size, patch in zip(AXES, shape[2:], config.patch_size, strict=True):
        if size // patch > config.rope_max_seq_len:
            raise ValueError(
                f"{size // patch} {axis} of tokens, but the rotary table holds {config.rope_max_seq_len} "
                "positions on each axis: load the transformer with a larger rope_max_seq_len, or make smaller videos"
            )


def round_size(name: str, size: int, multiple: int) -> int:
    """The largest multiple that is not above `size`, with a warning when it is another size.

    Raises ValueError when there is none.
    """
    check_number(name, size, minimum=1, whole=True)
    below = size // multiple * multiple
    if not below:
        raise ValueError(f"{name}={size} is smaller than {multiple}: use a multiple of that")
    if below != size:
        warnings.warn(
            f"{name}={size} is rounded down to {below}, a multiple of {multiple} (the next one is {below + multiple})",
            stacklevel=4,
        )
    return int(below)
