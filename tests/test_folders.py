"""Folders that appear whole: leftovers of killed processes go, those of living ones stay, faults say what is wrong."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mhla_diffusion.folders import check_writable, folder_in_the_making, locked

KILLED = """
import os, signal, sys
from pathlib import Path
from mhla_diffusion.folders import folder_in_the_making

with folder_in_the_making(Path(sys.argv[1])) as part:
    (part / "half").touch()
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    print("ready", flush=True)
    sys.stdin.read()
"""


def start(out: Path, how: str) -> subprocess.Popen:
    command = [sys.executable, "-c", KILLED, out, how]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def make(out: Path) -> None:
    with folder_in_the_making(out) as part:
        (part / "whole").touch()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_process_left_goes_and_what_a_living_one_makes_stays(tmp_path):
    killed = start(tmp_path / "out", "killed")
    killed.communicate(timeout=100)
    assert killed.returncode == -signal.SIGKILL and names(tmp_path) == [f".out.{killed.pid}.part"]
    living = start(tmp_path / "out", "living")
    try:
        assert living.stdout.readline() == "ready\n"
        assert names(tmp_path) == [f".out.{living.pid}.part"]
        make(tmp_path / "out")
        assert names(tmp_path) == [f".out.{living.pid}.part", "out"]
    finally:
        living.communicate(timeout=100)
    # It finds the name taken, and leaves nothing.
    assert living.returncode == 1 and names(tmp_path) == ["out"] and names(tmp_path / "out") == ["whole"]


def test_only_folders_of_the_same_name_whose_process_is_gone_are_removed(tmp_path):
    gone = 2**22 + 1  # above every number that Linux gives
    kept = [
        ".other.4194305.part",
        ".out.part",
        ".out.x.part",
        f".out.{os.getppid()}.part",
        f".out.{gone + 1}.part",
    ]
    for name in [*kept, f".out.{gone}.part", f".out.{os.getpid()}.part"]:
        (tmp_path / name).mkdir()
    elsewhere = locked(tmp_path / f".out.{gone + 1}.part")  # as by a process of another container
    make(tmp_path / "out")
    os.close(elsewhere)
    assert names(tmp_path) == sorted([*kept, "out"])


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), folder_in_the_making(tmp_path / "new" / "out"):
        raise KeyError
    assert names(tmp_path / "new") == []


def test_a_place_that_takes_no_files_is_named(tmp_path):
    (tmp_path / "file").touch()
    check_writable(tmp_path / "new" / "folder")
    with pytest.raises(ValueError, match=r"file is a file; give another folder$"):
        check_writable(tmp_path / "file" / "out")
    with pytest.raises(
        ValueError, match=r"^cannot write into /proc/x: /proc takes no files \(.+\); .* with --out$"
    ):
        check_writable(Path("/proc/x"), "--out")
    assert names(tmp_path) == ["file"]
