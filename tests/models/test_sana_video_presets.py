"""The published SANA-Video models: their size, the tokens of their videos, and MHLA of the paper's shape in them."""

import pytest
import torch
from diffusers import SanaVideoTransformer3DModel
from model_checks import relative

from mhla_diffusion.models.convert import convert
from mhla_diffusion.models.sana_video import MHLASanaVideoTransformer3DModel
from mhla_diffusion.models.sana_video_presets import SANA_VIDEO_MODELS, sana_video_config

# Latents of the videos that each is made for, 81 frames of 480x832 and of 704x1280, and how many tokens they become.
LATENTS = {"2B-480p": (16, 21, 60, 104), "2B-720p": (128, 11, 22, 40)}
TOKENS = {"2B-480p": 32760, "2B-720p": 9680}
NARROW = {
    "num_attention_heads": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_dim": 224,
    "caption_channels": 16,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
}


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", SANA_VIDEO_MODELS)
def test_the_sizes_are_the_published_ones(name):
    config = sana_video_config(name)
    with torch.device("meta"):
        stock = SanaVideoTransformer3DModel(**config)
        ours = MHLASanaVideoTransformer3DModel(**config)
        gated = MHLASanaVideoTransformer3DModel(
            **config, mhla_gate=True, mhla_local_conv=3, mhla_layers="2/3"
        )
    assert round(count(stock) / 1e9, 2) == 2.06  # published as 2B
    assert count(ours) - count(stock) == 20 * 150 * 150
    # Matrix, gate, convolution and its bias, in 13 of 20 layers.
    assert count(gated) - count(stock) == 13 * (150 * 150 + 2240 * 2240 + 2240 + 28 * 2240)
    channels, *size = LATENTS[name]
    assert config["in_channels"] == channels
    grid = ours.rope(torch.empty(1, channels, *size, device="meta")).grid
    assert grid[0] * grid[1] * grid[2] == TOKENS[name]


@torch.no_grad()
@pytest.mark.parametrize("name", SANA_VIDEO_MODELS)
def test_one_block_equals_stock_attention_at_the_size_each_is_made_for(name):
    """With two heads only: places are large, and a float32 frequency times a place must be exact enough there."""
    torch.manual_seed(0)
    stock = SanaVideoTransformer3DModel(**(sana_video_config(name) | NARROW)).eval()
    stock.transformer_blocks[0].attn1.to_out[0].bias.zero_()  # or it would be most of the output
    latents = torch.empty(1, 4, *LATENTS[name][1:])
    x = torch.randn(1, TOKENS[name], 224)
    expected, one, many = (
        made.transformer_blocks[0].attn1(x, rotary_emb=made.rope(latents))
        for made in (stock, convert(stock, (1, 1, 1)), convert(stock))
    )
    assert relative(one, expected) < 1e-5 < 0.1 < relative(many, expected)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="choose one of 2B-480p, 2B-720p"):
        sana_video_config("480p")
