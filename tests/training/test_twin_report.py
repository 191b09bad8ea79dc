import copy
import json
from pathlib import Path

import pytest
from PIL import Image

from mhla_diffusion.training.recipe import load_recipe
from mhla_diffusion.training.twin_report import write_report

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "eval" / "results" / "twins_emoji.json"
PROMPTS = ["a red apple", "a whale"]


def result(twin, seed, loss):
    measured = {"sigma": [0.25, 0.75], "loss": [loss, loss], "mean": loss, "pictures": 3, "noise_seed": 0}
    run = {"name": f"{twin}-{seed}", "out": f"/somewhere/runs/{twin}-{seed}", "seed": seed, "batch_size": 8}
    return {
        "twin": twin,
        "seed": seed,
        "flow_loss": {split: copy.deepcopy(measured) for split in ("train", "heldout", "val")},
        "parameters": {"transformer": 1234, "text_encoder": 5},
        "steps": 7,
        "images_per_second": float("nan"),
        "prompts": PROMPTS,
        "environment": {"torch": "9.9", "device": "cpu: toy"},
        "settings": {
            "run": run | {"max_minutes": 1.0 + seed},
            "model": {"base": "pipelines/base", "transformer": {"mhla_gate": twin == "b"}},
            "data": {"path": "/somewhere/else/set.tar", "cache": f"/tmp/latents-{twin}"},
            "sample": {"guidance": 9.0},
        },
    }


@pytest.fixture
def write(tmp_path):
    def make(results, **arguments):
        source, target = tmp_path / "twins", tmp_path / "report"
        source.mkdir(exist_ok=True)
        for number, facts in enumerate(results):
            stem = f"{facts['twin']}-{facts['seed']}"
            (source / f"{stem}.json").write_text(json.dumps(facts))
            Image.new("RGB", (66, 32), (80 * number, 0, 0)).save(source / f"{stem}.png")
        page = write_report(source, target, ["b", "a"], **arguments)
        return (
            page,
            json.loads((target / "twins_emoji.json").read_text()),
            Image.open(target / "twins_emoji.png"),
        )

    return make


def test_runs_in_order_with_the_mean_and_spread_of_the_seeds(write):
    results = [result("a", 0, 0.5), result("a", 1, 0.54), result("b", 0, 0.25)]
    page, merged, sheet = write(results, splits={"a whale": "heldout"}, remarks=["By hand."])
    assert [(run["twin"], run["seed"]) for run in merged["runs"]] == [("b", 0), ("a", 0), ("a", 1)]
    assert "| a | 1 | 1,234 | 0.5400 | 0.5400 | 0.5400 |" in page
    assert "| a | 2 | 0.5200, 0.0400 | 0.5200, 0.0400 | 0.5200, 0.0400 |" in page and "| b | 1 |" not in page
    assert "7 steps of 8 pictures" in page and "cpu: toy" in page and "train 3, heldout 3, val 3" in page
    assert "\nBy hand.\n" in page and merged["remarks"] == ["By hand."]
    assert "Not the same" not in page
    colours = [sheet.convert("RGB").getpixel((160, 68 + 36 * row + 5))[0] for row in range(3)]
    assert colours == [160, 0, 80]


def test_the_header_of_the_sheet_has_room_for_the_whole_prompt(write):
    facts = result("a", 0, 0.5) | {"prompts": ["a flat face with hand over mouth moving down and right"]}
    _, _, sheet = write([facts])
    above = sheet.convert("L").crop((150, 68, sheet.width, sheet.height - 36))
    assert sheet.height > 68 + 36 and above.getextrema()[0] < 64  # letters where the row would have been


def test_common_facts_stand_once_and_no_place_of_a_machine_remains(write):
    page, merged, _ = write([result("a", 0, 0.5), result("b", 0, 0.25)])
    assert merged["common"]["settings.data.path"] == "set.tar"
    assert merged["common"]["settings.model.base"] == "pipelines/base"
    assert merged["common"]["flow_loss.val.sigma"] == [0.25, 0.75]
    assert merged["runs"][1]["settings.model.transformer.mhla_gate"] is False
    text = json.dumps(merged) + page
    for absent in ("somewhere", "/tmp", "max_minutes", "guidance", "NaN"):
        assert absent not in text


@pytest.mark.parametrize("path", ["/a/b/set.tar", "C:\\b\\set.tar", "\\\\host\\b\\set.tar", "~/b/set.tar"])
def test_absolute_paths_keep_their_last_part(write, path):
    facts = result("a", 0, 0.5)
    facts["settings"]["data"]["path"] = path
    assert write([facts])[1]["common"]["settings.data.path"] == "set.tar"


def test_what_else_differs_is_said(write):
    other = result("b", 0, 0.25)
    other["environment"]["device"] = "cpu: another"
    other["settings"]["run"]["batch_size"] = 9
    assert (
        "Not the same in all runs, beside attention and seed: environment.device, settings.run.batch_size."
        in write([result("a", 0, 0.5), other])[0]
    )


def test_nothing_to_report(tmp_path):
    with pytest.raises(ValueError, match="holds no twin results; train some first"):
        write_report(tmp_path, tmp_path / "report", [])


def test_the_recipe_is_that_of_the_committed_results():
    merged = json.loads(COMMITTED.read_text())
    recipe = load_recipe(str(ROOT / "train" / "recipes" / "twins-emoji.toml"))
    elsewhere = {"data.path", "run.device"}
    ran = {
        key.removeprefix("settings."): value
        for key, value in merged["common"].items()
        if key.startswith("settings.")
    }
    assert ran["run.steps"] == 4000 and len(merged["runs"]) == 10
    for key, value in ran.items():
        if key not in elsewhere:
            place = recipe
            for part in key.split("."):
                place = place[part] if isinstance(place, dict) else getattr(place, part)
            assert place == value, key
