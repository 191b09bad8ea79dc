"""MHLASanaVideoTransformer3DModel: stock where MHLA is off or has one block, its formula where it has more."""

import pytest
import torch
from model_checks import gradients, relative, same_weights, stirred
from tiny_sana_video import model, run, stock_transformer, transformer_inputs

from mhla_diffusion.models.convert import convert


def guided() -> dict:
    return transformer_inputs() | {"guidance": torch.tensor([0.4, 0.2])}


def of_an_image() -> dict:
    """The given frame is clean: its tokens have the timestep 0, in the shape that the pipeline gives them."""
    times = torch.tensor([20.0, 900.0]).view(2, 1, 1, 1, 1).repeat(1, 1, 5, 4, 6)
    times[:, :, 0] = 0
    return transformer_inputs() | {"timestep": times}


KINDS = {
    "480p": ({}, transformer_inputs),
    "720p, a token for each latent": (
        {"patch_size": (1, 1, 1)},
        lambda: transformer_inputs(size=(3, 4, 7)),
    ),
    "without norms of queries and keys": ({"qk_norm": None}, transformer_inputs),
    "with a bias": ({"attention_bias": True}, transformer_inputs),
    "guidance as an input": ({"guidance_embeds": True}, guided),
    "image to video": ({}, of_an_image),
}
SHRUNK = pytest.mark.filterwarnings("ignore:the token grid holds only")


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_mhla_it_is_the_stock_model_bit_for_bit(kind, dtype):
    changes, inputs = KINDS[kind][0], KINDS[kind][1]()
    stock, ours = (
        stirred(made).to(dtype) for made in (stock_transformer(**changes), model(mhla_layers=[], **changes))
    )
    assert same_weights(stock, ours)
    kept = ("timestep", "guidance", "encoder_attention_mask")
    inputs = {name: x if name in kept else x.to(dtype) for name, x in inputs.items()}
    assert torch.equal(run(stock, **inputs), run(ours, **inputs))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_one_block_is_stock_attention_and_more_are_what_the_reference_says(kind):
    changes, inputs = KINDS[kind][0], KINDS[kind][1]()
    stock = stirred(stock_transformer(**changes))
    expected = run(stock, **inputs)
    assert relative(run(convert(stock, (1, 1, 1)), **inputs), expected) < 1e-5
    # Equal coefficients between all blocks are one summary, in as many pieces as there are blocks.
    assert (
        relative(run(convert(stock, (2, 2, 3), mixing_init="uniform", gate=True), **inputs), expected) < 1e-5
    )
    ours = stirred(convert(stock, (2, 2, 3), layers="1/2", gate=True, local_conv=3, per_head_mixing=True))
    out = run(ours, **inputs)
    assert relative(out, expected) > 1e-3 and out.isfinite().all()
    ours.set_mhla_backend("reference")
    assert relative(out, run(ours, **inputs)) < 1e-5


@torch.no_grad()
def test_tokens_without_any_active_feature_are_zeros_as_in_stock():
    stock = stock_transformer()
    for layer in stock.transformer_blocks:  # negative queries: relu leaves nothing of them
        layer.attn1.norm_q.weight.copy_(-1e-30)
    assert relative(run(convert(stock, (1, 1, 1))), run(stock)) < 1e-5


@torch.no_grad()
@SHRUNK
def test_sizes_that_users_type_run_on_one_set_of_weights():
    """Patches included: 480x832 and the other bins of 480p with 81 frames, one frame, 17 frames; 720p with LTX-2's."""
    kinds = [
        ({}, [(21, 30, 52), (21, 28, 56), (21, 52, 30), (1, 30, 52), (5, 42, 37)]),
        ({"patch_size": (1, 1, 1)}, [(11, 22, 40), (11, 40, 22), (1, 21, 42)]),
    ]
    for changes, grids in kinds:
        ours = stirred(model(num_layers=1, mhla_block_grid=(3, 5, 10), **changes))
        scale = ours.config.patch_size[1]
        for frames, rows, columns in grids:
            inputs = transformer_inputs(batch=1, size=(frames, scale * rows, scale * columns))
            out = run(ours, **inputs)
            assert out.shape == inputs["hidden_states"].shape and out.isfinite().all()
            if (frames, rows, columns) in ((21, 30, 52), (1, 30, 52), (11, 22, 40)):
                ours.set_mhla_backend("reference")
                assert relative(out, run(ours, **inputs)) < 1e-5
                ours.set_mhla_backend("auto")


def test_conversion_starts_from_what_stock_attention_computes():
    config = convert(stock_transformer()).config
    assert (config.mhla_normalizer, config.mhla_feature_eps, config.mhla_denominator_eps) == (
        "paper",
        0,
        1e-15,
    )
    none = convert(stock_transformer(), normalizer="none").config
    assert (none.mhla_normalizer, none.mhla_norm_out) == ("none", True)


def test_gradients_with_one_block_are_those_of_the_stock_model():
    stock = stirred(stock_transformer())
    expected = gradients(stock, **transformer_inputs())
    ours = gradients(convert(stock, (1, 1, 1)), **transformer_inputs())
    assert all(relative(ours[name], value) < 1e-5 for name, value in expected.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timestep": torch.zeros(2, 1, 5, 4, 5)}, r"for each sample, \(2,\), or .* \(2, 1, 5, 4, 6\)"),
        ({"timestep": torch.tensor(3.0)}, r"timestep has shape \(\): give one for each sample"),
        ({"hidden_states": torch.zeros(2, 4, 8, 12)}, r"takes \(batch, 4, frames, height, width\)"),
        ({"hidden_states": torch.zeros(2, 5, 5, 8, 12)}, r"latents have shape \(2, 5, 5, 8, 12\)"),
    ],
)
def test_inputs_of_another_shape_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        run(model(), **(transformer_inputs() | changes))
    assert "\n" not in str(caught.value)


def test_a_mask_of_tokens_is_refused():
    with pytest.raises(ValueError, match="cannot leave tokens out"):
        run(model(), **transformer_inputs(), attention_mask=torch.ones(2, 120))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mhla_block_grid": (4, 4)}, r"three positive integers \(frames, rows, columns\)"),
        ({"qk_norm": "layer_norm"}, "qk_norm='layer_norm': choose one of rms_norm_across_heads, None"),
    ],
)
def test_options_outside_the_allowed_ones_are_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        model(**options)
    assert "\n" not in str(caught.value)
