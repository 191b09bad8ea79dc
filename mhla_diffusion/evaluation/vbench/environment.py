"""VBench's own environment: it pins releases that no current pipeline runs with, so it gets a Python of its own.

uv builds it from `environment.lock`, which names every package with its hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..faults import MissingWeights
from ..networks.weight_files import cache_folder
from .dimensions import DIMENSIONS

HERE = Path(__file__).resolve().parent
LOCK = HERE / "environment.lock"
RUNNER = HERE / "foreign.py"
PYTHON = "3.11"  # which the lock was resolved for
# Two packages of the lock are built from source by a module that newer setuptools lack.
BUILD_CONSTRAINTS = "setuptools<81\n"
RECORD = "mhla_vbench.json"
# VBench fetches what it lacks with these; in its process they say no.
SHADOWED = ("wget", "curl", "git", "unzip")


class MissingEnvironment(MissingWeights):
    """VBench's environment, or what builds it, is not there."""


def default_environment() -> Path:
    """`$MHLA_CACHE/vbench-environment`, or in the user's cache folder."""
    return cache_folder() / "vbench-environment"


def find_uv() -> str:
    """The program uv: beside this Python, or on the path. Raises MissingEnvironment when there is none."""
    beside = Path(sys.executable).parent
    found = shutil.which("uv", path=str(beside)) or shutil.which("uv")
    if found is None:
        raise MissingEnvironment(
            f"no uv, which builds VBench's environment; searched {beside} and the folders of $PATH. To have it: "
            "pip install 'mhla_diffusion[vbench]'"
        )
    return found


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def locked(lock: Path) -> list[str]:
    """`name==version` of everything in a lock file. Raises ValueError when there is nothing, or it pins no hashes."""
    try:
        text = lock.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read the lock file {lock} ({error.strerror}): give another") from None
    found = re.findall(r"^([A-Za-z0-9._-]+==[^\s;\\]+)", text, re.MULTILINE)
    if not any(line.startswith("vbench==") for line in found) or text.count("--hash=sha256:") < len(found):
        raise ValueError(
            f"{lock} is no lock file of VBench: it needs vbench==... and a --hash=sha256: of every package"
        )
    return found


def steps(
    environment: Path, *, uv: str = "uv", lock: Path = LOCK, python: str = PYTHON, wheels: Path | None = None
) -> list[list[str]]:
    """The commands that build the environment. With `wheels` everything comes from that folder, without a network."""
    local = ["--offline", "--no-index", "--find-links", str(wheels)] if wheels else []
    constraints = str(environment / "build-constraints.txt")
    return [
        [uv, "venv", "--no-project", "--python", python, "--allow-existing", str(environment)],
        [uv, "pip", "sync", "--python", str(python_of(environment)), "--require-hashes", "--build-constraints",
         constraints, *local, str(lock)],
    ]  # fmt: skip


def check_place(environment: Path) -> None:
    """Raise ValueError unless the folder is empty, absent, or an environment that was built here."""
    if environment.is_dir() and any(environment.iterdir()) and not (environment / RECORD).is_file():
        raise ValueError(f"{environment} is something else: give a new folder, or remove it")
    if environment.exists() and not environment.is_dir():
        raise ValueError(f"{environment} is a file: give a new folder")


def record_of(environment: Path) -> dict:
    """What was noted when the environment was built; empty for one of the user's."""
    try:
        return json.loads((environment / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def build(
    environment: Path, *, lock: Path = LOCK, python: str = PYTHON, wheels: Path | None = None
) -> tuple[dict, bool]:
    """Build it and return its record, and whether anything was done: one whole from the same lock is left as it is.

    Raises MissingEnvironment without uv, ValueError when the place is taken or a step fails.
    """
    packages = locked(lock)
    check_place(environment)
    uv = find_uv()
    lock_hash = hashlib.sha256(lock.read_bytes()).hexdigest()
    record = record_of(environment)
    if record.get("whole") and record.get("lock_sha256") == lock_hash and python_of(environment).exists():
        return record, False
    environment.mkdir(parents=True, exist_ok=True)
    record = {"lock_sha256": lock_hash, "packages": len(packages), "whole": False}
    path = environment / RECORD
    path.write_text(json.dumps(record), encoding="utf-8")
    (environment / "build-constraints.txt").write_text(BUILD_CONSTRAINTS, encoding="utf-8")
    for command in steps(environment, uv=uv, lock=lock, python=python, wheels=wheels):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            told = " ".join(done.stderr.split())[-600:]
            raise ValueError(f"uv could not build {environment} ({' '.join(command[1:3])}): {told}")
    record |= {"whole": True} | probe(environment)
    path.write_text(json.dumps(record, indent=1), encoding="utf-8")
    return record, True


def closed(work: Path) -> dict[str, str]:
    """Environment variables of a process that scores: no hub, no fetching programs, nothing of this Python's."""
    shadows = work / "bin"
    shadows.mkdir(exist_ok=True)
    for name in SHADOWED:
        program = shadows / name
        program.write_text(f"#!/bin/sh\necho '{name} is not run: everything must be on disk' >&2\nexit 1\n")
        program.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {
        "PATH": f"{shadows}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "MPLBACKEND": "agg",
    }


def probe(environment: Path, dimensions: Sequence[str] = tuple(DIMENSIONS)) -> dict:
    """Versions in the environment, VBench's prompt list, and why dimensions cannot be scored there (`faults`).

    Raises MissingEnvironment when it has no Python, ValueError when that fails.
    """
    python = python_of(environment)
    if not python.exists():
        raise MissingEnvironment(
            f"no environment of VBench at {environment} (no bin/python in it). To have one: mhla eval vbench setup "
            f"{environment}, or give yours with --environment FOLDER"
        )
    with tempfile.TemporaryDirectory() as place:
        work, answer = Path(place), Path(place) / "answer.json"
        variables = closed(work) | {
            "VBENCH_CACHE_DIR": place,
            "MHLA_VBENCH_DIMENSIONS": json.dumps(list(dimensions)),
        }
        command = [str(python), "-I", str(RUNNER), "probe", str(answer)]
        done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=work)
        if done.returncode:
            told = " ".join(done.stderr.split())[-400:]
            raise ValueError(f"{python} does not run ({told}): build the environment again")
        found = json.loads(answer.read_text(encoding="utf-8"))
    if found["prompts"] is None:
        raise MissingEnvironment(
            f"the environment {environment} has no vbench. To have one: mhla eval vbench setup FOLDER"
        )
    return found
