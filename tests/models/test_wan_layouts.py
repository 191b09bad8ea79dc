"""Wan's original layout and the released MHLA code's: keys, values, and what the models compute."""

import json

import pytest
import tiny_wan
import torch
from model_checks import relative
from original_keys import to_original, to_ours
from original_wan import HEADS, RELEASED, released_attention, released_state, stock_wan, wan_state
from safetensors import safe_open
from safetensors.torch import save_file

from mhla_diffusion.loading import load_pipeline
from mhla_diffusion.models.checkpoint_layouts import LAYOUTS, find_layout
from mhla_diffusion.models.checkpoints import expand, pattern
from mhla_diffusion.models.convert import restore
from mhla_diffusion.models.wan import MHLAWanTransformer3DModel
from mhla_diffusion.pipelines.conversion import convert_folder

KINDS = {
    "text to video": ({}, tiny_wan.transformer_inputs),
    "image to video": (tiny_wan.IMAGE_TO_VIDEO, tiny_wan.image_inputs),
    "first and last frame": (tiny_wan.FIRST_LAST_FRAME, lambda: tiny_wan.image_inputs(frames=2)),
    "without a norm before the cross-attention": ({"cross_attn_norm": False}, tiny_wan.transformer_inputs),
}
EVEN = (3, 10, 20)  # tokens that the released code can divide


def run(model, **inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).sample


def converted(state: dict, folder, **options) -> MHLAWanTransformer3DModel:
    save_file(state, folder / "model.safetensors")
    convert_folder(folder / "model.safetensors", folder / "out", **({"config": HEADS} | options))
    return MHLAWanTransformer3DModel.from_pretrained(folder / "out")


def refused(state: dict, folder, **options) -> str:
    torch.save(state, folder / "a.pt")
    with pytest.raises(ValueError) as caught:
        convert_folder(folder / "a.pt", folder / "out", **({"config": HEADS} | options))
    assert "\n" not in str(caught.value) and not (folder / "out").exists()
    return str(caught.value)


@pytest.mark.parametrize("kind", [*KINDS, *RELEASED])
def test_each_key_has_one_rule_and_the_rules_can_be_read_backwards(kind):
    if kind in KINDS:
        state, name = wan_state(stock_wan(**KINDS[kind][0])), "wan"
    else:
        state, name = released_state(stock_wan(), kind), "wan-mhla"
    found = find_layout(state)
    assert found.name == name
    moves, left_out, unexpected = expand(found, state)
    assert not unexpected and not left_out and {move.source for move in moves} == state.keys()
    for key in state:
        assert sum(bool(pattern(rule.source).fullmatch(key)) for rule in found.rules) == 1
    back = to_original(to_ours(state, found), found)
    assert back.keys() == state.keys()
    for key, tensor in back.items():
        if key.endswith(".g.bias"):  # ours is 1.2784645 less
            torch.testing.assert_close(tensor, state[key], rtol=0, atol=1e-6)
        else:
            assert torch.equal(tensor, state[key])


@pytest.mark.parametrize("kind", KINDS)
def test_an_original_wan_file_computes_what_the_stock_class_does(tmp_path, kind):
    changes, inputs = KINDS[kind][0], KINDS[kind][1]()
    stock = stock_wan(**changes)
    ours = converted(wan_state(stock), tmp_path, layers=[])
    fields = (
        "patch_size",
        *tiny_wan.TRANSFORMER,
        "image_dim",
        "added_kv_proj_dim",
        "pos_embed_seq_len",
        "cross_attn_norm",
    )
    for name in set(fields) - {"rope_max_seq_len"}:
        theirs = stock.config[name]
        assert ours.config[name] == (list(theirs) if isinstance(theirs, tuple) else theirs), name
    assert ours.config.rope_max_seq_len == 1024
    assert relative(run(ours, **inputs), run(stock, **inputs)) < 1e-6
    assert all(torch.equal(x, stock.state_dict()[key]) for key, x in restore(ours).state_dict().items())


def test_a_file_as_other_programs_pack_it_is_read_as_well(tmp_path):
    """All keys behind one prefix, and weights in half precision, which they keep."""
    state = {f"model.diffusion_model.{key}": x.bfloat16() for key, x in wan_state(stock_wan()).items()}
    ours = converted(state, tmp_path, layers="1/2", gate=True)
    assert ours.blocks[1].attn1.to_gate.weight.dtype == torch.float32  # from_pretrained without a dtype
    with safe_open(tmp_path / "out" / "diffusion_pytorch_model.safetensors", "pt") as file:
        kinds = {key: file.get_slice(key).get_dtype() for key in file.keys()}
    assert {key for key, kind in kinds.items() if kind != "BF16"} == {"blocks.1.attn1.mixing.weight"}


@pytest.mark.parametrize("sharded", [False, True])
def test_an_original_folder_of_wan_is_read_with_its_own_config(tmp_path, sharded):
    """As Wan publishes it: shards with an index, a config.json of another kind, and other models' files beside them."""
    source, stock = tmp_path / "Wan", stock_wan()
    source.mkdir()
    state = wan_state(stock)
    config = {
        "_class_name": "WanModel",
        "dim": 24,
        "num_heads": 2,
        "eps": 1e-6,
        "model_type": "t2v",
        "text_len": 512,
    }
    (source / "config.json").write_text(json.dumps(config))
    torch.save({"shared.weight": torch.ones(2, 2)}, source / "models_t5_umt5-xxl-enc-bf16.pth")
    if sharded:
        names = [f"diffusion_pytorch_model-{n:05d}-of-00002.safetensors" for n in (1, 2)]
        keys = sorted(state)
        parts = (keys[: len(keys) // 2], keys[len(keys) // 2 :])
        index = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        for name, part in zip(names, parts, strict=True):
            save_file({key: state[key] for key in part}, source / name)
        text = json.dumps({"metadata": {}, "weight_map": index})
        (source / "diffusion_pytorch_model.safetensors.index.json").write_text(text)
    else:
        save_file(state, source / "diffusion_pytorch_model.safetensors")
    convert_folder(source, tmp_path / "out", layers=[])
    ours = MHLAWanTransformer3DModel.from_pretrained(tmp_path / "out")
    inputs = tiny_wan.transformer_inputs()
    assert ours.config.attention_head_dim == 12 and ours.config.mhla_block_grid == [3, 5, 10]
    assert relative(run(ours, **inputs), run(stock, **inputs)) < 1e-6
    for read in (MHLAWanTransformer3DModel.from_pretrained, load_pipeline):
        with pytest.raises(ValueError, match=f"original layout.*mhla convert {source} ") as caught:
            read(source)
        assert "\n" not in str(caught.value)


@torch.no_grad()
@pytest.mark.parametrize("kind", RELEASED)
def test_released_weights_give_that_codes_output(tmp_path, kind):
    stock = stock_wan()
    state = released_state(stock, kind)
    ours = converted(state, tmp_path)
    parts = RELEASED[kind]
    assert (ours.config.mhla_block_grid, ours.config.mhla_layers) == ([3, 5, 10], None)
    assert ours.config.mhla_gate is ("g" in parts) and ours.config.mhla_normalizer == "none"
    assert ours.config.mhla_local_conv == (3 if "lepe" in parts else None)
    assert ours.config.mhla_norm_across_heads is ("g_norm of all heads" in parts)
    assert ours.config.mhla_norm_projected is ("out_rmsnorm" in parts)
    tokens = EVEN[0] * EVEN[1] * EVEN[2]
    x = torch.randn(2, tokens, 24, generator=torch.Generator().manual_seed(3))
    positions = ours.rope(torch.empty(1, 4, 3, 20, 40))
    for i, layer in enumerate(ours.blocks):
        theirs = released_attention(state, f"blocks.{i}.self_attn", x, EVEN)
        assert relative(layer.attn1(x, None, None, positions).double(), theirs) < 1e-5
    # Entries out of [0, 1] are kept: loading never clips.
    assert torch.equal(
        ours.blocks[0].attn1.mixing.weight, state["blocks.0.self_attn.block_attn.conv.weight"][:, :, 0, 0]
    )
    # A grid that the released code cannot take.
    assert run(ours, **tiny_wan.transformer_inputs(size=(4, 14, 22))).isfinite().all()


@torch.no_grad()
def test_the_released_denominator_can_be_asked_for(tmp_path):
    state = released_state(stock_wan(), "mhla_uni gated")
    ours = converted(state, tmp_path, config=HEADS | {"mhla_normalizer": "official"})
    x = torch.randn(1, EVEN[0] * EVEN[1] * EVEN[2], 24, generator=torch.Generator().manual_seed(3))
    positions = ours.rope(torch.empty(1, 4, 3, 20, 40))
    theirs = released_attention(state, "blocks.0.self_attn", x, EVEN, normalised=True)
    assert relative(ours.blocks[0].attn1(x, None, None, positions).double(), theirs) < 1e-5


def test_released_hybrid_weights_keep_their_softmax_layers(tmp_path):
    stock = stock_wan(num_layers=3)
    ours = converted(released_state(stock, "mhla_uni", layers=[1, 2]), tmp_path)
    assert ours.config.mhla_layers == [1, 2]
    assert type(ours.blocks[0].attn1).__name__ == "WanAttention"


def test_the_number_of_blocks_is_read_and_their_grid_given(tmp_path):
    state = released_state(stock_wan(), "mhla_uni", blocks=105)
    message = refused(state, tmp_path)
    assert (
        "mixes 105 blocks" in message and "--block-grid FRAMES,ROWS,COLUMNS whose product is 105" in message
    )
    assert "mixes 105 blocks" in refused(state, tmp_path, block_grid=(3, 5, 10))
    ours = converted(state, tmp_path, block_grid=(7, 3, 5))
    assert ours.config.mhla_block_grid == [7, 3, 5]
    theirs = state["blocks.1.self_attn.block_attn.conv.weight"][:, :, 0, 0]
    assert torch.equal(ours.blocks[1].attn1.mixing.weight, theirs)


def test_released_weights_change_their_block_grid(tmp_path):
    state = released_state(stock_wan(), "mhla_uni")
    ours = converted(state, tmp_path, block_grid=(3, 5, 5))
    theirs = state["blocks.0.self_attn.block_attn.conv.weight"][:, :, 0, 0]
    mixing = ours.blocks[0].attn1.mixing.weight
    assert mixing.shape == (75, 75)
    # Each new row is the mean of the two old rows that it stands between, with the same sum.
    torch.testing.assert_close(
        mixing.sum(dim=1), theirs.sum(dim=1).reshape(75, 2).mean(dim=1), rtol=1e-4, atol=1e-4
    )


def test_keys_match_as_a_whole(tmp_path):
    """`self_attn.o` is a rule and `self_attn.out_rmsnorm` another; what merely looks like one of them is refused."""
    layouts = {layout.name: layout for layout in LAYOUTS}
    state = released_state(stock_wan(), "mhla")
    ours = to_ours(state, layouts["wan-mhla"])
    assert torch.equal(
        ours["blocks.0.attn1.norm_projected.weight"], state["blocks.0.self_attn.out_rmsnorm.weight"]
    )
    assert not any("0ut" in key for key in ours)
    # Without a matrix beside it there is no MHLA layer that it could belong to.
    softmax = wan_state(stock_wan()) | {"blocks.1.self_attn.out_rmsnorm.weight": torch.ones(24)}
    assert "blocks.1.self_attn.out_rmsnorm.weight" in refused(softmax, tmp_path)
    odd = [
        "blocks.0.self_attn.output.weight",
        "blocks.0.norm3.weight_g",
        "x.head.modulation",
        "blocks.00.modulation",
    ]
    message = refused(wan_state(stock_wan()) | {key: torch.zeros(24) for key in odd}, tmp_path)
    assert "holds 4 weights" in message and all(key in message for key in odd)


@pytest.mark.parametrize("kind", ["wan", "gated_mhla_lepe"])
def test_nothing_is_made_up_for_a_missing_key(tmp_path, kind):
    state = wan_state(stock_wan()) if kind == "wan" else released_state(stock_wan(), kind)
    for key in [key for key in state if "blocks.1.self_attn" in key or "head." in key or "embedding" in key]:
        message = refused({k: x for k, x in state.items() if k != key}, tmp_path)
        assert "lacks" in message or "not in the same layers" in message or "none of the layouts" in message


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (lambda s: s.update({"blocks.1.self_attn.g_norm.weight": torch.ones(7)}), HEADS, "differ in shape"),
        (
            lambda s: s.update({f"blocks.{i}.self_attn.g_norm.weight": torch.ones(7) for i in (0, 1)}),
            HEADS,
            "has 7 weights: known are norms of each head (12) and over all heads (24)",
        ),
        (lambda s: s.pop("blocks.1.self_attn.g.bias"), HEADS, "blocks.1.attn1.to_gate.bias"),
        (
            lambda s: [s.pop(f"blocks.{i}.self_attn.g_norm.weight") for i in (0, 1)],
            HEADS,
            "but no norm of the output (g_norm), which every released class with a gate has",
        ),
        (
            lambda s: s.update(
                {f"blocks.{i}.self_attn.block_attn.conv.weight": torch.ones(120, 150, 1, 1) for i in (0, 1)}
            ),
            HEADS,
            "has the shape (120, 150, 1, 1): known are as many blocks of queries as of keys",
        ),
        (lambda s: s, {}, "a width of 24 does not divide into heads of 128 channels"),
    ],
)
def test_what_cannot_be_told_is_refused(tmp_path, change, config, message):
    state = released_state(stock_wan(), "mhla_uni gated")
    change(state)
    assert message in refused(state, tmp_path, config=config)


def test_a_stock_model_becomes_a_hybrid_by_a_share_of_its_layers(tmp_path):
    stock = stock_wan(num_layers=4)
    ours = converted(wan_state(stock), tmp_path, layers="2/3", gate=True, local_conv=3)
    assert ours.config.mhla_layers == [1, 2] and ours.config.mhla_norm_out is True
    stock.save_pretrained(tmp_path / "stock")
    convert_folder(tmp_path / "stock", tmp_path / "again", layers="2/3", gate=True, local_conv=3)
    again = MHLAWanTransformer3DModel.from_pretrained(tmp_path / "again")
    assert all(torch.equal(x, ours.state_dict()[key]) for key, x in again.state_dict().items())
    convert_folder(tmp_path / "again", tmp_path / "other", block_grid=(2, 5, 5))
    other = MHLAWanTransformer3DModel.from_pretrained(tmp_path / "other")
    assert other.blocks[1].attn1.mixing.weight.shape == (50, 50)


@torch.no_grad()
def test_a_weight_that_the_stock_class_itself_ignores_is_left_out_by_name(tmp_path):
    """Published Wan 2.1 I2V folders in Diffusers' layout hold a norm that nothing uses; any other key is an error."""
    stock = tiny_wan.stock_transformer(**tiny_wan.IMAGE_TO_VIDEO)
    stock.save_pretrained(tmp_path / "stock")
    file = tmp_path / "stock" / "diffusion_pytorch_model.safetensors"
    state = stock.state_dict() | {f"blocks.{i}.attn2.norm_added_q.weight": torch.ones(24) for i in range(2)}
    save_file(state, file)
    done = convert_folder(tmp_path / "stock", tmp_path / "out", layers=[])
    assert "left out: blocks.{0-1}.attn2.norm_added_q.weight (the stock model has no use for it, either)" in (
        done.report()
    )
    ours = MHLAWanTransformer3DModel.from_pretrained(tmp_path / "out")
    assert torch.equal(run(ours, **tiny_wan.image_inputs()), run(stock, **tiny_wan.image_inputs()))
    single = MHLAWanTransformer3DModel.from_single_file(file, config=tmp_path / "stock", mhla_layers=[])
    assert torch.equal(run(single, **tiny_wan.image_inputs()), run(stock, **tiny_wan.image_inputs()))
    save_file(state | {"blocks.0.attn2.norm_added_p.weight": torch.ones(24)}, file)
    with pytest.raises(ValueError, match="no place for: blocks.0.attn2.norm_added_p.weight"):
        convert_folder(tmp_path / "stock", tmp_path / "other")
