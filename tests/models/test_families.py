"""What a transformer with MHLA is beside its stock class, asked of each family: DiT, SANA, SANA-Video and Wan."""

import inspect
from contextlib import nullcontext

import pytest
import torch
from families import DIT, EACH, SANA, SANA_VIDEO, SOFTMAX_BESIDE, VIDEO, WAN
from hypothesis import given, settings
from hypothesis import strategies as st
from model_checks import public, relative, same_weights, stirred

from mhla_diffusion.attention import GridSelfAttention
from mhla_diffusion.mixing import initial_mixing
from mhla_diffusion.models.convert import convert, restore

NO_MHLA_BUT_SOFTMAX = {"mhla_layers": [], "mhla_other_layers": "softmax"}


@EACH
def test_every_stock_argument_has_the_stock_default(family):
    stock, ours = (inspect.signature(kind.__init__).parameters for kind in (family.stock, family.ours))
    assert {name: ours[name].default for name in stock} == {name: p.default for name, p in stock.items()}
    assert {name for name in ours if name not in stock} == {n for n in ours if n.startswith("mhla_")}
    stock, ours = (inspect.signature(kind.forward).parameters for kind in (family.stock, family.ours))
    assert list(stock) == list(ours)


@EACH
def test_the_same_seed_gives_the_same_shared_weights_whatever_the_attention(family):
    stock = family.stock_model().state_dict()
    for options in (family.tiny.EVERYTHING, {"mhla_layers": [0]}, NO_MHLA_BUT_SOFTMAX):
        ours = family.model(**options).state_dict()
        assert all(torch.equal(ours[key], value) for key, value in stock.items())
    after = torch.rand(1)
    family.stock_model()
    assert torch.equal(after, torch.rand(1))


@EACH
def test_layers_get_the_attention_they_were_given(family):
    stock = family.layer(family.stock_model(), 0).attn1
    for layers, expected in (
        ("2/3", [1, 2, 4]),
        ("all", None),
        ([4, 0], [0, 4]),
        ("1/2", [1, 3]),
        (None, None),
    ):
        hybrid = family.model(num_layers=5, mhla_layers=layers, mhla_gate=True)
        chosen = range(5) if expected is None else expected
        assert hybrid.config.mhla_layers == expected
        kinds = [type(family.layer(hybrid, i).attn1) for i in range(5)]
        assert kinds == [family.attention if i in chosen else type(stock) for i in range(5)]
    softmax = family.model(mhla_layers=[0], mhla_other_layers="softmax", **family.tiny.EVERYTHING)
    ours = family.layer(softmax, 1).attn1
    assert type(ours) is family.softmax
    parts, added = ({name.split(".")[0] for name in x.state_dict()} for x in (stock, ours))
    assert added == parts | {"to_gate", "local_conv"}


@EACH
@torch.no_grad()
def test_tokens_lie_in_memory_one_after_another_behind_every_layer(family):
    """From the patches' convolution they come with channels outermost, which reads slowly all the way down."""
    model, laid = family.model(num_layers=3).eval(), []
    for index in range(3):
        family.layer(model, index).register_forward_hook(
            lambda module, arguments, tokens: laid.append(tokens.is_contiguous())
        )
    family.run(model)
    assert laid == [True] * 3


@VIDEO
def test_the_output_norm_comes_with_the_normaliser_that_needs_it(family):
    for options, expected in (
        ({}, family is WAN),  # a softmax became linear there
        ({"mhla_normalizer": "none"}, True),
        ({"mhla_normalizer": "none", "mhla_norm_out": False}, False),
        ({"mhla_normalizer": "paper"}, False),
        ({"mhla_normalizer": "paper", "mhla_norm_out": True}, True),
    ):
        ours = family.model(**options)
        assert ours.config.mhla_norm_out is expected
        assert (family.layer(ours, 0).attn1.norm_out is not None) is expected


@torch.no_grad()
@pytest.mark.parametrize("family", [DIT, WAN], ids=["DiT", "Wan"])
def test_softmax_layers_of_ours_equal_the_stock_attention(family):
    ours = family.model(mhla_gate=True, mhla_local_conv=3, **NO_MHLA_BUT_SOFTMAX)
    assert relative(family.run(ours), family.run(family.stock_model())) < 1e-6


@torch.no_grad()
@VIDEO
@settings(max_examples=12, deadline=None)
@given(
    grid=st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)),
    blocks=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)),
    everything=st.booleans(),
)
@pytest.mark.filterwarnings("ignore:the token grid holds only")
def test_any_grid_equals_the_reference_and_an_item_its_single_run(family, grid, blocks, everything):
    options = family.tiny.EVERYTHING if everything else {}
    ours = stirred(family.model(mhla_block_grid=blocks, **options))
    inputs = family.inputs(batch=3, size=(grid[0], 2 * grid[1], 2 * grid[2]))
    out = family.run(ours, **inputs)
    assert out.shape == inputs["hidden_states"].shape and out.isfinite().all()
    order = torch.tensor([2, 0, 1])
    assert relative(family.run(ours, **{name: x[order] for name, x in inputs.items()}), out[order]) < 1e-5
    assert relative(family.run(ours, **{name: x[1:2] for name, x in inputs.items()}), out[1:2]) < 1e-5
    ours.set_mhla_backend("reference")
    assert relative(out, family.run(ours, **inputs)) < 1e-5


# As converted, with a published head of SANA-Video.
HEAD_OF_112 = {
    "num_attention_heads": 1,
    "attention_head_dim": 112,
    "cross_attention_head_dim": 56,
    "cross_attention_dim": 112,
    "mhla_block_grid": (1, 2, 1),
    "mhla_feature_eps": 0.0,
    "mhla_denominator_eps": 1e-15,
}
FUSED = {
    "Wan, everything": (WAN, WAN.tiny.EVERYTHING),
    "Wan, a denominator": (WAN, {"mhla_normalizer": "paper", "mhla_gate": True}),
    "SANA-Video, everything": (SANA_VIDEO, {**SANA_VIDEO.tiny.EVERYTHING, "mhla_denominator_eps": 1e-15}),
    "SANA-Video, without norms": (
        SANA_VIDEO,
        {"qk_norm": None, "mhla_feature_eps": 0.0, "mhla_denominator_eps": 1e-15},
    ),
    "SANA-Video, a head of 112": (SANA_VIDEO, HEAD_OF_112),
}


@torch.no_grad()
@pytest.mark.parametrize("case", FUSED)
def test_the_fused_kernels_compute_the_same(case):
    """In the interpreter where there is no GPU: norms of queries and keys, rotation, normaliser, gate, convolution."""
    family, options = FUSED[case]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ours = stirred(family.model(num_layers=1, **options)).to(device)
    inputs = {name: x.to(device) for name, x in family.inputs(batch=1, size=(3, 8, 10)).items()}
    ours.set_mhla_backend("reference")
    expected = family.run(ours, **inputs)
    ours.set_mhla_backend("triton")
    assert relative(family.run(ours, **inputs), expected) < 1e-5


@torch.no_grad()
@EACH
@pytest.mark.parametrize("kind", ["plain", "everything", "softmax beside"])
def test_save_and_load_are_bit_equal(family, kind, tmp_path):
    options = {"plain": {}, "everything": family.tiny.EVERYTHING, "softmax beside": SOFTMAX_BESIDE}[kind]
    ours = stirred(family.model(**options))
    ours.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = family.ours.from_pretrained(tmp_path)
    assert public(again.config) == public(ours.config)
    assert same_weights(again, ours)
    # Into fresh memory: the address of a tensor mapped from a file decides the order of a product's sums.
    fresh = family.model(**options)
    fresh.load_state_dict(again.state_dict())
    assert torch.equal(family.run(fresh), family.run(ours))


@EACH
@pytest.mark.parametrize("per_head", [True, False])
def test_loading_a_stock_checkpoint_starts_every_new_weight_as_documented(family, per_head, tmp_path):
    family.stock_model().save_pretrained(tmp_path)
    options = family.tiny.EVERYTHING | {"mhla_per_head_mixing": per_head}
    added = {"mixing.weight", *(f"{x}.{y}" for x in ("to_gate", "local_conv") for y in ("weight", "bias"))}
    added |= set(family.norms)
    start = initial_mixing(family.default_grid).float()
    start = start.expand(2, -1, -1) if per_head else start
    for dtype in (torch.float32, torch.bfloat16):
        ours, info = family.ours.from_pretrained(
            tmp_path, torch_dtype=dtype, output_loading_info=True, **options
        )
        missing = {f"{family.layers}.{i}.attn1.{name}" for i in range(2) for name in added}
        assert set(info["missing_keys"]) == missing
        for layer in getattr(ours, family.layers):
            attention = layer.attn1
            assert attention.mixing.weight.dtype == torch.float32
            assert torch.equal(attention.mixing.weight, start)
            for module in (attention.to_gate, attention.local_conv):
                assert all(p.dtype == dtype and not p.any() for p in module.parameters())
            for name in family.norms:
                assert (attention.get_parameter(name) == (0 if name.endswith("bias") else 1)).all()
        assert not any(parameter.is_meta for parameter in ours.parameters())
        if family is WAN:
            assert ours.scale_shift_table.dtype == torch.float32  # as in the stock model
        few_tokens = pytest.warns(UserWarning, match="the token grid holds only")
        with few_tokens if family.is_video else nullcontext():
            assert family.run(ours, **family.inputs(dtype=dtype)).isfinite().all()


@torch.no_grad()
@EACH
@pytest.mark.parametrize(("layers", "chosen"), [("2/3", [1, 2]), ([0, 2], [0, 2])])
def test_conversion_shares_every_tensor_and_is_undone_bit_for_bit(family, layers, chosen):
    stock = family.stock_model(num_layers=3)
    expected = family.run(stock)
    grid = (2, 2, 3) if family.is_video else (2, 3)
    converted = convert(stock, block_grid=grid, layers=layers, gate=True, local_conv=3)
    assert type(converted) is family.ours
    theirs = {name: x.data_ptr() for name, x in stock.state_dict().items()}
    assert theirs.items() <= {name: x.data_ptr() for name, x in converted.state_dict().items()}.items()
    buffers = dict(converted.named_buffers())
    for name, table in stock.named_buffers():
        assert buffers[name].data_ptr() == table.data_ptr()
        buffers[name].data = torch.zeros(0)  # as offloading to the disk does it: of this model alone
        assert table.numel() > 0
        buffers[name].data = table
    kinds = [isinstance(family.layer(converted, i).attn1, GridSelfAttention) for i in range(3)]
    assert kinds == [i in chosen for i in range(3)]
    if family in (DIT, WAN):  # a softmax became linear: it has to be trained again
        assert relative(family.run(converted), expected) > 1e-3
    plain = convert(stock, block_grid=grid, layers=layers)
    assert relative(family.run(converted), family.run(plain)) < 1e-6  # gate and convolution are neutral
    restored = restore(converted)
    assert type(restored) is family.stock and torch.equal(family.run(restored), expected)
    assert public(restored.config) == public(stock.config)
    assert torch.equal(family.run(convert(stock, layers=[])), expected)
    assert torch.equal(family.run(stock), expected)
    assert convert(stock).config.mhla_block_grid == list(family.default_grid)
    out = family.run(converted)
    converted.set_mhla_backend("reference")
    assert relative(out, family.run(converted)) < 1e-5


@EACH
@pytest.mark.parametrize(("layers", "chosen"), [(None, [0, 1]), ("1/2", [1])], ids=["all", "half"])
def test_checkpointing_gives_the_same_gradients_also_with_a_frozen_base(family, layers, chosen):
    ours = stirred(family.model(mhla_layers=layers, **family.tiny.EVERYTHING)).train()
    inputs = family.inputs(size=family.sizes[0])
    plain = family.gradients(ours, **inputs)
    assert plain.keys() == {name for name, _ in ours.named_parameters()}
    ours.enable_gradient_checkpointing()
    checkpointed = family.gradients(ours, **inputs)
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(checkpointed[name], value) for name, value in plain.items())
    ours.requires_grad_(False)
    for index in chosen:
        family.layer(ours, index).attn1.mixing.requires_grad_(True)
    frozen = family.gradients(ours, **inputs)
    assert set(frozen) == {f"{family.layers}.{i}.attn1.mixing.weight" for i in chosen}
    assert all(relative(value, plain[name]) < 1e-6 for name, value in frozen.items())


@EACH
def test_two_grids_in_flight_under_checkpointing_keep_their_own(family):
    ours = stirred(family.model())
    ours.enable_gradient_checkpointing()
    inputs = [family.inputs(), family.inputs(size=family.sizes[0])]
    sum(family.run(ours, **each).square().sum() for each in inputs).backward()
    both = {name: p.grad.clone() for name, p in ours.named_parameters() if p.grad is not None}
    alone = [family.gradients(ours, **each) for each in inputs]
    for name, value in both.items():
        assert relative(value, alone[0][name] + alone[1][name]) < 1e-5, name


COMPILED = {
    "DiT": (DIT, SOFTMAX_BESIDE, DIT.sizes),
    "SANA": (SANA, SOFTMAX_BESIDE, SANA.sizes),
    "Wan": (WAN, {"num_layers": 1}, ((5, 8, 12), (3, 12, 14))),
    "SANA-Video": (SANA_VIDEO, {"num_layers": 1}, ()),
}


@pytest.mark.parametrize("case", COMPILED)
def test_compiled_in_one_graph_it_gives_the_same_output_and_gradients(case):
    family, layers, sizes = COMPILED[case]
    ours = stirred(family.model(mhla_gate=True, mhla_local_conv=3, **layers))
    out, plain = family.run(ours), family.gradients(ours)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert relative(family.run(compiled), out) < 1e-6
    for size in (
        sizes
    ):  # another size, then a graph for any size; of videos forwards only, its backward takes a minute
        inputs = family.inputs(size=size)
        with torch.set_grad_enabled(not family.is_video):
            assert relative(family.run(compiled, **inputs), family.run(ours, **inputs)) < 1e-6
    compiled_gradients = family.gradients(compiled)
    for name, value in plain.items():
        assert relative(compiled_gradients[f"_orig_mod.{name}"], value) < 1e-5, name


@torch.no_grad()
@EACH
def test_regional_compilation_finds_the_layers(family):
    ours = stirred(family.model(mhla_layers=[0]))
    out = family.run(ours)
    ours.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    assert relative(family.run(ours), out) < 1e-6


@VIDEO
@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({}, (5, 7, 12), "latents of 5x7x12 do not divide into patches of 1x2x2"),
        ({"rope_max_seq_len": 5}, (5, 8, 12), "6 columns of tokens, but the rotary table holds 5 positions"),
    ],
)
def test_latents_without_a_place_are_refused_before_the_model_runs(family, options, size, message):
    ours = family.model(**options)
    family.layer(ours, 0).register_forward_pre_hook(lambda *_: pytest.fail("a layer ran"))
    with pytest.raises(ValueError, match=message) as caught:
        family.run(ours, **family.inputs(size=size))
    assert "\n" not in str(caught.value)


@VIDEO
def test_heads_that_cannot_be_turned_in_pairs_are_refused_in_one_line(family):
    with pytest.raises(ValueError, match="attention_head_dim=7: give an even number") as caught:
        family.model(attention_head_dim=7)
    assert "\n" not in str(caught.value)


@EACH
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mhla_block_grid": [2, 2, 2, 2]}, "AXES positive integers"),
        ({"mhla_block_grid": [3, 5, 0]}, "AXES positive integers"),
        ({"mhla_block_grid": [0, 4]}, "AXES positive integers"),
        ({"mhla_block_grid": [4]}, "AXES positive integers"),
        ({"mhla_block_grid": 8}, "AXES positive integers"),
        ({"mhla_layers": [2]}, "from 0 to 1"),
        ({"mhla_layers": [-1]}, "from 0 to 1"),
        ({"mhla_layers": [0, 0]}, "different layer indices"),
        ({"mhla_layers": "half"}, "give .all., 'none' or a list of layer indices, or a share such as '2/3'"),
        ({"mhla_layers": "0/3"}, "a share such as '2/3'"),
        ({"mhla_layers": "3/3"}, "a share such as '2/3'"),
        ({"mhla_layers": "2/3x"}, "a share such as '2/3'"),
        ({"mhla_normalizer": "Paper"}, "choose one of paper, none, official"),
        ({"mhla_mixing_init": "lineal"}, "choose one of linear"),
        ({"mhla_mixing_normalization": "rows"}, "choose one of row"),
        ({"mhla_other_layers": "linear"}, "choose one of stock, softmax"),
        ({"mhla_feature_eps": float("nan")}, "mhla_feature_eps=nan: give a finite number"),
        ({"mhla_denominator_eps": -1.0}, "mhla_denominator_eps=-1.0: give a finite number"),
        ({"mhla_gate": "false"}, "mhla_gate='false': give True or False"),
        ({"mhla_mixing_learnable": 0}, "mhla_mixing_learnable=0: give True or False"),
        ({"mhla_local_conv": 2}, "odd kernel size"),
        ({"mhla_local_conv": 4}, "odd kernel size"),
    ],
)
def test_an_option_outside_the_allowed_ones_is_refused_in_one_line(family, options, message):
    message = message.replace("AXES", "three" if family.is_video else "two")
    with pytest.raises(ValueError, match=message) as caught:
        family.model(**options)
    assert "\n" not in str(caught.value)


@EACH
def test_more_blocks_than_there_may_be_are_refused_in_one_line(family):
    with pytest.raises(ValueError, match=r"4160 blocks have .* at most 4096 in all") as caught:
        family.model(mhla_block_grid=[65, 64, 1] if family.is_video else [65, 64])
    assert "\n" not in str(caught.value)
