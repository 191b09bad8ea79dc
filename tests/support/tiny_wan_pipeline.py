"""Real components of Wan pipelines at toy size: every class is the stock one, only the numbers are small.

And pipelines of them with MHLA, stock ones and ours, with videos and LoRAs of these.
"""

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline
from model_checks import stirred
from random_lora import save_lora_of
from tiny_sana import tokenizer
from tiny_wan import IMAGE_WIDTH, TEXT_WIDTH, model, stock_transformer
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    UMT5Config,
    UMT5EncoderModel,
)

from mhla_diffusion.pipelines.wan import MHLAWanPipeline

CHANNELS = 4
CALL = {
    "height": 32,
    "width": 48,
    "num_frames": 9,
    "num_inference_steps": 4,
    "max_sequence_length": 8,
    "output_type": "pt",
    "negative_prompt": "green",
}


def text_encoder() -> UMT5EncoderModel:
    torch.manual_seed(1)
    config = UMT5Config(
        vocab_size=32,
        d_model=TEXT_WIDTH,
        d_kv=6,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        relative_attention_num_buckets=4,
        pad_token_id=0,
    )
    return UMT5EncoderModel(config).eval()


def autoencoder() -> AutoencoderKLWan:
    """Compresses 8 times along height and width, 4 times along time: 17 x 32 x 48 to 5 x 4 x 6 latents."""
    torch.manual_seed(2)
    return AutoencoderKLWan(
        base_dim=3,
        z_dim=CHANNELS,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.0, 0.3],
        latents_std=[1.0, 2.0, 1.5, 0.5],
    ).eval()


def image_encoder() -> CLIPVisionModelWithProjection:
    torch.manual_seed(3)
    config = CLIPVisionConfig(
        hidden_size=IMAGE_WIDTH,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        projection_dim=IMAGE_WIDTH,
    )
    return CLIPVisionModelWithProjection(config).eval()


def image_processor() -> CLIPImageProcessor:
    return CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})


def components(transformer: torch.nn.Module | None = None) -> dict:
    return {
        "tokenizer": tokenizer(),
        "text_encoder": text_encoder(),
        "vae": autoencoder(),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
        "transformer": stirred(model()) if transformer is None else transformer,
    }


def stock_pipeline(transformer: torch.nn.Module | None = None) -> WanPipeline:
    pipe = WanPipeline(**components(stirred(stock_transformer()) if transformer is None else transformer))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def transformer(**options) -> torch.nn.Module:
    return stirred(model(num_layers=3, **options))


def pipeline(cls: type = MHLAWanPipeline, **more) -> WanPipeline:
    pipe = cls(**(components(transformer()) | more))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: WanPipeline, seed: int = 0, **changes) -> torch.Tensor:
    return pipe("a red apple", generator=generator(seed), **(CALL | changes)).frames.cpu()


def lora(folder, seed: int = 0, mixing: bool = False) -> str:
    """A LoRA made on the stock transformer, or with `mixing` one on ours that brings its mixings."""
    made = transformer() if mixing else stock_transformer(num_layers=3)
    return save_lora_of(made, folder, WanPipeline, seed=seed, mixing=mixing)
