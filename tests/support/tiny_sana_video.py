"""A SANA-Video transformer at toy size: the stock class, only the numbers are small."""

import torch
from diffusers import SanaVideoTransformer3DModel
from tiny_sana import TEXT_WIDTH

from mhla_diffusion.models.sana_video import MHLASanaVideoTransformer3DModel

TRANSFORMER = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 12,
    "cross_attention_dim": 24,
    "caption_channels": TEXT_WIDTH,
    "rope_max_seq_len": 64,
}
# Every part that MHLA can add to a layer.
EVERYTHING = {"mhla_gate": True, "mhla_local_conv": 3, "mhla_norm_out": True, "mhla_per_head_mixing": True}
LATENTS = (5, 8, 12)  # a token grid of 5 x 4 x 6


def stock_transformer(seed: int = 0, **changes) -> SanaVideoTransformer3DModel:
    torch.manual_seed(seed)
    return SanaVideoTransformer3DModel(**(TRANSFORMER | changes)).eval()


def model(seed: int = 0, **options) -> MHLASanaVideoTransformer3DModel:
    torch.manual_seed(seed)
    return MHLASanaVideoTransformer3DModel(**({"mhla_block_grid": (2, 2, 3)} | TRANSFORMER | options)).eval()


def transformer_inputs(
    batch: int = 2, size: tuple[int, int, int] = LATENTS, seed: int = 0, dtype=torch.float32
) -> dict:
    """Arguments of one forward pass: latents of frames x height x width, captions with one padded token, timesteps."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch, 5)
    mask[:, -1] = 0
    return {
        "hidden_states": torch.randn(batch, 4, *size, generator=draw).to(dtype),
        "encoder_hidden_states": torch.randn(batch, 5, TEXT_WIDTH, generator=draw).to(dtype),
        "timestep": torch.linspace(20.0, 900.0, batch),
        "encoder_attention_mask": mask,
    }


def run(target: torch.nn.Module, **inputs) -> torch.Tensor:
    return target(**(inputs or transformer_inputs())).sample
