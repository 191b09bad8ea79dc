"""Which videos are planned, and what is found amiss in a folder of them."""

import json

import numpy as np
import pytest

from mhla_diffusion.cli import main
from mhla_diffusion.evaluation.faults import MissingWeights
from mhla_diffusion.evaluation.vbench.check import check_videos, faults
from mhla_diffusion.evaluation.vbench.plan import plan, read_plan, read_records, read_rewritten
from mhla_diffusion.pipelines.videos import save_video

RECORDS = [
    {"prompt_en": "a still stop sign", "dimension": ["temporal_flickering"]},
    {
        "prompt_en": "a cat, running",
        "dimension": ["subject_consistency", "dynamic_degree", "motion_smoothness"],
    },
    {"prompt_en": "a fantasy landscape", "dimension": ["appearance_style"]},
    {"prompt_en": "A fantasy landscape", "dimension": ["scene"]},
    {"prompt_en": "a cat, running", "dimension": ["aesthetic_quality", "imaging_quality"]},
]
ABOUT = {"path": "list.json", "sha256": "0" * 64}


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    monkeypatch.delenv("MHLA_WEIGHTS", raising=False)
    path = tmp_path / "VBench_full_info.json"
    path.write_text(json.dumps(RECORDS))
    return path


def test_a_plan_names_every_video_once(prompts):
    found = plan(*read_records(prompts), seed=7)
    files = [row["file"] for row in found["videos"]]
    assert len(files) == len(set(files)) == 25 + 5 + 5 + 5
    assert files[:2] == ["a still stop sign-0.mp4", "a still stop sign-1.mp4"]
    cat = [row for row in found["videos"] if "cat" in row["file"]]
    assert [row["seed"] for row in cat] == [7, 8, 9, 10, 11]
    assert cat[0]["dimensions"] == [*RECORDS[1]["dimension"], *RECORDS[4]["dimension"]]
    assert (
        "not the prompt list of vbench 0.1.5" in found["warnings"][0]
        and "one file where" in found["warnings"][1]
    )
    assert (
        found["settings"]["prompt_file"]["records"] == 5
        and len(found["settings"]["prompt_file"]["sha256"]) == 64
    )


def test_a_part_of_it_and_rewritten_prompts(tmp_path):
    found = plan(RECORDS, ABOUT, dimensions=["imaging_quality"], samples=2, extension=".gif")
    assert [row["file"] for row in found["videos"]] == ["a cat, running-0.gif", "a cat, running-1.gif"]
    assert found["videos"][0]["dimensions"] == ["imaging_quality"] and found["protocol"] == "vbench_partial"
    (tmp_path / "long.txt").write_text("\n".join(f"a long story {i}" for i in range(5)) + "\n")
    long = read_rewritten(tmp_path / "long.txt", 5)
    found = plan(RECORDS, ABOUT, rewritten=long, samples=1, flicker_samples=1)
    assert [(row["file"], row["prompt"]) for row in found["videos"]][:2] == [
        ("a still stop sign-0.mp4", "a long story 0"),
        ("a cat, running-0.mp4", "a long story 1"),
    ]
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    for name in ("absent.txt", "binary.txt"):
        with pytest.raises(ValueError, match=rf"{name} cannot be read \(.*one prompt a line"):
            read_rewritten(tmp_path / name, 6)
    with pytest.raises(ValueError, match="has 5 lines"):
        read_rewritten(tmp_path / "long.txt", 6)


def test_what_cannot_be_planned_is_refused(tmp_path, prompts):
    for arguments, message in (
        ({"dimensions": ["speed"]}, "'speed' is no dimension"),
        ({"dimensions": ["scene", "human_action"]}, "list.json has no prompt for human_action"),
        ({"samples": 0}, "at least 1"),
        ({"seed": -5}, "seed -5 is out of range"),
        ({"extension": "mp4"}, "with its dot"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(RECORDS, ABOUT, **arguments)
    for prompt in ("either/or", "long " * 60):
        with pytest.raises(ValueError, match="cannot be a file name"):
            plan([{"prompt_en": prompt, "dimension": ["scene"]}], ABOUT)
    with pytest.raises(MissingWeights, match="no prompt list 'vbench-prompts'; searched"):
        read_records()
    for content in (
        "[",
        "[]",
        '[{"prompt_en": "a", "dimension": ["b"]}]',
        '[{"prompt": "a"}]',
        '[{"dimension": []}]',
    ):
        prompts.write_text(content)
        with pytest.raises(ValueError, match=r"VBench_full_info.json|no prompts"):
            read_records(prompts)
    with pytest.raises(ValueError, match="make one with"):
        read_plan(tmp_path / "absent.json")
    prompts.write_text("{}")
    with pytest.raises(ValueError, match="no plan of this version"):
        read_plan(prompts)


def video(path, frames: int = 4, size: int = 32, fps: float = 8):
    pixels = np.random.default_rng(0).integers(0, 256, (frames, size, size, 3), np.uint8)
    save_video(pixels, path, fps=fps)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "videos").mkdir()
    return tmp_path / "videos"


SMALL = plan(RECORDS[1:2], ABOUT, samples=3)


def test_a_whole_set_passes(folder):
    for row in SMALL["videos"]:
        video(folder / row["file"])
    (folder / "notes.txt").touch()
    report = check_videos(folder, SMALL, fps=8, size=(32, 32), frames=4, whole=True)
    assert faults(report) == [] and report["found"] == report["expected"] == 3
    assert (
        report["videos"] == {"fps": 8, "frames": 4, "width": 32, "height": 32} and report["unexpected"] == []
    )
    assert "fps 8.0, not 16" in faults(check_videos(folder, SMALL, fps=16))[0]


def test_everything_amiss_is_counted_with_its_first_example(folder):
    first, second, third = (row["file"] for row in SMALL["videos"])
    report = check_videos(folder, SMALL)
    assert faults(report) == [f"0 of 3 expected videos found; first missing: {first!r}"]
    video(folder / first)
    (folder / second).write_bytes((folder / first).read_bytes()[:200])
    video(folder / "other.mp4")
    video(folder / first.upper().replace(".MP4", ".mp4"))  # another prompt, which differs in its case only
    video(folder / first.replace(".mp4", ".gif"))
    report = check_videos(folder, SMALL)
    found = " | ".join(faults(report))
    assert f"2 of 3 expected videos found; first missing: {third!r}" in found
    assert (
        "1 videos are there in two formats" in found
        and f"1 videos cannot be used, first: {second!r}" in found
    )
    assert report["doubled"] == [[first.replace(".mp4", ".gif"), first]]
    assert report["unexpected"][1:] == [first.replace(".mp4", ".gif"), "other.mp4"]
    video(folder / second)
    video(folder / third, size=48, fps=12, frames=5)
    unlike = check_videos(folder, SMALL)["unlike"]
    assert (
        set(unlike) == {third} and "width 48, not 32" in unlike[third] and "fps 12.0, not 8" in unlike[third]
    )


def test_long_videos_belong_to_another_benchmark(folder):
    video(folder / SMALL["videos"][0]["file"], frames=11, fps=2)
    assert "VBench-Long" in check_videos(folder, SMALL)["warnings"][0]
    with pytest.raises(ValueError, match="there is no folder"):
        check_videos(folder / "absent", SMALL)


def test_the_commands(tmp_path, prompts, folder, capsys):
    """Case: no file name matched, the result was NaN and the exit status 0."""
    made = str(tmp_path / "plan.json")
    base = ["eval", "vbench"]
    command = [
        *base,
        "plan",
        made,
        "--prompts",
        str(prompts),
        "--dimensions",
        "imaging_quality",
        "--samples",
        "1",
    ]
    assert main(command) == 0
    assert "1 videos of 1 prompts" in capsys.readouterr().out
    report = str(tmp_path / "report.json")
    assert main([*base, "check", str(folder), "--plan", made, "--out", report]) == 2
    err = capsys.readouterr().err
    assert (
        "0 of 1 expected videos found; first missing: 'a cat, running-0.mp4'" in err and err.count("\n") == 1
    )
    assert json.loads((tmp_path / "report.json").read_text())["missing"] == ["a cat, running-0.mp4"]
    video(folder / "a cat, running-0.mp4")
    assert main([*base, "check", str(folder), "--plan", made, "--size", "32", "32"]) == 0
    assert "1 of 1 videos are there and alike" in capsys.readouterr().out
    assert main([*base, "plan", made]) == 3


def test_a_place_that_cannot_be_written_is_named_before_anything_is_computed(prompts, tmp_path, capsys):
    (tmp_path / "a.json").write_text('{"scene": 0.5}')
    for line in (
        ["plan", "/proc/x/p.json", "--prompts", str(prompts)],
        ["aggregate", str(tmp_path / "a.json"), "--out", "/proc/x/p.json"],
        ["aggregate", str(tmp_path / "a.json"), "--out", str(tmp_path)],
        ["flicker", str(tmp_path), "--out", "/proc/x/p.json"],
        ["setup", "/proc/x", "--dry-run"],
    ):
        assert main(["eval", "vbench", *line]) == 2
        out, err = capsys.readouterr()
        assert out == "" and ("cannot write into" in err or "is a folder" in err)
