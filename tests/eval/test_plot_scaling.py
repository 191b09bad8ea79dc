"""The plot of the operator's times is drawn from what the command writes."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from programs import load_program

from mhla_diffusion.evaluation.bench_operator import bench

PROGRAM = Path(__file__).resolve().parent.parent.parent / "eval" / "plot_scaling.py"


def draw(*paths: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, str(PROGRAM), *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def result(tmp_path) -> Path:
    # "1024 tokens" and "2048 tokens" at a size for a CPU.
    bench(out=tmp_path / "s.json", rows=["1024", "2048"], device="cpu", scaling=True, quick=True, repeats=1)
    return tmp_path / "s.json"


def test_a_small_picture_is_drawn(result, tmp_path):
    done = draw(result, tmp_path / "plots" / "s.png")
    assert done.returncode == 0, done.stderr
    with Image.open(tmp_path / "plots" / "s.png") as picture:
        assert picture.width > 600 and len(picture.convert("RGB").resize((64, 64)).getcolors(4096)) > 10
    assert (tmp_path / "plots" / "s.png").stat().st_size < 150_000


def test_peers_without_points_are_named():
    program = load_program("eval/plot_scaling.py")
    rows = [
        {"shape": {"N": 1024}, "peers_ms": {"A": 1.0, "C": 1.0}, "peers_not_run": {"B": "not installed"}},
        {
            "shape": {"N": 2048},
            "peers_ms": {"C": 2.0},
            "peers_not_run": {"A": "left out", "B": "not installed"},
        },
        {
            "shape": {"N": 4096},
            "peers_ms": {},
            "peers_not_run": {"A": "left out", "C": "stopped: one call took 1 s"},
        },
    ]
    assert program.gaps({"rows": rows}) == [
        "not installed: B", "not timed beyond 1k tokens: A", "stopped beyond 2k tokens: C",
    ]  # fmt: skip


def test_nothing_to_draw_is_said(tmp_path):
    (tmp_path / "empty.json").write_text('{"rows": []}')
    done = draw(tmp_path / "empty.json", tmp_path / "s.png")
    assert done.returncode == 1 and "mhla bench op --scaling" in done.stderr
