"""A Wan transformer at toy size: the stock class, only the numbers are small."""

import torch
from diffusers import WanTransformer3DModel

from mhla_diffusion.models.wan import MHLAWanTransformer3DModel

TEXT_WIDTH = 12
TRANSFORMER = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": TEXT_WIDTH,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 64,
}
# What image-to-video models of Wan 2.1 have besides; the first and last frame share one position table.
IMAGE_WIDTH = 10
IMAGE_TO_VIDEO = {"image_dim": IMAGE_WIDTH, "added_kv_proj_dim": 24, "in_channels": 9}
FIRST_LAST_FRAME = {**IMAGE_TO_VIDEO, "pos_embed_seq_len": 10}
# Every part that MHLA can add to a layer.
EVERYTHING = {
    "mhla_gate": True,
    "mhla_local_conv": 3,
    "mhla_norm_projected": True,
    "mhla_per_head_mixing": True,
}
LATENTS = (5, 8, 12)  # a token grid of 5 x 4 x 6


def stock_transformer(seed: int = 0, **changes) -> WanTransformer3DModel:
    torch.manual_seed(seed)
    return WanTransformer3DModel(**(TRANSFORMER | changes)).eval()


def model(seed: int = 0, **options) -> MHLAWanTransformer3DModel:
    torch.manual_seed(seed)
    return MHLAWanTransformer3DModel(**({"mhla_block_grid": (2, 2, 3)} | TRANSFORMER | options)).eval()


def transformer_inputs(
    batch: int = 2,
    size: tuple[int, int, int] = LATENTS,
    seed: int = 0,
    dtype=torch.float32,
    channels: int = 4,
) -> dict:
    """Arguments of one forward pass: latents of frames x height x width, timesteps, captions."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(batch, channels, *size, generator=draw).to(dtype),
        "timestep": torch.linspace(20.0, 900.0, batch),
        "encoder_hidden_states": torch.randn(batch, 7, TEXT_WIDTH, generator=draw).to(dtype),
    }


def image_inputs(frames: int = 1, **options) -> dict:
    """The same with what an image encoder makes of one frame, or of two; captions of the length stock relies on."""
    inputs = transformer_inputs(channels=9, **options)
    draw = torch.Generator().manual_seed(9)
    batch = len(inputs["timestep"])
    inputs["encoder_hidden_states"] = torch.randn(batch, 512, TEXT_WIDTH, generator=draw)
    inputs["encoder_hidden_states_image"] = torch.randn(batch * frames, 5, IMAGE_WIDTH, generator=draw)
    return inputs


def run(target: torch.nn.Module, **inputs) -> torch.Tensor:
    return target(**(inputs or transformer_inputs())).sample


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()
