"""Videos that would be black: where the first infinite or NaN value came from, told before anything is decoded."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.video_processor import VideoProcessor

from .checks import FiniteWatch


class VideoWatch(FiniteWatch):
    """Step callback that stops at the first step whose latents are not finite, and names the layer they come from.

    A step of a video takes seconds, so each one is looked at when it ends; the steps behind it would be wasted. The
    layer is found by one more forward pass, which only a failing step costs.

    Args:
        latents: what the first step begins with.
        callback, tensor_inputs: the user's own, see `FiniteWatch`.
    """

    def __init__(self, latents: torch.Tensor, callback: Callable | None, tensor_inputs: list[str]):
        super().__init__(callback, tensor_inputs)
        captions = {"prompt_embeds", "negative_prompt_embeds"}
        self.tensor_inputs += sorted(captions - set(self.tensor_inputs))
        self.latents = latents

    def __call__(self, pipe: DiffusionPipeline, step: int, timestep, tensors: dict) -> dict[str, Any]:
        if not tensors["latents"].isfinite().all():
            captions = [tensors["prompt_embeds"], tensors["negative_prompt_embeds"]]
            self.fail(pipe, step, self.origin(pipe, timestep, captions))
        changed = {}
        if self.callback is not None:
            given = {name: tensors[name] for name in self.callback_inputs}
            changed = self.callback(pipe, step, timestep, given) or {}
        if "latents" in changed and not changed["latents"].isfinite().all():
            self.fail(pipe, step, ", as callback_on_step_end returned them", "check what it returns")
        self.latents = changed.get("latents", tensors["latents"])
        return changed

    def origin(self, pipe: DiffusionPipeline, timestep, captions: list[torch.Tensor | None]) -> str:
        """Words that say what first made such a value in the step that began with `self.latents`."""
        captions = [caption for caption in captions if caption is not None]
        if not all(caption.isfinite().all() for caption in captions):
            return ", and so are the embeddings of the prompt"
        part, transformer = self.expert(pipe, timestep)
        for caption in captions:
            layer = first_layer_not_finite(transformer, self.inputs(pipe, timestep, len(caption)), caption)
            if layer:
                return f", first in {part}.{layer}"
        return ", though the transformer's predictions are finite (guidance or the scheduler made them so)"

    def expert(self, pipe: DiffusionPipeline, timestep) -> tuple[str, torch.nn.Module]:
        """Name and module of the transformer that denoises at this timestep."""
        return pipe.expert(timestep)

    def inputs(self, pipe: DiffusionPipeline, timestep, batch: int) -> dict[str, torch.Tensor]:
        """What that transformer is given besides a caption of this batch size."""
        return pipe.model_inputs(self.latents, timestep)


class SanaVideoWatch(VideoWatch):
    """The same for the stock SANA-Video pipeline, which denoises with and without the prompt in one batch.

    The layer is looked for without the mask of the captions, which the pipeline does not hand to callbacks.
    """

    def expert(self, pipe: DiffusionPipeline, timestep) -> tuple[str, torch.nn.Module]:
        return "transformer", pipe.transformer

    def inputs(self, pipe: DiffusionPipeline, timestep, batch: int) -> dict[str, torch.Tensor]:
        latents = self.latents.repeat(batch // len(self.latents), 1, 1, 1, 1)
        return {"hidden_states": latents.to(pipe.transformer.dtype), "timestep": timestep.expand(batch)}


def first_layer_not_finite(transformer: torch.nn.Module, inputs: dict, caption: torch.Tensor) -> str | None:
    """Name of the first part of a video transformer, in the order of its forward pass, whose output is not finite."""
    found: list[str] = []

    def note(name: str) -> Callable:
        def hook(module, args, output):
            values = output if isinstance(output, torch.Tensor) else output[0]
            if not found and not values.isfinite().all():
                found.append(name)

        return hook

    name = "blocks" if hasattr(transformer, "blocks") else "transformer_blocks"
    layers = {f"{name}.{index}": layer for index, layer in enumerate(getattr(transformer, name))}
    parts = {"patch_embedding": transformer.patch_embedding, **layers, "proj_out": transformer.proj_out}
    hooks = [part.register_forward_hook(note(name)) for name, part in parts.items()]
    # A cache must not answer in place of a layer.
    apart = transformer.cache_context("where") if hasattr(transformer, "cache_context") else nullcontext()
    try:
        # Graphs compiled before know nothing of the hooks.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), apart:
            transformer(**inputs, encoder_hidden_states=caption.to(transformer.dtype), return_dict=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


class FiniteVideoProcessor(VideoProcessor):
    """The stock processor, which refuses decoded videos that are not finite."""

    def postprocess_video(self, video: torch.Tensor, output_type: str = "np", **kwargs):
        """As in Diffusers. Raises FloatingPointError when `video` `(B, 3, F, H, W)` holds an infinite value or NaN."""
        if not video.isfinite().all():
            raise FloatingPointError(
                f"the latents are finite, but the videos that the decoder made of them in {video.dtype} are not: use "
                "pipe.vae.to(torch.float32)"
            )
        return super().postprocess_video(video, output_type, **kwargs)
