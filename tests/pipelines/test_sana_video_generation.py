"""`mhla generate` with SANA-Video pipelines: the same names, settings and words as with Wan."""

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, SanaImageToVideoPipeline
from model_checks import stirred
from tiny_sana_video import model
from tiny_sana_video_pipeline import stock_pipeline
from tiny_wan_pipeline import generator

from mhla_diffusion.cli import main
from mhla_diffusion.loading import load_pipeline
from mhla_diffusion.pipelines.generation import generate
from mhla_diffusion.pipelines.video_painter import SanaVideoPainter
from mhla_diffusion.pipelines.videos import read_video, read_video_settings

PROMPTS = ["a red apple", "two blue emoji"]
ASKED = {"steps": 2, "frames": 5, "height": 32, "width": 64, "guidance": 3.0, "device": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A stock SANA-Video pipeline with our transformer at toy size, on disk."""
    path = tmp_path_factory.mktemp("pipelines") / "toy"
    stock_pipeline(stirred(model())).save_pretrained(path)
    return path


def test_videos_have_settings_and_are_the_pipelines_own(folder, tmp_path):
    report = generate(PROMPTS, pipeline=folder, seeds=[4, 5], out=tmp_path, batch_size=2, fps=8, **ASKED)
    names = ["0000_a-red-apple_4.mp4", "0001_two-blue-emoji_5.mp4"]
    assert [path.name for path in report.drawn.values()] == names and not report.failed
    settings = read_video_settings(tmp_path / names[1])
    expected = {
        "prompt": "two blue emoji", "seed": 5, "steps": 2, "guidance": 3.0, "height": 32, "width": 64, "frames": 5,
        "fps": 8, "pipeline_class": "SanaVideoPipeline", "pipeline": "toy", "flow_shift": 8.0, "dtype": "float32",
        "vae_dtype": "float32", "negative_prompt": "", "scheduler": "DPMSolverMultistepScheduler",
    }  # fmt: skip
    assert expected.items() <= settings.items()
    # What the pipeline does by itself with the same noise.
    pipe = load_pipeline(folder)
    pipe.set_progress_bar_config(disable=True)
    size = {name: ASKED[name] for name in ("frames", "height", "width")}
    alone = pipe(
        "two blue emoji",
        num_inference_steps=2,
        guidance_scale=3.0,
        generator=generator(5),
        use_resolution_binning=False,
        output_type="np",
        **size,
    ).frames[0]
    video = read_video(tmp_path / names[1])
    assert video.frames.shape == (5, 32, 64, 3) and video.fps == 8
    assert np.abs(video.frames / 255 - alone).mean() * 255 < 12
    again = generate(PROMPTS, pipeline=folder, seeds=[4, 5], out=tmp_path, fps=8, **ASKED)
    assert list(again.skipped) == [0, 1] and not again.drawn
    with pytest.raises(ValueError, match="is another video .*frames 5 there, 9 asked"):
        generate(PROMPTS, pipeline=folder, seeds=[4, 5], out=tmp_path, fps=8, **(ASKED | {"frames": 9}))


@pytest.mark.parametrize(("sample_size", "size"), [(30, (480, 832)), (22, (704, 1280)), (7, (480, 832))])
def test_the_defaults_are_those_that_the_published_models_are_made_for(tmp_path, sample_size, size):
    stock_pipeline(stirred(model(sample_size=sample_size))).save_pretrained(tmp_path / "toy")
    painter = SanaVideoPainter(tmp_path / "toy", "", torch.device("cpu"), "bfloat16")
    expected = {"steps": 50, "guidance": 6.0, "height": size[0], "width": size[1], "frames": 81, "fps": 16}
    assert painter.defaults == expected and painter.size_multiple == (32, 32)
    assert (painter.pipe.transformer.dtype, painter.pipe.vae.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--frames", "80"], "frames=80 is not a multiple of 4 and one: use 77 or 81"),
        (["--height", "540"], "height is 540: it must be a multiple of 32, for example --height 512 or 544"),
        (["--steps", "2000"], "the scheduler has 1000"),
        (["--width", "1056"], "66 columns of tokens, but the rotary table holds 64 positions on each axis"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_made(folder, tmp_path, monkeypatch, capsys, options, told):
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "a", "--pipeline", str(folder), "--device", "cpu", *options]) == 2
    errors = [text for text in capsys.readouterr().err.splitlines() if text.startswith("mhla:")]
    assert len(errors) == 1 and told in errors[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ("layer", "after step 1 of 2, first in transformer.transformer_blocks.1"),
        ("stock layer", "after step 1 of 2, first in transformer.transformer_blocks.1"),
        ("word", "after step 1 of 2, and so are the embeddings"),
        ("decoder", "the videos that the decoder made of them"),
    ],
)
def test_a_video_that_blows_up_says_where(folder, tmp_path, part, told):
    pipe = load_pipeline(folder)
    if part == "stock layer":
        pipe = stock_pipeline()
    with torch.no_grad():
        if "layer" in part:
            pipe.transformer.transformer_blocks[1].ff.conv_point.weight.fill_(float("inf"))
        elif part == "word":
            pipe.text_encoder.embed_tokens.weight[pipe.tokenizer("whale")["input_ids"][-1]] = float("nan")
        else:
            pipe.vae.decoder.conv_out.bias.fill_(float("nan"))
    pipe.save_pretrained(tmp_path / "toy")
    prompts = ["a whale", "a red apple"] if part == "word" else ["a whale"]
    report = generate(prompts, pipeline=tmp_path / "toy", out=tmp_path / "out", batch_size=2, **ASKED)
    assert told in report.failed[0] and list(report.drawn) == list(range(1, len(prompts)))


def test_a_pipeline_that_wants_a_picture_is_refused_before_it_is_loaded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", None)
    parts = stock_pipeline(stirred(model())).components | {"scheduler": FlowMatchEulerDiscreteScheduler()}
    SanaImageToVideoPipeline(**parts).save_pretrained(tmp_path / "toy")
    line = [
        "generate",
        "a",
        "--pipeline",
        str(tmp_path / "toy"),
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(line) == 2
    assert "a text-to-video one (Wan, SANA-Video)" in capsys.readouterr().err
