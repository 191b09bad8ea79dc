"""`mhla generate` with Wan pipelines: videos with the same names, settings and resuming as pictures have."""

import json

import numpy as np
import pytest
import tiny_wan_pipeline
import torch
from model_checks import stirred
from PIL import Image
from tiny_wan import model

from mhla_diffusion.cli import main
from mhla_diffusion.pipelines.generation import generate
from mhla_diffusion.pipelines.video_painter import VideoPainter
from mhla_diffusion.pipelines.videos import read_video, read_video_settings
from mhla_diffusion.pipelines.wan import MHLAWanPipeline

PROMPTS = ["a red apple", "two blue emoji"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A whole text-to-video pipeline at toy size, 5 frames of 32 x 48, on disk."""
    path = tmp_path_factory.mktemp("pipelines") / "toy"
    MHLAWanPipeline(
        **tiny_wan_pipeline.components(),
        default_steps=2,
        default_guidance_scale=2.0,
        default_height=32,
        default_width=48,
        default_frames=5,
        default_fps=8,
        max_sequence_length=8,
    ).save_pretrained(path)
    return path


def test_videos_have_settings_and_are_the_pipelines_own(folder, tmp_path):
    report = generate(
        PROMPTS, pipeline=folder, seeds=[4, 5], out=tmp_path, device="cpu", batch_size=2, gif=True
    )
    names = ["0000_a-red-apple_4", "0001_two-blue-emoji_5"]
    assert [path.name for path in report.drawn.values()] == [
        f"{name}.mp4" for name in names
    ] and not report.failed
    assert len(list(tmp_path.iterdir())) == 6
    settings = read_video_settings(tmp_path / f"{names[1]}.mp4")
    assert json.loads((tmp_path / f"{names[1]}.json").read_text()) == settings
    expected = {
        "prompt": "two blue emoji", "seed": 5, "steps": 2, "guidance": 2.0, "height": 32, "width": 48, "frames": 5,
        "fps": 8, "pipeline_class": "MHLAWanPipeline", "pipeline": "toy", "flow_shift": 3.0, "dtype": "float32",
        "vae_dtype": "float32", "negative_prompt": "", "scheduler": "FlowMatchEulerDiscreteScheduler",
        "video": {"frames": 5, "height": 32, "width": 48, "fps": 8},
    }  # fmt: skip
    assert expected.items() <= settings.items() and settings["versions"]["torch"]
    pipe = MHLAWanPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    alone = pipe("two blue emoji", generator=torch.Generator().manual_seed(5)).frames[0]
    for suffix, near in ((".mp4", 12), (".gif", 8)):
        video = read_video(tmp_path / f"{names[1]}{suffix}")
        assert video.frames.shape == (5, 32, 48, 3) and video.fps == 8 and video.settings == settings
        assert np.abs(video.frames / 255 - alone).mean() * 255 < near


def test_it_goes_on_where_it_was_and_never_replaces(folder, tmp_path):
    first = generate(PROMPTS, pipeline=folder, out=tmp_path, device="cpu")
    before = first.drawn[0].read_bytes()
    first.drawn[1].unlink()
    # What is the default may be asked for by name.
    asked = {"steps": 2, "frames": 5, "fps": 8.0, "height": 32}
    second = generate(PROMPTS, pipeline=folder, out=tmp_path, device="cpu", gif=True, **asked)
    assert list(second.drawn) == [1] and list(second.skipped) == [0] and first.drawn[0].read_bytes() == before
    assert first.drawn[0].with_suffix(".gif").exists()
    for change, told in (({"frames": 9}, "frames 5 there, 9 asked"), ({"fps": 4}, "fps 8 there, 4 asked")):
        with pytest.raises(ValueError, match=f"is another video .*{told}"):
            generate(PROMPTS, pipeline=folder, out=tmp_path, device="cpu", **change)


def test_the_command_makes_other_sizes_and_lengths_and_a_sheet(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = [
        "generate",
        *PROMPTS,
        "--pipeline",
        str(folder),
        "--device",
        "cpu",
        "--frames",
        "1",
        "--fps",
        "12.5",
    ]
    assert main([*line, "--height", "48", "--width", "32", "--steps", "1", "--sheet", "sheet.png"]) == 0
    assert capsys.readouterr().out == "2 drawn in outputs, contact sheet in sheet.png\n"
    video = read_video(tmp_path / "outputs" / "0000_a-red-apple_0.mp4")
    assert video.frames.shape == (1, 48, 32, 3) and video.fps == 12.5
    assert Image.open("sheet.png").width == 2 * 168 + 8


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--frames", "80"], "frames=80 is not a multiple of 4 and one: use 77 or 81"),
        (["--frames", "0"], "frames is 0: give a whole number"),
        (["--fps", "-1"], "fps is -1.0: give the frames of a second"),
        (["--fps", "60", "--gif"], "leave --gif out"),
        (["--height", "540"], "height is 540: it must be a multiple of 16, for example --height 528 or 544"),
        (["--width", "10"], "width is 10: it must be a multiple of 16, for example --width 16"),
        (["--steps", "2000"], "the scheduler has 1000"),
        (["--width", "1040"], "65 columns of tokens, but the rotary table holds 64 positions on each axis"),
        (["--frames", "257"], "65 frames of tokens, but the rotary table holds 64 positions on each axis"),
        (
            ["--offload", "model"],
            "--offload model saves memory of a GPU, and this draws on the cpu: leave it out",
        ),
        (["--offload", "disk"], "unknown offload 'disk': give model or sequential"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_made(folder, tmp_path, monkeypatch, capsys, options, told):
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "a", "--pipeline", str(folder), "--device", "cpu", *options]) == 2
    errors = [text for text in capsys.readouterr().err.splitlines() if text.startswith("mhla:")]
    assert len(errors) == 1 and told in errors[0]
    assert list(tmp_path.iterdir()) == []


def test_options_of_videos_are_refused_for_pictures(tmp_path, capsys):
    assert main(["generate", "a", "--frames", "5", "--out", str(tmp_path / "out")]) == 2
    assert "--frames is for videos, and this pipeline draws pictures" in capsys.readouterr().err


def test_a_video_that_blows_up_does_not_lose_the_others(folder, tmp_path):
    pipe = MHLAWanPipeline.from_pretrained(folder)
    word = pipe.tokenizer("whale")["input_ids"][-1]
    with torch.no_grad():
        pipe.text_encoder.shared.weight[word] = float("nan")
    pipe.save_pretrained(tmp_path / "toy")
    report = generate(
        ["a whale", "a red apple"],
        pipeline=tmp_path / "toy",
        out=tmp_path / "out",
        device="cpu",
        batch_size=2,
    )
    assert list(report.drawn) == [1] and "after step 1 of 2, and so are the embeddings" in report.failed[0]


def test_stock_pipelines_make_videos_too_and_the_decoder_stays_exact(tmp_path):
    tiny_wan_pipeline.stock_pipeline(stirred(model())).save_pretrained(tmp_path / "toy")
    asked = {"steps": 1, "frames": 5, "height": 32, "width": 32, "device": "cpu"}
    report = generate(["a"], pipeline=tmp_path / "toy", out=tmp_path / "out", **asked)
    settings = read_video_settings(report.drawn[0])
    assert (settings["pipeline_class"], settings["fps"], settings["guidance"]) == ("WanPipeline", 16, 5.0)
    painter = VideoPainter(tmp_path / "toy", "", torch.device("cpu"), "bfloat16")
    assert type(painter.pipe) is MHLAWanPipeline and painter.pipe.transformer.dtype == torch.bfloat16
    assert painter.pipe.vae.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["model", "sequential"])
def test_with_weights_off_the_gpu_the_videos_are_the_same(folder, tmp_path, offload):
    made = [
        generate(
            PROMPTS[:1], pipeline=folder, out=tmp_path / str(way), device="cuda", dtype="float32", offload=way
        )
        for way in (None, offload)
    ]
    one, other = (read_video(report.drawn[0]).frames.astype(int) for report in made)
    assert np.abs(one - other).max() <= 3


def vbench_plan(folder, *options):
    records = [
        {"prompt_en": "a red apple", "dimension": ["motion_smoothness"]},
        {"prompt_en": "two blue emoji, " + "very " * 40 + "long", "dimension": ["temporal_flickering"]},
    ]
    (folder / "info.json").write_text(json.dumps(records))
    line = ["eval", "vbench", "plan", str(folder / "plan.json"), "--prompts", str(folder / "info.json")]
    assert main([*line, "--samples", "2", "--flicker-samples", "1", "--seed", "5", *options]) == 0
    return json.loads((folder / "plan.json").read_text())["videos"]


def test_a_vbench_plan_is_drawn_whole_and_goes_on(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = vbench_plan(tmp_path)
    line = ["generate", "--vbench-plan", "plan.json", "--pipeline", str(folder), "--device", "cpu"]
    assert main([*line, "--out", "videos"]) == 0
    assert sorted(path.name for path in (tmp_path / "videos").iterdir()) == sorted(r["file"] for r in rows)
    assert "a red apple-1.mp4" in [row["file"] for row in rows] and len(rows[2]["file"]) > 220
    for row in rows:
        settings = read_video_settings(tmp_path / "videos" / row["file"])
        assert (settings["prompt"], settings["seed"]) == (row["prompt"], row["seed"])
    assert [row["seed"] for row in rows] == [5, 6, 5]
    check = ["eval", "vbench", "check", "videos", "--plan", "plan.json", "--fps", "8", "--size", "48", "32"]
    assert main(check) == 0
    # The same as a video of its own.
    alone = generate(["a red apple"], pipeline=folder, seeds=[6], out=tmp_path / "alone", device="cpu")
    frames = [read_video(path).frames for path in (alone.drawn[0], tmp_path / "videos" / "a red apple-1.mp4")]
    assert (frames[0] == frames[1]).all()
    (tmp_path / "videos" / rows[1]["file"]).unlink()
    capsys.readouterr()
    assert main([*line, "--out", "videos"]) == 0
    assert capsys.readouterr().out == "1 drawn, 2 there already in videos\n"
    assert main([*line, "--out", "videos", "--steps", "1"]) == 2
    assert "steps 2 there, 1 asked" in capsys.readouterr().err


def test_a_longer_prompt_is_drawn_under_the_name_of_the_original(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "long.txt").write_text("a red apple on a table\ntwo emoji\n")
    rewritten = ["--rewritten", "long.txt", "--dimensions", "motion_smoothness"]
    assert len(vbench_plan(tmp_path, *rewritten)) == 2
    line = ["generate", "--vbench-plan", "plan.json", "--pipeline", str(folder), "--device", "cpu"]
    assert main([*line, "--out", "videos"]) == 0
    names = sorted(path.name for path in (tmp_path / "videos").iterdir())
    assert names == ["a red apple-0.mp4", "a red apple-1.mp4"]
    assert (
        read_video_settings(tmp_path / "videos" / "a red apple-0.mp4")["prompt"] == "a red apple on a table"
    )


def test_what_a_plan_cannot_be_drawn_with_is_named_before_anything_is_drawn(
    folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    vbench_plan(tmp_path)
    line = ["generate", "--vbench-plan", "plan.json", "--pipeline", str(folder), "--out", "videos"]
    for more, told in (
        (["--seed", "3"], "leave --seed out"),
        (["a prompt"], "give either prompts or a file"),
        (["--prompts", "x.txt"], "give either prompts or a file"),
    ):
        assert main([*line[:3], *more, *line[3:]] if more[0][0] != "-" else [*line, *more]) == 2
        assert told in capsys.readouterr().err
    assert main([*line[:3], "--out", "pictures"]) == 2  # with the default pipeline
    assert "plan.json is a plan of videos, and sana-mhla-emoji makes none of texts" in capsys.readouterr().err
    for change, told in (
        ({"file": "../a.mp4"}, "cannot be the name of a file here"),
        ({"file": "a.gif"}, "end in .mp4"),
        ({"file": "a red apple-1.mp4"}, "there twice"),
        ({"seed": 1.5}, "no plan of this version"),
        ({"dimensions": ["motion"]}, "no plan of this version"),
    ):
        vbench_plan(tmp_path)
        plan = json.loads((tmp_path / "plan.json").read_text())
        plan["videos"][0] |= change
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        capsys.readouterr()
        assert main(line) == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "videos").exists()
    with pytest.raises(ValueError, match="1 file names for 2 prompts"):
        generate(PROMPTS, pipeline=folder, names=["a.mp4"], device="cpu", out=tmp_path / "videos")
