"""Two processes (gloo) train like one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mhla_diffusion.training import run

PROGRAM = Path(__file__).resolve().parents[2] / "train" / "train.py"


def launch(recipe, *overrides, processes=2):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(processes)]
    command += [
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--main_process_port",
        "0",
        str(PROGRAM),
        str(recipe),
    ]
    for override in overrides:
        command += ["--set", override]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parents[1])}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def test_two_processes_equal_one(recipe_file, tmp_path):
    # Adam divides by the gradient's size: rounding of a near-zero gradient becomes a whole step, but for this eps.
    eps = "optimizer.eps=0.01"
    done = launch(recipe_file("pair"), eps)
    assert done.returncode == 0, done.stderr[-3000:]
    run(recipe_file("single"), [eps])
    run(recipe_file("accumulated"), [eps, "run.gradient_accumulation=2"])
    for name in ("weights", "ema", "optimizer"):
        files = {
            kind: load_file(tmp_path / kind / "checkpoints" / "step-00000006" / f"{name}.safetensors")
            for kind in ("single", "pair", "accumulated")
        }
        for key, value in files["single"].items():
            torch.testing.assert_close(files["pair"][key], value, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(files["accumulated"][key], value, rtol=1e-4, atol=1e-6)
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / kind / "metrics.jsonl").read_text().splitlines()]
        for kind in ("single", "pair")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    again = subprocess.run(
        [sys.executable, PROGRAM, recipe_file("single"), "--set", eps, "run.log_every=1"],
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[1])}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr  # as with `mhla train`, the same line goes on with the run
    assert "6 of 6 steps done" in again.stdout


def test_two_processes_distil_like_one(adapt, stock, tmp_path):
    options = [
        f"model.base={stock}", "model.new_classes=true", "model.convert.block_grid=[2, 2]", "distill.steps=4",
        "run.steps=2", "run.log_every=1", "optimizer.eps=0.01", "checkpoint.every=2",
    ]  # fmt: skip
    done = launch(adapt("pair"), *options)
    assert done.returncode == 0, done.stderr[-3000:]
    run(adapt("single"), options)
    for folder, step in (("distillation", 4), ("checkpoints", 2)):
        pair, single = (
            load_file(tmp_path / kind / folder / f"step-{step:08d}" / "weights.safetensors")
            for kind in ("pair", "single")
        )
        for key, value in single.items():
            torch.testing.assert_close(pair[key], value, rtol=1e-4, atol=1e-6)
    pair, single = (
        [
            json.loads(line)["layers"]
            for line in (tmp_path / kind / "distillation.jsonl").read_text().splitlines()
        ]
        for kind in ("pair", "single")
    )
    assert len(pair) == len(single) == 4
    for left, right in zip(pair, single, strict=True):
        assert left == pytest.approx(right, rel=1e-4)
