"""What the documentation tells people to type works as printed, and its links lead somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mhla_diffusion.cli import build_parser
from mhla_diffusion.training.recipe import load_recipe

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("pipelines/*/*.md")})
PLACEHOLDER = "path/to"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def all_blocks(language: str):
    return [
        pytest.param(block, id=f"{page.relative_to(ROOT).as_posix()}-{number}")
        for page in PAGES
        for number, block in enumerate(blocks(page, language))
    ]


def commands(block: str) -> list[list[str]]:
    lines = block.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("block", all_blocks("bash"))
def test_a_shell_line_names_real_options_targets_and_files(block):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands(block):
        if words[0] == "mhla":
            build_parser().parse_args(words[1:])
        elif words[0] == "make":
            assert words[1] in targets
        files = [word for word in words[1:] if re.fullmatch(r"[\w./-]+\.(?:py|toml|txt)", word)]
        assert [file for file in files if PLACEHOLDER not in file and not (ROOT / file).is_file()] == []


def test_the_readmes_training_lines_may_be_typed_one_after_the_other():
    lines = [words for block in blocks(ROOT / "README.md", "bash") for words in commands(block)]
    train = [build_parser().parse_args(words[1:]) for words in lines if words[:2] == ["mhla", "train"]]
    runs = [load_recipe(ROOT / line.recipe, line.overrides).run.out for line in train]
    assert len(train) > 1 and len(set(runs)) == len(runs), (
        "a second recipe is refused in the folder of the first"
    )
    drawn = [
        line for words in lines if words[:2] == ["mhla", "generate"] for line in words if "runs/" in line
    ]
    assert drawn == [f"{runs[0]}/pipeline"]


@pytest.mark.parametrize("block", all_blocks("python"))
def test_a_python_block_runs(block, tmp_path):
    if PLACEHOLDER in block:
        compile(block, "block", "exec")
        return
    for name in ("pipelines", "assets", "train", "eval"):
        if (ROOT / name).exists():
            (tmp_path / name).symlink_to(ROOT / name)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", block]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_programs_that_are_named_exist(page):
    named = re.findall(r"`([\w/-]+\.py)`", page.read_text(encoding="utf-8"))
    places = (ROOT, page.parent, ROOT / "mhla_diffusion" / "training")
    assert [name for name in named if not any((place / name).is_file() for place in places)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [target for target in local if not (page.parent / target).exists()] == []
