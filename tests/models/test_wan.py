"""MHLAWanTransformer3DModel: stock where MHLA is off, and what its formula says where it is on."""

import copy

import pytest
import tiny_wan
import torch
from model_checks import relative, same_weights, stirred
from tiny_wan import EVERYTHING, image_inputs, model, run, stock_transformer, transformer_inputs

from mhla_diffusion.models.convert import convert

KINDS = {
    "text to video": ({}, transformer_inputs),
    "no norm before cross-attention": ({"cross_attn_norm": False}, transformer_inputs),
    "patches of two frames": ({"patch_size": (2, 2, 2)}, lambda: transformer_inputs(size=(4, 8, 12))),
    "image to video": (tiny_wan.IMAGE_TO_VIDEO, image_inputs),
    "first and last frame": (tiny_wan.FIRST_LAST_FRAME, lambda: image_inputs(frames=2)),
    "timesteps of tokens": (
        {},
        lambda: transformer_inputs() | {"timestep": torch.arange(240.0).view(2, 120)},
    ),
}
SHRUNK = pytest.mark.filterwarnings("ignore:the token grid holds only")


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_mhla_it_is_the_stock_model_bit_for_bit(kind, dtype):
    changes, inputs = KINDS[kind][0], KINDS[kind][1]()
    stock, ours = stock_transformer(**changes).to(dtype), model(mhla_layers=[], **changes).to(dtype)
    assert same_weights(stock, ours)
    inputs = {name: x if name == "timestep" else x.to(dtype) for name, x in inputs.items()}
    assert torch.equal(run(stock, **inputs), run(ours, **inputs))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_wan_computes_with_mhla_what_the_reference_does(kind):
    changes, inputs = KINDS[kind][0], KINDS[kind][1]()
    ours = stirred(model(mhla_layers="1/2", **EVERYTHING, **changes))
    out = run(ours, **inputs)
    assert (
        out.isfinite().all()
        and relative(out, run(stirred(model(mhla_layers=[], **changes)), **inputs)) > 1e-3
    )
    ours.set_mhla_backend("reference")
    assert relative(out, run(ours, **inputs)) < 1e-5


def test_conversion_normalises_the_output_or_what_it_is_told():
    config = convert(stock_transformer()).config
    assert (config.mhla_normalizer, config.mhla_norm_out) == ("none", True)
    paper = convert(stock_transformer(), normalizer="paper").config
    assert (paper.mhla_normalizer, paper.mhla_norm_out) == ("paper", False)


def test_the_frequencies_survive_a_cast_and_stock_tables_do_what_they_do_in_stock():
    ours, stock = model(mhla_layers=[]).to(torch.bfloat16), stock_transformer().to(torch.bfloat16)
    assert ours.rope.frequencies.dtype == torch.float32
    assert torch.equal(ours.rope.frequencies, model().rope.frequencies)
    assert ours.rope.freqs_cos.dtype == stock.rope.freqs_cos.dtype


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 0),
        ({"mhla_other_layers": "softmax"}, 0),
        ({"mhla_layers": "1/2"}, 120),
        ({"mhla_layers": "1/2", "mhla_other_layers": "softmax"}, 120),
    ],
)
def test_the_rotary_table_is_made_where_a_layer_reads_it(options, tokens):
    ours = stirred(model(**options))
    positions = ours.rope(transformer_inputs()["hidden_states"])
    assert positions.cos.shape == positions.sin.shape == (1, tokens, 1, ours.config.attention_head_dim)
    expected = run(ours, **transformer_inputs())
    ours.rope.tabulated = True
    assert torch.equal(run(ours, **transformer_inputs()), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timestep": torch.zeros(2, 119)}, r"shape \(2, 119\): give one for each sample, .*\(batch, 120\)"),
        ({"timestep": torch.tensor(3.0)}, r"timestep has shape \(\): give one for each sample"),
        ({"hidden_states": torch.zeros(2, 4, 8, 12)}, r"takes \(batch, 4, frames, height, width\)"),
        ({"hidden_states": torch.zeros(2, 5, 5, 8, 12)}, r"latents have shape \(2, 5, 5, 8, 12\)"),
        ({"hidden_states": torch.zeros(2, 4, 0, 8, 12)}, r"latents have shape .* at least one of each"),
    ],
)
def test_inputs_of_another_shape_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        run(model(), **(transformer_inputs() | changes))
    assert "\n" not in str(caught.value)


@torch.no_grad()
@pytest.mark.parametrize(("options", "each"), [(tiny_wan.IMAGE_TO_VIDEO, 1), (tiny_wan.FIRST_LAST_FRAME, 2)])
def test_videos_of_one_image_share_it_and_other_numbers_are_refused(options, each):
    ours, inputs = stirred(model(**options)), image_inputs(frames=each, batch=4)
    images = inputs.pop("encoder_hidden_states_image")
    two = images[: 2 * each]  # of the first and the second two videos
    repeated = torch.cat([two[:each], two[:each], two[each:], two[each:]])
    expected = run(ours, **inputs, encoder_hidden_states_image=repeated)
    assert torch.equal(run(ours, **inputs, encoder_hidden_states_image=two), expected)
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="eager")
    assert relative(run(compiled, **inputs, encoder_hidden_states_image=two), expected) < 1e-6
    with pytest.raises(ValueError, match=f"{3 * each} images for 4 samples: give {each} for each"):
        run(ours, **inputs, encoder_hidden_states_image=images[: 3 * each])
    with pytest.raises(ValueError, match=r"takes no images \(image_dim=None\)"):
        run(model(), **transformer_inputs(), encoder_hidden_states_image=images)


@torch.no_grad()
@SHRUNK
def test_sizes_that_wan_users_type_run_on_one_set_of_weights():
    """480x832, 480x800 and 720x1280 of 81 frames, portrait, 704x1280, one frame, 17, 33, and TI2V's of 121 frames."""
    ours = stirred(
        model(num_layers=1, num_attention_heads=1, mhla_block_grid=(3, 5, 10), rope_max_seq_len=128)
    )
    grids = [
        (21, 30, 52),
        (21, 30, 50),
        (21, 52, 30),
        (21, 45, 80),
        (3, 44, 80),
        (1, 30, 52),
        (5, 30, 52),
        (9, 52, 30),
        (31, 22, 40),
    ]
    exact = copy.deepcopy(ours).double()
    exact.set_mhla_backend("reference")
    for frames, rows, columns in grids:
        inputs = transformer_inputs(batch=1, size=(frames, 2 * rows, 2 * columns))
        out = run(ours, **inputs)
        assert out.shape == inputs["hidden_states"].shape and out.isfinite().all()
        if (frames, rows, columns) in ((21, 30, 52), (1, 30, 52)):  # ragged, and blocks that have no frames
            expected = run(exact, **{name: x.double() for name, x in inputs.items()})
            assert expected.dtype == torch.float64 and relative(out.double(), expected) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mhla_block_grid": (4, 4)},
            r"three positive integers \(frames, rows, columns\), such as \(3, 5, 10\)",
        ),
        ({"mhla_normalizer": "paper", "mhla_norm_across_heads": True}, "without mhla_norm_out"),
    ],
)
def test_options_outside_the_allowed_ones_are_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        model(**options)
    assert "\n" not in str(caught.value)
