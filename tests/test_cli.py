import argparse
import json
import os
import subprocess
import sys

import original_layouts
import pytest
import tiny_sana
import torch
from PIL import Image

from mhla_diffusion.cli import main
from mhla_diffusion.models.convert import convert
from mhla_diffusion.pipelines.sana import MHLASanaPipeline

RECIPE = '[run]\nname = "x"\nsteps = 2\n[data]\nkind = "folder"\npath = "pictures"\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    parts = tiny_sana.components(convert(tiny_sana.stock_transformer(), block_grid=(2, 2)))
    path = tmp_path_factory.mktemp("pipelines") / "toy"
    MHLASanaPipeline(**parts, default_steps=1, max_sequence_length=8).save_pretrained(path)
    return str(path)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_help_and_mistakes_need_no_torch():
    result = run_python(
        "import sys\n"
        "sys.modules['torch'] = sys.modules['diffusers'] = None\n"
        "from mhla_diffusion.cli import main\n"
        "print(main(['generate', 'a', '--pipeline', 'nowhere']), main(['generate', 'a', '--steps', '-1']))\n"
        "print(main(['train', 'nowhere.toml']), main([]))\n"
        "main(['--help'])\n"
    )
    assert result.stdout.startswith("2 2\n") and "generate" in result.stdout
    assert result.returncode == 0 and len(result.stderr.splitlines()) == 3, result.stderr


@pytest.mark.parametrize("command", ["generate a --pipeline nowhere", "train nowhere.toml"])
@pytest.mark.parametrize(
    ("given", "kept"), [({}, "1000"), ({"GOMP_SPINCOUNT": "9"}, "9"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)]
)
def test_threads_wait_asleep_unless_told_otherwise(monkeypatch, command, given, kept):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    code = f"import os; from mhla_diffusion.cli import main; main({command.split()})"
    assert run_python(f"{code}; print(os.environ.get('GOMP_SPINCOUNT'))").stdout == f"{kept}\n"


def test_generate_draws_reports_and_goes_on(folder, here, capsys):
    (here / "prompts.txt").write_text("a red apple\n\na whale\n\n\n")
    line = [
        "generate",
        "--prompts",
        "prompts.txt",
        "--pipeline",
        folder,
        "--device",
        "cpu",
        "--sheet",
        "sheet.png",
    ]
    assert main(line) == 1
    first = capsys.readouterr()
    assert first.out == "2 drawn, 1 failed in outputs, contact sheet in sheet.png\n"
    assert first.err.endswith("mhla: prompt 1 failed: the prompt is empty\n")
    assert sorted(path.name for path in here.iterdir()) == ["outputs", "prompts.txt", "sheet.png"]
    assert len(list((here / "outputs").iterdir())) == 4
    (here / "prompts.txt").write_text("a red apple\na green apple\na whale")
    line[-1] = "sheet.webp"
    assert main(line) == 0
    assert (Image.open("sheet.png").format, Image.open("sheet.webp").format) == ("PNG", "WEBP")
    assert capsys.readouterr().out.startswith("1 drawn, 2 there already in outputs")


def test_prompts_stand_on_the_command_line_with_a_seed_each(folder, here):
    line = [
        "generate",
        "a whale",
        "an apple",
        "--pipeline",
        folder,
        "--seeds",
        "4,5",
        "--steps",
        "2",
        "--out",
        "new/pictures",
    ]
    assert main([*line, "--guidance", "1.5", "--height", "32", "--width", "64", "--batch-size", "1"]) == 0
    settings = json.loads((here / "new" / "pictures" / "0001_an-apple_5.json").read_text())
    assert (settings["steps"], settings["guidance"], settings["height"], settings["width"]) == (
        2,
        1.5,
        32,
        64,
    )


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("generate", "give either prompts or a file"),
        ("generate a --prompts empty.txt", "give either prompts or a file"),
        ("generate --prompts empty.txt", "the prompt file empty.txt is empty"),
        ("generate --prompts none.txt", "cannot read the prompt file none.txt"),
        ("generate --prompts latin.txt", "is not UTF-8 text"),
        ("generate --prompts list.json", "list.json is no JSON list of prompts"),
        ("generate a --pipeline none", "no pipeline 'none'; searched"),
        ("generate a --pipeline .", "is not a pipeline folder"),
        ("generate a --pipeline TOY --height 31", "height is 31: it must be a multiple of 4"),
        ("generate a --steps -1", "steps is -1: give a whole number of at least 1"),
        ("generate a --steps 2.5", "invalid int value: '2.5'"),
        ("generate a --guidance nan", "guidance is nan"),
        ("generate a b --seeds 1,2,3", "3 seeds for 2 prompts"),
        ("generate a b --seeds 1,2,3", "for several pictures of each prompt, one call a seed"),
        ("generate a --seeds 1,x", "'1,x' is not a number or numbers joined by commas"),
        ("generate a --out empty.txt/sub", "is a file; give another folder with --out"),
        ("generate a --stepz 3", "unknown option --stepz, did you mean --steps?"),
        ("generate a --seed 3 b", "unexpected 'b'"),
        ("draw", "invalid choice: 'draw'"),
        ("convert none out", "there is no none: give a pipeline or a transformer folder"),
        ("convert . out --block-grid 4x4", "'4x4' is not a number"),
        ("convert TOY out", "with block_grid (2, 2) already"),
        ("convert TOY out --block-grid 4", "two positive integers"),
        ("convert TOY out --block-grid 0,2", "two positive integers"),
        ("convert TOY out --block-grid 2,2,2", "two positive integers"),
        ("convert TOY out --block-grid 2.5,2", "'2.5,2' is not a number"),
        ("convert TOY out --layers 0", "keeps the layers and options"),
        ("convert TOY out --from wan", "is in Diffusers' layout, not in 'wan'"),
        ("convert empty.txt out", "is no checkpoint of tensors"),
        ("train none.toml", "none.toml"),
        ("train good.toml --set run.stepz=3", "did you mean 'steps'?"),
        ("train good.toml --set run.steps=many", "run.steps"),
        ("train typo.toml", "did you mean 'steps'?"),
        ("train good.toml --set model.base=TOY", "data.path = 'pictures' does not exist"),
        ("train type.toml", "run.steps"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_on_stderr_and_nothing_is_left(folder, here, capfd, line, named):
    (here / "empty.txt").write_text("\n \n")
    (here / "list.json").write_text('[{"caption": "a whale"}]')
    (here / "latin.txt").write_bytes("ein Bär".encode("latin-1"))
    (here / "good.toml").write_text(RECIPE)
    (here / "typo.toml").write_text(RECIPE.replace("steps", "stepz"))
    (here / "type.toml").write_text(RECIPE.replace("steps = 2", 'steps = "2"'))
    before = sorted(here.rglob("*"))
    assert main(line.replace("TOY", folder).split()) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("mhla: ") and named in err
    assert err.count("\n") == 1 and "Traceback" not in err
    assert sorted(here.rglob("*")) == before


def test_train_runs_a_recipe_and_goes_on(folder, here, capsys):
    for colour in ("red", "blue"):
        (here / "pictures" / colour).mkdir(parents=True)
        Image.new("RGB", (40, 32), colour).save(here / "pictures" / colour / "a.png")
    (here / "recipe.toml").write_text(f'{RECIPE}size = 32\n[model]\nbase = "{folder}"\n')
    line = ["train", "recipe.toml", "--set", "run.batch_size=2", "run.device=cpu"]
    assert main([*line, "run.steps=1"]) == 0
    assert "images/s" in capsys.readouterr().err
    assert main(line) == 0
    assert "2 of 2 steps done" in capsys.readouterr().out
    assert main([*line, "--resume", "none"]) == 2
    assert main(["generate", "red", "--pipeline", "runs/x/pipeline", "--device", "cpu"]) == 0


def test_imports_for_training_are_no_work_for_the_garbage_collector(folder, here):
    (here / "recipe.toml").write_text(f'{RECIPE}size = 32\n[model]\nbase = "{folder}"\n')
    result = run_python(
        "import gc\n"
        "from mhla_diffusion.cli import main\n"
        "print(main(['train', 'recipe.toml']), gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
    )
    assert result.stdout == "2 True True\n", result.stderr


def test_a_traceback_is_shown_when_asked_for(here):
    with pytest.raises(ValueError, match="steps is 0"):
        main(["generate", "a", "--steps", "0", "--traceback"])


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_stops_early_is_no_error(unbuffered):
    process = subprocess.Popen(
        [sys.executable, "-m", "mhla_diffusion.cli", "env"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=120) == 1


def test_env_prints_facts_for_people_and_programs(capsys):
    assert main(["env"]) == 0
    assert "torch" in capsys.readouterr().out
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hardware"]["device"] in ("cpu", "cuda")


def test_convert_prints_the_key_map_and_writes_nothing(here, capsys):
    stock = original_layouts.stock_dit()
    torch.save({"ema": original_layouts.official_state(stock), "args": argparse.Namespace(a=1)}, "mhla.pt")
    (here / "heads.json").write_text('{"num_attention_heads": 2}')
    line = ["convert", "mhla.pt", "out", "--from", "official", "--config", "heads.json"]
    assert main([*line, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "blocks.1.attn.lepe.weight -> transformer_blocks.1.attn1.local_conv.weight (16, 1, 3, 3)" in shown
    assert "weights taken from the entry 'ema' of mhla.pt" in shown
    assert shown.endswith("nothing written (--dry-run)\n") and not (here / "out").exists()
    assert main([*line, "--block-grid", "2,2"]) == 0
    shown = capsys.readouterr().out
    assert "mixing interpolated from (4, 4) to (2, 2) blocks; there and back differs by" in shown
    assert "->" not in shown and shown.endswith("out written\n")
    assert main(["convert", "out", "again", "--block-grid", "4,2"]) == 0
    assert json.loads((here / "again" / "config.json").read_text())["mhla_block_grid"] == [4, 2]
    assert main(["convert", "mhla.pt", "plain", "--layers", "none", "--config", "heads.json"]) == 2
    assert "keeps the layers and options that it has" in capsys.readouterr().err


def test_convert_leaves_code_in_a_checkpoint_alone(here, capsys):
    class Bait:
        def __reduce__(self):
            return open, (str(here / "ran"), "w")

    torch.save({"model": Bait()}, "bad.pt")
    assert main(["convert", "bad.pt", "out"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "was not run" in error and "open" in error
    assert [path.name for path in here.iterdir()] == ["bad.pt"]


def test_convert_writes_a_folder_that_draws(here):
    tiny_sana.stock_pipeline().save_pretrained("stock")
    assert main(["convert", "stock", "mhla", "--block-grid", "2,2", "--layers", "0"]) == 0
    assert json.loads((here / "mhla" / "transformer" / "config.json").read_text())["mhla_layers"] == [0]
    assert main(["generate", "a whale", "--pipeline", "mhla", "--steps", "1", "--device", "cpu"]) == 0
