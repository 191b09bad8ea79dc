"""Whole pipelines: what is looked at, when, and what is stored of it."""

import json

import pytest
import tiny_dit
import tiny_sana
import tiny_sana_video_pipeline
import tiny_wan_pipeline
import torch
from diffusers import SanaVideoPipeline
from model_checks import stirred
from PIL import Image

from mhla_diffusion.cli import main
from mhla_diffusion.evaluation.diagnostics.commands import labels
from mhla_diffusion.evaluation.diagnostics.mixing_figures import (
    coloured,
    heat_map,
    mixing_figures,
    on_grid,
    sheet,
)
from mhla_diffusion.evaluation.diagnostics.study import FIGURES, ONE_BLOCK, Options, study, summary, watching
from mhla_diffusion.mixing import BlockMixing
from mhla_diffusion.models.dit import MHLADiTTransformer2DModel
from mhla_diffusion.models.sana import MHLASanaTransformer2DModel
from mhla_diffusion.pipelines.dit import MHLADiTPipeline
from mhla_diffusion.pipelines.painter import Painter
from mhla_diffusion.pipelines.requests import Request
from mhla_diffusion.pipelines.sana import MHLASanaPipeline
from mhla_diffusion.pipelines.video_painter import video_painter
from mhla_diffusion.pipelines.wan import MHLAWanPipeline


def sana_folder(path, **options):
    transformer = MHLASanaTransformer2DModel(**tiny_sana.TRANSFORMER, mhla_block_grid=(2, 2), **options)
    MHLASanaPipeline(**tiny_sana.components(stirred(transformer).eval())).save_pretrained(path)
    return path


def run(*arguments) -> int:
    return main(["eval", "attention", *map(str, arguments), "--device", "cpu"])


def test_pipelines_side_by_side_with_the_papers_figures(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("a red apple\ntwo whale\n")
    ours = sana_folder(tmp_path / "mixed", mhla_layers=[1], mhla_other_layers="softmax")
    stock = tmp_path / "stock"
    tiny_sana.stock_pipeline().save_pretrained(stock)
    code = run(
        ours, stock, "--prompts", tmp_path / "prompts.txt", "--steps", 3, "--at", "0,2", "--out", tmp_path / "out",
        "--height", 32, "--width", 32, "--every-row",
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert (
        code == 0 and "| mixed | softmax | 64 | 64 |" in printed and "| stock | linear | 64 | 8 |" in printed
    )
    for figures in ("58.4", "254.8", "233.4", "5.12", "4.13", "4.06"):
        assert figures in printed
    found = json.loads((tmp_path / "out" / "mixed.json").read_text())
    assert found["protocol"] == "attention" and found["token_grid"] == [8, 8]
    # 2 layers x 2 heads x 2 steps x 2 drawings
    assert len(found["rows"]) == 16 and {row["step"] for row in found["rows"]} == {0, 2}
    assert [entry["kind"] for entry in found["layers"]] == ["softmax", "mhla"]
    assert all(row["rank"] <= row["rank_bound"] for row in found["rows"])
    assert [row["module"] for row in found["mixing"]] == ["transformer_blocks.1.attn1"]
    assert found["inputs"]["seeds"] == [0, 1] and found["pipeline"]["pipeline_sha256"]
    assert len(found["heads"]) == 4 and found["values"]["mhla.entropy"]["n"] == 8
    for name in found["pictures"]:
        Image.open(tmp_path / "out" / name).verify()
    assert found["pictures"] == ["mixed_rows.png", "mixed_mixing.png"]
    assert "layers" in (tmp_path / "out" / "attention.md").read_text()


def sana_video_folder(path):
    SanaVideoPipeline(**tiny_sana_video_pipeline.components()).save_pretrained(path)
    return path


def dit_folder(path):
    transformer = MHLADiTTransformer2DModel(**tiny_dit.TRANSFORMER, mhla_block_grid=(2, 2))
    MHLADiTPipeline(**tiny_dit.components(stirred(transformer).eval())).save_pretrained(path)
    return path


FAMILIES = {
    "sana": (sana_folder, 32, 32, None, "a red apple"),
    "sana video": (sana_video_folder, 32, 64, 5, "a red apple"),
    "dit": (dit_folder, None, None, None, "1"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_figures_are_of_the_calls_with_the_prompt(tmp_path, family):
    """The same drawing without guidance looks at the same attention in its first step."""
    save, height, width, frames, prompt = FAMILIES[family]
    painter_of = video_painter(save(tmp_path / "p")) if frames else Painter
    save(tmp_path / "p")
    painter = painter_of(tmp_path / "p", "", torch.device("cpu"), "float32")
    painter.pipe.set_progress_bar_config(disable=True)
    found = []
    for guidance in (1.0, 4.0):
        request = Request(0, prompt, 0, 2, guidance, height, width, frames=frames)
        rows = study(painter, [request], at=[0])["rows"]
        found.append([row[name] for row in rows for name in FIGURES])
    assert len(found[0]) == 4 * len(FIGURES) and found[0] == pytest.approx(found[1], rel=1e-3)


def test_nothing_is_drawn_after_the_last_step_looked_at(tmp_path):
    painter = Painter(sana_folder(tmp_path / "p"), "", torch.device("cpu"), "float32")
    painter.pipe.set_progress_bar_config(disable=True)
    calls = []
    painter.pipe.transformer.register_forward_hook(lambda *_: calls.append(1))
    request = Request(0, "a red apple", 0, 6, 4.0, 32, 32)
    assert study(painter, [request], at=[1])["at"] == [1] and len(calls) == 2
    assert not any(module._forward_pre_hooks for module in painter.pipe.transformer.modules())


def test_dit_and_wan_pipelines(tmp_path, capsys):
    dit_folder(tmp_path / "dit")
    MHLAWanPipeline(**tiny_wan_pipeline.components()).save_pretrained(tmp_path / "wan")
    assert run(tmp_path / "dit", "--steps", 2, "--at", 1, "--out", tmp_path / "a") == 0
    (tmp_path / "prompts.txt").write_text("a red apple\n")
    assert (
        run(
            tmp_path / "wan", "--prompts", tmp_path / "prompts.txt", "--steps", 2, "--at", 1, "--out", tmp_path / "b",
            "--height", 32, "--width", 48, "--frames", 17, "--layers", 1, "--heads", "0", "--exact-limit", 8,
            "--lanczos-steps", 8, "--entropy-rows", 30, "--one-block",
        )
        == 0
    )  # fmt: skip
    wan = json.loads((tmp_path / "b" / "wan.json").read_text())
    assert wan["token_grid"] == [5, 2, 3] and [row["layer"] for row in wan["layers"]] == [1, 1]
    assert [row["kind"] for row in wan["kinds"]] == ["mhla", ONE_BLOCK]
    notes = capsys.readouterr().err
    assert "negative weights" in notes and "ranks are estimated" in notes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--at", "9", "--steps", "3"], "give 0 to 2"),
        (["--layers", "7"], "there is no layer 7: give 0 to 1"),
        (["--heads", "5"], "there is no head 5: give 0 to 1"),
        (["--threshold", "2"], "rank threshold 2"),
        (["--probes", "1"], "--probes 1: give at least 2"),
        (["--frames", "3"], "--frames is for videos"),
        (["--at", "x"], "'x' is not numbers joined by commas"),
    ],
)
def test_mistakes_are_named(tmp_path_factory, capsys, arguments, message):
    folder = tmp_path_factory.getbasetemp() / "mistakes"
    if not folder.exists():
        sana_folder(folder)
    (folder.parent / "prompts.txt").write_text("a red apple\n")
    out = folder.parent / "nothing"
    assert run(folder, "--prompts", folder.parent / "prompts.txt", "--out", out, *arguments) == 2
    assert message in capsys.readouterr().err and not out.exists()


def test_hooks_are_gone_after_a_failure():
    model = MHLASanaTransformer2DModel(**tiny_sana.TRANSFORMER).eval()
    with pytest.raises(RuntimeError, match="stop"), watching({"t": model}, [0], slice, Options()):
        raise RuntimeError("stop")
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_layers_of_one_kind_are_summed_up():
    details = {"negative": 0.0}
    same = {
        "kind": "mhla",
        "tokens": 4,
        "rank_bound": 4,
        "threshold": 1e-3,
        "ranks": {"0.1": 1},
        "errors": {},
    }
    soft = ("effective_rank", "participation_ratio", "stable_rank", "entropy", "relative_entropy")
    rows = [same | dict.fromkeys(soft, 1.0) | {"rank": n, "entropy_details": details} for n in (2, 4)]
    (entry,) = summary(rows, ("kind",))
    assert entry["rank"] == {"mean": 3.0, "std": pytest.approx(2**0.5)} and entry["matrices"] == 2


def test_mixing_figures_of_known_matrices():
    mixing = BlockMixing((2, 3))
    start = mixing_figures(mixing)[0]
    assert start["moved"] < 1e-6 and start["reach"] == pytest.approx(start["initial_reach"], rel=1e-6)
    assert start["row_sum_smallest"] == pytest.approx(1, rel=1e-6)
    with torch.no_grad():
        mixing.weight.copy_(torch.eye(6))
    one = mixing_figures(mixing)[0]
    assert one["at_one"] == pytest.approx(1 / 6) and one["at_zero"] == pytest.approx(5 / 6)
    assert (one["rank"], one["diagonal"], one["reach"]) == (6, 1.0, 0.0)
    with torch.no_grad():
        mixing.weight.fill_(0.25)
    flat = mixing_figures(mixing)[0]
    assert flat["rank"] == 1 and flat["effective_rank"] == pytest.approx(1, abs=1e-6)
    assert len(mixing_figures(BlockMixing((2, 2), num_heads=3))) == 3


def test_heat_maps_lie_where_their_blocks_lie():
    matrix = torch.eye(6) + 0.5 * torch.eye(6).roll(1, dims=1)
    shown = heat_map(matrix, (2, 3))
    assert shown.shape == (5, 11)
    for block in range(6):
        row, column = divmod(block, 3)
        small = shown[3 * row : 3 * row + 2, 4 * column : 4 * column + 3].flatten()
        assert small.argmax() == block and small[(block + 1) % 6] == 0.5
    assert torch.isnan(shown[2]).all()
    frames = heat_map(torch.eye(12), (2, 2, 3))
    assert frames.shape == (2 * 3 - 1, 2 * 3 * 7 - 1)
    assert on_grid(torch.arange(12), (2, 2, 3)).tolist() == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]


def test_colours_go_from_dark_to_light_and_sheets_hold_every_map():
    picture = coloured(torch.tensor([[0.0, 0.5, 1.0, float("nan")]]))
    lights = [sum(picture.getpixel((x, 0))) for x in range(4)]
    assert lights == sorted(lights) and picture.getpixel((3, 0)) == (255, 255, 255)
    assert sheet([torch.rand(4, 4)] * 3, ["a", "b", "c"], columns=2).width > 400
    with pytest.raises(ValueError, match="give at least one"):
        sheet([], [])


def test_pipelines_of_one_name_get_different_labels():
    assert labels(["a/x", "b/x", "runs/mhla-0/pipeline"]) == ["x", "x-2", "mhla-0"]
