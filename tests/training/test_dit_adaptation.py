"""A softmax DiT, its adaptation to MHLA and the curves of both, from the shipped recipes at toy size."""

import json
from pathlib import Path

import pytest
from PIL import Image
from programs import load_program

from mhla_diffusion.training import run

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "train" / "recipes"
SMALL = [
    "model.transformer.num_layers=2",
    "model.transformer.num_attention_heads=2",
    "model.transformer.attention_head_dim=8",
]


@pytest.fixture(scope="module")
def program():
    return load_program("train/dit_adaptation.py")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of the original, which went on after it was adapted, and of two adaptations."""
    folder = tmp_path_factory.mktemp("runs")
    common = [
        f"model.base={ROOT}/pipelines/sana-mhla-emoji", f"data.path={ROOT}/assets/emoji_sample.tar", "run.device=cpu",
        "run.compile=false", "run.mixed_precision=no", "run.batch_size=4", "run.log_every=2", "run.tracker=none",
        f"data.cache={folder}/cache", "optimizer.warmup=2", "sample.every=4", "sample.steps=2",
        'sample.prompts=["food-fruit"]',
    ]  # fmt: skip
    original = [*common, *SMALL, f"run.out={folder}/original"]
    run(RECIPES / "dit-emoji.toml", [*original, "run.steps=4"])
    adaptation = [*common, f"model.base={folder}/original/pipeline", "run.first_step=4", "run.steps=8"]
    for name, train, steps in (("all", "all", 0), ("mixing", "mixing", 0), ("warm", "all", 4)):
        changes = [f'model.train="{train}"', f"run.out={folder}/{name}", f"distill.steps={steps}"]
        run(RECIPES / "dit-emoji-mhla.toml", [*adaptation, *changes])
    run(RECIPES / "dit-emoji.toml", [*original, "run.steps=8"], resume="auto")
    return folder


def call(program, monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["dit_adaptation.py", *map(str, arguments)])
    return program.main()


def test_curves_and_numbers_of_both(program, runs, tmp_path, monkeypatch, capsys):
    adapted = [runs / "all", runs / "mixing", runs / "warm"]
    assert (
        call(
            program,
            monkeypatch,
            "--original",
            runs / "original",
            "--adapted",
            *adapted,
            "--out",
            tmp_path / "x",
        )
        == 0
    )
    facts = json.loads((tmp_path / "x.json").read_text())
    assert facts["softmax"]["steps"] == [2, 4, 6, 8] and len(facts["softmax"]["loss"]) == 4
    first, second, warm = facts["adapted"]
    assert warm["name"] == "MHLA, distilled for 4 steps, trained: all"
    assert warm["distillation"]["steps"] == [2, 4] and "distillation" not in first
    assert 0 < warm["distillation"]["error"][1] < 10
    assert first["steps"] == [6, 8] and first["name"] == "MHLA, trained: all"
    assert second["trained_parameters"] == 2 * 16 * 16
    said = first["comparison"]
    assert said["first_window_softmax"] == facts["softmax"]["loss"][2] and said["first_step"] == 4
    for entry in (facts["softmax"], facts["converted_untrained"], first, second, warm):
        assert all(0 < loss < 2 for loss in entry["unseen"].values())
    assert facts["softmax"]["unseen"] != facts["converted_untrained"]["unseen"]
    assert str(runs) not in json.dumps(facts["softmax"]["recipe"]["run"])
    with Image.open(tmp_path / "x.png") as picture:
        assert picture.width > 1000
    assert "MHLA, trained: mixing: loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("layers", "said"), [(None, ""), ("all", ""), ("2/3", ", layers 2/3"), ([0, 2], ", layers 0, 2")]
)
def test_a_run_is_named_by_what_its_recipe_says(program, layers, said):
    model = {"convert": {"gate": True, "local_conv": 3, "layers": layers}, "train": "all"}
    wanted = f"MHLA + gate + local convolution{said}, trained: all"
    assert program.name_of({"recipe": {"model": model}}) == wanted


def test_runs_that_cannot_be_compared_are_told(program, runs, tmp_path, monkeypatch, capsys):
    out = ["--out", tmp_path / "x"]
    assert call(program, monkeypatch, "--original", tmp_path, *out) == 2
    assert "holds no run" in capsys.readouterr().err
    assert call(program, monkeypatch, "--original", runs / "all", "--adapted", runs / "original", *out) == 2
    assert "is no adaptation: its recipe has no [model.convert]" in capsys.readouterr().err
    short = program.read_run(runs / "original")
    short = {**short, "steps": short["steps"][:2]}
    with pytest.raises(
        ValueError, match="ends at step 4: let it go on with mhla train ... --set run.steps=8"
    ):
        program.check_pair(short, program.read_run(runs / "all"))
    other = program.read_run(runs / "all")
    other["recipe"]["run"]["seed"] = 7
    with pytest.raises(ValueError, match="run.seed is 7 in .* would not show the same batches"):
        program.check_pair(program.read_run(runs / "original"), other)
