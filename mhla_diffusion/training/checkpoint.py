"""Checkpoints that are whole or absent.

A checkpoint is a folder `step-00000042` of safetensors files, `state.json` and, written last, `manifest.json` with the
size and SHA-256 of every other file. It is written under a temporary name, each file flushed to disk, then renamed:
a process killed at any moment leaves the older checkpoints and a temporary folder that nothing loads.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file, save_file

_TEMPORARY = ".writing-"


def _flush(path: Path) -> None:
    """Asks the system to put a file's or folder's contents on disk before anything that follows."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Replaces the folder `target` by what `fill(folder)` writes, at once or not at all.

    Several processes may write the same target; the last one wins.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for stale in target.parent.glob(f"{_TEMPORARY}{target.name}-*"):
        owner = stale.name.rpartition("-")[2]
        # Left by a killed process, or by one with our own number: in a container each run may have the same.
        if not owner.isdigit() or int(owner) == os.getpid() or not psutil.pid_exists(int(owner)):
            shutil.rmtree(stale, ignore_errors=True)
    temporary = target.parent / f"{_TEMPORARY}{target.name}-{os.getpid()}"
    temporary.mkdir()
    try:
        fill(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for path in sorted(temporary.rglob("*"), reverse=True):
        _flush(path)
    _flush(temporary)
    try:
        temporary.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        # A folder cannot be renamed over a full one, so that steps aside first; for a moment neither has the name.
        old = target.parent / f"{_TEMPORARY}{target.name}-old{os.getpid()}"
        target.rename(old)
        temporary.rename(target)
        shutil.rmtree(old)
    _flush(target.parent)


def write_checkpoint(
    folder: Path, step: int, tensors: dict[str, dict[str, torch.Tensor]], state: dict
) -> Path:
    """Writes `folder/step-<step>`: one safetensors file per entry of `tensors`, and `state` as JSON."""

    def fill(temporary: Path) -> None:
        for name, values in tensors.items():
            whole = {key: value.detach().contiguous().cpu() for key, value in values.items()}
            save_file(whole, temporary / f"{name}.safetensors")
        (temporary / "state.json").write_text(json.dumps({**state, "step": step}, indent=1))
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": _digest(path)}
            for path in sorted(temporary.iterdir())
        }
        (temporary / "manifest.json").write_text(json.dumps({"files": files}, indent=1))

    target = folder / f"step-{step:08d}"
    write_folder(target, fill)
    return target


def fault(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, in one line; None when it is whole."""
    manifest = path / "manifest.json"
    if not manifest.is_file():
        return f"{path} has no manifest.json, so it is not a finished checkpoint"
    try:
        files = json.loads(manifest.read_text())["files"]
    except (ValueError, KeyError):
        return f"{manifest} is not readable"
    for name, entry in files.items():
        file = path / name
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != entry["bytes"]:
            return f"{file} has {file.stat().st_size} bytes in place of {entry['bytes']}"
        if _digest(file) != entry["sha256"]:
            return f"{file} does not match its checksum"
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first; whether they are whole is `fault`'s question."""
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


def find_checkpoint(folder: Path, resume: str | Path | None) -> Path | None:
    """The checkpoint that `resume` means: "none" or None, "auto" (the newest whole one, if any), or a path.

    Raises:
        ValueError: the path is no whole checkpoint.
    """
    if resume is None or str(resume) == "none":
        return None
    if str(resume) != "auto":
        problem = fault(Path(resume))
        if problem:
            raise ValueError(
                f"cannot resume: {problem}; give a step-* folder under {folder}, or --resume auto"
            )
        return Path(resume)
    for path in reversed(list_checkpoints(folder)):
        problem = fault(path)
        if problem is None:
            return path
        warnings.warn(f"skipping a damaged checkpoint: {problem}", stacklevel=2)
    return None


def read_checkpoint(path: Path) -> tuple[dict[str, dict[str, torch.Tensor]], dict]:
    """Tensors by file name, on the CPU, and the state, of a checkpoint that `find_checkpoint` found whole."""
    tensors = {file.stem: load_file(file) for file in sorted(path.glob("*.safetensors"))}
    return tensors, json.loads((path / "state.json").read_text())


def prune(folder: Path, keep: int) -> None:
    """Removes all but the `keep` newest checkpoints."""
    for path in list_checkpoints(folder)[:-keep]:
        # Renamed first, so that a kill inside rmtree cannot leave half a checkpoint under its own name.
        doomed = path.with_name(f"{_TEMPORARY}{path.name}-old")
        path.rename(doomed)
        shutil.rmtree(doomed)


def step_of(line: str) -> float:
    """The step that a line of metrics.jsonl is about; infinite when the line was cut short by a kill."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return float("inf")


def keep_lines(path: Path, last_step: int) -> None:
    """Removes from a file such as metrics.jsonl, if it is there, the steps after `last_step`: they are done again."""
    if path.is_file():
        lines = [line for line in path.read_text().splitlines() if step_of(line) <= last_step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in lines))
        os.replace(temporary, path)


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, torch.Tensor]:
    """AdamW's state as `{"exp_avg/<parameter>": tensor}`; `names` maps `id(parameter)` to its name."""
    return {
        f"{key}/{names[id(parameter)]}": value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for key, value in optimizer.state[parameter].items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, torch.nn.Parameter],
    tensors: dict[str, torch.Tensor],
) -> None:
    """Puts `optimizer_tensors` back; the step counts stay float32 on the parameter's device, as fused AdamW wants."""
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        optimizer.state[parameters[name]][kind] = value.to(parameters[name].device)
