"""A loaded pipeline that draws requests, and the settings that each picture is stored with."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline, DiTPipeline, SanaPipeline
from PIL import Image

from mhla_diffusion.loading import load_pipeline, no_library_bars
from mhla_diffusion.pipelines.dit import MHLADiTPipeline, label_names
from mhla_diffusion.pipelines.pictures import save_picture
from mhla_diffusion.pipelines.requests import Request, check_size
from mhla_diffusion.pipelines.sana import BINNED_SAMPLE_SIZES, FiniteWatch, MHLASanaPipeline
from mhla_diffusion.provenance import versions
from mhla_diffusion.weights import read_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Diffusers' methods that keep what is not computing in the machine's memory: whole models, or single layers.
OFFLOADS = {"model": "enable_model_cpu_offload", "sequential": "enable_sequential_cpu_offload"}
# Its lists of resolutions are in pixels, for autoencoders of this factor.
BINNED_VAE_FACTOR = 32
# What the stock SANA pipeline wants of a size, whatever its autoencoder needs.
STOCK_SIZE_MULTIPLE = 32


class Painter:
    """A loaded pipeline that draws requests and knows the full settings of what it drew.

    Of a class-conditional pipeline (DiT, stock ones included) a prompt is a class's name or number.
    """

    kinds = (SanaPipeline, DiTPipeline)

    def __init__(
        self, folder: Path, sha256: str, device: torch.device, dtype: str, offload: str | None = None
    ):
        self.folder, self.sha256, self.device, self.dtype = folder, sha256, device, dtype
        self.pipeline_class = None
        # Told by its name before gigabytes are read, where Diffusers knows the name.
        kind = getattr(diffusers, str(read_json(folder / "model_index.json").get("_class_name")), None)
        if isinstance(kind, type):
            self.check_kind(kind)
        with no_library_bars():
            self.pipe = self.load()
        self.check_kind(type(self.pipe))
        self.pipeline_class = self.pipeline_class or type(self.pipe).__name__
        self.pipe.set_progress_bar_config(desc="steps", leave=False, position=1, disable=None)
        self.defaults = self.call_defaults()
        if offload is None:
            self.pipe.to(device)
        else:
            getattr(self.pipe, OFFLOADS[offload])(device=device)

    def check_kind(self, kind: type) -> None:
        """Raise ValueError on a class of pipelines that are not for drawing what a text or a class names."""
        if not issubclass(kind, self.kinds):
            raise ValueError(
                f"{self.folder} is a {kind.__name__}: give a text-to-image pipeline (SANA), a class-conditional one "
                "(DiT), or a text-to-video one (Wan, SANA-Video)"
            )

    def load(self) -> DiffusionPipeline:
        """The pipeline on the CPU, where ours is better than the stock one as ours; notes what is in the folder."""
        pipe = load_pipeline(self.folder, dtype=DTYPES[self.dtype])
        if isinstance(pipe, DiTPipeline) and not isinstance(pipe, MHLADiTPipeline):
            self.pipeline_class = type(pipe).__name__
            # Stock's has no sizes, steps of its own or label checks. `from_pipe` would cast what has its dtype already.
            pipe = MHLADiTPipeline(**pipe.components, id2label=label_names(pipe))
        return pipe

    def call_defaults(self) -> dict[str, Any]:
        """Steps, guidance, height and width that the pipeline draws with when a call does not name them."""
        pipe = self.pipe
        if isinstance(pipe, (MHLASanaPipeline, MHLADiTPipeline)):
            height, width = pipe.default_size
            return {
                "steps": pipe.config.default_steps,
                "guidance": pipe.config.default_guidance_scale,
                "height": height,
                "width": width,
            }
        parameters = inspect.signature(pipe.__call__).parameters
        side = pipe.transformer.config.sample_size * pipe.vae_scale_factor
        return {
            "steps": parameters["num_inference_steps"].default,
            "guidance": parameters["guidance_scale"].default,
            "height": side,
            "width": side,
        }

    @property
    def by_class(self) -> bool:
        return isinstance(self.pipe, DiTPipeline)

    def check(self, request: Request) -> None:
        """Raise ValueError unless the pipeline can draw pictures of this size in this many steps."""
        check_size(request.height, request.width, getattr(self.pipe, "size_multiple", STOCK_SIZE_MULTIPLE))
        self.check_steps(request.steps)

    def check_steps(self, steps: int | None) -> None:
        longest = self.pipe.scheduler.config.num_train_timesteps
        if steps is not None and steps > longest:
            raise ValueError(f"steps is {steps}: the scheduler has {longest}, for example --steps 20")

    def fault(self, request: Request) -> str | None:
        """Why this prompt cannot be drawn, where that is known beforehand: no such class."""
        if self.by_class:
            try:
                self.pipe.typed_labels([request.prompt])
            except ValueError as error:
                return str(error)
        return None

    def draw(self, requests: Sequence[Request]) -> list[Image.Image]:
        """One picture per request; all have the same size, steps and guidance."""
        values = self.values(requests[0])
        prompts = [request.prompt for request in requests]
        what = {"class_labels": self.pipe.typed_labels(prompts)} if self.by_class else {"prompt": prompts}
        return self.pipe(
            **what,
            num_inference_steps=values["steps"],
            guidance_scale=values["guidance"],
            height=values["height"],
            width=values["width"],
            generator=[torch.Generator("cpu").manual_seed(request.seed) for request in requests],
            **self.stock_arguments(),
        ).images

    def save(self, image: Image.Image, path: Path, request: Request) -> None:
        """Write what `draw` made, with its settings."""
        save_picture(image, path, self.settings(request), beside=request.name is None)

    def stock_arguments(self) -> dict[str, Any]:
        """What the stock pipeline must be told and ours does by itself."""
        if isinstance(self.pipe, (MHLASanaPipeline, MHLADiTPipeline)):
            return {}
        # It has lists of resolutions for some sample sizes, and fails for the others unless told not to.
        known = self.pipe.transformer.config.sample_size in BINNED_SAMPLE_SIZES
        return {
            "callback_on_step_end": FiniteWatch(None, ["latents"]),
            "use_resolution_binning": known and self.pipe.vae_scale_factor == BINNED_VAE_FACTOR,
        }

    def values(self, request: Request) -> dict[str, Any]:
        asked = {name: getattr(request, name) for name in self.defaults}
        return {name: self.defaults[name] if value is None else value for name, value in asked.items()}

    def settings(self, request: Request) -> dict[str, Any]:
        """Everything that decides the picture, and where it was drawn, as JSON values."""
        on_gpu = self.device.type == "cuda"
        label = {"class_label": self.pipe.typed_labels([request.prompt])[0]} if self.by_class else {}
        return {
            "prompt": request.prompt,
            **label,
            "seed": request.seed,
            **self.values(request),
            "dtype": self.dtype,
            "defaults": self.defaults,
            "pipeline": self.folder.resolve().name,
            "pipeline_class": self.pipeline_class,
            "pipeline_sha256": self.sha256,
            "scheduler": type(self.pipe.scheduler).__name__,
            "flow_shift": self.pipe.scheduler.config.get("flow_shift"),
            "device": torch.cuda.get_device_name(self.device) if on_gpu else self.device.type,
            "versions": versions(("mhla_diffusion", "torch", "diffusers", "transformers")),
        }


def choose_device(device: str) -> torch.device:
    """The device named, or for "auto" CUDA where there is one and else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}: give auto, cpu, cuda or cuda:0") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is not one that pictures are drawn on: give auto, cpu or cuda")
    count = torch.cuda.device_count()
    if chosen.type == "cuda" and (chosen.index or 0) >= count:
        raise ValueError(f"device {device} is not there ({count} CUDA devices): give --device cpu or auto")
    return chosen


def check_offload(offload: str | None, device: torch.device) -> None:
    """Raise ValueError unless weights can be kept off this device in the way named."""
    if offload is None:
        return
    if offload not in OFFLOADS:
        raise ValueError(f"unknown offload {offload!r}: give {' or '.join(OFFLOADS)}")
    if device.type != "cuda":
        raise ValueError(
            f"--offload {offload} saves memory of a GPU, and this draws on the {device.type}: leave it out"
        )


def choose_dtype(dtype: str, device: torch.device) -> str:
    """Name of the dtype asked for, or for "auto" bfloat16 on CUDA and float32 elsewhere."""
    if dtype == "auto":
        return "bfloat16" if device.type == "cuda" else "float32"
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: give auto, {', '.join(DTYPES)}")
    return dtype
