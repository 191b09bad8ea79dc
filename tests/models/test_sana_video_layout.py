"""SANA-Video in its original layout and in Diffusers' folders: `mhla convert` reads both, every key accounted for."""

import json

import original_layouts as original
import pytest
import tiny_sana
import torch
from diffusers import DiffusionPipeline
from model_checks import relative, stirred
from original_keys import to_original, to_ours
from tiny_sana_video import run, stock_transformer, transformer_inputs
from tiny_sana_video_pipeline import stock_pipeline

from mhla_diffusion.cli import main
from mhla_diffusion.models.checkpoint_layouts import SANA_VIDEO, find_layout
from mhla_diffusion.models.checkpoints import expand, pattern
from mhla_diffusion.models.convert import convert, restore
from mhla_diffusion.models.sana_video import MHLASanaVideoTransformer3DModel
from mhla_diffusion.models.sana_video_presets import SANA_VIDEO_MODELS, sana_video_config
from mhla_diffusion.pipelines.conversion import convert_folder

HEADS = {"num_attention_heads": 2, "attention_head_dim": 12}
HEADS |= {"num_cross_attention_heads": 2, "cross_attention_head_dim": 12}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A stock model, and a file of it as SANA-Video's trainer writes it."""
    stock = stirred(stock_transformer(num_layers=3))
    path = tmp_path_factory.mktemp("original") / "SANA_Video.pth"
    torch.save({"state_dict": original.sana_video_state(stock), "epoch": 3}, path)
    return stock, path


def test_each_key_has_one_rule_and_the_rules_can_be_read_backwards(written):
    state = original.sana_video_state(written[0])
    assert find_layout(state) is SANA_VIDEO and find_layout(state, "sana-video") is SANA_VIDEO
    moves, left_out, unexpected = expand(SANA_VIDEO, state)
    assert unexpected == [] and set(left_out) == {"pos_embed", "y_embedder.y_embedding"}
    for key in state.keys() - left_out.keys():
        assert sum(bool(pattern(rule.source).fullmatch(key)) for rule in SANA_VIDEO.rules) == 1
    back = to_original(to_ours(state, SANA_VIDEO), SANA_VIDEO)
    assert back.keys() == state.keys() - left_out.keys()
    assert all(torch.equal(back[key], state[key]) for key in back)
    assert find_layout(original.sana_state(tiny_sana.stock_transformer())).name == "sana"
    with pytest.raises(ValueError, match="give --from sana-video"):
        find_layout(state, "sana")


@torch.no_grad()
def test_an_original_file_computes_what_the_stock_class_does(tmp_path, written):
    stock, path = written
    for number, options in enumerate(({"layers": []}, {"block_grid": (1, 1, 1)}, {"layers": "2/3"})):
        convert_folder(path, tmp_path / str(number), config=HEADS, **options)
    ours = [MHLASanaVideoTransformer3DModel.from_pretrained(tmp_path / str(n)) for n in range(3)]
    assert relative(run(ours[0]), run(stock)) < 1e-12 and relative(run(ours[1]), run(stock)) < 1e-5
    assert ours[2].config.mhla_block_grid == [3, 5, 10] and ours[2].config.mhla_layers == [1, 2]
    state = restore(ours[2]).state_dict()
    assert all(torch.equal(state[key], value) for key, value in stock.state_dict().items())


def test_a_width_that_is_not_published_asks_for_the_heads_and_nothing_is_made_up(tmp_path, written):
    stock, path = written
    with pytest.raises(ValueError, match=r"width of 24 is none of the published ones \(2240\).*--config"):
        convert_folder(path, tmp_path / "no")
    state = original.sana_video_state(stock)
    del state["blocks.1.mlp.t_conv.weight"]
    torch.save(state, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"lacks 1 weights.*blocks\.1\.ff\.conv_temp\.weight"):
        convert_folder(tmp_path / "a.pth", tmp_path / "no", config=HEADS)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("name", SANA_VIDEO_MODELS)
def test_the_published_models_are_read_off_their_shapes(name):
    config = sana_video_config(name)
    with torch.device("meta"):
        state = MHLASanaVideoTransformer3DModel(**config, mhla_layers=[]).state_dict()
    shapes = {key: tuple(tensor.shape) for key, tensor in to_original(state, SANA_VIDEO).items()}
    found = SANA_VIDEO.read_config(shapes, {}.__getitem__, {})
    assert found == config | {"patch_size": list(config["patch_size"]), "attention_bias": False}


@torch.no_grad()
def test_a_pipeline_folder_converts_and_gets_another_block_grid(tmp_path, capsys):
    stock = stock_pipeline()
    stock.save_pretrained(tmp_path / "stock", max_shard_size="20KB")
    line = ["convert", str(tmp_path / "stock"), str(tmp_path / "mhla"), "--layers", "1/2", "--gate"]
    assert main([*line, "--block-grid", "2,2,3"]) == 0
    assert "MHLASanaVideoTransformer3DModel with 2x2x3 blocks in 1 of 2 layers" in capsys.readouterr().out
    made = DiffusionPipeline.from_pretrained(tmp_path / "mhla").transformer
    expected = convert(stock.transformer, (2, 2, 3), layers="1/2", gate=True)
    assert torch.equal(run(made), run(expected))
    assert (
        json.loads((tmp_path / "mhla" / "model_index.json").read_text())["_class_name"] == "SanaVideoPipeline"
    )
    convert_folder(tmp_path / "mhla", tmp_path / "other", block_grid=(1, 4, 5))
    other = DiffusionPipeline.from_pretrained(tmp_path / "other").transformer
    assert other.config.mhla_block_grid == [1, 4, 5]
    assert run(other, **transformer_inputs()).isfinite().all()


def test_an_original_file_becomes_a_pipeline_with_the_parts_of_another(tmp_path, written):
    stock_pipeline().save_pretrained(tmp_path / "stock")
    convert_folder(written[1], tmp_path / "out", config=HEADS, pipeline=tmp_path / "stock")
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "out")
    assert type(pipe.transformer) is MHLASanaVideoTransformer3DModel
    assert len(pipe.transformer.transformer_blocks) == 3
    tiny_sana.stock_pipeline().save_pretrained(tmp_path / "images")
    with pytest.raises(ValueError, match="where a MHLASanaVideoTransformer3DModel cannot go"):
        convert_folder(written[1], tmp_path / "no", config=HEADS, pipeline=tmp_path / "images")
