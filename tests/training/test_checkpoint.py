import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from mhla_diffusion.training.checkpoint import (
    fault,
    find_checkpoint,
    list_checkpoints,
    prune,
    read_checkpoint,
    write_checkpoint,
    write_folder,
)


def tensors(value):
    return {
        name: {"a": torch.full((3,), value), "b": torch.zeros(2, 2)}
        for name in ("weights", "ema", "optimizer")
    }


def test_reads_what_it_wrote(tmp_path):
    path = write_checkpoint(tmp_path, 12, tensors(1.5), {"note": "x"})
    assert path.name == "step-00000012" and fault(path) is None
    read, state = read_checkpoint(path)
    assert state == {"note": "x", "step": 12}
    assert torch.equal(read["ema"]["a"], torch.full((3,), 1.5)) and set(read) == {
        "weights",
        "ema",
        "optimizer",
    }


@pytest.mark.parametrize("resume", [None, "none", "auto"])
def test_nothing_to_resume(tmp_path, resume):
    assert find_checkpoint(tmp_path / "absent", resume) is None


def test_auto_takes_the_newest_whole_one(tmp_path):
    old = write_checkpoint(tmp_path, 3, tensors(1.0), {})
    new = write_checkpoint(tmp_path, 6, tensors(2.0), {})
    assert find_checkpoint(tmp_path, "auto") == new
    data = (new / "ema.safetensors").read_bytes()
    (new / "ema.safetensors").write_bytes(data[:-4] + b"\0\0\0\1")  # same size, other bits
    with pytest.warns(UserWarning, match="does not match its checksum"):
        assert find_checkpoint(tmp_path, "auto") == old
    with pytest.raises(ValueError, match="cannot resume: .*checksum; give a step-"):
        find_checkpoint(tmp_path, new)


def test_faults_are_named(tmp_path):
    path = write_checkpoint(tmp_path, 3, tensors(1.0), {})
    data = (path / "weights.safetensors").read_bytes()
    (path / "weights.safetensors").write_bytes(data[:-1])
    assert f"{len(data) - 1} bytes in place of {len(data)}" in fault(path)
    (path / "weights.safetensors").unlink()
    assert "weights.safetensors is missing" in fault(path)
    (path / "manifest.json").write_text("{")
    assert "not readable" in fault(path)
    (path / "manifest.json").unlink()
    assert "not a finished checkpoint" in fault(path)


def test_prune_keeps_the_newest(tmp_path):
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step, tensors(1.0), {})
    prune(tmp_path, 2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_is_replaced_whole(tmp_path):
    target = tmp_path / "pipeline"
    write_folder(target, lambda folder: (folder / "a").write_text("1"))

    def fails(folder):
        (folder / "b").write_text("2")
        raise OSError("disk full")

    with pytest.raises(OSError):
        write_folder(target, fails)
    assert [p.name for p in target.iterdir()] == ["a"]
    write_folder(target, lambda folder: (folder / "b").write_text("2"))
    assert [p.name for p in target.iterdir()] == ["b"]
    assert [p.name for p in tmp_path.iterdir()] == ["pipeline"]


def test_what_a_killed_process_of_the_same_number_left_is_no_obstacle(tmp_path):
    """In a container every run may be process 1."""
    (tmp_path / f".writing-pipeline-{os.getpid()}" / "half").mkdir(parents=True)
    write_folder(tmp_path / "pipeline", lambda folder: (folder / "a").write_text("1"))
    assert [p.name for p in tmp_path.iterdir()] == ["pipeline"]


def test_two_processes_may_write_one_folder(tmp_path):
    """What twins on several GPUs do with the latents cache: nobody's half-written files are taken away."""
    target = tmp_path / "latents"

    def fill(folder):
        (folder / "a").write_text("outer")
        other = subprocess.run([sys.executable, "-c", OTHER, str(target)], capture_output=True, text=True)
        assert other.returncode == 0, other.stderr
        assert (target / "a").read_text() == "other"

    write_folder(target, fill)
    assert (target / "a").read_text() == "outer" and [p.name for p in tmp_path.iterdir()] == ["latents"]


OTHER = """
import sys
from pathlib import Path
from mhla_diffusion.training.checkpoint import write_folder
write_folder(Path(sys.argv[1]), lambda folder: (folder / "a").write_text("other"))
"""

# Kills itself with SIGKILL at the n-th of: file written (4), checkpoint renamed, old checkpoint pruned.
KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from mhla_diffusion.training import checkpoint
from mhla_diffusion.training.checkpoint import prune, write_checkpoint

out, deadly, count = Path(sys.argv[1]), int(sys.argv[2]), 0
tensors = {n: {"a": torch.ones(3)} for n in ("weights", "ema", "optimizer")}
write_checkpoint(out, 3, tensors, {})

def counted(function):
    def call(*args, **kwargs):
        global count
        count += 1
        if count == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

checkpoint.save_file = counted(checkpoint.save_file)
Path.write_text = counted(Path.write_text)
Path.rename = counted(Path.rename)
checkpoint.shutil.rmtree = counted(checkpoint.shutil.rmtree)
write_checkpoint(out, 6, tensors, {})
prune(out, 1)
"""


def test_kill_at_every_point_of_a_write_loses_nothing(tmp_path):
    """SIGKILL before each file, each rename and each removal: one whole checkpoint is always found."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    points = range(
        1, 10
    )  # 3 safetensors, state, manifest, rename, then prune: rename, remove; the last is past the end
    running = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / str(point)), str(point)], env=os.environ
        )
        for point in points
    ]
    codes = [process.wait(timeout=120) for process in running]
    assert codes[:-1] == [-signal.SIGKILL] * (len(codes) - 1) and codes[-1] == 0
    found = []
    for point in points:
        folder = tmp_path / str(point)
        path = find_checkpoint(folder, "auto")
        found.append(json.loads((path / "state.json").read_text())["step"])
        assert all(fault(p) is None for p in list_checkpoints(folder)), (
            "a half-written one has a checkpoint's name"
        )
    assert found == [3] * 6 + [6] * 3
