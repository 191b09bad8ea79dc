import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from programs import load_program

from mhla_diffusion.training.components import build_components
from mhla_diffusion.training.data import open_source
from mhla_diffusion.training.latents import caption_table, load_or_encode
from mhla_diffusion.training.losses import FlowLoss
from mhla_diffusion.training.recipe import load_recipe
from mhla_diffusion.training.validation import fixed_noise, flow_losses

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def program(name):
    return load_program(f"train/{name}.py")


@pytest.fixture
def everything(recipe_file):
    recipe = load_recipe(recipe_file())
    parts = build_components(recipe)
    encoded = load_or_encode(open_source(recipe.data, 4, 0), parts, recipe.data, CPU)
    return (
        FlowLoss(parts.transformer, parts.text_encoder),
        encoded,
        caption_table(encoded, parts, True, 12, CPU),
    )


def test_flow_losses_do_not_depend_on_the_batch_size_or_the_random_state(everything):
    module, encoded, table = everything
    whole = flow_losses(module, encoded, table, device=CPU)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    parts = flow_losses(module, encoded, table, device=CPU, batch_size=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert whole["loss"] == pytest.approx(parts["loss"], rel=1e-5)
    assert whole["pictures"] == 10 and len(whole["sigma"]) == 16
    assert whole["mean"] == pytest.approx(np.mean(whole["loss"]))
    assert module.training  # as it was


def test_flow_losses_are_the_definition(everything):
    module, encoded, table = everything
    result = flow_losses(module, encoded, table, device=CPU, levels=2, seed=3)
    assert result["sigma"] == [0.25, 0.75]
    noise = torch.stack([fixed_noise(i, encoded.latents[0].shape[1:], 3) for i in range(10)])
    entry = table.choice[0][:, 0]
    for sigma, loss in zip(result["sigma"], result["loss"], strict=True):
        with torch.no_grad():
            direct = module(
                encoded.latents[0], noise, torch.full((10,), sigma), table.values[entry], table.mask[entry]
            )
        assert loss == pytest.approx(direct.mean().item(), rel=1e-5)
    other = flow_losses(module, encoded, table, device=CPU, levels=2, seed=4)
    assert other["loss"] != result["loss"]


def test_twins_train_measure_and_report(recipe_file, tmp_path, monkeypatch):
    """Two twins on the sample of the emoji set, then the merged table; a second call trains nothing."""
    twins = program("twins")
    path = recipe_file()
    text = path.read_text().replace('kind = "folder"', 'kind = "emoji"\nbackgrounds = 1\ncompositions = 8')
    lines = [line for line in text.splitlines() if not line.startswith(("path =", "mhla_"))]
    lines.insert(lines.index("[data]") + 1, f'path = "{ROOT / "assets" / "emoji_sample.tar"}"')
    path.write_text("\n".join(lines))
    out, report = tmp_path / "twins", tmp_path / "report"
    arguments = [
        "twins.py",
        str(path),
        "--out",
        str(out),
        "--only",
        "softmax:0,mhla+cpe+gate:0",
        "--set",
        "run.steps=2",
    ]
    monkeypatch.setattr("sys.argv", arguments)
    assert twins.main() == 0
    facts = json.loads((out / "mhla+cpe+gate-0.json").read_text())
    assert facts["flow_loss"].keys() == {"train", "heldout", "val"} and facts["steps"] == 2
    assert facts["settings"]["model"]["transformer"]["mhla_block_grid"] == [4, 4]
    assert len(facts["prompts"]) == 12 and Image.open(out / "softmax-0.png").size == (12 * 34 - 2, 32)
    softmax = json.loads((out / "softmax-0.json").read_text())
    assert softmax["settings"]["model"]["transformer"]["mhla_other_layers"] == "softmax"
    assert softmax["flow_loss"]["val"]["pictures"] == facts["flow_loss"]["val"]["pictures"] > 0

    stamps = {p: p.stat().st_mtime_ns for p in out.glob("*.json")}
    assert twins.main() == 0
    assert stamps == {p: p.stat().st_mtime_ns for p in out.glob("*.json")}

    monkeypatch.setattr("sys.argv", ["twins.py", "--report", "--out", str(out), "--report-to", str(report)])
    assert twins.main() == 0
    merged = json.loads((report / "twins_emoji.json").read_text())
    assert [r["twin"] for r in merged["runs"]] == ["softmax", "mhla+cpe+gate"]
    assert merged["common"]["settings.run.steps"] == 2 and len(merged["common"]["data.sha256"]) == 64
    assert merged["runs"][1]["settings.model.transformer.mhla_gate"] is True
    assert "| softmax | 0 |" in (report / "twins_emoji.md").read_text()
    assert (report / "twins_emoji.png").is_file()


def test_unknown_twin(monkeypatch, capsys, tmp_path):
    twins = program("twins")
    monkeypatch.setattr("sys.argv", ["twins.py", "--only", "mla:0", "--out", str(tmp_path / "t")])
    assert twins.main() == 2
    assert "no twin 'mla'; choose among softmax, linear, mhla" in capsys.readouterr().err
