import json
import os

import numpy as np
import pytest
import tiny_sana
import torch
from PIL import Image

from mhla_diffusion.models.convert import convert
from mhla_diffusion.pipelines.generation import generate
from mhla_diffusion.pipelines.painter import Painter
from mhla_diffusion.pipelines.pictures import read_settings
from mhla_diffusion.pipelines.sana import MHLASanaPipeline

PROMPTS = ["a red apple", "a green whale", "two blue emoji"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A whole MHLA pipeline at toy size, 32 px, on disk."""
    parts = tiny_sana.components(convert(tiny_sana.stock_transformer(), block_grid=(2, 2)))
    pipe = MHLASanaPipeline(**parts, default_steps=2, default_guidance_scale=2.0, max_sequence_length=8)
    path = tmp_path_factory.mktemp("pipelines") / "toy"
    pipe.save_pretrained(path)
    return path


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB"), dtype=np.int16)


def test_pictures_have_settings_and_names_that_do_not_change(folder, tmp_path):
    report = generate(PROMPTS, pipeline=folder, seeds=[7], out=tmp_path, device="cpu")
    names = ["0000_a-red-apple_7.png", "0001_a-green-whale_7.png", "0002_two-blue-emoji_7.png"]
    assert [path.name for path in report.drawn.values()] == names and not report.failed
    assert len(list(tmp_path.iterdir())) == 6
    settings = read_settings(tmp_path / names[1])
    assert json.loads((tmp_path / names[1]).with_suffix(".json").read_text()) == settings
    expected = {"prompt": "a green whale", "seed": 7, "steps": 2, "guidance": 2.0, "height": 32, "width": 32}
    assert expected.items() <= settings.items()
    assert settings["dtype"] == "float32" and settings["device"] == "cpu" and settings["pipeline"] == "toy"
    assert settings["flow_shift"] == 3.0 and settings["versions"]["torch"].startswith(torch.__version__[:3])
    assert Image.open(tmp_path / names[1]).size == (32, 32)


def test_a_picture_does_not_depend_on_its_batch(folder, tmp_path):
    together = generate(
        PROMPTS, pipeline=folder, seeds=[1, 2, 3], out=tmp_path / "a", batch_size=3, device="cpu"
    )
    alone = generate(PROMPTS[1:2], pipeline=folder, seeds=[2], out=tmp_path / "b", batch_size=1, device="cpu")
    assert np.abs(pixels(together.drawn[1]) - pixels(alone.drawn[0])).max() <= 1
    assert np.abs(pixels(together.drawn[1]) - pixels(together.drawn[2])).max() > 1


def test_a_rerun_draws_only_what_is_missing(folder, tmp_path):
    first = generate(PROMPTS, pipeline=folder, out=tmp_path, device="cpu")
    before = first.drawn[0].stat().st_mtime_ns
    first.drawn[2].unlink()
    # What is the default may be asked for by name: that is the same picture.
    second = generate(PROMPTS, pipeline=folder, out=tmp_path, device="cpu", steps=2, height=32)
    assert list(second.drawn) == [2] and list(second.skipped) == [0, 1]
    assert first.drawn[0].stat().st_mtime_ns == before
    third = generate(PROMPTS, pipeline=folder, out=tmp_path, device="cpu", overwrite=True)
    assert list(third.drawn) == [0, 1, 2] and first.drawn[0].stat().st_mtime_ns > before
    assert third.summary() == "3 drawn" and second.summary() == "1 drawn, 2 there already"


@pytest.mark.parametrize(
    ("change", "named"),
    [({"steps": 3}, "steps 2 there, 3 asked"), ({"guidance": 1.5}, "guidance"), ({"width": 64}, "width")],
)
def test_a_picture_with_other_settings_is_not_replaced(folder, tmp_path, change, named):
    first = generate(PROMPTS[:1], pipeline=folder, out=tmp_path, device="cpu")
    before = pixels(first.drawn[0])
    with pytest.raises(ValueError, match=named):
        generate(PROMPTS, pipeline=folder, out=tmp_path, device="cpu", **change)
    assert len(list(tmp_path.iterdir())) == 2 and (pixels(first.drawn[0]) == before).all()
    generate(PROMPTS[:1], pipeline=folder, out=tmp_path, device="cpu", overwrite=True, **change)
    assert read_settings(first.drawn[0])[next(iter(change))] == next(iter(change.values()))


def test_a_foreign_file_and_other_weights_are_not_taken_for_done(folder, tmp_path):
    path = tmp_path / "0000_a-red-apple_0.png"
    Image.new("RGB", (8, 8)).save(path)
    with pytest.raises(ValueError, match="no settings in it"):
        generate(PROMPTS[:1], pipeline=folder, out=tmp_path, device="cpu")
    path.unlink()
    generate(PROMPTS[:1], pipeline=folder, out=tmp_path, device="cpu")
    index = folder / "model_index.json"
    kept = index.read_text()
    index.write_text(kept + "\n")
    with pytest.raises(ValueError, match="other weights"):
        generate(PROMPTS[:1], pipeline=folder, out=tmp_path, device="cpu")
    index.write_text(kept)


def test_an_empty_prompt_between_others_does_not_lose_them(folder, tmp_path):
    prompts = [PROMPTS[0], "  ", PROMPTS[1]]
    report = generate(
        prompts,
        pipeline=folder,
        seeds=[1, 2, 3],
        out=tmp_path / "out",
        sheet=tmp_path / "sheet.png",
        device="cpu",
    )
    assert [path.name for path in report.drawn.values()] == [
        "0000_a-red-apple_1.png",
        "0002_a-green-whale_3.png",
    ]
    assert report.failed == {1: "the prompt is empty"}
    assert Image.open(tmp_path / "sheet.png").width == 3 * 168 + 8


def test_a_prompt_that_fails_while_it_is_drawn_does_not_lose_its_batch(folder, tmp_path):
    # The embedding of one word is not a number in this pipeline, so every picture of a "whale" blows up.
    parts = tiny_sana.components(convert(tiny_sana.stock_transformer(), block_grid=(2, 2)))
    word = parts["tokenizer"]("whale")["input_ids"][-1]
    with torch.no_grad():
        parts["text_encoder"].get_input_embeddings().weight[word] = float("nan")
    MHLASanaPipeline(**parts, default_steps=1, max_sequence_length=8).save_pretrained(tmp_path / "toy")
    report = generate(PROMPTS, pipeline=tmp_path / "toy", out=tmp_path / "out", batch_size=3, device="cpu")
    assert list(report.drawn) == [0, 2]
    assert list(report.failed) == [1] and "NaN" in report.failed[1]
    assert len(list((tmp_path / "out").iterdir())) == 4


def test_a_stock_pipeline_with_a_small_autoencoder_is_not_drawn_at_512_pixels(tmp_path):
    """Stock SANA takes sample size 16 for 512 px, which holds for autoencoders of factor 32 only."""
    tiny_sana.stock_pipeline(tiny_sana.stock_transformer(sample_size=16)).save_pretrained(tmp_path / "toy")
    painter = Painter(tmp_path / "toy", "", torch.device("cpu"), "float32")
    assert painter.defaults["height"] == 64 and not painter.stock_arguments()["use_resolution_binning"]


def test_stock_pipelines_draw_too(tmp_path):
    tiny_sana.stock_pipeline(convert(tiny_sana.stock_transformer(), block_grid=(2, 2))).save_pretrained(
        tmp_path / "toy"
    )
    report = generate(PROMPTS[:1], pipeline=tmp_path / "toy", steps=1, out=tmp_path / "out", device="cpu")
    settings = read_settings(report.drawn[0])
    assert (
        settings["pipeline_class"] == "SanaPipeline"
        and settings["height"] == 32
        and settings["guidance"] == 4.5
    )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"prompts": []}, "no prompt"),
        ({"prompts": ["", " "]}, "no prompt"),
        ({"prompts": "a whale"}, "give a list of strings"),
        ({"prompts": ["a whale", None]}, "give a list of strings"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": -3}, "steps is -3"),
        ({"steps": 1.5}, "steps is 1.5"),
        ({"steps": "3"}, "steps is '3'"),
        ({"steps": 2000}, "the scheduler has 1000"),
        ({"guidance": float("nan")}, "guidance is nan"),
        ({"guidance": float("inf")}, "guidance is inf"),
        ({"guidance": -1.0}, "guidance is -1.0"),
        ({"seeds": [1, 2]}, "2 seeds for 3 prompts"),
        ({"seeds": []}, "0 seeds for 3 prompts"),
        ({"seeds": [-1]}, "seed -1 is out of range"),
        ({"seeds": [2**70]}, "out of range"),
        ({"seeds": [1.5]}, "seed 1.5 is no whole number"),
        ({"height": 30}, "--height 28 or 32"),
        ({"width": 1}, "--width 4"),
        ({"width": 0}, "--width 4"),
        ({"width": 32.0}, "width is 32.0"),
        ({"batch_size": 0}, "batch size is 0"),
        ({"device": "tpu9"}, "unknown device 'tpu9'"),
        ({"device": "meta"}, "give auto, cpu or cuda"),
        ({"device": "cuda:99"}, "device cuda:99 is not there"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
        ({"columns": 0, "sheet": "sheet.png"}, "at least 1 column"),
        (
            {"prompts": ["a whale"] * 77, "columns": 1, "sheet": "s.WEBP"},
            "at most 16383: give more --columns",
        ),
        ({"pipeline": "no-such-pipeline"}, "no pipeline 'no-such-pipeline'"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(folder, tmp_path, monkeypatch, settings, named):
    monkeypatch.chdir(tmp_path)
    arguments = {"prompts": PROMPTS, "pipeline": folder, "out": "new/out", "device": "cpu"} | settings
    with pytest.raises(ValueError) as error:
        generate(arguments.pop("prompts"), **arguments)
    assert named in str(error.value) and "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_an_out_folder_that_cannot_be_written_is_named_first(folder, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for out in (tmp_path / "file", tmp_path / "file" / "sub"):
        with pytest.raises(ValueError, match="is a file; give another folder with --out"):
            generate(PROMPTS, pipeline=folder, out=out, device="cpu")
    with pytest.raises(ValueError, match="give another folder with --sheet"):
        generate(PROMPTS, pipeline=folder, out=tmp_path, sheet=tmp_path / "file" / "sheet.png", device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_system_that_takes_no_files_is_named_before_anything_is_drawn(folder):
    with pytest.raises(ValueError, match="takes no files .*give another folder with --out"):
        generate(PROMPTS, pipeline=folder, out="/proc/somewhere/new", device="cpu")


@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder"])
def test_a_cut_weight_file_is_named(folder, tmp_path, component):
    copy = tmp_path / "toy"
    for path in folder.rglob("*"):
        if path.is_file():
            (copy / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            os.link(path, copy / path.relative_to(folder))
    weights = next((copy / component).glob("*.safetensors"))
    content = weights.read_bytes()[:-100]
    weights.unlink()
    weights.write_bytes(content)
    with pytest.raises(ValueError, match=f"{component}/.* is cut short"):
        generate(PROMPTS, pipeline=copy, out=tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
def test_a_gpu_draws_the_same_picture_from_the_same_seed(folder, tmp_path):
    settings = {"pipeline": folder, "seeds": [5], "dtype": "float32"}
    on_cpu = generate(PROMPTS[:1], out=tmp_path / "cpu", device="cpu", **settings)
    on_gpu = generate(PROMPTS[:1], out=tmp_path / "gpu", device="cuda", **settings)
    assert np.abs(pixels(on_cpu.drawn[0]) - pixels(on_gpu.drawn[0])).mean() < 1
    half = generate(PROMPTS[:1], pipeline=folder, out=tmp_path / "half", device="auto")
    assert read_settings(half.drawn[0])["dtype"] == "bfloat16"
