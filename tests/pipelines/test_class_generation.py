"""`mhla generate` with DiT pipelines: labels as prompts, the same files, settings and resuming."""

import json
import warnings

import numpy as np
import pytest
import tiny_dit
import torch
from PIL import Image

from mhla_diffusion import convert
from mhla_diffusion.cli import main
from mhla_diffusion.pipelines.dit import MHLADiTPipeline
from mhla_diffusion.pipelines.generation import generate
from mhla_diffusion.pipelines.painter import Painter
from mhla_diffusion.pipelines.pictures import read_settings

LABELS = ["white shark", "2", "goldfish"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pipelines") / "toy"
    transformer = convert(tiny_dit.stock_transformer(), block_grid=(2, 2))
    parts = tiny_dit.components(transformer)
    MHLADiTPipeline(
        **parts, id2label=tiny_dit.LABELS, default_steps=2, default_guidance_scale=2.0
    ).save_pretrained(path)
    return path


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB"), dtype=np.int16)


def test_labels_by_name_and_number_give_the_pipelines_own_pictures(folder, tmp_path):
    report = generate(LABELS, pipeline=folder, seeds=[4, 5, 6], out=tmp_path, device="cpu")
    names = ["0000_white-shark_4.png", "0001_2_5.png", "0002_goldfish_6.png"]
    assert [path.name for path in report.drawn.values()] == names and not report.failed
    settings = read_settings(tmp_path / names[0])
    assert json.loads((tmp_path / names[0]).with_suffix(".json").read_text()) == settings
    expected = {
        "prompt": "white shark", "class_label": 1, "seed": 4, "steps": 2, "guidance": 2.0, "height": 16, "width": 16,
        "pipeline_class": "MHLADiTPipeline", "scheduler": "DDIMScheduler",
    }  # fmt: skip
    assert expected.items() <= settings.items()
    assert read_settings(tmp_path / names[1])["class_label"] == 2
    pipe = MHLADiTPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    alone = pipe("goldfish", generator=torch.Generator().manual_seed(6)).images[0]
    assert np.abs(np.asarray(alone, dtype=np.int16) - pixels(tmp_path / names[2])).max() <= 1


def test_it_goes_on_where_it_was_and_never_replaces(folder, tmp_path):
    first = generate(LABELS, pipeline=folder, out=tmp_path, device="cpu")
    first.drawn[1].unlink()
    second = generate(LABELS, pipeline=folder, out=tmp_path, device="cpu", steps=2, height=16)
    assert list(second.drawn) == [1] and list(second.skipped) == [0, 2]
    with pytest.raises(ValueError, match="guidance 2.0 there, 3.0 asked"):
        generate(LABELS, pipeline=folder, out=tmp_path, device="cpu", guidance=3.0)


def test_other_sizes(folder, tmp_path):
    report = generate(LABELS[:1], pipeline=folder, out=tmp_path, device="cpu", height=24, width=32)
    assert Image.open(report.drawn[0]).size == (32, 24)
    with pytest.raises(ValueError, match="--height 16 or 20"):
        generate(LABELS[:1], pipeline=folder, out=tmp_path / "b", device="cpu", height=18)


def test_no_such_class_is_told_and_the_others_are_drawn(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = ["generate", "white sharc", "umbrella", "12", "--pipeline", str(folder), "--device", "cpu"]
    assert main(line) == 1
    printed = capsys.readouterr()
    assert printed.out == "1 drawn, 2 failed in outputs\n"
    errors = [text for text in printed.err.splitlines() if text.startswith("mhla:")]
    assert errors == [
        "mhla: prompt 0 failed: class label 'white sharc' is not known: did you mean 'white shark'? "
        "(pipe.labels has all 4)",
        "mhla: prompt 2 failed: class label 12: give a name or a number from 0 to 9 (10, the null class, draws "
        "without a class)",
    ]
    assert [path.name for path in sorted((tmp_path / "outputs").glob("*.png"))] == ["0001_umbrella_0.png"]


def test_stock_dit_pipelines_draw_too(tmp_path):
    tiny_dit.stock_pipeline(convert(tiny_dit.stock_transformer(), block_grid=(2, 2))).save_pretrained(
        tmp_path / "toy"
    )
    report = generate(["3"], pipeline=tmp_path / "toy", steps=1, out=tmp_path / "out", device="cpu")
    settings = read_settings(report.drawn[0])
    assert (settings["pipeline_class"], settings["class_label"], settings["guidance"]) == (
        "DiTPipeline",
        3,
        4.0,
    )
    failed = generate(["cat"], pipeline=tmp_path / "toy", steps=1, out=tmp_path / "out2", device="cpu").failed
    assert "this pipeline has no label names, give class numbers from 0 to 9" in failed[0]


def test_a_stock_dit_keeps_the_dtype_that_was_asked_for(tmp_path):
    tiny_dit.stock_pipeline().save_pretrained(tmp_path / "toy")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of arguments that Diffusers is about to drop
        painter = Painter(tmp_path / "toy", "", torch.device("cpu"), "bfloat16")
    assert painter.pipe.transformer.dtype == torch.bfloat16 and type(painter.pipe) is MHLADiTPipeline
