"""The shipped video pipeline makes what its prompt asks for, in time, on a CPU."""

import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from mhla_diffusion import load_pipeline
from mhla_diffusion.evaluation.moving.prompted import read_prompts
from mhla_diffusion.evaluation.moving.scores import score_clip
from mhla_diffusion.pipelines.videos import read_video

ROOT = Path(__file__).resolve().parents[2]


def test_a_clip_and_a_gif_in_ninety_seconds_that_move_as_asked(tmp_path):
    prompts = read_prompts(ROOT / "eval" / "prompts" / "moving_emoji.jsonl")
    prompt = next(text for text, entry in prompts.items() if (entry.motion, entry.split) == ("up", "heldout"))
    command = [sys.executable, "-m", "mhla_diffusion.cli", "generate", prompt, "--pipeline", "wan-mhla-emoji"]
    command += ["--gif", "--out", str(tmp_path), "--device", "cpu", "--seed", "0"]
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 90
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".gif", ".json", ".mp4"]
    video = read_video(next(tmp_path.glob("*.mp4")))
    assert video.frames.shape == (17, 64, 64, 3) and video.settings["fps"] == 8
    scored = score_clip(video.frames, prompts[prompt], 0)
    assert scored.motion_right and scored.background_right


def test_its_parts_are_those_of_the_card():
    pipe = load_pipeline(ROOT / "pipelines" / "wan-mhla-emoji")
    config = pipe.transformer.config
    assert config.mhla_layers == [1, 2, 4, 5] and list(config.mhla_block_grid) == [3, 5, 5]
    assert config.mhla_gate and config.mhla_local_conv == 3 and config.num_layers == 6
    assert len(pipe.tokenizer) == 885
    card = (ROOT / "pipelines" / "wan-mhla-emoji" / "README.md").read_text(encoding="utf-8")
    for part, words in ((pipe.transformer, "1.9"), (pipe.text_encoder, "0.6"), (pipe.vae, "1.2")):
        count = sum(parameter.numel() for parameter in part.parameters())
        assert f"{count / 1e6:.1f}" == words and f"| {words} million |" in card
    stored = load_file(
        ROOT / "pipelines" / "wan-mhla-emoji" / "transformer" / "diffusion_pytorch_model.safetensors"
    )
    assert {x.dtype for name, x in stored.items() if ".mixing." in name} == {torch.float32}
    assert {x.dtype for name, x in stored.items() if ".to_q." in name} == {torch.bfloat16}
