"""The wheel and the pinned development install."""

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


def test_every_direct_dependency_is_pinned_to_a_release_it_allows():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    assert all(str(pin.specifier).startswith("==") for pin in pins)
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *extras["train"], *extras["dev"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), text
