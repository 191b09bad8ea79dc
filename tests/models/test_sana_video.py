"""MHLASanaVideoTransformer3DModel: stock where MHLA is off or has one block, its formula where it has more."""

import inspect

import pytest
import torch
from diffusers import SanaVideoTransformer3DModel
from hypothesis import given, settings
from hypothesis import strategies as st
from model_checks import gradients, public
from tiny_sana_video import EVERYTHING, model, run, stock_transformer, transformer_inputs
from tiny_wan import relative, stirred

from mhla_diffusion.attention import GridSelfAttention
from mhla_diffusion.mixing import initial_mixing
from mhla_diffusion.models.convert import convert, restore
from mhla_diffusion.models.sana_video import MHLASanaVideoTransformer3DModel
from mhla_diffusion.sana_video_attention import MHLASanaVideoAttention, SoftmaxSanaVideoAttention


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


def test_every_stock_argument_has_the_stock_default():
    stock = inspect.signature(SanaVideoTransformer3DModel.__init__).parameters
    ours = inspect.signature(MHLASanaVideoTransformer3DModel.__init__).parameters
    assert {name: ours[name].default for name in stock} == {name: p.default for name, p in stock.items()}
    assert {name for name in ours if name not in stock} == {n for n in ours if n.startswith("mhla_")}
    forward = [
        list(inspect.signature(kind.forward).parameters)
        for kind in (SanaVideoTransformer3DModel, MHLASanaVideoTransformer3DModel)
    ]
    assert forward[0] == forward[1]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_mhla_it_is_the_stock_model_bit_for_bit(kind, dtype):
    changes, inputs = KINDS[kind][0], KINDS[kind][1]()
    stock, ours = (
        stirred(made).to(dtype) for made in (stock_transformer(**changes), model(mhla_layers=[], **changes))
    )
    assert stock.state_dict().keys() == ours.state_dict().keys()
    assert all(torch.equal(ours.state_dict()[key], value) for key, value in stock.state_dict().items())
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


def test_the_same_seed_gives_the_same_shared_weights_whatever_the_attention():
    stock = stock_transformer().state_dict()
    for options in (EVERYTHING, {"mhla_layers": [0]}, {"mhla_layers": [], "mhla_other_layers": "softmax"}):
        ours = model(**options).state_dict()
        assert all(torch.equal(ours[key], value) for key, value in stock.items())
    after = torch.rand(1)
    stock_transformer()
    assert torch.equal(after, torch.rand(1))


def test_layers_get_the_attention_they_were_given():
    for layers, expected in (("2/3", [1, 2, 4]), ("all", None), ([4, 0], [0, 4]), ("1/2", [1, 3])):
        hybrid = model(num_layers=5, mhla_layers=layers)
        kinds = [isinstance(layer.attn1, MHLASanaVideoAttention) for layer in hybrid.transformer_blocks]
        chosen = [i for i, ours in enumerate(kinds) if ours]
        assert hybrid.config.mhla_layers == expected
        assert chosen == (list(range(5)) if expected is None else expected)
    softmax = model(mhla_layers=[0], mhla_other_layers="softmax", **EVERYTHING)
    assert type(softmax.transformer_blocks[1].attn1) is SoftmaxSanaVideoAttention
    new = {key.split(".")[3] for key in softmax.state_dict() if key.startswith("transformer_blocks.1.attn1.")}
    assert new == {"to_q", "to_k", "to_v", "to_out", "norm_q", "norm_k", "to_gate", "local_conv"}


def test_the_output_norm_comes_with_the_normaliser_that_needs_it():
    for options, expected in (
        ({}, False),
        ({"mhla_normalizer": "none"}, True),
        ({"mhla_normalizer": "none", "mhla_norm_out": False}, False),
        ({"mhla_norm_out": True}, True),
    ):
        ours = model(**options)
        assert ours.config.mhla_norm_out is expected
        assert (ours.transformer_blocks[0].attn1.norm_out is not None) is expected


@torch.no_grad()
@settings(max_examples=10, deadline=None)
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
@pytest.mark.parametrize(
    "options",
    [
        EVERYTHING,
        {"qk_norm": None, "mhla_feature_eps": 0.0},
        # As converted, with a published head.
        {
            "num_attention_heads": 1,
            "attention_head_dim": 112,
            "cross_attention_head_dim": 56,
            "cross_attention_dim": 112,
            "mhla_block_grid": (1, 2, 1),
            "mhla_feature_eps": 0.0,
        },
    ],
    ids=["everything", "without norms", "a head of 112"],
)
def test_the_fused_kernels_compute_the_same(options):
    """In the interpreter where there is no GPU: norms of queries and keys, rotation, denominator, gate, convolution."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"num_layers": 1, "mhla_denominator_eps": 1e-15} | options
    ours = stirred(model(**options)).to(device)
    inputs = {name: x.to(device) for name, x in transformer_inputs(batch=1, size=(3, 8, 10)).items()}
    ours.set_mhla_backend("reference")
    expected = run(ours, **inputs)
    ours.set_mhla_backend("triton")
    assert relative(run(ours, **inputs), expected) < 1e-5


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


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, EVERYTHING, {"mhla_layers": [0], "mhla_other_layers": "softmax"}])
def test_save_and_load_are_bit_equal(tmp_path, options):
    ours = stirred(model(**options))
    ours.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = MHLASanaVideoTransformer3DModel.from_pretrained(tmp_path)
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
        ours, info = MHLASanaVideoTransformer3DModel.from_pretrained(
            tmp_path, torch_dtype=dtype, output_loading_info=True, **EVERYTHING
        )
        assert len(info["missing_keys"]) == 2 * 6
        for layer in ours.transformer_blocks:
            attention = layer.attn1
            assert attention.mixing.weight.dtype == torch.float32
            assert torch.equal(attention.mixing.weight, initial_mixing((3, 5, 10)).float().expand(2, -1, -1))
            for module in (attention.to_gate, attention.local_conv):
                assert all(p.dtype == dtype and not p.any() for p in module.parameters())
            assert (attention.norm_out.weight == 1).all()
        assert not any(parameter.is_meta for parameter in ours.parameters())
        with pytest.warns(UserWarning, match="the token grid holds only"):
            assert run(ours, **transformer_inputs(dtype=dtype)).isfinite().all()


@torch.no_grad()
def test_conversion_shares_every_tensor_and_is_undone_bit_for_bit():
    stock = stock_transformer(num_layers=3)
    expected = run(stock)
    converted = convert(stock, block_grid=(2, 2, 3), layers="2/3", gate=True, local_conv=3)
    assert type(converted) is MHLASanaVideoTransformer3DModel
    theirs = {name: x.data_ptr() for name, x in stock.state_dict().items()}
    assert theirs.items() <= {name: x.data_ptr() for name, x in converted.state_dict().items()}.items()
    ours = [isinstance(layer.attn1, GridSelfAttention) for layer in converted.transformer_blocks]
    assert ours == [False, True, True]
    config = converted.config
    assert (config.mhla_normalizer, config.mhla_feature_eps, config.mhla_denominator_eps) == (
        "paper",
        0,
        1e-15,
    )
    plain = convert(stock, block_grid=(2, 2, 3), layers="2/3")
    assert relative(run(converted), run(plain)) < 1e-6  # gate and convolution are neutral
    restored = restore(converted)
    assert type(restored) is SanaVideoTransformer3DModel and torch.equal(run(restored), expected)
    assert public(restored.config) == public(stock.config)
    assert torch.equal(run(convert(stock, layers=[])), expected) and torch.equal(run(stock), expected)
    assert convert(stock).config.mhla_block_grid == [3, 5, 10]
    none = convert(stock, normalizer="none")
    assert (none.config.mhla_normalizer, none.config.mhla_norm_out) == ("none", True)


def test_checkpointing_gives_the_same_gradients_also_with_a_frozen_base():
    ours = stirred(model(mhla_layers="1/2", **EVERYTHING)).train()
    plain = gradients(ours, **transformer_inputs())
    assert plain.keys() == {name for name, _ in ours.named_parameters()}
    ours.enable_gradient_checkpointing()
    checkpointed = gradients(ours, **transformer_inputs())
    assert all(torch.equal(checkpointed[name], value) for name, value in plain.items())
    ours.requires_grad_(False)
    name = "transformer_blocks.1.attn1.mixing.weight"
    ours.get_parameter(name).requires_grad_(True)
    frozen = gradients(ours, **transformer_inputs())
    assert set(frozen) == {name} and relative(frozen[name], plain[name]) < 1e-6


def test_gradients_with_one_block_are_those_of_the_stock_model():
    stock = stirred(stock_transformer())
    expected = gradients(stock, **transformer_inputs())
    ours = gradients(convert(stock, (1, 1, 1)), **transformer_inputs())
    assert all(relative(ours[name], value) < 1e-5 for name, value in expected.items())


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
    plain = gradients(ours, **transformer_inputs())
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    compiled_gradients = gradients(compiled, **transformer_inputs())
    for name, value in plain.items():
        assert relative(compiled_gradients[f"_orig_mod.{name}"], value) < 1e-5, name


@torch.no_grad()
def test_regional_compilation_finds_the_layers():
    ours = stirred(model(mhla_layers=[0]))
    out = run(ours)
    ours.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    assert relative(run(ours), out) < 1e-6


@pytest.mark.parametrize(
    ("options", "inputs", "message"),
    [
        ({}, {"size": (5, 7, 12)}, "latents of 5x7x12 do not divide into patches of 1x2x2"),
        ({"rope_max_seq_len": 5}, {}, "6 columns of tokens, but the rotary table holds 5 positions"),
    ],
)
def test_latents_without_a_place_are_refused_before_the_model_runs(options, inputs, message):
    ours = model(**options)
    ours.transformer_blocks[0].register_forward_pre_hook(lambda *_: pytest.fail("a layer ran"))
    with pytest.raises(ValueError, match=message) as caught:
        run(ours, **transformer_inputs(**inputs))
    assert "\n" not in str(caught.value)


def test_a_mask_of_tokens_is_refused():
    with pytest.raises(ValueError, match="cannot leave tokens out"):
        run(model(), **transformer_inputs(), attention_mask=torch.ones(2, 120))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mhla_block_grid": (4, 4)}, r"three positive integers \(frames, rows, columns\)"),
        ({"mhla_layers": [2]}, "from 0 to 1"),
        ({"mhla_layers": "3/3"}, "a share such as '2/3'"),
        ({"mhla_normalizer": "row"}, "choose one of paper, none, official"),
        ({"mhla_local_conv": 2}, "odd kernel size"),
        ({"qk_norm": "layer_norm"}, "qk_norm='layer_norm': choose one of rms_norm_across_heads, None"),
    ],
)
def test_options_outside_the_allowed_ones_are_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        model(**options)
    assert "\n" not in str(caught.value)
