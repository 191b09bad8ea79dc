"""The full-size recipes: their models without memory, and the program that rehearses their steps, at toy size."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights

from mhla_diffusion import (
    MHLADiTTransformer2DModel,
    MHLASanaTransformer2DModel,
    MHLAWanTransformer3DModel,
)
from mhla_diffusion.models.dit_presets import dit_config
from mhla_diffusion.models.sana_presets import sana_config
from mhla_diffusion.models.wan_presets import wan_config
from mhla_diffusion.training.parameters import parameter_groups, trainable
from mhla_diffusion.training.recipe import load_recipe
from mhla_diffusion.training.rehearsal import Rehearsal

WAN = wan_config("2.1-t2v-1.3B")
ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "train" / "recipes"
TOY = {
    "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "cross_attention_dim": 16,
    "num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "caption_channels": 8,
}  # fmt: skip


def on_meta(name: str, base: dict | None = None, size: int | None = None):
    """The recipe, and its transformer on the meta device."""
    recipe = load_recipe(RECIPES / f"{name}.toml")
    fields = recipe.model.transformer or base
    if recipe.model.convert is not None:
        options = recipe.model.convert
        fields = {
            **fields, "mhla_block_grid": options.block_grid, "mhla_layers": options.layers,
            "mhla_gate": options.gate, "mhla_local_conv": options.local_conv,
        }  # fmt: skip
    cls = MHLADiTTransformer2DModel if "num_embeds_ada_norm" in fields else MHLASanaTransformer2DModel
    cls = MHLAWanTransformer3DModel if "freq_dim" in fields else cls
    with init_empty_weights(include_buffers=False):
        return recipe, cls(**fields)


@pytest.mark.parametrize(
    ("name", "base", "millions"),
    [
        ("dit-s2-256", None, (37, 60)),  # 33 published, gate, and the embedders of eleven further layers
        ("dit-xl2-mhla", dit_config("XL/2", 512), (785, 795)),  # 675, 75 of embedders, 37 of gates
        ("dit-xl2-mhla", dit_config("XL/2", 256), (785, 795)),
        ("sana-0.6b-mhla", sana_config("0.6B", 1024), (580, 600)),
        ("wan-1.3b-mhla", WAN, (1485, 1500)),  # 1419 published, 71 of gates
    ],
)
def test_full_size_recipes_build_and_group(name, base, millions):
    recipe, model = on_meta(name, base)
    assert all(parameter.is_meta for parameter in model.parameters())
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert millions[0] < count < millions[1]
    for train in ("mixing", "attention", "all"):
        names = trainable(model, train)
        assert sum(".mixing." in n for n in names) == model.config.num_layers
    parameters = dict(model.named_parameters())
    groups = parameter_groups(parameters, recipe.optimizer)
    mixing = [group for group in groups if group["kind"] == "mixing"]
    assert len(mixing) == 1 and mixing[0]["weight_decay"] == 0
    blocks = math.prod(model.config.mhla_block_grid)
    assert mixing[0]["lr"] == pytest.approx(recipe.optimizer.mixing_lr / blocks)


def test_published_settings_of_the_recipes():
    s2 = load_recipe(RECIPES / "dit-s2-256.toml")
    published = dit_config("S/2", 256)
    assert {k: s2.model.transformer[k] for k in published} == published
    assert (s2.run.steps, s2.run.batch_size, s2.optimizer.lr, s2.ema.decay) == (400000, 256, 1e-4, 0.9999)
    assert s2.optimizer.mixing_lr / 16 == pytest.approx(1e-4)
    sana = load_recipe(RECIPES / "sana-0.6b-mhla.toml")
    assert (sana.run.steps, sana.run.batch_size, sana.model.train) == (40000, 256, "all")
    wan = load_recipe(RECIPES / "wan-1.3b-mhla.toml")
    assert (wan.data.sizes, wan.data.fps, wan.optimizer.lr) == ([[81, 480, 800]], 16, 2e-5)
    assert (wan.flow.weighting, wan.flow.shift, wan.optimizer.max_grad_norm) == ("logit_normal", 3.0, 0.1)


@pytest.mark.parametrize("train", ["all", "lora+mixing"])
@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("dit-xl2-mhla", {"num_embeds_ada_norm": 10, "out_channels": 8}),
        ("sana-0.6b-mhla", {"in_channels": 4, "out_channels": 4}),
        ("dit-s2-256", None),
    ],
)
def test_a_rehearsal_is_the_recipe_on_random_numbers(name, base, train):
    fresh = [f"model.transformer.{k}={v}" for k, v in TOY.items() if "c" not in k[0] and k[:8] != "num_cros"]
    settings = [
        "run.batch_size=2", "run.device=cpu", "run.compile=false", f'model.train="{train}"', "run.mixed_precision=no",
        "data.max_sequence_length=6", *(fresh if base is None else []),
    ]  # fmt: skip
    if base is not None and "num_embeds_ada_norm" in base:
        base = {k: v for k, v in (TOY | base).items() if "cross" not in k and k != "caption_channels"}
    elif base is not None:
        base = TOY | base
    before = sorted(ROOT.glob("runs/*"))
    job = Rehearsal(load_recipe(RECIPES / f"{name}.toml", settings), base, pictures=4)
    row = job.measure(steps=4)
    assert row["finite"] and len(row["losses"]) == 4 and row["step_ms"] > 0 and row["peak_gb"] is None
    assert (row["trained_parameters"] < row["parameters"]) == (train != "all")
    assert sorted(ROOT.glob("runs/*")) == before


@pytest.mark.parametrize(
    "setting", ["model.convert.layers=1/2", 'model.train="lora+mixing"', "run.batch_size=2"]
)
def test_a_rehearsal_of_wan_takes_videos(setting):
    base = WAN | {
        "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "text_dim": 8, "freq_dim": 16,
        "ffn_dim": 16,
    }  # fmt: skip
    settings = [
        "run.batch_size=1", "run.device=cpu", "run.compile=false", "run.mixed_precision=no",
        "model.convert.block_grid=[2,2,3]", "data.sizes=[[9,64,96]]", "data.max_sequence_length=6", setting,
    ]  # fmt: skip
    row = Rehearsal(load_recipe(RECIPES / "wan-1.3b-mhla.toml", settings), base, pictures=3).measure(steps=2)
    assert row["finite"] and row["latents"] == [16, 3, 8, 12]
    assert (row["trained_parameters"] < row["parameters"]) == ("lora" in setting)


def test_a_rehearsal_that_breaks_down_says_so():
    settings = ["run.batch_size=2", "run.device=cpu", "run.compile=false", "run.mixed_precision=no"]
    settings += [
        f"model.transformer.{k}={v}" for k, v in TOY.items() if k in ("num_layers", "attention_head_dim")
    ]
    job = Rehearsal(load_recipe(RECIPES / "dit-s2-256.toml", settings), pictures=2)
    job.feed.latents[0].fill_(float("nan"))
    assert not job.measure(steps=2)["finite"]


def test_the_program_writes_its_rows(tmp_path):
    line = [
        "--only",
        "dit-s2-256",
        "--batch",
        "1",
        "--steps",
        "2",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "o.json"),
    ]
    small = ["--set", "model.transformer.num_layers=1", "run.mixed_precision=no"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "train" / "full_size_steps.py"), *line, *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "o.json").read_text())
    assert [row["name"] for row in facts["rows"]] == ["dit-s2-256"] and facts["rows"][0]["finite"]
    assert "ms a step of 1 pictures" in done.stdout and "finite" in done.stdout


@pytest.mark.gpu
def test_a_compiled_rehearsal_on_the_gpu_measures_memory():
    settings = ["run.batch_size=8", "run.device=cuda", "model.transformer.num_layers=2"]
    row = Rehearsal(load_recipe(RECIPES / "dit-s2-256.toml", settings)).measure(steps=6)
    assert row["finite"] and row["peak_gb"] > 0 and row["compiled"] == "layers"
    assert torch.isfinite(torch.tensor(row["losses"])).all()
