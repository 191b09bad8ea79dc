import dataclasses
from pathlib import Path

import pytest

from mhla_diffusion.training.config import Recipe
from mhla_diffusion.training.recipe import describe, differing_keys, flat, load_recipe

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = '[run]\nname = "x"\n[model]\nbase = "b"\n[data]\npath = "p"\n'


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "r.toml"
        path.write_text(text)
        return path

    return write


def test_defaults_and_overrides(written):
    overrides = ["optimizer.lr=3e-4", "run.steps=7", "run.name=other", "optimizer.betas=[0.8, 0.9]"]
    recipe = load_recipe(written(MINIMAL), [*overrides, "model.lora.rank=3"])
    assert recipe.run.out == "runs/other"
    assert (recipe.optimizer.lr, recipe.run.steps, recipe.optimizer.betas) == (3e-4, 7, [0.8, 0.9])
    assert recipe.model.lora.rank == 3
    assert load_recipe(written(MINIMAL + "[optimizer]\nlr = 1")).optimizer.lr == 1.0  # an integer is a number


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optimizer]\nlearning_rate = 1", "unknown key 'learning_rate' in [optimizer]"),
        ("[optimizer]\nmixing_lrr = 1", "did you mean 'mixing_lr'?"),
        ("[optimiser]\nlr = 1", "unknown key 'optimiser' in the recipe; did you mean 'optimizer'?"),
        ("[optimizer]\nlr = 'fast'", "optimizer.lr = 'fast' is not a number, for example 0.0001"),
        ("[optimizer]\nwarmup = 2.5", "optimizer.warmup = 2.5 is not an integer, for example "),
        ("[optimizer]\nwarmup = true", "optimizer.warmup = True is not an integer"),
        ("[optimizer]\nbetas = [0.9, 'x']", "optimizer.betas[1] = 'x' is not a number"),
        (
            "[optimizer]\nbetas = 0.9",
            "optimizer.betas = 0.9 is not a list of numbers, for example [0.9, 0.99]",
        ),
        ("[optimizer]\nschedule = 'linear'", "is not one of 'constant', 'cosine'"),
        ("[ema]\ndecay = 1.0", "ema.decay = 1.0; allowed: 0 to below 1"),
        ("[checkpoint]\nkeep = 0", "checkpoint.keep = 0; allowed: 1 or more"),
        ("[flow]\nshift = 0", "flow.shift = 0.0; allowed: above 0"),
        ("[sample]\nsteps = 0", "sample.steps = 0; allowed: 1 or more"),
        ("[sample]\nevery = -1", "sample.every = -1; allowed: 0 (never in between) or more steps"),
        ("[checkpoint]\nevery = -1", "checkpoint.every = -1; allowed: 0"),
        ("[optimizer]\nlr = inf", "optimizer.lr = inf; allowed: above 0"),
        ("[optimizer]\neps = -1", "optimizer.eps = -1.0; allowed: above 0"),
        ("[flow]\nlogit_mean = nan", "flow.logit_mean = nan; allowed: a finite number"),
        ("[ema]\nwarmup = nan", "ema.warmup = nan; allowed: 0"),
        ("[sample]\nevery = 5", "sample.prompts = []; allowed: at least one prompt"),
        ("ema = 3", "ema = 3 is not a table"),
        ("[model.convert]\nblock_grid = [4, 4]\n[model.transformer]\nnum_layers = 2", "keep one of them"),
        ("[model.text_encoder]\nhidden_size = 8", "write model.train_text_encoder = true"),
    ],
)
def test_faults_are_one_line_and_say_what_to_write(written, text, message):
    body = text if text == "ema = 3" else ""
    path = written(body + "\n" + MINIMAL + ("" if body else text))
    if "[model.convert]" in text or "[model.text_encoder]" in text:
        path = written(MINIMAL.replace("[data]", text + "\n[data]"))
    with pytest.raises(ValueError) as caught:
        load_recipe(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("word", ["fp16", "float16"])
def test_fp16_is_refused_with_advice(written, word):  # case T2
    with pytest.raises(ValueError, match='write "bf16"'):
        load_recipe(written(MINIMAL), [f"run.mixed_precision={word}"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lr=1"], "unknown key 'lr' in the recipe"),
        (["optimizer.lr"], "write it as section.key=value"),
        (["run.batch_size=6", "run.gradient_accumulation=4"], "does not divide"),
        (["run.name="], "run.name = ''"),
        (["data.template=nothing"], "with {} where the class name goes"),
    ],
)
def test_bad_overrides(written, overrides, message):
    with pytest.raises(ValueError) as caught:
        load_recipe(written(MINIMAL), overrides)
    assert message in str(caught.value)


def test_missing_and_broken_files(tmp_path, written):
    with pytest.raises(ValueError, match="no recipe at"):
        load_recipe(tmp_path / "absent.toml")
    with pytest.raises(ValueError, match="not valid TOML"):
        load_recipe(written("[run"))


def test_differing_keys_ignore_what_changes_no_number(written):
    recipe = load_recipe(written(MINIMAL))
    stored = dataclasses.asdict(recipe)
    changed = load_recipe(
        written(MINIMAL), ["run.log_every=3", "checkpoint.every=9", "run.steps=99", "run.compile=true"]
    )
    assert differing_keys(changed, stored) == []
    changed = load_recipe(
        written(MINIMAL), ["optimizer.lr=1", "flow.shift=3.0", "optimizer.schedule=cosine", "run.steps=9"]
    )
    assert differing_keys(changed, stored) == [
        "flow.shift",
        "optimizer.lr",
        "optimizer.schedule",
        "run.steps",
    ]


SHIPPED = sorted(
    path.stem for path in (ROOT / "train" / "recipes").glob("*.toml") if "autoencoder" not in path.stem
)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_are_valid(name):
    assert load_recipe(ROOT / "train" / "recipes" / f"{name}.toml").run.name == name


def test_a_setting_that_a_stored_recipe_is_too_old_to_have_counts_as_its_default(written):
    recipe = load_recipe(written(MINIMAL))
    stored = dataclasses.asdict(recipe)
    del stored["loss"], stored["data"]["flip"]
    assert differing_keys(recipe, stored) == []
    changed = load_recipe(written(MINIMAL), ["data.flip=true", "loss.kind=flow"])
    assert differing_keys(changed, stored) == ["data.flip", "loss.kind"]
    changed = load_recipe(written(MINIMAL), ["model.transformer.num_layers=3"])
    assert "model.transformer.num_layers" in differing_keys(changed, stored)


def test_every_setting_is_documented():
    table = describe()
    for name in flat(Recipe()):
        assert f"`{name.split('.')[0]}." in table
    assert all(row.rsplit("|", 2)[1].strip() for row in table.splitlines())
    readme = (ROOT / "train" / "README.md").read_text(encoding="utf-8")
    assert table in readme, "train/README.md: paste the output of mhla_diffusion.training.recipe.describe()"
