"""The published SANA models: their sizes, every resolution of their pipelines, and conversion of each kind."""

import pytest
import torch
from diffusers import SanaTransformer2DModel
from diffusers.pipelines.pixart_alpha.pipeline_pixart_alpha import ASPECT_RATIO_512_BIN, ASPECT_RATIO_1024_BIN
from model_checks import relative
from tiny_sana import stock_transformer, transformer_inputs

from mhla_diffusion.models.convert import convert
from mhla_diffusion.models.sana import MHLASanaTransformer2DModel
from mhla_diffusion.models.sana_presets import SANA_MODELS, sana_config

# Millions of parameters as the papers and model cards print them, and how finely they round.
PUBLISHED = {
    "0.6B": (590, 10),
    "1.6B": (1604, 1),
    "1.5-1.6B": (1600, 50),
    "1.5-4.8B": (4800, 100),
    "sprint-0.6B": (600, 50),
    "sprint-1.6B": (1600, 50),
}
BINS = {512: ASPECT_RATIO_512_BIN, 1024: ASPECT_RATIO_1024_BIN}
GRIDS = {size: [(int(h) // 32, int(w) // 32) for h, w in bins.values()] for size, bins in BINS.items()}


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", SANA_MODELS)
def test_the_sizes_are_the_published_ones(name):
    with torch.device("meta"):
        stock = SanaTransformer2DModel(**sana_config(name))
        ours = MHLASanaTransformer2DModel(**sana_config(name), mhla_block_grid=(4, 4))
    millions, rounding = PUBLISHED[name]
    assert abs(count(stock) / 1e6 - millions) < rounding
    layers = SANA_MODELS[name]["num_layers"]
    assert count(ours) - count(stock) == layers * 16 * 16
    width = 1152 if "0.6B" in name else 2240
    assert stock.transformer_blocks[0].attn1.to_q.weight.shape == (width, width)
    assert (stock.transformer_blocks[0].attn1.norm_q is not None) == ("1.5-" in name or "sprint" in name)
    assert stock.config.guidance_embeds == ("sprint" in name)


@pytest.mark.parametrize("size", [512, 1024, 2048, 4096])
def test_every_picture_size_has_its_positions(size):
    with torch.device("meta"):
        model = MHLASanaTransformer2DModel(**(sana_config("0.6B", size) | {"num_layers": 1}))
    assert model.config.sample_size == size // 32
    positions = model.patch_embed.pos_embed
    assert (positions is None) == (size < 2048)
    if positions is not None:
        assert positions.shape == (1, (size // 32) ** 2, 1152)


@pytest.mark.parametrize(
    ("given", "message"),
    [(("2B",), "choose one of 0.6B, 1.6B"), (("0.6B", 768), "choose one of 512, 1024, 2048, 4096 pixels")],
)
def test_another_name_or_size_is_refused_in_one_line(given, message):
    with pytest.raises(ValueError, match=message) as caught:
        sana_config(*given)
    assert "\n" not in str(caught.value)


@torch.no_grad()
@pytest.mark.parametrize("size", GRIDS)
@pytest.mark.parametrize("block_grid", [(4, 4), (3, 5), (8, 8)])
def test_every_resolution_bin_equals_the_reference(size, block_grid):
    """At (4, 4) most bins have unequal blocks: 24 of 33 at 1024 px, 28 at 512 px."""
    assert len(GRIDS[size]) == 33
    model = convert(stock_transformer(num_layers=1), block_grid=block_grid)
    for grid in GRIDS[size]:
        inputs = transformer_inputs(batch=1, size=grid)
        model.set_mhla_backend("auto")
        out = model(**inputs).sample
        model.set_mhla_backend("reference")
        assert out.shape == (1, 4, *grid)
        assert relative(out, model(**inputs).sample) < 1e-5, grid


def test_most_bins_divide_into_unequal_blocks():
    uneven = {size: sum(h % 4 != 0 or w % 4 != 0 for h, w in grids) for size, grids in GRIDS.items()}
    assert uneven == {512: 28, 1024: 24}


@torch.no_grad()
@pytest.mark.parametrize(("size", "block_grid"), [(2048, (4, 4)), (4096, (8, 8))])
def test_two_and_four_thousand_pixels_with_their_stretched_positions(size, block_grid):
    scale = sana_config("1.6B", size)["interpolation_scale"]
    side = size // 32
    stock = stock_transformer(num_layers=1, sample_size=side, interpolation_scale=scale)
    one_block = convert(stock, block_grid=(1, 1))
    blocks = convert(stock, block_grid=block_grid)
    for grid in ((side, side), (side + side // 4, side - side // 4)):
        inputs = transformer_inputs(batch=1, size=grid)
        expected = stock(**inputs).sample
        assert relative(one_block(**inputs).sample, expected) < 1e-5
        assert 1e-6 < relative(blocks(**inputs).sample, expected) < 1.0


@torch.no_grad()
@pytest.mark.parametrize("name", SANA_MODELS)
def test_one_block_equals_stock_for_every_kind(name):
    """The published configuration with fewer, narrower layers; SANA-1.5's norms and Sprint's guidance included."""
    narrow = {"num_attention_heads": 4, "num_cross_attention_heads": 4, "num_layers": 3}
    narrow |= {"attention_head_dim": 8, "cross_attention_head_dim": 8, "cross_attention_dim": 32}
    narrow |= {"in_channels": 4, "out_channels": 4, "caption_channels": 16}
    torch.manual_seed(0)
    stock = SanaTransformer2DModel(**(sana_config(name) | narrow)).eval()
    for parameter in stock.parameters():  # norms whose weights are all one would hide a slip
        parameter += 0.05 * torch.rand_like(parameter)
    inputs = transformer_inputs(size=(9, 7))
    if stock.config.guidance_embeds:
        inputs["guidance"] = torch.tensor([0.45, 0.2])
    expected = stock(**inputs).sample
    assert relative(convert(stock, block_grid=(1, 1))(**inputs).sample, expected) < 1e-5
    assert relative(convert(stock, block_grid=(3, 3))(**inputs).sample, expected) > 1e-5
    # Equal coefficients between all blocks are one summary, in as many pieces as there are blocks.
    uniform = convert(stock, block_grid=(3, 3), mixing_init="uniform")
    assert relative(uniform(**inputs).sample, expected) < 1e-5
