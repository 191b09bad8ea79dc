"""A DiT pipeline of toy size with MHLA, and pictures of it."""

import torch
from diffusers import DiffusionPipeline
from model_checks import stirred
from tiny_dit import LABELS, components, generator, stock_transformer

from mhla_diffusion.models.convert import convert
from mhla_diffusion.pipelines.dit import MHLADiTPipeline


def pipeline(transformer=None, **options) -> MHLADiTPipeline:
    if transformer is None:
        transformer = stirred(convert(stock_transformer(), block_grid=(2, 2)))
    options = {"id2label": LABELS, "default_steps": 3} | options
    pipe = MHLADiTPipeline(**components(transformer), **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: DiffusionPipeline, labels=(1,), seed: int = 0, **arguments) -> torch.Tensor:
    arguments = {"generator": generator(seed), "output_type": "pt"} | arguments
    return pipe(list(labels) if isinstance(labels, tuple) else labels, **arguments).images
