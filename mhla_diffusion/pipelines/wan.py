"""Text to video with Wan: the stock pipeline, with its defaults kept in the saved pipeline and faults named early."""

from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from diffusers.pipelines.wan.pipeline_output import WanPipelineOutput
from transformers import AutoTokenizer, UMT5EncoderModel

from ..models.adapters import AdapterMixin
from ..models.wan import MHLAWanTransformer3DModel
from .checks import (
    OUTPUT_TYPES,
    CheckedLoading,
    check_attention_kwargs,
    check_choice,
    check_defaults,
    check_frames,
    check_generators,
    check_latents,
    check_number,
    check_positions,
    check_prompts,
    check_tensor_inputs,
    check_text_encoder,
    forget_broken_off,
    number_of_prompts,
    round_size,
    wanted_tensors,
)
from .finite import FiniteVideoProcessor, VideoWatch
from .videos import check_fps


class MHLAWanPipeline(CheckedLoading, WanPipeline):
    """`WanPipeline` whose defaults are kept in `model_index.json`, and which never ends in a black video.

    Text to video with Wan 2.1 and 2.2 (two experts, and TI2V). A batch is prompt-major (all videos of the first
    prompt first), and video i equals its single run. Image to video and video to video: Diffusers' own pipelines take
    our transformer as it is.

    Height and width are rounded down to multiples of `size_multiple`, as stock Wan does, with a warning that names
    what is used and the next size above. Frame counts must be a multiple of the decoder's factor and one (4 k + 1).

    Args (besides the stock components; saved with the pipeline, each the default of a call argument):
        default_steps: denoising steps (`num_inference_steps`).
        default_guidance_scale: classifier-free guidance (`guidance_scale`); 1 or less means none.
        default_height, default_width: pixels.
        default_frames: `num_frames`.
        default_fps: frames a second that the model was trained with; what saves a video reads it.
        default_negative_prompt: what guidance leads away from.
        max_sequence_length: tokens that a caption is padded or cut to.

    Raises ValueError on a default that no call could use.
    """

    def __init__(
        self,
        tokenizer: AutoTokenizer,
        text_encoder: UMT5EncoderModel,
        vae: AutoencoderKLWan,
        scheduler: FlowMatchEulerDiscreteScheduler,
        transformer: WanTransformer3DModel | MHLAWanTransformer3DModel | None = None,
        transformer_2: WanTransformer3DModel | MHLAWanTransformer3DModel | None = None,
        boundary_ratio: float | None = None,
        expand_timesteps: bool = False,
        default_steps: int = 50,
        default_guidance_scale: int | float = 5.0,
        default_height: int = 480,
        default_width: int = 832,
        default_frames: int = 81,
        default_fps: int | float = 16,
        default_negative_prompt: str = "",
        max_sequence_length: int = 512,
    ):
        check_defaults(default_steps, default_guidance_scale)
        for name, value in {
            "default_height": default_height,
            "default_width": default_width,
            "default_frames": default_frames,
            "max_sequence_length": max_sequence_length,
        }.items():
            check_number(name, value, minimum=1, whole=True)
        check_fps(default_fps)
        super().__init__(
            tokenizer,
            text_encoder,
            vae,
            scheduler,
            transformer,
            transformer_2,
            boundary_ratio,
            expand_timesteps,
        )
        self.register_to_config(
            default_steps=default_steps,
            default_guidance_scale=default_guidance_scale,
            default_height=default_height,
            default_width=default_width,
            default_frames=default_frames,
            default_fps=default_fps,
            default_negative_prompt=default_negative_prompt,
            max_sequence_length=max_sequence_length,
        )
        self.video_processor = FiniteVideoProcessor(vae_scale_factor=self.vae_scale_factor_spatial)

    @property
    def denoiser(self) -> torch.nn.Module | None:
        """The transformer, or Wan 2.2's second expert where it does all steps; for what both have in common."""
        return self.transformer if self.transformer is not None else self.transformer_2

    @property
    def size_multiple(self) -> tuple[int, int]:
        """Height and width in pixels must be multiples of these: VAE factor times patch size."""
        _, rows, columns = self.denoiser.config.patch_size
        return self.vae_scale_factor_spatial * rows, self.vae_scale_factor_spatial * columns

    @property
    def default_size(self) -> tuple[int, int]:
        """Default height and width in pixels."""
        return self.config.default_height, self.config.default_width

    @property
    def fps(self) -> float:
        """Frames a second of the videos, for what saves them."""
        return self.config.default_fps

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        guidance_scale_2: float | None = None,
        num_videos_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        output_type: str = "np",
        return_dict: bool = True,
        attention_kwargs: dict[str, Any] | None = None,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
        max_sequence_length: int | None = None,
    ) -> WanPipelineOutput | tuple:
        """Make videos; arguments as in `WanPipeline`, where None takes the saved default.

        Args:
            prompt: one caption or a non-empty list of them.
            height, width: pixels, rounded down to multiples of `size_multiple` with a warning.
            num_frames: 4 k + 1 (1 makes a picture); other counts are refused.
            generator: None, one generator for the whole batch, or one for each video.
            latents: the noise to start from, (B, C, frames, h, w).
            output_type: "np" (B, F, H, W, 3) or "pt" (B, F, 3, H, W) in [0, 1], "pil" (lists of pictures), or
                "latent" (B, C, frames, h, w).

        Returns:
            `WanPipelineOutput(frames=...)`, or `(frames,)` with `return_dict=False`.

        Raises:
            ValueError: an argument that cannot work, before anything is computed; says what is allowed.
            FloatingPointError: the latents became infinite or NaN; names the step and the layer. Or the decoder's
                output did.
        """
        config = self.config
        if negative_prompt is None and negative_prompt_embeds is None:
            negative_prompt = config.default_negative_prompt
        steps = config.default_steps if num_inference_steps is None else num_inference_steps
        guidance_scale = config.default_guidance_scale if guidance_scale is None else guidance_scale
        frames = config.default_frames if num_frames is None else num_frames
        length = config.max_sequence_length if max_sequence_length is None else max_sequence_length
        height = config.default_height if height is None else height
        width = config.default_width if width is None else width
        callback_on_step_end_tensor_inputs = wanted_tensors(
            callback_on_step_end, callback_on_step_end_tensor_inputs
        )

        if self.denoiser is None:
            raise ValueError("this pipeline has no transformer: load it with one")
        check_number("num_inference_steps", steps, minimum=1, whole=True)
        longest = self.scheduler.config.get("num_train_timesteps")
        if longest is not None and steps > longest:
            raise ValueError(f"num_inference_steps={steps}: the scheduler has {longest}, give at most that")
        check_number("guidance_scale", guidance_scale, minimum=0)
        if guidance_scale_2 is not None:
            check_number("guidance_scale_2", guidance_scale_2, minimum=0)
        check_number("num_videos_per_prompt", num_videos_per_prompt, minimum=1, whole=True)
        check_number("max_sequence_length", length, minimum=1, whole=True)
        check_choice("output_type", output_type, OUTPUT_TYPES)
        check_attention_kwargs(attention_kwargs)
        check_number("num_frames", frames, minimum=1, whole=True)
        check_frames(frames, self.vae_scale_factor_temporal)
        height = round_size("height", height, self.size_multiple[0])
        width = round_size("width", width, self.size_multiple[1])
        self.check_inputs(
            prompt,
            negative_prompt,
            height,
            width,
            prompt_embeds,
            negative_prompt_embeds,
            callback_on_step_end_tensor_inputs,
            guidance_scale_2,
        )
        check_text_encoder(self.text_encoder, prompt, guidance_scale > 1, negative_prompt_embeds)
        videos = number_of_prompts(prompt, prompt_embeds) * num_videos_per_prompt
        check_generators(generator, videos, "video")
        shape = self.latent_shape(videos, frames, height, width)
        check_positions(shape, self.denoiser.config)
        check_latents(latents, shape)

        self._check_experts(steps)
        latents = self.prepare_latents(
            videos, shape[1], height, width, frames, torch.float32, self._execution_device, generator, latents
        )
        watch = VideoWatch(latents, callback_on_step_end, callback_on_step_end_tensor_inputs)
        forget_broken_off(self)
        return super().__call__(
            prompt=prompt,
            negative_prompt=negative_prompt,
            height=height,
            width=width,
            num_frames=frames,
            num_inference_steps=steps,
            guidance_scale=guidance_scale,
            guidance_scale_2=guidance_scale_2,
            num_videos_per_prompt=num_videos_per_prompt,
            generator=generator,
            latents=latents,
            prompt_embeds=prompt_embeds,
            negative_prompt_embeds=negative_prompt_embeds,
            output_type=output_type,
            return_dict=return_dict,
            attention_kwargs=attention_kwargs,
            callback_on_step_end=watch,
            callback_on_step_end_tensor_inputs=watch.tensor_inputs,
            max_sequence_length=length,
        )

    def encode_prompt(
        self,
        prompt: str | list[str] | None,
        negative_prompt: str | list[str] | None = None,
        do_classifier_free_guidance: bool = True,
        num_videos_per_prompt: int = 1,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        max_sequence_length: int = 226,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The stock encoding, in which embeddings that were given are repeated for several videos as well.

        Returns prompt embeddings `(B, L, C)` in prompt-major order, B = prompts * num_videos_per_prompt, and the
        negative ones (None without guidance).
        """
        encoded = super().encode_prompt(
            [prompt] if isinstance(prompt, str) else prompt,
            negative_prompt,
            do_classifier_free_guidance,
            1,
            prompt_embeds,
            negative_prompt_embeds,
            max_sequence_length,
            device,
            dtype,
        )
        return tuple(
            None if x is None else x.repeat_interleave(num_videos_per_prompt, dim=0) for x in encoded
        )

    def load_lora_weights(
        self,
        pretrained_model_name_or_path_or_dict,
        adapter_name: str | None = None,
        hotswap: bool = False,
        load_into_transformer_2: bool = False,
        **where,
    ) -> None:
        """As in Diffusers; a mixing and the like may come with the LoRA, see `load_adapter`.

        Args (besides those of Diffusers):
            load_into_transformer_2: into Wan 2.2's expert for the low noise. Raises ValueError when there is none.
        """
        source = pretrained_model_name_or_path_or_dict
        if load_into_transformer_2 and self.transformer_2 is None:
            raise ValueError("this pipeline has no transformer_2: leave load_into_transformer_2 out")
        if load_into_transformer_2 and isinstance(self.transformer_2, AdapterMixin):
            self.transformer_2.load_lora_adapter(
                source, adapter_name=adapter_name, hotswap=hotswap, _pipeline=self, **where
            )
            return
        if load_into_transformer_2:
            WanPipeline.load_lora_weights(
                self, source, adapter_name, hotswap, load_into_transformer_2=True, **where
            )
            return
        super().load_lora_weights(source, adapter_name=adapter_name, hotswap=hotswap, **where)

    def check_inputs(
        self,
        prompt,
        negative_prompt,
        height,
        width,
        prompt_embeds=None,
        negative_prompt_embeds=None,
        callback_on_step_end_tensor_inputs=None,
        guidance_scale_2=None,
    ) -> None:
        """Raise a one-line ValueError on a prompt, embedding or callback input that cannot work."""
        check_tensor_inputs(callback_on_step_end_tensor_inputs, self._callback_tensor_inputs)
        check_prompts(prompt, negative_prompt, prompt_embeds, negative_prompt_embeds)
        prompts = number_of_prompts(prompt, prompt_embeds)
        width = self.denoiser.config.text_dim
        for name, embeds in (
            ("prompt_embeds", prompt_embeds),
            ("negative_prompt_embeds", negative_prompt_embeds),
        ):
            if embeds is None:
                continue
            if embeds.ndim != 3 or embeds.shape[0] != prompts or embeds.shape[2] != width:
                raise ValueError(
                    f"{name} have shape {tuple(embeds.shape)}: they need (prompts, tokens, channels), here "
                    f"({prompts}, any, {width})"
                )
        if self.config.boundary_ratio is None and guidance_scale_2 is not None:
            raise ValueError(
                "guidance_scale_2 is for pipelines of two experts (boundary_ratio): leave it out for this one"
            )

    def expert(self, timestep) -> tuple[str, torch.nn.Module]:
        """Name and module of the transformer that denoises at this timestep: Wan 2.2 has two of them."""
        boundary = self.config.boundary_ratio
        first = boundary is None or timestep >= boundary * self.scheduler.config.num_train_timesteps
        return ("transformer", self.transformer) if first else ("transformer_2", self.transformer_2)

    def model_inputs(self, latents: torch.Tensor, timestep: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a transformer is given at one step besides the caption, as the stock loop makes it."""
        batch, _, *sizes = latents.shape
        times = timestep.expand(batch)
        if self.config.expand_timesteps:
            frames, rows, columns = (
                size // patch for size, patch in zip(sizes, self.denoiser.config.patch_size, strict=True)
            )
            times = timestep.expand(batch, frames * rows * columns)
        return {"hidden_states": latents.to(self.denoiser.dtype), "timestep": times}

    def _check_experts(self, steps: int) -> None:
        """Raise ValueError when a step belongs to an expert that is not there."""
        self.scheduler.set_timesteps(steps)
        missing = sorted(
            {self.expert(time)[0] for time in self.scheduler.timesteps if self.expert(time)[1] is None}
        )
        if missing:
            raise ValueError(
                f"this pipeline has no {missing[0]}, which steps with boundary_ratio={self.config.boundary_ratio} "
                "need: load it with that transformer, or with another boundary_ratio"
            )

    def latent_shape(self, videos: int, frames: int, height: int, width: int) -> tuple[int, ...]:
        """Of the latents `(B, C, frames, h, w)` of videos of this length and of this size in pixels."""
        return (
            videos,
            self.denoiser.config.in_channels,
            (frames - 1) // self.vae_scale_factor_temporal + 1,
            height // self.vae_scale_factor_spatial,
            width // self.vae_scale_factor_spatial,
        )
