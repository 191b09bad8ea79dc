"""A loaded text-to-video pipeline that makes what is requested, and the settings that each video is stored with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, WanPipeline

from mhla_diffusion.loading import load_pipeline
from mhla_diffusion.pipelines.checks import check_frames
from mhla_diffusion.pipelines.painter import DTYPES, Painter
from mhla_diffusion.pipelines.requests import Request, check_size
from mhla_diffusion.pipelines.videos import save_video
from mhla_diffusion.pipelines.wan import MHLAWanPipeline


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

    def check(self, request: Request) -> None:
        """Raise ValueError unless the pipeline can make videos of this size and length in this many steps."""
        rows, columns = self.pipe.size_multiple
        check_size(request.height, None, rows)
        check_size(None, request.width, columns)
        if request.frames is not None:
            check_frames(request.frames, self.pipe.vae_scale_factor_temporal, "frames")
        self.check_steps(request.steps)

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
            "negative_prompt": self.pipe.config.default_negative_prompt,
            "vae_dtype": str(self.pipe.vae.dtype).removeprefix("torch."),
        }
        return super().settings(request) | more

    def save(self, video: np.ndarray, path: Path, request: Request) -> None:
        save_video(video, path, fps=self.values(request)["fps"], settings=self.settings(request))
