"""A loaded text-to-video pipeline that makes what is requested, and the settings that each video is stored with."""

import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, SanaVideoPipeline, WanPipeline

from mhla_diffusion.loading import load_pipeline
from mhla_diffusion.pipelines.checks import check_frames, check_positions
from mhla_diffusion.pipelines.finite import FiniteVideoProcessor, SanaVideoWatch
from mhla_diffusion.pipelines.painter import DTYPES, STOCK_SIZE_MULTIPLE, Painter
from mhla_diffusion.pipelines.requests import Request, check_size
from mhla_diffusion.pipelines.videos import save_video
from mhla_diffusion.pipelines.wan import MHLAWanPipeline
from mhla_diffusion.weights import read_json

# Height and width that SANA-Video is made for, by the sample size that its transformers note.
SANA_VIDEO_SIZES = {30: (480, 832), 22: (704, 1280)}
SANA_VIDEO_FPS = 16  # which its pipeline does not note


def video_painter(folder: Path) -> type["VideoPainter"]:
    """The painter for the text-to-video pipeline in `folder`."""
    name = read_json(folder / "model_index.json").get("_class_name")
    return SanaVideoPainter if name == SanaVideoPipeline.__name__ else VideoPainter


class VideoPainter(Painter):
    """As `Painter`, for Wan; the stock pipeline gets the defaults, checks and words of ours."""

    kinds = (WanPipeline,)

    def load(self) -> DiffusionPipeline:
        # Wan's autoencoder shows stripes in half precision, and costs little beside the transformer.
        pipe = load_pipeline(self.folder, dtype={"default": DTYPES[self.dtype], "vae": torch.float32})
        if type(pipe) is WanPipeline:
            self.pipeline_class = "WanPipeline"
            config = {name: pipe.config[name] for name in ("boundary_ratio", "expand_timesteps")}
            pipe = MHLAWanPipeline(**pipe.components, **config)
        return pipe

    @property
    def size_multiple(self) -> tuple[int, int]:
        """Height and width must be multiples of these."""
        return self.pipe.size_multiple

    @property
    def negative_prompt(self) -> str:
        return self.pipe.config.default_negative_prompt

    def check(self, request: Request) -> None:
        """Raise ValueError unless the pipeline can make videos of this size and length in this many steps."""
        rows, columns = self.size_multiple
        check_size(request.height, None, rows)
        check_size(None, request.width, columns)
        if request.frames is not None:
            check_frames(request.frames, self.pipe.vae_scale_factor_temporal, "frames")
        self.check_steps(request.steps)
        check_positions(self.latent_shape(self.values(request)), self.denoiser.config)

    @property
    def denoiser(self) -> torch.nn.Module:
        return self.pipe.denoiser

    def latent_shape(self, values: dict[str, Any]) -> tuple[int, ...]:
        """Of the latents of one video, by its frames, height and width."""
        return self.pipe.latent_shape(1, values["frames"], values["height"], values["width"])

    def call_defaults(self) -> dict[str, Any]:
        config = self.pipe.config
        return {
            "steps": config.default_steps,
            "guidance": config.default_guidance_scale,
            "height": config.default_height,
            "width": config.default_width,
            "frames": config.default_frames,
            "fps": config.default_fps,
        }

    def draw(self, requests: Sequence[Request]) -> list[np.ndarray]:
        """Frames (F, H, W, 3) in [0, 1] of each request; all have the same size, length, steps and guidance."""
        values = self.values(requests[0])
        return list(
            self.pipe(
                [request.prompt for request in requests],
                num_inference_steps=values["steps"],
                guidance_scale=values["guidance"],
                height=values["height"],
                width=values["width"],
                num_frames=values["frames"],
                generator=[torch.Generator("cpu").manual_seed(request.seed) for request in requests],
                output_type="np",
            ).frames
        )

    def settings(self, request: Request) -> dict[str, Any]:
        scheduler = self.pipe.scheduler.config
        more = {
            "flow_shift": scheduler.get("flow_shift", scheduler.get("shift")),
            "negative_prompt": self.negative_prompt,
            "vae_dtype": str(self.pipe.vae.dtype).removeprefix("torch."),
        }
        return super().settings(request) | more

    def save(self, video: np.ndarray, path: Path, request: Request) -> None:
        alone = request.name is not None
        fps = self.values(request)["fps"]
        save_video(video, path, fps=fps, settings=self.settings(request), beside=not alone)


class SanaVideoPainter(VideoPainter):
    """As `VideoPainter`, for the stock SANA-Video pipeline.

    Videos have the size that is asked for. The stock pipeline would take the nearest of its list and resize, and
    refuses most entries of that list as no multiples of 32.
    """

    kinds = (SanaVideoPipeline,)
    negative_prompt = ""

    def load(self) -> DiffusionPipeline:
        pipe = load_pipeline(self.folder, dtype={"default": DTYPES[self.dtype], "vae": torch.float32})
        pipe.video_processor = FiniteVideoProcessor(vae_scale_factor=pipe.vae_scale_factor_spatial)
        return pipe

    @property
    def size_multiple(self) -> tuple[int, int]:
        _, rows, columns = self.pipe.transformer.config.patch_size
        factor = self.pipe.vae_scale_factor_spatial
        return tuple(math.lcm(STOCK_SIZE_MULTIPLE, factor * patch) for patch in (rows, columns))

    @property
    def denoiser(self) -> torch.nn.Module:
        return self.pipe.transformer

    def latent_shape(self, values: dict[str, Any]) -> tuple[int, ...]:
        frames = (values["frames"] - 1) // self.pipe.vae_scale_factor_temporal + 1
        sides = (values[name] // self.pipe.vae_scale_factor_spatial for name in ("height", "width"))
        return (1, self.denoiser.config.in_channels, frames, *sides)

    def call_defaults(self) -> dict[str, Any]:
        parameters = inspect.signature(self.pipe.__call__).parameters
        stock = {name: parameters[name].default for name in ("height", "width", "frames")}
        size = SANA_VIDEO_SIZES.get(self.pipe.transformer.config.sample_size)
        return {
            "steps": parameters["num_inference_steps"].default,
            "guidance": parameters["guidance_scale"].default,
            **stock,
            **(dict(zip(("height", "width"), size, strict=True)) if size else {}),
            "fps": SANA_VIDEO_FPS,
        }

    def draw(self, requests: Sequence[Request]) -> list[np.ndarray]:
        values, pipe = self.values(requests[0]), self.pipe
        size = {name: values[name] for name in ("height", "width")}
        generators = [torch.Generator("cpu").manual_seed(request.seed) for request in requests]
        latents = pipe.prepare_latents(
            len(requests),
            pipe.transformer.config.in_channels,
            **size,
            num_frames=values["frames"],
            dtype=torch.float32,
            device=pipe._execution_device,
            generator=generators,
        )
        watch = SanaVideoWatch(latents, None, ["latents"])
        made = pipe(
            [request.prompt for request in requests],
            negative_prompt=self.negative_prompt,
            num_inference_steps=values["steps"],
            guidance_scale=values["guidance"],
            **size,
            frames=values["frames"],
            generator=generators,
            latents=latents,
            output_type="np",
            use_resolution_binning=False,
            callback_on_step_end=watch,
            callback_on_step_end_tensor_inputs=watch.tensor_inputs,
        )
        return list(made.frames)
