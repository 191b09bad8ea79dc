"""Shares of encoded videos whose truth is known."""

import numpy as np
import pytest

from mhla_diffusion.evaluation.moving.prompted import Prompt, summary
from mhla_diffusion.evaluation.moving.scores import score_clip
from mhla_diffusion.evaluation.moving.videos import score_motions
from mhla_diffusion.pipelines.videos import read_video, save_video


def square(motion: str) -> np.ndarray:
    """A red square on yellow that moves left or grows, `(9, 64, 64, 3)`."""
    frames = np.full((9, 64, 64, 3), (250, 220, 60), np.uint8)
    for step, frame in enumerate(frames):
        half, x = (6 + step, 32) if motion == "grow" else (7, 48 - 4 * step)
        frame[32 - half : 32 + half, x - half : x + half] = (230, 60, 40)
    return frames


@pytest.fixture
def videos(tmp_path):
    """Two that move left, one that grows; a caption each, of which the last is wrong and names no background."""
    paths = [tmp_path / f"{index}.mp4" for index in range(3)]
    for path, motion in zip(paths, ("left", "left", "grow"), strict=True):
        save_video(square(motion), path, fps=8)
    first = "a flat square moving left on a yellow background"
    return paths, [first, first.replace("yellow", "red"), "a flat square shrinking"]


def test_shares_of_encoded_videos(videos):
    found = score_motions(*videos)
    values = found["values"]
    assert values["motion"]["value"] == pytest.approx(2 / 3) and values["motion"]["n"] == 3
    assert values["motion"]["chance"] == pytest.approx(1 / 12)
    assert values["direction"]["value"] == 1 and values["direction"]["n"] == 2
    assert values["background"]["value"] == 0.5 and values["background"]["n"] == 2
    assert values["background"]["std"] == pytest.approx(0.5)
    assert found["measured"] == {"left": {"left": 2}, "shrink": {"grow": 1}} and found["warnings"] == []
    assert found["videos"][2]["prompt"] == "a flat square shrinking"
    assert found["videos"][0]["measured"]["background"] == "yellow"


def test_clips_of_one_prompt_count_once_in_the_error(videos):
    """They are no independent samples: three of one prompt say as little about the spread as one."""
    paths, captions = videos
    once = score_motions(paths[1:], captions[1:])["values"]["motion"]
    often = score_motions([*[paths[1]] * 3, paths[2]], [*[captions[1]] * 3, captions[2]])["values"]["motion"]
    assert often["n"] == 4 and once["n"] == 2 and often["std"] == once["std"] == pytest.approx(0.5)
    assert "std" not in score_motions(paths[:1], captions[:1])["values"]["motion"]


def test_both_programs_score_a_clip_alike(videos):
    paths, captions = videos
    prompts = [
        Prompt(captions[0], "left", "yellow", "square", "heldout", 0),
        Prompt(captions[1], "left", "red", "square", "heldout", 1),
    ]
    clips = [
        score_clip(read_video(path).frames, prompt) for path, prompt in zip(paths, prompts, strict=False)
    ]
    listed, typed = summary(clips)["heldout"], score_motions(paths[:2], captions[:2])
    for name in ("motion", "direction", "background"):
        assert listed[name] == typed["values"][name]["value"]
    assert listed["motion_standard_error"] == typed["values"]["motion"]["std"]
    assert listed["measured"] == typed["measured"]


def test_what_cannot_be_scored_is_named(videos, tmp_path):
    paths, captions = videos
    with pytest.raises(ValueError, match="1.mp4: the caption"):
        score_motions(paths, [captions[0], "a whale", captions[2]])
    with pytest.raises(ValueError, match="no videos"):
        score_motions([], [])
    save_video(square("left")[:2], tmp_path / "short.mp4", fps=8)
    with pytest.raises(ValueError, match="short.mp4: .* at least 3"):
        score_motions([tmp_path / "short.mp4"], captions[:1])
