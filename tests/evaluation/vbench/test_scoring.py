"""Dimensions scored in VBench's own environment, by a small package that stands in for it."""

import json
import sys
import time

import numpy as np
import pytest
import tiny_vbench

from mhla_diffusion.cli import main
from mhla_diffusion.evaluation.vbench.dimensions import DIMENSIONS
from mhla_diffusion.evaluation.vbench.needs import FILES, LEAVES_OUT, ORIGINS
from mhla_diffusion.pipelines.videos import save_video

MOTION, DYNAMIC, FLICKER = "motion_smoothness", "dynamic_degree", "temporal_flickering"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vbench")
    wheels, lock = tiny_vbench.build(folder)
    line = ["eval", "vbench", "setup", str(folder / "env"), "--python", sys.executable]
    assert main([*line, "--wheels", str(wheels), "--lock", str(lock)]) == 0
    return folder / "env"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the plan of the stand-in's prompts, their videos, and no weights anywhere."""
    for name in ("VBENCH_CACHE_DIR", "MHLA_WEIGHTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "info.json").write_text(json.dumps(tiny_vbench.RECORDS))
    line = ["eval", "vbench", "plan", "plan.json", "--prompts", "info.json", "--flicker-samples", "12"]
    assert main([*line, "--samples", "2", "--seed", "3"]) == 0
    frames = np.zeros((2, 16, 16, 3), np.uint8)
    for row in json.loads((tmp_path / "plan.json").read_text())["videos"]:
        about = {
            "prompt": row["prompt"],
            "seed": row["seed"],
            "steps": 20,
            "guidance": 5.0,
            "flow_shift": 3.0,
        }
        about |= {
            "height": 16,
            "width": 16,
            "frames": 2,
            "fps": 8,
            "pipeline": "toy",
            "pipeline_sha256": "0" * 64,
        }
        save_video(frames, tmp_path / "videos" / row["file"], fps=8, settings=about, beside=False)
    return tmp_path


def scored(environment, *more, dimensions=(MOTION, DYNAMIC, FLICKER), weights="weights") -> int:
    line = ["eval", "vbench", "run", "videos", "--plan", "plan.json", "--environment", str(environment)]
    return main(
        [*line, "--out", "out", "--dimensions", *dimensions, "--weights", weights, "--device", "cpu", *more]
    )


def result(here, name):
    return json.loads((here / "out" / f"{name}_eval_results.json").read_text())[name]


def test_every_dimension_has_its_files_and_every_file_an_origin():
    assert FILES.keys() == DIMENSIONS.keys() and LEAVES_OUT <= DIMENSIONS.keys()
    assert {file for files in FILES.values() for file in files} == ORIGINS.keys()


def test_dimensions_are_scored_and_a_second_run_scores_nothing(environment, here, capsys):
    tiny_vbench.weights(here / "weights")
    assert scored(environment) == 0
    out = capsys.readouterr().out
    assert "3 dimensions in out" in out and "there already" not in out
    value, rows = result(here, MOTION)
    assert value == pytest.approx(0.05) and len(rows) == 4
    assert rows[0]["video_path"] == "videos/a cat, running-0.mp4"
    # The stand-in takes odd videos for still: the first five of them count, under their own names.
    value, rows = result(here, FLICKER)
    assert [row["video_path"] for row in rows] == [
        f"videos/a still stop sign-{i}.mp4" for i in (1, 3, 5, 7, 9)
    ]
    assert value == pytest.approx(np.mean([0.0, 0.1, 0.2, 0.3, 0.4]))
    stamps = {path.name: path.stat().st_mtime_ns for path in (here / "out").iterdir()}
    assert scored(environment) == 0
    out = capsys.readouterr().out
    assert out.count("(there already)") == 3
    assert stamps == {path.name: path.stat().st_mtime_ns for path in (here / "out").iterdir()}
    (here / "out" / f"{DYNAMIC}_eval_results.json").unlink()
    assert scored(environment) == 0
    assert capsys.readouterr().out.count("(there already)") == 2
    assert main(["eval", "vbench", "aggregate", "out", "--out", "total.json"]) == 0
    found = json.loads((here / "total.json").read_text())
    assert found["values"][MOTION]["videos"] == 4 and found["total"] is None


def test_what_a_score_depends_on_stands_in_the_totals(environment, here):
    """Case: a score that nobody can repeat, since prompts, sampler and version are unknown."""
    tiny_vbench.weights(here / "weights")
    assert scored(environment) == 0
    assert main(["eval", "vbench", "aggregate", "out", "--out", "total.json"]) == 0
    settings = json.loads((here / "total.json").read_text())["settings"]
    assert len(settings["plan"]["prompt_file"]["sha256"]) == 64 and settings["plan"]["seed"] == 3
    assert settings["mode"] == "vbench_standard" and settings["vbench"] == "0.1.5"
    drawn = settings["drawn"]
    expected = {
        "steps": 20,
        "guidance": 5.0,
        "flow_shift": 3.0,
        "height": 16,
        "width": 16,
        "frames": 2,
        "fps": 8,
    }
    assert expected.items() <= drawn.items() and drawn["seeds"] == {"first": 3, "last": 14, "different": 12}
    run = json.loads((here / "out" / f"{MOTION}_run.json").read_text())
    assert run["environment"]["device"] == "cpu" and len(run["key"]["weights"]["amt_model/amt-s.pth"]) == 64


def test_results_of_other_videos_weights_or_unknown_ones_are_not_taken_for_done(environment, here, capsys):
    tiny_vbench.weights(here / "weights")
    assert scored(environment, dimensions=[MOTION]) == 0
    before = result(here, MOTION)
    (here / "weights" / "amt_model" / "amt-s.pth").write_text("fine")
    assert scored(environment, dimensions=[MOTION]) == 2
    assert "is of another run (weights differ): use --overwrite" in capsys.readouterr().err
    (here / "videos" / "a dog-0.mp4").write_bytes(b"other")
    assert scored(environment, dimensions=[MOTION]) == 2
    assert "(videos, weights differ)" in capsys.readouterr().err and result(here, MOTION) == before
    assert scored(environment, "--overwrite", dimensions=[MOTION]) == 0
    (here / "out" / f"{MOTION}_run.json").unlink()
    assert scored(environment, dimensions=[MOTION]) == 2
    assert "another run (nothing beside it says of what): use" in capsys.readouterr().err


def test_missing_weights_are_named_in_under_a_second_with_every_place(environment, here, monkeypatch, capsys):
    monkeypatch.setenv("VBENCH_CACHE_DIR", str(here / "cache"))
    monkeypatch.setenv("MHLA_WEIGHTS", str(here / "mine"))
    line = ["eval", "vbench", "run", "videos", "--plan", "plan.json", "--environment", str(environment)]
    line += ["--out", "out", "--device", "cpu", "--dimensions", MOTION, DYNAMIC]
    start = time.monotonic()
    assert main(line) == 3
    assert time.monotonic() - start < 1
    err = capsys.readouterr().err
    assert "amt_model/amt-s.pth (lalala125/AMT; for motion_smoothness)" in err and "raft-things.pth" in err
    for place in (here / "cache", here / "mine" / "vbench", here / "home" / ".cache" / "vbench"):
        assert str(place) in err
    assert "--weights FOLDER" in err and err.count("\n") == 1 and not (here / "out").exists()
    # Of several places each may have some of it.
    tiny_vbench.weights(here / "cache")
    (here / "cache" / "amt_model" / "amt-s.pth").unlink()
    assert main(line) == 3
    assert "the other 1 can be scored without: add --skip-missing" in capsys.readouterr().err
    assert main([*line, "--skip-missing"]) == 0
    assert "motion_smoothness is left out: no weights amt_model/amt-s.pth" in capsys.readouterr().err
    tiny_vbench.weights(here / "mine" / "vbench")
    assert main(line) == 0 and result(here, MOTION)[0] == pytest.approx(0.05)


def test_a_package_that_is_missing_there_is_named(environment, here, capsys):
    tiny_vbench.weights(here / "weights")
    grit = here / "weights" / "grit_model" / "grit_b_densecap_objectdet.pth"
    grit.parent.mkdir()
    grit.write_text("good")
    assert scored(environment, dimensions=[MOTION, "color"]) == 3
    err = capsys.readouterr().err
    assert "color cannot be scored in" in err and "'detectron2'" in err and "the other 1 can" in err
    assert scored(environment, "--skip-missing", dimensions=[MOTION, "color"]) == 0
    assert "color is left out: ModuleNotFoundError" in capsys.readouterr().err
    assert scored(environment, "--skip-missing", dimensions=["color"]) == 3


def test_no_environment_is_said_beside_the_missing_weights(here, capsys):
    assert scored(here / "absent", dimensions=[MOTION]) == 3
    err = capsys.readouterr().err
    assert "amt-s.pth" in err and f"mhla eval vbench setup {here / 'absent'}" in err


def test_a_folder_without_its_videos_is_refused_with_the_first_name(environment, here, capsys):
    """Case: no file name matched, the result was NaN and the exit status 0."""
    tiny_vbench.weights(here / "weights")
    for path in (here / "videos").iterdir():
        path.unlink()
    assert scored(environment, dimensions=[MOTION]) == 2
    err = capsys.readouterr().err
    assert "0 of 4 expected videos found in videos; first missing: 'a cat, running-0.mp4'" in err
    assert "mhla generate --vbench-plan" in err and not (here / "out").exists()
    assert main(["eval", "vbench", "run", "nowhere", "--plan", "plan.json"]) == 2
    assert main(["eval", "vbench", "run", "videos", "--environment", str(environment)]) == 2
    assert "holds no videos" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("drop", "VBench scored 3 of 4 videos; first missing: 'a dog-1.mp4'"),
        ("nan", "no video was scored"),
        ("crash", "the process said nothing"),
        ("nothing", "VBench wrote no result"),
        ("git", "VBench wanted to fetch something, which it must find on disk"),
        ("network", "scoring reaches no network"),
        ("pickle", "add --trust-weights"),
    ],
)
def test_a_dimension_that_fails_leaves_no_result_and_the_others_are_scored(
    environment, here, capsys, how, told
):
    tiny_vbench.weights(here / "weights", amt=how)
    assert scored(environment, dimensions=[MOTION, DYNAMIC]) == 4
    out = capsys.readouterr().out
    assert told in out and "1 dimensions in out" in out
    assert not (here / "out" / f"{MOTION}_eval_results.json").exists()
    assert result(here, DYNAMIC)[0] == pytest.approx(0.05)
    if how == "drop":
        assert scored(environment, dimensions=[MOTION]) == 2
        assert "every dimension failed" in capsys.readouterr().err
        tiny_vbench.weights(here / "weights")
        assert scored(environment, dimensions=[MOTION, DYNAMIC]) == 0
        assert capsys.readouterr().out.count("(there already)") == 1


def test_weights_that_run_code_are_read_only_when_trusted(environment, here):
    tiny_vbench.weights(here / "weights", amt="trusted")
    assert scored(environment, dimensions=[MOTION]) == 2
    assert scored(environment, "--trust-weights", dimensions=[MOTION]) == 0


def test_flickering_without_the_filter_says_so_and_needs_no_weights(environment, here, capsys):
    (here / "weights").mkdir()
    assert scored(environment, dimensions=[FLICKER]) == 3
    assert "raft-things.pth" in capsys.readouterr().err
    assert scored(environment, "--no-static-filter", dimensions=[FLICKER]) == 0
    assert "is of all videos, not of still ones" in capsys.readouterr().err
    assert len(result(here, FLICKER)[1]) == 5
    tiny_vbench.weights(here / "weights", raft="restless")
    assert scored(environment, "--overwrite", dimensions=[FLICKER]) == 2
    assert "none of the videos is still" in capsys.readouterr().out


def test_few_still_videos_are_warned_about(environment, here, capsys):
    tiny_vbench.weights(here / "weights")
    line = ["eval", "vbench", "plan", "plan.json", "--prompts", "info.json", "--flicker-samples", "4"]
    assert main([*line, "--samples", "2", "--seed", "3"]) == 0
    assert scored(environment, dimensions=[FLICKER]) == 0
    assert (
        "1 prompts have fewer than 5 still videos, for example 'a still stop sign'" in capsys.readouterr().err
    )


def test_any_videos_are_scored_without_a_plan(environment, here, capsys):
    tiny_vbench.weights(here / "weights")
    line = ["eval", "vbench", "run", "videos", "--environment", str(environment), "--out", "out"]
    line += ["--weights", "weights", "--device", "cpu"]
    assert main([*line, "--dimensions", MOTION, FLICKER]) == 0
    assert "is of all videos, not of still ones" in capsys.readouterr().err
    assert len(result(here, MOTION)[1]) == len(result(here, FLICKER)[1]) == 18
    assert main([*line, "--dimensions", "scene"]) == 2
    assert "asks what VBench's own prompts ask for: give their videos with --plan" in capsys.readouterr().err
    assert main(["eval", "vbench", "aggregate", "out", "--out", "total.json"]) == 0
    assert json.loads((here / "total.json").read_text())["settings"]["mode"] == "custom_input"


def test_videos_for_vbench_long_are_warned_about(environment, here, capsys):
    tiny_vbench.weights(here / "weights")
    for path in (here / "videos").iterdir():
        frames = np.zeros((2, 16, 16, 3), np.uint8)
        save_video(frames, path, fps=8, settings={"frames": 81, "fps": 16}, beside=False)
    assert scored(environment, dimensions=[MOTION]) == 0
    assert "videos of 5.1 s: from 5 s on papers report VBench-Long" in capsys.readouterr().err


def test_a_plan_of_another_prompt_list_is_refused(environment, here, capsys):
    tiny_vbench.weights(here / "weights")
    (here / "info.json").write_text(json.dumps(tiny_vbench.RECORDS, indent=1))
    line = ["eval", "vbench", "plan", "plan.json", "--prompts", "info.json", "--flicker-samples", "12"]
    assert main([*line, "--samples", "2", "--seed", "3"]) == 0
    assert scored(environment, dimensions=[MOTION]) == 2
    assert "the plan is of another prompt list" in capsys.readouterr().err
    assert scored(environment, "--prompts", "info.json", dimensions=[MOTION]) == 0
    assert scored(environment, dimensions=["scene"]) == 2
    assert "the plan has no videos for scene" in capsys.readouterr().err
