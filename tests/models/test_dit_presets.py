"""The named DiT models: sizes, parameters and work as published (DiT, arXiv 2212.09748, Table 4)."""

import math

import pytest
import torch
from tiny_dit import TRANSFORMER, stock_transformer, transformer_inputs
from torch.utils.flop_counter import FlopCounterMode

from mhla_diffusion.models.dit import MHLADiTTransformer2DModel
from mhla_diffusion.models.dit_presets import DIT_MODELS, dit_config, start_as_published

# Millions of parameters and thousand million multiply-adds ("Gflops") of one picture at 256 px.
PUBLISHED = {
    "S/8": (33, 0.36),
    "S/4": (33, 1.41),
    "S/2": (33, 6.06),
    "B/8": (131, 1.42),
    "B/4": (130, 5.56),
    "B/2": (130, 23.01),
    "L/8": (459, 5.01),
    "L/4": (458, 19.70),
    "L/2": (458, 80.71),
    "XL/8": (676, 7.39),
    "XL/4": (675, 29.05),
    "XL/2": (675, 118.64),
}
PUBLISHED_512 = {"XL/2": 524.60}


def on_meta(name: str, size: int, **options) -> MHLADiTTransformer2DModel:
    with torch.device("meta"):
        return MHLADiTTransformer2DModel(**dit_config(name, size) | options).eval()


def multiply_adds(model: MHLADiTTransformer2DModel) -> float:
    """Thousand millions of one pass for one picture, with one embedder instead of one per layer."""
    side = model.config.sample_size
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 4, side, side), torch.zeros(1), torch.zeros(1, dtype=torch.long))
    # Each layer has an embedder of its own here: all but one of their passes are too many.
    embedder = model.transformer_blocks[0].norm1.emb.timestep_embedder
    extra = sum(p.numel() for p in embedder.parameters() if p.ndim == 2) * (len(model.transformer_blocks) - 1)
    return (counter.get_total_flops() / 2 - extra) / 1e9


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_work_are_the_published_ones(name):
    model = on_meta(name, 256, mhla_layers=[])
    parameters = sum(p.numel() for p in model.parameters())
    # Diffusers' layout has the timestep and label embedder in every layer, the published models have one.
    copy = sum(p.numel() for p in model.transformer_blocks[0].norm1.emb.parameters())
    once = parameters - (len(model.transformer_blocks) - 1) * copy
    expected, work = PUBLISHED[name]
    assert round(once / 1e6) == expected
    # The published work also counts norms and activations, two in ten thousand.
    assert multiply_adds(model) == pytest.approx(work, rel=1e-3, abs=6e-3)


def test_the_work_at_512_pixels():
    model = on_meta("XL/2", 512, mhla_layers=[])
    assert multiply_adds(model) == pytest.approx(PUBLISHED_512["XL/2"], rel=1e-3)


def test_what_mhla_adds_in_weights_and_saves_in_work():
    softmax = on_meta("XL/2", 512, mhla_layers=[], num_layers=1)
    linear = on_meta("XL/2", 512, num_layers=1)
    extra = {name for name, _ in linear.named_parameters()} - {name for name, _ in softmax.named_parameters()}
    assert extra == {"transformer_blocks.0.attn1.mixing.weight"}
    # Summaries and read-out (2 N D per channel) and their mixing (M M D) in place of 2 N N.
    tokens, blocks, head_dim, width = 1024, 16, 72, 1152
    saved = width * (2 * tokens**2 - 2 * tokens * head_dim - blocks**2 * head_dim)
    difference = multiply_adds(softmax) - multiply_adds(linear)
    assert difference == pytest.approx(saved / 1e9, rel=1e-2)


def test_every_name_at_both_sizes():
    assert set(DIT_MODELS) == set(PUBLISHED)
    for name in DIT_MODELS:
        for size in (256, 512):
            config = dit_config(name, size)
            assert config["sample_size"] == size // 8 and config["out_channels"] == 2 * config["in_channels"]
            assert f"/{config['patch_size']}" == name[-2:]
    assert dit_config("DiT-B/4") == dit_config("B/4", 256)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("XL", 256), "name='XL': choose one of S/2, "),
        (("XL/3", 256), "name='XL/3': choose one of"),
        ((2, 256), "name=2: choose one of"),
        (("XL/2", 1024), "size=1024: choose one of 256, 512 pixels"),
    ],
)
def test_an_unknown_name_or_size_is_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        dit_config(*arguments)
    assert "\n" not in str(caught.value)


def test_a_new_model_starts_as_published():
    options = {"mhla_gate": True, "mhla_local_conv": 3, "mhla_norm_in": True, "mhla_layers": [0]}
    wide = TRANSFORMER | {"attention_head_dim": 64, "num_layers": 3, "num_embeds_ada_norm": 500}
    model = MHLADiTTransformer2DModel(**wide, **options)
    before = {name: p.clone() for name, p in model.named_parameters()}
    start_as_published(model, torch.Generator().manual_seed(3))
    after = dict(model.named_parameters())

    kept = {name for name in after if torch.equal(after[name], before[name])}
    new = {name for name in after if "mixing" in name or "norm_in" in name or "to_gate" in name}
    assert {name for name in kept if "local_conv" not in name} == new

    def bound(inputs: int, outputs: int) -> float:
        return math.sqrt(6 / (inputs + outputs))

    limits = {
        "pos_embed.proj.weight": bound(16, 128),
        "transformer_blocks.0.attn1.to_q.weight": bound(128, 3 * 128),
        "transformer_blocks.1.attn1.to_v.weight": bound(128, 3 * 128),
        "transformer_blocks.0.attn1.to_out.0.weight": bound(128, 128),
        "transformer_blocks.2.ff.net.0.proj.weight": bound(128, 512),
    }
    for name, limit in limits.items():
        assert 0.95 * limit < after[name].abs().max() <= limit, name
        assert not after[name.replace(".weight", ".bias")].any(), name
    table = after["transformer_blocks.0.norm1.emb.class_embedder.embedding_table.weight"]
    assert table.std().item() == pytest.approx(0.02, rel=0.02)
    model.share_embedders()  # all copies are the same

    out = model.eval()(**transformer_inputs()).sample
    assert not out.any()  # the output layer is zero
    (out - 1).square().sum().backward()
    assert model.proj_out_2.weight.grad.abs().sum() > 0
    stock = stock_transformer()
    start_as_published(stock)
    assert not stock(**transformer_inputs()).sample.any()
