"""Temporal flickering: by hand, and from videos on disk."""

import numpy as np
import pytest

from mhla_diffusion.cli import main
from mhla_diffusion.evaluation.faults import InsufficientSamples
from mhla_diffusion.evaluation.vbench.check import decoded
from mhla_diffusion.evaluation.vbench.flicker import flickering, flickering_of_videos
from mhla_diffusion.pipelines.videos import save_video


def frames(count: int, step: int) -> np.ndarray:
    return np.stack([np.full((16, 16, 3), 10 + step * i, np.uint8) for i in range(count)])


def test_by_hand():
    assert flickering(frames(5, 0)) == 1
    assert flickering(frames(5, 7)) == pytest.approx(248 / 255, rel=1e-14)
    assert flickering(np.stack([frames(1, 0)[0] * 0, frames(1, 0)[0] * 0 + 255])) == 0
    noise = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8)
    by_hand = np.mean([np.abs(a.astype(float) - b).mean() for a, b in zip(noise, noise[1:], strict=False)])
    assert flickering(noise) == pytest.approx(1 - by_hand / 255, rel=1e-14)


def test_videos_are_averaged_whatever_their_length(tmp_path):
    paths = [tmp_path / "a.mp4", tmp_path / "b.mp4"]
    save_video(frames(3, 0), paths[0], fps=8)
    save_video(frames(9, 20), paths[1], fps=8)
    mean, rows = flickering_of_videos(paths)
    assert [row["video_path"] for row in rows] == [str(path) for path in paths]
    assert rows[0]["video_results"] == 1 and rows[1]["video_results"] == pytest.approx(235 / 255, abs=2 / 255)
    assert mean == pytest.approx((rows[0]["video_results"] + rows[1]["video_results"]) / 2)
    assert next(decoded(paths[0])).shape == (16, 16, 3)


def test_the_command_feeds_the_totals(tmp_path, capsys):
    save_video(frames(4, 5), tmp_path / "a.mp4", fps=8)
    out = tmp_path / "flicker_eval_results.json"
    assert main(["eval", "vbench", "flicker", str(tmp_path), "--out", str(out)]) == 0
    assert "(1 videos)" in capsys.readouterr().out
    assert main(["eval", "vbench", "aggregate", str(out)]) == 0
    assert "temporal_flickering" in capsys.readouterr().out
    assert main(["eval", "vbench", "flicker", str(tmp_path / "absent")]) == 2


def test_what_cannot_flicker_is_refused(tmp_path):
    with pytest.raises(InsufficientSamples, match="fewer than 2 frames"):
        flickering(frames(1, 0))
    with pytest.raises(ValueError, match="uint8"):
        flickering(frames(2, 1).astype(float))
    with pytest.raises(ValueError, match="one size"):
        flickering([frames(1, 0)[0], frames(1, 0)[0][:8]])
    with pytest.raises(InsufficientSamples, match="no videos"):
        flickering_of_videos([])
    save_video(frames(3, 9), tmp_path / "b.mp4")
    (tmp_path / "b.mp4").write_bytes(
        (tmp_path / "b.mp4").read_bytes()[:300]
    )  # what an interrupted copy leaves
    with pytest.raises(ValueError, match=r"b.mp4: has no video in it"):
        flickering_of_videos([tmp_path / "b.mp4"])
    (tmp_path / "a.mp4").write_bytes(b"no video")
    with pytest.raises(ValueError, match=r"a.mp4: cannot be read"):
        flickering_of_videos([tmp_path / "a.mp4"])
