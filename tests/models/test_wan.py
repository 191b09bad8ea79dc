"""MHLAWanTransformer3DModel: stock where MHLA is off, and what its formula says where it is on."""

import copy
import inspect

import pytest
import tiny_wan
import torch
from diffusers import WanTransformer3DModel
from hypothesis import given, settings
from hypothesis import strategies as st
from model_checks import gradients, public
from tiny_wan import (
    EVERYTHING,
    image_inputs,
    model,
    relative,
    run,
    stirred,
    stock_transformer,
    transformer_inputs,
)

from mhla_diffusion.attention import GridSelfAttention
from mhla_diffusion.mixing import initial_mixing
from mhla_diffusion.models.convert import convert, restore
from mhla_diffusion.models.wan import MHLAWanTransformer3DModel
from mhla_diffusion.wan_attention import MHLAWanAttention, SoftmaxWanAttention

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


def test_every_stock_argument_has_the_stock_default():
    stock = inspect.signature(WanTransformer3DModel.__init__).parameters
    ours = inspect.signature(MHLAWanTransformer3DModel.__init__).parameters
    assert {name: ours[name].default for name in stock} == {name: p.default for name, p in stock.items()}
    assert {name for name in ours if name not in stock} == {n for n in ours if n.startswith("mhla_")}


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_mhla_it_is_the_stock_model_bit_for_bit(kind, dtype):
    changes, inputs = KINDS[kind][0], KINDS[kind][1]()
    stock, ours = stock_transformer(**changes).to(dtype), model(mhla_layers=[], **changes).to(dtype)
    assert stock.state_dict().keys() == ours.state_dict().keys()
    assert all(torch.equal(ours.state_dict()[key], value) for key, value in stock.state_dict().items())
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


def test_the_same_seed_gives_the_same_shared_weights_whatever_the_attention():
    stock = stock_transformer().state_dict()
    for options in (EVERYTHING, {"mhla_layers": [0]}, {"mhla_layers": [], "mhla_other_layers": "softmax"}):
        ours = model(**options).state_dict()
        assert all(torch.equal(ours[key], value) for key, value in stock.items())
    after = torch.rand(1)
    stock_transformer()
    assert torch.equal(after, torch.rand(1))


def test_layers_get_the_attention_they_were_given():
    for layers, expected in (
        ("2/3", [1, 2, 4]),
        ("all", None),
        ([4, 0], [0, 4]),
        ("1/2", [1, 3]),
        (None, None),
    ):
        hybrid = model(num_layers=5, mhla_layers=layers)
        chosen = [i for i, layer in enumerate(hybrid.blocks) if isinstance(layer.attn1, MHLAWanAttention)]
        assert hybrid.config.mhla_layers == expected and chosen == (
            list(range(5)) if expected is None else expected
        )
    softmax = model(mhla_layers=[0], mhla_other_layers="softmax", **EVERYTHING)
    assert type(softmax.blocks[1].attn1) is SoftmaxWanAttention
    new = {key.split(".")[3] for key in softmax.state_dict() if key.startswith("blocks.1.attn1.")}
    assert new == {"to_q", "to_k", "to_v", "to_out", "norm_q", "norm_k", "to_gate", "local_conv"}
    for layers in ("3/3", "0/3", "half", "2/3x"):
        with pytest.raises(ValueError, match="a share such as '2/3'"):
            model(mhla_layers=layers)


def test_the_output_norm_comes_with_the_normaliser_that_needs_it(tmp_path):
    for options, expected in (
        ({}, True),
        ({"mhla_normalizer": "paper"}, False),
        ({"mhla_norm_out": False}, False),
        ({"mhla_normalizer": "paper", "mhla_norm_out": True}, True),
    ):
        ours = model(**options)
        assert ours.config.mhla_norm_out is expected
        assert (ours.blocks[0].attn1.norm_out is not None) is expected
    with pytest.raises(ValueError, match="without mhla_norm_out"):
        model(mhla_normalizer="paper", mhla_norm_across_heads=True)


@torch.no_grad()
def test_softmax_layers_of_ours_equal_the_stock_attention():
    ours = model(mhla_layers=[], mhla_other_layers="softmax", mhla_gate=True, mhla_local_conv=3)
    assert relative(run(ours), run(stock_transformer())) < 1e-6


def test_the_frequencies_survive_a_cast_and_stock_tables_do_what_they_do_in_stock():
    ours, stock = model(mhla_layers=[]).to(torch.bfloat16), stock_transformer().to(torch.bfloat16)
    assert ours.rope.frequencies.dtype == torch.float32
    assert torch.equal(ours.rope.frequencies, model().rope.frequencies)
    assert ours.rope.freqs_cos.dtype == stock.rope.freqs_cos.dtype


@torch.no_grad()
@settings(max_examples=12, deadline=None)
@given(
    grid=st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)),
    blocks=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)),
    everything=st.booleans(),
)
@SHRUNK
def test_any_grid_equals_the_reference_and_an_item_its_single_run(grid, blocks, everything):
    ours = stirred(model(mhla_block_grid=blocks, **(EVERYTHING if everything else {})))
    inputs = transformer_inputs(batch=3, size=(grid[0], 2 * grid[1], 2 * grid[2]))
    out = run(ours, **inputs)
    assert out.shape == inputs["hidden_states"].shape and out.isfinite().all()
    order = torch.tensor([2, 0, 1])
    assert relative(run(ours, **{name: x[order] for name, x in inputs.items()}), out[order]) < 1e-5
    assert relative(run(ours, **{name: x[1:2] for name, x in inputs.items()}), out[1:2]) < 1e-5
    ours.set_mhla_backend("reference")
    assert relative(out, run(ours, **inputs)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("options", [EVERYTHING, {"mhla_normalizer": "paper", "mhla_gate": True}])
def test_the_fused_kernels_compute_the_same(options):
    """In the interpreter where there is no GPU: norms of queries and keys, rotation, output norm, gate, convolution."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ours = stirred(model(num_layers=1, **options)).to(device)
    inputs = {name: x.to(device) for name, x in transformer_inputs(batch=1, size=(3, 8, 10)).items()}
    ours.set_mhla_backend("reference")
    expected = run(ours, **inputs)
    ours.set_mhla_backend("triton")
    assert relative(run(ours, **inputs), expected) < 1e-5


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


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, EVERYTHING, {"mhla_layers": [0], "mhla_other_layers": "softmax"}])
def test_save_and_load_are_bit_equal(tmp_path, options):
    ours = stirred(model(**options))
    ours.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = MHLAWanTransformer3DModel.from_pretrained(tmp_path)
    assert public(again.config) == public(ours.config)
    assert again.state_dict().keys() == ours.state_dict().keys()
    assert all(torch.equal(again.state_dict()[key], value) for key, value in ours.state_dict().items())
    # Into fresh memory: the address of a tensor mapped from a file decides the order of a product's sums.
    fresh = model(**options)
    fresh.load_state_dict(again.state_dict())
    assert torch.equal(run(fresh), run(ours))


def test_loading_a_stock_checkpoint_starts_every_new_weight_as_documented(tmp_path):
    stock_transformer().save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        ours, info = MHLAWanTransformer3DModel.from_pretrained(
            tmp_path, torch_dtype=dtype, output_loading_info=True, **EVERYTHING
        )
        assert len(info["missing_keys"]) == 2 * 7
        for layer in ours.blocks:
            attention = layer.attn1
            assert attention.mixing.weight.dtype == torch.float32
            assert torch.equal(attention.mixing.weight, initial_mixing((3, 5, 10)).float().expand(2, -1, -1))
            for module in (attention.to_gate, attention.local_conv):
                assert all(p.dtype == dtype and not p.any() for p in module.parameters())
            assert (attention.norm_out.weight == 1).all() and (attention.norm_projected.weight == 1).all()
        assert not any(parameter.is_meta for parameter in ours.parameters())
        assert ours.scale_shift_table.dtype == torch.float32  # as in the stock model
        with pytest.warns(UserWarning, match="the token grid holds only"):
            assert run(ours, **transformer_inputs(dtype=dtype)).isfinite().all()


@torch.no_grad()
def test_conversion_shares_every_tensor_and_is_undone_bit_for_bit():
    stock = stock_transformer(num_layers=3)
    expected = run(stock)
    converted = convert(stock, block_grid=(2, 2, 3), layers="2/3", gate=True, local_conv=3)
    assert type(converted) is MHLAWanTransformer3DModel
    theirs = {name: x.data_ptr() for name, x in stock.state_dict().items()}
    assert theirs.items() <= {name: x.data_ptr() for name, x in converted.state_dict().items()}.items()
    assert [isinstance(layer.attn1, GridSelfAttention) for layer in converted.blocks] == [False, True, True]
    assert (converted.config.mhla_normalizer, converted.config.mhla_norm_out) == ("none", True)
    assert relative(run(converted), expected) > 1e-3  # a softmax became linear: it has to be trained again
    plain = convert(stock, block_grid=(2, 2, 3), layers="2/3")
    assert relative(run(converted), run(plain)) < 1e-6  # gate and convolution are neutral
    restored = restore(converted)
    assert type(restored) is WanTransformer3DModel and torch.equal(run(restored), expected)
    assert public(restored.config) == public(stock.config)
    assert torch.equal(run(convert(stock, layers=[])), expected) and torch.equal(run(stock), expected)
    assert convert(stock).config.mhla_block_grid == [3, 5, 10]
    paper = convert(stock, normalizer="paper")
    assert (paper.config.mhla_normalizer, paper.config.mhla_norm_out) == ("paper", False)


def test_checkpointing_gives_the_same_gradients_also_with_a_frozen_base():
    ours = stirred(model(mhla_layers="1/2", **EVERYTHING)).train()
    plain = gradients(ours)
    assert plain.keys() == {name for name, _ in ours.named_parameters()}
    ours.enable_gradient_checkpointing()
    checkpointed = gradients(ours)
    assert all(torch.equal(checkpointed[name], value) for name, value in plain.items())
    ours.requires_grad_(False)
    ours.blocks[1].attn1.mixing.requires_grad_(True)
    frozen = gradients(ours)
    assert set(frozen) == {"blocks.1.attn1.mixing.weight"}
    assert relative(frozen["blocks.1.attn1.mixing.weight"], plain["blocks.1.attn1.mixing.weight"]) < 1e-6


def test_two_grids_in_flight_under_checkpointing_keep_their_own():
    ours = stirred(model())
    ours.enable_gradient_checkpointing()
    inputs = [transformer_inputs(size=size) for size in ((5, 8, 12), (2, 12, 6))]
    sum(run(ours, **each).square().sum() for each in inputs).backward()
    both = {name: p.grad.clone() for name, p in ours.named_parameters() if p.grad is not None}
    alone = [gradients(ours, **each) for each in inputs]
    for name, value in both.items():
        assert relative(value, alone[0][name] + alone[1][name]) < 1e-5, name


def test_compiled_in_one_graph_it_gives_the_same_output_and_gradients():
    ours = stirred(model(num_layers=1, mhla_gate=True, mhla_local_conv=3))
    plain = gradients(ours)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    compiled_gradients = gradients(compiled)
    for name, value in plain.items():
        assert relative(compiled_gradients[f"_orig_mod.{name}"], value) < 1e-5, name
    with torch.no_grad():
        for size in ((5, 8, 12), (3, 12, 14)):  # another size, which makes a graph for any size
            inputs = transformer_inputs(size=size)
            assert relative(run(compiled, **inputs), run(ours, **inputs)) < 1e-6


@torch.no_grad()
def test_regional_compilation_finds_the_layers():
    ours = stirred(model(mhla_layers=[0]))
    out = run(ours)
    ours.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    assert relative(run(ours), out) < 1e-6


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({}, (5, 7, 12), "latents of 5x7x12 do not divide into patches of 1x2x2"),
        ({"rope_max_seq_len": 5}, (5, 8, 12), "6 columns of tokens, but the rotary table holds 5 positions"),
    ],
)
def test_latents_without_a_place_are_refused_before_the_model_runs(options, size, message):
    ours = model(**options)
    ours.blocks[0].register_forward_pre_hook(lambda *_: pytest.fail("a layer ran"))
    with pytest.raises(ValueError, match=message) as caught:
        run(ours, **transformer_inputs(size=size))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mhla_block_grid": (4, 4)},
            r"three positive integers \(frames, rows, columns\), such as \(3, 5, 10\)",
        ),
        ({"mhla_block_grid": (3, 5, 0)}, "three positive integers"),
        ({"mhla_layers": [2]}, "from 0 to 1"),
        ({"mhla_normalizer": "row"}, "choose one of paper, none, official"),
        ({"mhla_local_conv": 2}, "odd kernel size"),
    ],
)
def test_options_outside_the_allowed_ones_are_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        model(**options)
    assert "\n" not in str(caught.value)
