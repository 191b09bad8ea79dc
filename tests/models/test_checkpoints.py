"""Original layouts of DiT, SANA and the released MHLA-DiT code: keys, values, and what the models compute."""

import argparse
import dataclasses

import original_layouts as original
import pytest
import tiny_sana
import torch
from diffusers.models.embeddings import get_2d_sincos_pos_embed
from model_checks import relative
from original_keys import to_original, to_ours
from safetensors.torch import save_file

from mhla_diffusion.models.checkpoint_layouts import LAYOUTS, find_layout
from mhla_diffusion.models.checkpoints import compressed, expand, pattern
from mhla_diffusion.models.convert import restore
from mhla_diffusion.models.dit import MHLADiTTransformer2DModel
from mhla_diffusion.models.dit_presets import DIT_MODELS, dit_config
from mhla_diffusion.models.sana import MHLASanaTransformer2DModel
from mhla_diffusion.models.sana_presets import SANA_MODELS, sana_config
from mhla_diffusion.pipelines.conversion import convert_folder

SANA_KINDS = {
    "plain": {},
    "with positions": {"interpolation_scale": 2.0},
    "unstretched positions": {"interpolation_scale": 1.0, "patch_size": 2},
    "SANA-1.5": {"qk_norm": "rms_norm_across_heads"},
    "SANA-Sprint": {"qk_norm": "rms_norm_across_heads", "guidance_embeds": True},
}


def layout(name: str):
    return next(x for x in LAYOUTS if x.name == name)


def state_in(name: str) -> dict[str, torch.Tensor]:
    if name == "dit":
        return original.dit_state(original.stock_dit())
    if name == "official":
        return original.official_state(original.stock_dit())
    kind = "SANA-Sprint" if name == "sana-sprint" else "SANA-1.5"
    return original.sana_state(tiny_sana.stock_transformer(**SANA_KINDS[kind]))


def run(model, **inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).sample


def refused(source, out, **options) -> str:
    with pytest.raises(ValueError) as caught:
        convert_folder(source, out, **({"config": original.HEADS} | options))
    assert "\n" not in str(caught.value) and not out.exists()
    return str(caught.value)


@pytest.mark.parametrize("name", ["dit", "official", "sana", "sana-sprint"])
def test_each_key_has_one_rule_and_the_rules_can_be_read_backwards(name):
    state = state_in(name)
    found = find_layout(state)
    assert found.name == name
    moves, left_out, unexpected = expand(found, state)
    assert unexpected == [] and set(left_out) | {move.source for move in moves} == state.keys()
    for key in state:
        assert sum(bool(pattern(rule.source).fullmatch(key)) for rule in found.rules) == (key not in left_out)
    ours = to_ours(state, found)
    assert len(ours) == len(moves)
    back = to_original(ours, found)
    assert back.keys() == state.keys() - left_out.keys()
    assert all(torch.equal(back[key], state[key]) for key in back)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("changes", [{}, {"patch_size": 4, "sample_size": 16, "num_embeds_ada_norm": 7}])
def test_an_original_dit_file_computes_what_the_stock_class_does(tmp_path, suffix, changes):
    stock = original.stock_dit(**changes)
    path = tmp_path / f"DiT{suffix}"
    state = {f"module.{key}": x for key, x in original.dit_state(stock).items()}
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    convert_folder(path, tmp_path / "out", layers=[], config=original.HEADS)
    ours = MHLADiTTransformer2DModel.from_pretrained(tmp_path / "out")
    inputs = original.dit_inputs(side=stock.config.sample_size)
    inputs["class_labels"] = torch.tensor([3, stock.config.num_embeds_ada_norm])
    assert torch.equal(run(ours, **inputs), run(stock, **inputs))
    assert all(torch.equal(x, stock.state_dict()[key]) for key, x in restore(ours).state_dict().items())


@pytest.mark.parametrize("kind", SANA_KINDS)
def test_an_original_sana_file_computes_what_the_stock_class_does(tmp_path, kind):
    stock = tiny_sana.stock_transformer(**SANA_KINDS[kind])
    torch.save({"state_dict": original.sana_state(stock), "epoch": 3}, tmp_path / "Sana.pth")
    inputs = tiny_sana.transformer_inputs()
    if stock.config.guidance_embeds:
        inputs["guidance"] = torch.tensor([0.45, 0.45])
    for number, options in enumerate(({"layers": []}, {"block_grid": (1, 1)})):
        out = tmp_path / f"out{number}"
        convert_folder(tmp_path / "Sana.pth", out, config=original.SANA_HEADS, **options)
        ours = MHLASanaTransformer2DModel.from_pretrained(out)
        assert relative(run(ours, **inputs), run(stock, **inputs)) < (1e-5 if number else 1e-12)
    assert ours.config.interpolation_scale == stock.config.interpolation_scale


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    """A training checkpoint of the released MHLA-DiT code, as its trainer writes it, and its averaged weights."""
    state = original.official_state(original.stock_dit())
    path = tmp_path_factory.mktemp("official") / "0050000.pt"
    untrained = {key: x if key == "pos_embed" else torch.zeros_like(x) for key, x in state.items()}
    arguments = argparse.Namespace(model="DiT_MHLA-S/2", global_batch_size=256)
    saved = {"model": untrained, "ema": state, "opt": {"state": {}}, "args": arguments, "train_steps": 50000}
    torch.save(saved, path)
    return path, state


def test_released_mhla_dit_weights_give_that_codes_output_and_not_the_papers(tmp_path, official):
    path, state = official
    convert_folder(path, tmp_path / "out", config=original.HEADS)
    ours = MHLADiTTransformer2DModel.from_pretrained(tmp_path / "out")
    assert (ours.config.mhla_normalizer, ours.config.mhla_block_grid) == ("official", [4, 4])
    inputs = original.dit_inputs()
    theirs, papers = (
        original.official_output(state, *inputs.values(), heads=2, paper=paper) for paper in (False, True)
    )
    out = run(ours, **inputs)
    assert relative(out, theirs) < 1e-5
    assert relative(papers, theirs) > 0.01 < relative(out, papers)
    # With the paper's denominator in the config, the same weights give the paper's formula.
    formula = {"mhla_normalizer": "paper", "mhla_denominator_eps": 0.0}
    convert_folder(path, tmp_path / "paper", config=original.HEADS | formula)
    assert (
        relative(run(MHLADiTTransformer2DModel.from_pretrained(tmp_path / "paper"), **inputs), papers) < 1e-5
    )


def test_the_entry_of_a_training_checkpoint_can_be_chosen(tmp_path, official):
    path, _ = official
    done = convert_folder(path, tmp_path / "out", config=original.HEADS)
    assert "weights taken from the entry 'ema' of 0050000.pt" in done.report()
    convert_folder(path, tmp_path / "raw", config=original.HEADS, weights="model")
    raw = MHLADiTTransformer2DModel.from_pretrained(tmp_path / "raw")
    assert not any(x.any() for x in raw.state_dict().values())
    assert "no weights under 'best': it has ema, model" in refused(path, tmp_path / "no", weights="best")


def test_released_mhla_dit_weights_change_their_block_grid(tmp_path, official):
    path, state = official
    done = convert_folder(path, tmp_path / "out", config=original.HEADS, block_grid=(2, 2))
    ours = MHLADiTTransformer2DModel.from_pretrained(tmp_path / "out")
    mixing = ours.transformer_blocks[0].attn1.mixing.weight
    theirs = state["blocks.0.attn.piece_attn.conv.weight"].flatten(1)
    assert mixing.shape == (4, 4)
    # Each new row is the mean of the four old rows around it, with the same sum.
    sums = theirs.sum(dim=1).reshape(2, 2, 2, 2).mean(dim=(1, 3)).flatten()
    torch.testing.assert_close(mixing.sum(dim=1), sums)
    assert any("there and back differs by" in line for line in done.report())


def test_keys_match_as_a_whole(tmp_path):
    state = original.dit_state(original.stock_dit())
    odd = [
        "blocks.0.attn.projection.weight",
        "blocks.0.attn.proj.weight_g",
        "x.blocks.0.attn.proj.weight",
        "blocks.00.attn.proj.weight",
        "blocks.1.attn.out_rmsnorm.weight",
        "blocks.2.attn.out_rmsnorm.weight",
    ]
    torch.save(state | {key: torch.zeros(16) for key in odd}, tmp_path / "a.pt")
    message = refused(tmp_path / "a.pt", tmp_path / "out")
    assert "holds 6 weights" in message and "blocks.{1-2}.attn.out_rmsnorm.weight" in message
    assert all(key in message for key in odd[:4])


@pytest.mark.parametrize("name", ["dit", "official", "sana"])
def test_nothing_is_made_up_for_a_missing_key(tmp_path, name):
    state = state_in(name)
    heads = original.SANA_HEADS if name == "sana" else original.HEADS
    for key in [key for key in state if "blocks.1." in key or "final_layer" in key]:
        torch.save({k: x for k, x in state.items() if k != key}, tmp_path / "a.pt")
        message = refused(tmp_path / "a.pt", tmp_path / "out", config=heads)
        assert "lacks" in message
    torch.save({k: x for k, x in state.items() if "blocks.1." not in k}, tmp_path / "a.pt")
    if name == "dit":
        assert "has layer 2 but not 1" in refused(tmp_path / "a.pt", tmp_path / "out", config=heads)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("dit", lambda s: s.update({"pos_embed": s["pos_embed"] + 0.1}), "pos_embed differs from the positions"),
        ("dit", lambda s: s.update({"pos_embed": s["pos_embed"][:, :15]}), "form no square"),
        ("sana", lambda s: s.update({"pos_embed": s["pos_embed"] + 0.1}), "pos_embed differs from the positions"),
        ("dit", lambda s: s.update({"blocks.1.attn.qkv.bias": torch.zeros(47)}), "does not divide into 3"),
        ("dit", lambda s: s.update({"blocks.1.attn.qkv.bias": torch.zeros(())}), "does not divide into 3"),
        ("dit", lambda s: s.update({"blocks.1.mlp.fc1.bias": torch.zeros(3)}), "the shape (3,)"),
        ("official", lambda s: s.update({"blocks.0.attn.q_norm.weight": torch.ones(16)}), "(qk_norm) are not"),
        ("official", lambda s: s.update({"blocks.0.dw_conv.weight": torch.ones(16, 1, 3, 3)}), "(dwconv)"),
        ("official", lambda s: s.pop("blocks.1.attn.norm.weight"), "blocks.1.attn1.norm_in.weight"),
        ("official", lambda s: s.pop("blocks.1.attn.lepe.bias"), "blocks.1.attn1.local_conv.bias"),
        (
            "official",
            lambda s: s.update({f"blocks.{i}.attn.piece_attn.conv.weight": torch.ones(8, 8, 1, 1) for i in range(3)}),
            "square block grids",
        ),
        ("official", lambda s: s.pop("blocks.2.attn.piece_attn.conv.weight"), "blocks.2.attn1.mixing.weight"),
    ],
)  # fmt: skip
def test_what_would_change_the_output_is_refused(tmp_path, name, change, message):
    state = state_in(name)
    change(state)
    torch.save(state, tmp_path / "a.pt")
    heads = original.SANA_HEADS if name == "sana" else original.HEADS
    assert message in refused(tmp_path / "a.pt", tmp_path / "out", config=heads)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_values_that_no_model_can_compute_with_are_refused(tmp_path, suffix, dry_run):
    path, out, key = tmp_path / f"a.{suffix}", tmp_path / "out", "blocks.1.mlp.fc1.weight"
    state = state_in("dit")
    for values, message in (
        (torch.full_like(state[key], float("nan")), f"holds infinite values or NaN in {key}"),
        (state[key].half() * 1e9, f"holds infinite values or NaN in {key}"),
        (state[key].char(), f"{key} is of type torch.int8: give weights that are not quantised"),
    ):
        save = save_file if suffix == "safetensors" else torch.save
        save(state | {key: values}, path)
        assert message in refused(path, out, dry_run=dry_run)


def test_the_layout_is_recognised_or_said_to_be_unknown(tmp_path):
    path, out = tmp_path / "a.pt", tmp_path / "out"
    torch.save(state_in("official"), path)
    assert "is in the released MHLA-DiT layout, not in 'dit': give --from official" in refused(
        path, out, layout="dit"
    )
    assert "choose one of auto, dit, official, sana, sana-sprint" in refused(path, out, layout="pixart")
    assert "without config.json" in refused(path, out, layout="diffusers")
    torch.save(original.stock_dit().state_dict(), path)
    assert "give the folder with its config.json" in refused(path, out)
    torch.save({"conv.weight": torch.ones(2, 2)}, path)
    assert "its keys are conv.weight, ..." in refused(path, out)


@pytest.mark.parametrize("kind", [MHLADiTTransformer2DModel, MHLASanaTransformer2DModel])
def test_from_pretrained_of_an_original_folder_names_the_command(tmp_path, kind):
    (tmp_path / "model" / "checkpoints").mkdir(parents=True)
    path = tmp_path / "model" / "checkpoints" / "a.pth"
    torch.save(state_in("dit"), path)
    for arguments in ({"subfolder": "model"}, {}):
        folder = tmp_path if arguments else tmp_path / "model"
        with pytest.raises(ValueError, match="original layout") as caught:
            kind.from_pretrained(folder, **arguments)
        assert f"`mhla convert {path} OUT`" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(OSError, match="config.json"):
        kind.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", [MHLADiTTransformer2DModel, MHLASanaTransformer2DModel])
def test_from_pretrained_of_one_file_names_what_reads_it(tmp_path, kind):
    torch.save({}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"use from_single_file\('.*a.pt'\), or `mhla convert") as caught:
        kind.from_pretrained(tmp_path / "a.pt")
    assert "\n" not in str(caught.value)


def test_from_pretrained_of_a_pipeline_or_another_model_says_so(tmp_path):
    tiny_sana.stock_pipeline().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='is the folder of a pipeline.*subfolder="transformer"') as caught:
        MHLASanaTransformer2DModel.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)
    assert MHLASanaTransformer2DModel.from_pretrained(tmp_path, subfolder="transformer")
    with pytest.raises(ValueError, match="of a SanaTransformer2DModel, not of a MHLADiTTransformer2DModel"):
        MHLADiTTransformer2DModel.from_pretrained(tmp_path, subfolder="transformer")


def test_what_the_shapes_do_not_tell_is_asked_for(tmp_path):
    path, out = tmp_path / "a.pt", tmp_path / "out"
    torch.save(state_in("dit"), path)
    assert "a width of 16 is none of the published ones (384, 768, 1024, 1152)" in refused(
        path, out, config=None
    )
    assert "does not know, did you mean num_attention_heads?" in refused(
        path, out, config={"num_atention_heads": 2}
    )
    wrong = {"num_attention_heads": 2, "mhla_blok_grid": [2, 2]}
    assert (
        "'mhla_blok_grid', which MHLADiTTransformer2DModel does not know, did you mean mhla_block_grid?"
        in (refused(path, out, config=wrong))
    )
    torch.save(state_in("sana"), path)
    assert '"num_cross_attention_heads": ...' in refused(path, out, config=original.HEADS)


@pytest.mark.parametrize("name", SANA_MODELS)
def test_the_published_sana_models_are_read_off_their_shapes(name):
    config = sana_config(name, 2048)
    with torch.device("meta"):
        state = MHLASanaTransformer2DModel(**config, mhla_layers=[]).state_dict()
    keys = to_original(state, layout("sana-sprint" if "sprint" in name else "sana"))
    table = get_2d_sincos_pos_embed(64, 64, base_size=64, output_type="pt")[None].float()
    shapes = {key: tuple(x.shape) for key, x in keys.items()} | {"pos_embed": (1, 64 * 64, 64)}
    read = find_layout(shapes).read_config(shapes, {"pos_embed": table}.__getitem__, {})
    assert {key: read[key] for key in config} == config


@pytest.mark.parametrize("name", DIT_MODELS)
def test_the_published_dit_models_are_read_off_their_shapes(name):
    config = dit_config(name, 512) | {"num_layers": 1}  # one layer, for the others hold copies to be compared
    with torch.device("meta"):
        state = MHLADiTTransformer2DModel(**config, mhla_layers=[]).state_dict()
    shapes = {key: tuple(x.shape) for key, x in to_original(state, layout("dit")).items()}
    tokens = (config["sample_size"] // config["patch_size"]) ** 2
    read = find_layout(shapes).read_config(shapes | {"pos_embed": (1, tokens, 8)}, {}.__getitem__, {})
    assert read == config


def test_a_layout_can_be_added_by_its_tables_alone():
    other = dataclasses.replace(layout("dit"), name="new", marks=("blocks.{i}.attn.qkv.weight",), foreign=())
    assert to_ours(state_in("dit"), other).keys() == to_ours(state_in("dit"), layout("dit")).keys()


def test_keys_of_several_layers_become_one_in_a_message():
    keys = [f"blocks.{i}.a.weight" for i in (0, 1, 2, 5)] + ["blocks.3.b", "c"]
    assert compressed(keys) == "blocks.{0-2,5}.a.weight, blocks.3.b, c"
