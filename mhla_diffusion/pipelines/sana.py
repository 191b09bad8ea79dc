"""Text to image with SANA-MHLA: the stock pipeline, with its defaults kept in the saved pipeline."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
)
from diffusers.pipelines.sana.pipeline_output import SanaPipelineOutput
from transformers import Gemma2PreTrainedModel, GemmaTokenizer, GemmaTokenizerFast

from ..models.sana import MHLASanaTransformer2DModel
from .checks import (
    OUTPUT_TYPES,
    CheckedLoading,
    FiniteWatch,
    check_attention_kwargs,
    check_choice,
    check_defaults,
    check_generators,
    check_latents,
    check_multiple,
    check_number,
    check_prompts,
    check_tensor_inputs,
    check_text_encoder,
    check_texts,
    forget_broken_off,
    number_of_prompts,
    wanted_tensors,
)

# The stock pipeline has a list of resolutions for these sample sizes only.
BINNED_SAMPLE_SIZES = (16, 32, 64, 128)


class MHLASanaPipeline(CheckedLoading, SanaPipeline):
    """`SanaPipeline` with its defaults kept in `model_index.json`, so that `pipe("a red apple")` just draws.

    A batch is prompt-major (all pictures of the first prompt first), and picture i equals its single run.

    Args (besides the stock components; saved with the pipeline, each the default of a call argument):
        default_steps: denoising steps (`num_inference_steps`).
        default_guidance_scale: classifier-free guidance (`guidance_scale`); 1 or less means none.
        default_height, default_width: pixels; None: the size that the transformer was made for.
        default_negative_prompt: what guidance leads away from.
        max_sequence_length: tokens that a caption is padded or cut to.
        complex_human_instruction: text put before every prompt, None for none; a list of lines is joined.
        use_resolution_binning: draw at the nearest trained aspect ratio of the stock SANA models and resize.
    """

    def __init__(
        self,
        tokenizer: GemmaTokenizer | GemmaTokenizerFast,
        text_encoder: Gemma2PreTrainedModel,
        vae: AutoencoderDC,
        transformer: SanaTransformer2DModel | MHLASanaTransformer2DModel,
        scheduler: DPMSolverMultistepScheduler,
        default_steps: int = 20,
        default_guidance_scale: int | float = 4.5,
        default_height: int | None = None,
        default_width: int | None = None,
        default_negative_prompt: str = "",
        max_sequence_length: int = 300,
        complex_human_instruction: str | None = None,
        use_resolution_binning: bool = False,
    ):
        check_defaults(default_steps, default_guidance_scale)
        check_number("max_sequence_length", max_sequence_length, minimum=1, whole=True)
        super().__init__(tokenizer, text_encoder, vae, transformer, scheduler)
        if isinstance(complex_human_instruction, (list, tuple)):
            # A list in model_index.json would be taken for a component.
            complex_human_instruction = "\n".join(complex_human_instruction)
        self.register_to_config(
            default_steps=default_steps,
            default_guidance_scale=default_guidance_scale,
            default_height=default_height,
            default_width=default_width,
            default_negative_prompt=default_negative_prompt,
            max_sequence_length=max_sequence_length,
            complex_human_instruction=complex_human_instruction,
            use_resolution_binning=use_resolution_binning,
        )

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs):
        """As in Diffusers; from a stock pipeline with what its calls do by default, so it draws the same pictures."""
        if not isinstance(pipeline, MHLASanaPipeline):
            stock = inspect.signature(pipeline.__call__).parameters
            defaults = {
                name: stock[name].default
                for name in ("complex_human_instruction", "use_resolution_binning")
                if name in stock
            }
            model = kwargs.get("transformer", getattr(pipeline, "transformer", None))
            if model is None or model.config.sample_size not in BINNED_SAMPLE_SIZES:
                defaults["use_resolution_binning"] = False  # there is no list of resolutions for it
            kwargs = defaults | kwargs
        return super().from_pipe(pipeline, **kwargs)

    @property
    def size_multiple(self) -> int:
        """Height and width in pixels must be multiples of this: VAE factor times patch size."""
        return self.vae_scale_factor * self.transformer.config.patch_size

    @property
    def default_size(self) -> tuple[int, int]:
        """Default height and width in pixels."""
        own = self.transformer.config.sample_size * self.vae_scale_factor
        return self.config.default_height or own, self.config.default_width or own

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        num_inference_steps: int | None = None,
        timesteps: list[int] | None = None,
        sigmas: list[float] | None = None,
        guidance_scale: float | None = None,
        num_images_per_prompt: int = 1,
        height: int | None = None,
        width: int | None = None,
        eta: float = 0.0,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        negative_prompt_attention_mask: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        clean_caption: bool = False,
        use_resolution_binning: bool | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
        max_sequence_length: int | None = None,
        complex_human_instruction: str | list[str] | None = None,
    ) -> SanaPipelineOutput | tuple:
        """Draw pictures; arguments as in `SanaPipeline`, where None takes the saved default.

        Args:
            prompt: one caption or a non-empty list of them.
            generator: None, one generator for the whole batch, or one for each picture.
            complex_human_instruction: "" or [] draws without a saved instruction.
            output_type: "pil", "np" (B, H, W, 3) or "pt" (B, 3, H, W) in [0, 1], or "latent" (B, C, h, w).

        Returns:
            `SanaPipelineOutput(images=...)`, or `(images,)` with `return_dict=False`.

        Raises:
            ValueError: an argument that cannot work, before anything is computed; says what is allowed.
            FloatingPointError: the latents became infinite or NaN; names the first such step.
        """
        config = self.config
        default_height, default_width = self.default_size
        if negative_prompt is None and negative_prompt_embeds is None:
            negative_prompt = config.default_negative_prompt
        steps = config.default_steps if num_inference_steps is None else num_inference_steps
        guidance_scale = config.default_guidance_scale if guidance_scale is None else guidance_scale
        height = default_height if height is None else height
        width = default_width if width is None else width
        binning = config.use_resolution_binning if use_resolution_binning is None else use_resolution_binning
        length = config.max_sequence_length if max_sequence_length is None else max_sequence_length
        if complex_human_instruction is None:
            complex_human_instruction = config.complex_human_instruction
        if isinstance(complex_human_instruction, str):
            complex_human_instruction = [complex_human_instruction] if complex_human_instruction else None
        if complex_human_instruction:
            check_texts("complex_human_instruction", complex_human_instruction)

        callback_on_step_end_tensor_inputs = wanted_tensors(
            callback_on_step_end, callback_on_step_end_tensor_inputs
        )

        check_number("num_inference_steps", steps, minimum=1, whole=True)
        check_number("guidance_scale", guidance_scale, minimum=0)
        check_number("num_images_per_prompt", num_images_per_prompt, minimum=1, whole=True)
        check_number("max_sequence_length", length, minimum=1, whole=True)
        check_number("height", height, minimum=1, whole=True)
        check_number("width", width, minimum=1, whole=True)
        check_choice("output_type", output_type, OUTPUT_TYPES)
        check_attention_kwargs(attention_kwargs)
        if binning and self.transformer.config.sample_size not in BINNED_SAMPLE_SIZES:
            raise ValueError(
                f"use_resolution_binning knows sample sizes {BINNED_SAMPLE_SIZES} only, this transformer has "
                f"{self.transformer.config.sample_size}: pass use_resolution_binning=False"
            )
        self.check_inputs(
            prompt,
            self.size_multiple if binning else height,  # with binning, any size is mapped to one that fits
            self.size_multiple if binning else width,
            callback_on_step_end_tensor_inputs,
            negative_prompt,
            prompt_embeds,
            negative_prompt_embeds,
            prompt_attention_mask,
            negative_prompt_attention_mask,
        )
        guided = guidance_scale > 1
        check_text_encoder(self.text_encoder, prompt, guided, negative_prompt_embeds)
        if (
            guided
            and prompt_embeds is not None
            and negative_prompt_embeds is None
            and prompt_embeds.shape[1] != length
        ):
            raise ValueError(
                f"prompt_embeds hold {prompt_embeds.shape[1]} tokens but the negative prompt will hold "
                f"{length}: pass max_sequence_length={prompt_embeds.shape[1]} or negative_prompt_embeds of "
                "the same length"
            )
        prompts = number_of_prompts(prompt, prompt_embeds)
        self._check_noise(generator, latents, prompts * num_images_per_prompt, height, width, binning)

        watch = FiniteWatch(callback_on_step_end, callback_on_step_end_tensor_inputs)
        forget_broken_off(self)
        output = super().__call__(
            prompt=prompt,
            negative_prompt=negative_prompt,
            num_inference_steps=steps,
            timesteps=timesteps,
            sigmas=sigmas,
            guidance_scale=guidance_scale,
            num_images_per_prompt=num_images_per_prompt,
            height=height,
            width=width,
            eta=eta,
            generator=generator,
            latents=latents,
            prompt_embeds=prompt_embeds,
            prompt_attention_mask=prompt_attention_mask,
            negative_prompt_embeds=negative_prompt_embeds,
            negative_prompt_attention_mask=negative_prompt_attention_mask,
            output_type=output_type,
            return_dict=return_dict,
            clean_caption=clean_caption,
            use_resolution_binning=binning,
            attention_kwargs=attention_kwargs,
            callback_on_step_end=watch,
            callback_on_step_end_tensor_inputs=watch.tensor_inputs,
            max_sequence_length=length,
            complex_human_instruction=complex_human_instruction,
        )
        watch.check(self)
        return output

    # With the stock signature, by which Diffusers encodes prompts apart from drawing.
    @wraps(SanaPipeline.encode_prompt, assigned=())
    def encode_prompt(
        self,
        prompt: str | list[str],
        do_classifier_free_guidance: bool = True,
        negative_prompt: str | list[str] = "",
        num_images_per_prompt: int = 1,
        *args,
        **kwargs,
    ) -> tuple[torch.Tensor | None, ...]:
        """The stock encoding, with embeddings and masks both in prompt-major order.

        Returns prompt embeddings `(B, L, C)` and mask `(B, L)`, then the negative ones (None without
        guidance), where B = prompts * num_images_per_prompt. The stock method repeats the masks in another
        order than the embeddings.
        """
        encoded = super().encode_prompt(
            prompt, do_classifier_free_guidance, negative_prompt, 1, *args, **kwargs
        )
        return tuple(
            None if x is None else x.repeat_interleave(num_images_per_prompt, dim=0) for x in encoded
        )

    def check_inputs(
        self,
        prompt,
        height,
        width,
        callback_on_step_end_tensor_inputs=None,
        negative_prompt=None,
        prompt_embeds=None,
        negative_prompt_embeds=None,
        prompt_attention_mask=None,
        negative_prompt_attention_mask=None,
    ) -> None:
        """Raise a one-line ValueError on a size, prompt, embedding or callback input that cannot work."""
        check_multiple("height", height, self.size_multiple)
        check_multiple("width", width, self.size_multiple)
        check_tensor_inputs(callback_on_step_end_tensor_inputs, self._callback_tensor_inputs)
        check_prompts(prompt, negative_prompt, prompt_embeds, negative_prompt_embeds)
        pairs = (
            ("prompt", prompt_embeds, prompt_attention_mask),
            ("negative_prompt", negative_prompt_embeds, negative_prompt_attention_mask),
        )
        for name, embeds, mask in pairs:
            if embeds is not None and (mask is None or mask.shape != embeds.shape[:2]):
                given = "none" if mask is None else f"shape {tuple(mask.shape)}"
                raise ValueError(
                    f"{name}_embeds of shape {tuple(embeds.shape)} need a {name}_attention_mask of shape "
                    f"{tuple(embeds.shape[:2])}, got {given}"
                )
        if negative_prompt_embeds is not None:
            if prompt_embeds is None:
                raise ValueError("negative_prompt_embeds go with prompt_embeds: give both, or texts for both")
            if negative_prompt_embeds.shape != prompt_embeds.shape:
                raise ValueError(
                    f"negative_prompt_embeds have shape {tuple(negative_prompt_embeds.shape)}: they need "
                    f"that of prompt_embeds, {tuple(prompt_embeds.shape)}"
                )

    def _check_noise(self, generator, latents, pictures: int, height: int, width: int, binning: bool) -> None:
        """Raise ValueError unless generators and latents fit the number and size of the pictures."""
        check_generators(generator, pictures)
        if not binning:
            shape = (
                pictures,
                self.transformer.config.in_channels,
                height // self.vae_scale_factor,
                width // self.vae_scale_factor,
            )
            check_latents(latents, shape)
