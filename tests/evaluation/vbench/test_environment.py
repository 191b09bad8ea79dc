"""VBench's own environment, built by uv without a network from a package made here."""

import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import tiny_vbench

from mhla_diffusion.cli import main
from mhla_diffusion.evaluation.faults import MissingWeights
from mhla_diffusion.evaluation.vbench.environment import (
    LOCK,
    MissingEnvironment,
    default_environment,
    find_uv,
    locked,
    probe,
    python_of,
)


def setup_line(folder: Path, *more: str) -> list[str]:
    line = ["eval", "vbench", "setup", str(folder / "env"), "--python", sys.executable]
    return [*line, "--wheels", str(folder / "wheels"), "--lock", str(folder / "tiny.lock"), *more]


def test_the_lock_file_pins_vbench_and_what_breaks_it():
    pins = dict(line.split("==") for line in locked(LOCK))
    assert pins["vbench"] == "0.1.5" and pins["transformers"] == "4.33.2" and pins["pyiqa"] == "0.1.10"
    assert pins["numpy"].startswith("1.") and int(pins["setuptools"].split(".")[0]) < 81
    assert "opencv-python-headless" in pins and "opencv-python" not in pins and len(pins) > 100
    assert "://" not in LOCK.read_text() and "index" not in LOCK.read_text().replace(
        "--no-emit-index-url", ""
    )


def test_a_dry_run_prints_what_would_be_done_and_does_nothing(tmp_path, capsys):
    env = tmp_path / "env"
    assert main(["eval", "vbench", "setup", str(env), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("uv venv ") and str(env) in lines[0]
    assert lines[1].startswith("uv pip sync ") and "--require-hashes" in lines[1] and str(LOCK) in lines[1]
    assert "vbench==0.1.5" in lines[2] and lines[3] == "nothing done (--dry-run)" and not env.exists()


def test_it_is_built_once_and_says_what_it_cannot_score(tmp_path, capsys):
    tiny_vbench.build(tmp_path)
    env = tmp_path / "env"
    assert main(setup_line(tmp_path)) == 0
    out, err = capsys.readouterr()
    assert f"{env / 'bin' / 'python'} built: vbench 0.1.5" in out
    assert "color cannot be scored there: ModuleNotFoundError: No module named 'detectron2'" in err
    assert "motion_smoothness" not in err
    command = [python_of(env), "-c", "import vbench; print(vbench.__file__)"]
    where = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert where.startswith(str(env))
    record = json.loads((env / "mhla_vbench.json").read_text())
    assert record["whole"] and record["packages"] == 1 and record["versions"]["vbench"] == "0.1.5"
    stamp = (env / "mhla_vbench.json").stat().st_mtime_ns
    assert main(setup_line(tmp_path)) == 0
    assert "is there already" in capsys.readouterr().out
    assert (env / "mhla_vbench.json").stat().st_mtime_ns == stamp


def test_one_that_was_cut_short_is_finished(tmp_path, capsys):
    wheels, _ = tiny_vbench.build(tmp_path)
    wheel = next(wheels.iterdir())
    content = wheel.read_bytes()
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("vbench/more.py", "")
    assert main(setup_line(tmp_path)) == 2
    err = capsys.readouterr().err
    assert "uv could not build" in err and "hash" in err.lower()
    assert json.loads((tmp_path / "env" / "mhla_vbench.json").read_text())["whole"] is False
    wheel.write_bytes(content)
    assert main(setup_line(tmp_path)) == 0
    assert probe(tmp_path / "env")["versions"]["vbench"] == "0.1.5"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("vbench==0.1.5\n", "is no lock file of VBench"),
        ("torch==2.0 --hash=sha256:0\n", "is no lock file of VBench"),
        (None, "cannot read the lock file"),
    ],
)
def test_other_lock_files_are_refused(tmp_path, capsys, text, told):
    if text:
        (tmp_path / "tiny.lock").write_text(text)
    (tmp_path / "wheels").mkdir()
    assert main(setup_line(tmp_path)) == 2
    assert told in capsys.readouterr().err and not (tmp_path / "env").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path, capsys):
    tiny_vbench.build(tmp_path)
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "thesis.txt").write_text("mine")
    assert main(setup_line(tmp_path)) == 2
    assert "is something else: give a new folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "env").iterdir()] == ["thesis.txt"]
    assert main(["eval", "vbench", "setup", str(tmp_path / "x"), "--wheels", str(tmp_path / "absent")]) == 2


def test_without_uv_it_is_said_what_to_install(tmp_path, monkeypatch, capsys):
    tiny_vbench.build(tmp_path)
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(
        MissingEnvironment, match=r"no uv, .*searched .*pip install 'mhla_diffusion\[vbench\]'"
    ):
        find_uv()
    assert main(setup_line(tmp_path)) == 3 and not (tmp_path / "env").exists()


def test_what_is_no_environment_of_vbench_is_named_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("MHLA_CACHE", str(tmp_path))
    assert default_environment() == tmp_path / "vbench-environment"
    start = time.monotonic()
    with pytest.raises(MissingWeights, match="no environment of VBench at .*mhla eval vbench setup"):
        probe(tmp_path)
    assert time.monotonic() - start < 1
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    with pytest.raises(MissingEnvironment, match="has no vbench"):
        probe(tmp_path)
    (tmp_path / "bin" / "python").unlink()
    (tmp_path / "bin" / "python").symlink_to("/bin/false")
    with pytest.raises(ValueError, match="does not run"):
        probe(tmp_path)
