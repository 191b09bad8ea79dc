"""Class-conditional pictures with DiT-MHLA: any classes, sizes and schedulers, and defaults kept with the weights."""

import difflib
import inspect
import numbers
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    DiffusionPipeline,
    DiTPipeline,
    DiTTransformer2DModel,
    ImagePipelineOutput,
)
from diffusers.loaders import SanaLoraLoaderMixin
from diffusers.schedulers import KarrasDiffusionSchedulers
from diffusers.utils.torch_utils import randn_tensor

from ..models.dit import MHLADiTTransformer2DModel
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
    check_tensor_inputs,
    forget_broken_off,
    wanted_tensors,
)
from .class_labels import WHOLE_NUMBER, check_label_names, label_names
from .dit_schedulers import (
    DIT_SCHEDULERS,
    KEEPS_THREE_CHANNELS,
    READS_VARIANCES,
    dit_scheduler,
    set_timesteps,
)

__all__ = ["DIT_SCHEDULERS", "MHLADiTPipeline", "dit_scheduler", "label_names"]


class MHLADiTPipeline(CheckedLoading, DiTPipeline, SanaLoraLoaderMixin):
    """`DiTPipeline` for any number of classes, any picture size, and checkpoints guided in either way.

    The null class is the transformer's `num_embeds_ada_norm`. Picture i of a batch equals its single run, also
    with a scheduler that draws noise at each step. Noise and latents are float32 whatever the transformer's
    dtype. LoRAs load with `load_lora_weights`.

    Args (besides the stock components; saved with the pipeline):
        id2label: class numbers to names, several names of one class separated by commas.
        guidance_channels: guide the first so many latent channels, the others keep the prediction for the
            class; None: all of them. 3 is what the original DiT's code does, None what Diffusers does.
        default_steps, default_guidance_scale: defaults of the call arguments `num_inference_steps` and
            `guidance_scale`.
    """

    _callback_tensor_inputs = ["latents"]

    def __init__(
        self,
        transformer: DiTTransformer2DModel | MHLADiTTransformer2DModel,
        vae: AutoencoderKL | AutoencoderDC,
        scheduler: KarrasDiffusionSchedulers,
        id2label: dict[int, str] | dict[str, str] | None = None,
        guidance_channels: int | None = None,
        default_steps: int = 50,
        default_guidance_scale: int | float = 4.0,
    ):
        if not hasattr(transformer.config, "num_embeds_ada_norm"):
            raise ValueError(
                f"{type(self).__name__} draws with a DiT, got a {type(transformer).__name__}: load the pipeline that "
                "it belongs to"
            )
        check_label_names(id2label, transformer.config.num_embeds_ada_norm)
        check_defaults(default_steps, default_guidance_scale)
        super().__init__(transformer, vae, scheduler, id2label)
        if guidance_channels is not None:
            channels = transformer.config.in_channels
            check_number("guidance_channels", guidance_channels, minimum=1, whole=True)
            if guidance_channels > channels:
                raise ValueError(
                    f"guidance_channels={guidance_channels}: the latents have {channels} channels, give at most "
                    f"{channels}, or None for all"
                )
        self.register_to_config(
            id2label=None if id2label is None else {str(key): label for key, label in id2label.items()},
            guidance_channels=guidance_channels,
            default_steps=default_steps,
            default_guidance_scale=default_guidance_scale,
        )

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs):
        """As in Diffusers, with the label names, which a stock pipeline does not keep in its config."""
        if getattr(pipeline, "labels", None) and not pipeline.config.get("id2label"):
            kwargs.setdefault("id2label", label_names(pipeline))
        return super().from_pipe(pipeline, **kwargs)

    @property
    def vae_scale_factor(self) -> int:
        """Pixels per latent on each axis."""
        config = self.vae.config
        # The first is AutoencoderDC's.
        stages = config.get("encoder_block_out_channels") or config.block_out_channels
        return 2 ** (len(stages) - 1)

    @property
    def size_multiple(self) -> int:
        """Height and width in pixels must be multiples of this: VAE factor times patch size."""
        return self.vae_scale_factor * self.transformer.config.patch_size

    @property
    def default_size(self) -> tuple[int, int]:
        """Height and width in pixels that a call without them draws: what the transformer was made for."""
        side = self.transformer.config.sample_size * self.vae_scale_factor
        return side, side

    @property
    def num_classes(self) -> int:
        """Number of classes, which is also the number of the null class."""
        return self.transformer.config.num_embeds_ada_norm

    @property
    def guidance_scale(self) -> float:
        return self._guidance_scale

    @property
    def do_classifier_free_guidance(self) -> bool:
        return self._guidance_scale > 1

    @property
    def num_timesteps(self) -> int:
        return self._num_timesteps

    @property
    def interrupt(self) -> bool:
        return self._interrupt

    def get_label_ids(self, label: str | Sequence[str]) -> list[int]:
        """Class numbers of one name or several. Raises ValueError on an unknown name, with the nearest known ones."""
        names = [label] if isinstance(label, str) else list(label)
        for name in names:
            if name in self.labels:
                continue
            if not self.labels:
                raise ValueError(
                    f"class label {name!r}: this pipeline has no label names, give class numbers from 0 to "
                    f"{self.num_classes - 1} (or load it with id2label={{0: ...}})"
                )
            near = difflib.get_close_matches(str(name), self.labels, n=3) or list(self.labels)[:3]
            raise ValueError(
                f"class label {name!r} is not known: did you mean {', '.join(map(repr, near))}? (pipe.labels has all "
                f"{len(self.labels)})"
            )
        return [self.labels[name] for name in names]

    def class_id(self, label: int | str) -> int:
        """Class number of one label. Raises ValueError when it is no class."""
        if isinstance(label, str):
            return self.get_label_ids(label)[0]
        whole = isinstance(label, numbers.Integral) and not isinstance(label, bool)
        if not whole or not 0 <= label <= self.num_classes:
            raise ValueError(
                f"class label {label!r}: give a name or a number from 0 to {self.num_classes - 1} "
                f"({self.num_classes}, the null class, draws without a class)"
            )
        return int(label)

    def typed_labels(self, texts: Sequence[str]) -> list[int]:
        """Class numbers of labels as people type them: names, or numbers in digits where no class has that name."""
        return [
            self.class_id(int(text) if text not in self.labels and WHOLE_NUMBER.fullmatch(text) else text)
            for text in texts
        ]

    def class_ids(self, class_labels: int | str | Sequence | torch.Tensor) -> list[int]:
        """Class numbers of what the caller gave: numbers and names, one or several, also mixed.

        Raises ValueError when it is empty, or something is no class.
        """
        if hasattr(class_labels, "tolist"):  # tensors and arrays
            class_labels = class_labels.tolist()
        if not isinstance(class_labels, (list, tuple, range)):
            return [self.class_id(class_labels)]
        ids = []
        for label in class_labels:  # as in Diffusers, lists in lists are flattened
            ids += self.class_ids(label)
        if not ids:
            raise ValueError("class_labels is empty: give at least one class, such as class_labels=[0]")
        return ids

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | str | Sequence[int | str] | torch.Tensor,
        guidance_scale: float | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        num_inference_steps: int | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        *,
        height: int | None = None,
        width: int | None = None,
        eta: float = 0.0,
        latents: torch.Tensor | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
    ) -> ImagePipelineOutput | tuple:
        """Draw one picture for each class label.

        Args:
            class_labels: class numbers or names, a single one or several; `num_classes` is the null class.
            guidance_scale: classifier-free guidance; 1 or less means none. None: the saved default.
            generator: None, one generator for the whole batch, or one for each picture.
            num_inference_steps: None: the saved default.
            output_type: "pil", "np" (B, H, W, 3) or "pt" (B, 3, H, W) in [0, 1], or "latent" (B, C, h, w).
            height, width: pixels, multiples of `size_multiple`; None: the size the transformer was made for.
            eta: of DDIM, 0 for none to 1 for as much noise as DDPM.
            latents: the noise to start from, (B, C, h, w).
            attention_kwargs: `{"scale": s}` scales a LoRA.
            callback_on_step_end: called as `callback(pipe, step, timestep, tensors)` after each step, with the
                tensors named in `callback_on_step_end_tensor_inputs` ("latents"); what it returns replaces them.

        Returns:
            `ImagePipelineOutput(images=...)`, or `(images,)` with `return_dict=False`.

        Raises:
            ValueError: an argument that cannot work, before anything is computed; says what is allowed.
            FloatingPointError: the latents became infinite or NaN; names the first such step.
        """
        steps = self.config.default_steps if num_inference_steps is None else num_inference_steps
        guidance_scale = self.config.default_guidance_scale if guidance_scale is None else guidance_scale
        own_height, own_width = self.default_size
        height, width = own_height if height is None else height, own_width if width is None else width
        callback_on_step_end_tensor_inputs = wanted_tensors(
            callback_on_step_end, callback_on_step_end_tensor_inputs
        )
        self.check_inputs(
            guidance_scale, steps, output_type, height, width, eta, callback_on_step_end_tensor_inputs
        )
        labels = self.class_ids(class_labels)
        shape = (
            len(labels),
            self.transformer.config.in_channels,
            height // self.vae_scale_factor,
            width // self.vae_scale_factor,
        )
        check_generators(generator, shape[0])
        check_latents(latents, shape)
        check_attention_kwargs(attention_kwargs)

        device = self._execution_device
        self._guidance_scale, self._interrupt = guidance_scale, False
        set_timesteps(self.scheduler, steps, device)
        timesteps = self.scheduler.timesteps
        self._num_timesteps = len(timesteps)
        if latents is None:
            latents = randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
        else:
            latents = latents.to(device, torch.float32)
        latents = latents * getattr(self.scheduler, "init_noise_sigma", 1.0)
        null = [self.num_classes] * len(labels) if self.do_classifier_free_guidance else []
        labels = torch.tensor(labels + null, device=device)

        accepted = inspect.signature(self.scheduler.step).parameters
        options = {k: v for k, v in {"generator": generator, "eta": eta}.items() if k in accepted}
        watch = FiniteWatch(callback_on_step_end, callback_on_step_end_tensor_inputs)
        forget_broken_off(self)
        with self.progress_bar(total=len(timesteps)) as bar:
            for i, t in enumerate(timesteps):
                if self.interrupt:
                    continue
                with self.cache_context(i):
                    prediction = self.predict(latents, t, labels, attention_kwargs)
                latents = self.scheduler.step(prediction, t, latents, **options, return_dict=False)[0]
                latents = watch(self, i, t, {"latents": latents}).get("latents", latents)
                bar.update()
        watch.check(self)

        images = latents if output_type == "latent" else self.decode(latents, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def cache_context(self, step: int) -> AbstractContextManager:
        """Tells the transformer's cache, if it can have one, which step of the loop is computed."""
        context = getattr(self.transformer, "cache_context", None)  # the stock transformer has none
        if context is None:
            return nullcontext()
        return context("cond_uncond", step_index=step, num_inference_steps=self._num_timesteps)

    def predict(
        self,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        labels: torch.Tensor,
        attention_kwargs: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """The guided prediction `(B, C, h, w)` that the scheduler steps with; `(B, 2 C, h, w)` for one that takes
        variances.

        Args:
            latents: float32 `(B, C, h, w)`. labels: `(B,)`, or `(2 B,)` with the null class behind for guidance.
        """
        batch, channels = latents.shape[:2]
        x = torch.cat([latents] * (len(labels) // batch))
        x = (
            self.scheduler.scale_model_input(x, timestep)
            if hasattr(self.scheduler, "scale_model_input")
            else x
        )
        time = torch.as_tensor(timestep, device=x.device).expand(len(labels))
        prediction = self.transformer(
            x.to(self.transformer.dtype),
            timestep=time,
            class_labels=labels,
            cross_attention_kwargs=attention_kwargs,
            return_dict=False,
        )[0].to(latents.dtype)
        if len(labels) > batch:
            guided = self.config.guidance_channels or channels
            given, null = prediction[:batch], prediction[batch:, :guided]
            mean = null + self._guidance_scale * (given[:, :guided] - null)
            prediction = torch.cat([mean, given[:, guided:]], dim=1)
        takes_variance = isinstance(self.scheduler, READS_VARIANCES) and self.learns_variance()
        return prediction if takes_variance else prediction[:, :channels]

    def learns_variance(self) -> bool:
        """Whether the scheduler is set to read variances from the model's output."""
        return self.scheduler.config.get("variance_type") in ("learned", "learned_range")

    def decode(self, latents: torch.Tensor, output_type: str):
        """Pictures of latents `(B, C, h, w)`: "pt" (B, 3, H, W) or "np" (B, H, W, 3) in [0, 1], or "pil"."""
        samples = self.vae.decode((1 / self.vae.config.scaling_factor * latents).to(self.vae.dtype)).sample
        samples = (samples / 2 + 0.5).clamp(0, 1).float()
        if output_type == "pt":
            return samples
        arrays = samples.cpu().permute(0, 2, 3, 1).numpy()
        return self.numpy_to_pil(arrays) if output_type == "pil" else arrays

    def check_inputs(self, guidance_scale, steps, output_type, height, width, eta, tensor_inputs) -> None:
        """Raise a one-line ValueError on a setting that cannot work."""
        check_number("guidance_scale", guidance_scale, minimum=0)
        check_number("num_inference_steps", steps, minimum=1, whole=True)
        check_number("eta", eta, minimum=0)
        if eta > 1:
            raise ValueError(f"eta={eta}: give a number from 0 (no noise) to 1 (as much as DDPM)")
        longest = self.scheduler.config.get("num_train_timesteps")
        if longest is not None and steps > longest:
            raise ValueError(f"num_inference_steps={steps}: the scheduler has {longest}, give at most that")
        check_choice("output_type", output_type, OUTPUT_TYPES)
        for name, size in (("height", height), ("width", width)):
            check_number(name, size, minimum=1, whole=True)
            check_multiple(name, size, self.size_multiple)
        check_tensor_inputs(tensor_inputs, self._callback_tensor_inputs)
        channels, out = self.transformer.config.in_channels, self.transformer.config.out_channels or 0
        if self.learns_variance() and isinstance(self.scheduler, READS_VARIANCES) and out != 2 * channels:
            raise ValueError(
                f"the scheduler has variance_type={self.scheduler.config.variance_type!r} but the transformer predicts "
                'no variances: use pipe.scheduler = dit_scheduler("ddpm", variance_type="fixed_small")'
            )
        if self.learns_variance() and isinstance(self.scheduler, KEEPS_THREE_CHANNELS) and channels != 3:
            kind = type(self.scheduler).__name__
            raise ValueError(
                f"{kind} with variance_type={self.scheduler.config.variance_type!r} keeps 3 of the {channels} latent "
                f"channels: use pipe.scheduler = {kind}.from_config(pipe.scheduler.config, variance_type=None)"
            )
