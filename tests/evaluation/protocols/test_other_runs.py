"""Running protocols on videos, on VBench's results and on a pipeline's attention."""

import json

import numpy as np
import pytest
import tiny_sana
from model_checks import stirred
from protocol_files import protocol, result

from mhla_diffusion.cli import main
from mhla_diffusion.models.sana import MHLASanaTransformer2DModel
from mhla_diffusion.pipelines.sana import MHLASanaPipeline
from mhla_diffusion.pipelines.videos import save_video


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch):
    monkeypatch.delenv("MHLA_WEIGHTS", raising=False)
    monkeypatch.delenv("MHLA_PROTOCOLS", raising=False)


def run_of(folder) -> list[str]:
    """The command up to the protocol's file, with samples and results in the folder."""
    return ["eval", "run", "--samples", str(folder / "samples"), "--out", str(folder / "out"), "--protocol"]


def plan_of(folder, count: int) -> str:
    """A plan that wants so many videos."""
    whale = {"prompt": "a whale", "seed": 0, "dimensions": ["scene"]}
    videos = [{"file": f"a whale-{i}.mp4"} | whale for i in range(count)]
    plan = {"schema_version": 1, "warnings": [], "settings": {}, "videos": videos}
    (folder / "plan.json").write_text(json.dumps(plan))
    return str(folder / "plan.json")


def test_videos_and_the_results_of_vbench(tmp_path, capsys):
    videos = tmp_path / "samples"
    videos.mkdir()
    for index in range(2):
        frames = np.full((5, 16, 16, 3), 100, dtype=np.uint8)
        save_video(frames, videos / f"a whale-{index}.mp4", fps=8, settings={"prompt": "a whale"})
    (tmp_path / "scores.json").write_text(json.dumps({"subject_consistency": 0.9, "imaging_quality": 70.0}))
    text = (
        "samples: {kind: videos, least: 1}\nparts:\n- {scorer: vbench_flicker}\n"
        "- {scorer: vbench_totals, metrics: [subject_consistency, imaging_quality]}\n"
    )
    common = run_of(tmp_path)
    file = protocol(tmp_path, text)
    assert main([*common, file]) == 2 and "give --results" in capsys.readouterr().err
    assert main([*common, file, "--results", str(tmp_path / "scores.json")]) == 0
    values = result(tmp_path)["values"]
    assert values["temporal_flickering"]["value"] > 0.99 and values["imaging_quality"]["value"] == 0.7
    totals = protocol(tmp_path, text.replace("imaging_quality", "total"), "totals")
    assert main([*common, totals, "--results", str(tmp_path / "scores.json")]) == 4
    assert "hold no total" in result(tmp_path)["failed"]["vbench_totals"]

    plan = plan_of(tmp_path, 3)
    check = protocol(
        tmp_path, "samples: {kind: videos}\nparts:\n- {scorer: vbench_check, options: {fps: 8}}\n", "check"
    )
    assert main([*common, check, "--plan", plan]) == 2
    assert "2 of 3 expected videos found" in capsys.readouterr().err
    assert main([*common, check, "--plan", plan_of(tmp_path, 2)]) == 0
    assert (
        main([*common, check]) == 3 and "give VBench_full_info.json with --prompts" in capsys.readouterr().err
    )
    records = [{"prompt_en": "a whale", "dimension": ["scene"]}]
    (tmp_path / "info.json").write_text(json.dumps(records))
    assert main([*common, check, "--prompts", str(tmp_path / "info.json")]) == 2  # five of each prompt
    assert "2 of 5 expected videos found" in capsys.readouterr().err


def test_a_grid_of_videos_of_any_kind_and_a_broken_one_costs_no_numbers(tmp_path, capsys):
    frames = np.full((5, 16, 16, 3), 100, dtype=np.uint8)
    for name in ("a.MP4", "b.mov"):
        save_video(frames, tmp_path / "video.mp4", fps=8, settings={"prompt": "a whale"}, beside=False)
        (tmp_path / "samples").mkdir(exist_ok=True)
        (tmp_path / "video.mp4").rename(tmp_path / "samples" / name)
    file = protocol(tmp_path, "samples: {kind: videos}\nparts:\n- {scorer: vbench_flicker}\n")
    assert main([*run_of(tmp_path), file]) == 0 and result(tmp_path)["grid"] == "grid.png"
    (tmp_path / "samples" / "b.mov").write_bytes(b"no video")
    checked = protocol(tmp_path, "samples: {kind: videos}\nparts:\n- {scorer: vbench_check}\n", "checked")
    plan = {"schema_version": 1, "warnings": [], "settings": {}}
    plan["videos"] = [{"file": "a.MP4", "prompt": "a whale", "seed": 0, "dimensions": ["scene"]}]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert main([*run_of(tmp_path), checked, "--plan", str(tmp_path / "plan.json")]) == 0
    assert (
        "no grid.png" in capsys.readouterr().err and result(tmp_path)["values"]["videos_found"]["value"] == 1
    )


def test_no_video_of_the_plan_is_there(tmp_path, capsys):
    (tmp_path / "samples").mkdir()
    common = run_of(tmp_path)
    check = protocol(tmp_path, "samples: {kind: videos}\nparts:\n- {scorer: vbench_check}\n")
    assert main([*common, check, "--plan", plan_of(tmp_path, 1)]) == 2
    assert "0 of 1 expected videos found; first missing: 'a whale-0.mp4'" in capsys.readouterr().err


def test_a_limit_takes_the_first_videos_and_their_prompts(tmp_path, capsys):
    (tmp_path / "samples").mkdir()
    for index in range(3):
        frames = np.full((5, 32, 32, 3), 255, dtype=np.uint8)
        for step, frame in enumerate(frames):
            frame[12:20, 4 * step : 4 * step + 8] = (200, 30, 30)
        save_video(frames, tmp_path / "samples" / f"{index}.mp4", fps=8)
    (tmp_path / "prompts.txt").write_text("a box moving right\na box moving up\na box moving up\n")
    file = protocol(tmp_path, "samples: {kind: videos}\nparts:\n- {scorer: moving_emoji}\n")
    line = [*run_of(tmp_path), file, "--prompts", str(tmp_path / "prompts.txt")]
    assert main([*line, "--limit", "1"]) == 0
    assert result(tmp_path)["values"]["motion"] == {
        "value": 1.0,
        "n": 1,
        "higher_is_better": True,
        "chance": 1 / 12,
    }
    assert main(line) == 0 and result(tmp_path)["values"]["motion"]["value"] == pytest.approx(1 / 3)
    assert main([*line, "--background", "white"]) == 2
    assert "scores videos: leave --background out" in capsys.readouterr().err
    (tmp_path / "prompts.txt").write_text("a box moving right\na box moving up\n")
    assert main([*line, "--limit", "1"]) == 2 and "2 prompts for 3 videos" in capsys.readouterr().err


def test_attention_of_a_pipeline(tmp_path, capsys):
    transformer = MHLASanaTransformer2DModel(**tiny_sana.TRANSFORMER, mhla_block_grid=(2, 2))
    pipe = MHLASanaPipeline(**tiny_sana.components(stirred(transformer).eval()))
    pipe.save_pretrained(tmp_path / "samples")
    text = (
        "samples: {kind: pipeline}\nparts:\n- scorer: attention\n"
        "  options: {steps: 2, at: [1], one_block: true, prompts: [a red apple]}\n"
    )
    common = run_of(tmp_path)
    assert main([*common, protocol(tmp_path, text)]) == 0
    values = result(tmp_path)["values"]
    assert values["mhla.rank"]["n"] == values["one_block.rank"]["n"] == 4
    assert values["one_block.rank"]["value"] <= 8 < values["mhla.rank"]["value"]
    assert (tmp_path / "out" / "attention_mixing.png").is_file()
    for old, new, message in (
        ("[a red apple]", "apple", "option prompts is 'apple': give a list of texts"),
        ("at: [1]", "at: [one]", "option at is ['one']: give a list of whole numbers"),
        ("steps: 2", "steps: two", "option steps is 'two': give a whole number"),
        ("one_block: true", "one_block: 1", "option one_block is 1: give bool"),
    ):
        assert main([*common, protocol(tmp_path, text.replace(old, new))]) == 2
        assert message in capsys.readouterr().err
