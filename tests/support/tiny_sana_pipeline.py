"""SANA pipelines of toy size with MHLA, stock ones and ours, and pictures and LoRAs of them."""

import torch
from diffusers import SanaPipeline
from random_lora import save_lora_of
from tiny_sana import components, generator, stock_transformer

from mhla_diffusion.models.convert import convert
from mhla_diffusion.pipelines.sana import MHLASanaPipeline

CALL = {
    "height": 32,
    "width": 32,
    "num_inference_steps": 4,
    "output_type": "pt",
    "max_sequence_length": 8,
    "use_resolution_binning": False,
}


def transformer(**options) -> torch.nn.Module:
    return convert(stock_transformer(num_layers=3), block_grid=(3, 2), **options)


def pipeline(cls: type = MHLASanaPipeline, **options) -> SanaPipeline:
    pipe = cls(**components(transformer(**options)))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: SanaPipeline, seed: int = 0, **changes) -> torch.Tensor:
    return pipe(["a red apple", "two"], generator=generator(seed), **(CALL | changes)).images.cpu()


def lora(folder, seed: int = 0, **options) -> str:
    """A LoRA made on a converted transformer, or with `mixing` one that brings its mixings."""
    return save_lora_of(transformer(), folder, SanaPipeline, seed=seed, **options)
