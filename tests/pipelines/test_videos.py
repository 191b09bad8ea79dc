"""Videos on disk: what goes in comes out, with its settings, and what cannot be shown is refused by frame."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from mhla_diffusion.pipelines.videos import as_frames, read_video, read_video_settings, save_video

PALETTE = np.array(
    [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (128, 128, 128), (0, 0, 0)], dtype=np.uint8
)
SETTINGS = {"prompt": "a café with 😀", "seed": 3, "steps": 50}


def flat(count: int = 6, height: int = 32, width: int = 48) -> np.ndarray:
    """Frames of one colour each."""
    return np.broadcast_to(PALETTE[:count, None, None], (count, height, width, 3)).copy()


def moving(count: int = 9) -> np.ndarray:
    """A bright square that moves over a smooth ground, as floats."""
    rows, columns = np.mgrid[0:32, 0:48]
    frames = np.stack([np.stack([rows / 64, columns / 96, 0.3 + 0 * rows], -1)] * count)
    for index in range(count):
        frames[index, 8:20, 3 * index : 3 * index + 12] = (0.9, 0.8, 0.1)
    return frames


def worst(video, frames) -> int:
    return np.abs(video.frames.astype(int) - frames).max()


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "a"])
@pytest.mark.parametrize("size", [(32, 48), (33, 47), (1, 1), (64, 31)])
def test_colours_sizes_rate_and_settings_come_back(tmp_path, name, size):
    frames = flat(6, *size)
    path = save_video(frames, tmp_path / "new" / name, fps=12, settings=SETTINGS)
    video = read_video(path)
    assert video.frames.dtype == np.uint8 and video.frames.shape == frames.shape and video.fps == 12
    assert worst(video, frames) <= 2
    measures = {"frames": 6, "height": size[0], "width": size[1], "fps": 12}
    assert video.settings == SETTINGS | {"video": measures}
    beside = path / "settings.json" if path.is_dir() else path.with_suffix(".json")
    assert json.loads(beside.read_text(encoding="utf-8")) == video.settings
    assert {p.name for p in path.parent.iterdir()} == ({name} if path.is_dir() else {name, "a.json"})


@pytest.mark.parametrize("fps", [1, 16, 23.976, np.float32(29.97), 60])
def test_the_rate_is_kept(tmp_path, fps):
    import av  # here, so that a machine without it still collects its own tests

    path = save_video(flat(), tmp_path / "a.mp4", fps=fps)
    with av.open(str(path)) as container:
        assert float(container.streams.video[0].average_rate) == pytest.approx(fps, rel=1e-4)
        assert container.duration / av.time_base == pytest.approx(6 / fps, abs=0.02)


def test_a_moving_picture_looks_like_itself_and_quality_is_a_choice(tmp_path):
    frames = as_frames(moving())
    error, size = {}, {}
    for quality in (0, 18, 40):
        path = save_video(moving(), tmp_path / f"{quality}.mp4", quality=quality)
        error[quality] = np.abs(read_video(path).frames.astype(int) - frames).mean()
        size[quality] = path.stat().st_size
    assert error[0] <= error[18] < 4 and error[18] < error[40]
    assert size[0] > size[18] > size[40]


def test_players_get_what_all_of_them_can_show(tmp_path):
    import av

    path = save_video(flat(), tmp_path / "a.mp4")
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
        assert (stream.codec_context.colorspace, stream.codec_context.color_range) == (1, 1)
    data = path.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")  # the index comes first: a browser begins at once


def test_what_diffusers_gives_is_taken_as_it_is(tmp_path):
    frames = as_frames(moving())
    floats = frames.astype(np.float32) / 255
    tensor = torch.from_numpy(floats)
    pictures = [Image.fromarray(frame) for frame in frames]
    for video in (
        frames,
        list(frames),
        floats,
        list(floats),
        floats[None],  # a batch of one
        tensor,
        tensor.permute(0, 3, 1, 2),  # "pt"
        tensor.permute(0, 3, 1, 2)[None],
        tensor.double(),
        torch.from_numpy(frames),
        pictures,
        [pictures],
        [picture.convert("RGBA") for picture in pictures],
    ):
        assert np.array_equal(as_frames(video), frames)
    assert as_frames(tensor.bfloat16()).shape == frames.shape
    assert as_frames(np.full((2, 4, 5, 1), 0.5)).shape == (2, 4, 5, 3)
    assert as_frames(np.array([[[[-0.0005, 0.5, 1.0005]]]])).tolist() == [[[[0, 128, 255]]]]
    # uint8 is not multiplied once more.
    path = save_video([np.full((16, 16, 3), 128, np.uint8)] * 4, tmp_path / "a.mp4")
    assert abs(read_video(path).frames.mean() - 128) < 2


def bad_frame(value: float) -> np.ndarray:
    frames = np.full((4, 16, 16, 3), 0.5)
    frames[2, 3, 4, 1] = value
    return frames


@pytest.mark.parametrize(
    ("video", "told"),
    [
        ([np.full((16, 16, 3), np.nan)] * 4, "frame 0 holds values that are infinite or NaN"),
        (bad_frame(np.inf), "frame 2 holds values that are infinite"),
        (bad_frame(128.0), "frame 2 holds floats from 0.5 to 128: give floats in"),
        (bad_frame(-1.0), "frame 2 holds floats from -1 to 0.5"),
        (np.zeros((2, 4, 16, 16, 3)), r"a batch of 2 videos: save them one by one, for example frames\[0\]"),
        ([[Image.new("RGB", (8, 8))], [Image.new("RGB", (8, 8))]], "a batch of 2 videos"),
        ([], "no frames"),
        (None, "the video is None: give a list of frames"),
        (np.zeros((0, 16, 16, 3)), "at least one frame"),
        (np.zeros((16, 16, 3)), r"a video of shape \(16, 16, 3\)"),
        (np.zeros((4, 16, 16, 4)), r"shape \(4, 16, 16, 4\)"),
        ([np.zeros((16, 16, 3)), np.zeros((16, 8, 3))], "frame 1 has shape"),
        (
            [np.ones((16, 16, 3), np.uint8), np.ones((16, 16, 3))],
            "frame 1 is of dtype float64, frame 0 of uint8",
        ),
        ([np.ones((16, 16, 3)), Image.new("RGB", (16, 16))], "frame 1 is of dtype uint8, frame 0 of float64"),
        (np.zeros((4, 16, 16, 3), np.int64), "dtype int64: give uint8"),
    ],
)
def test_what_cannot_be_shown_is_refused_and_nothing_is_written(tmp_path, video, told):
    for name in ("a.mp4", "a.gif", "a"):
        with pytest.raises(ValueError, match=told) as caught:
            save_video(video, tmp_path / name)
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("a.avi", {}, "ends in .avi: give a name ending in .mp4 or .gif"),
        ("a.mp4", {"fps": 0}, "fps is 0: give the frames of a second"),
        ("a.mp4", {"fps": float("nan")}, "fps is nan"),
        ("a.gif", {"fps": 1e6}, "from 0.01 to 1000"),
        ("a.mp4", {"quality": 52}, "quality is 52"),
        ("a.mp4", {"quality": True}, "quality is True"),
        ("a.mp4", {"settings": "a cat"}, "the settings are 'a cat': give a dict"),
        ("a", {"settings": {"seed": np.float32(3)}}, "cannot be stored as JSON"),
        (
            "a.mp4",
            {"settings": {"loss": float("nan")}},
            "cannot be stored as JSON .*: give texts and finite numbers",
        ),
        ("a.gif", {"fps": 60}, "at most 50 frames a second"),
        ("a.mp4", {"settings": {"video": 1}}, 'hold "video" already'),
    ],
)
def test_options_that_cannot_work(tmp_path, name, options, told):
    with pytest.raises(ValueError, match=told):
        save_video(flat(), tmp_path / name, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fps", [7, 16, 30])
def test_a_gif_has_the_whole_duration_and_equal_frames_come_back(tmp_path, fps):
    frames = np.concatenate([flat(2)[:1]] * 5 + [flat(2)[1:]] * 4)
    path = save_video(frames, tmp_path / "a.gif", fps=fps)
    video = read_video(path)
    assert video.frames.shape == frames.shape and worst(video, frames) == 0
    with Image.open(path) as image:
        duration = 0
        for index in range(image.n_frames):
            image.seek(index)
            duration += image.info["duration"]
        assert abs(duration - 1000 * 9 / fps) <= 5


def test_a_video_is_replaced_whole_or_not_at_all(tmp_path):
    path = save_video(flat(), tmp_path / "a.mp4", settings={"seed": 1})
    before = path.read_bytes()
    too_wide = np.zeros((1, 2, 20000, 3), np.uint8)
    with pytest.raises(ValueError, match="H.264 does not take frames of 2 x 20000"):
        save_video(too_wide, path, settings={"seed": 2})
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "a.mp4"]


def test_a_full_disk_is_not_blamed_on_the_size(tmp_path):
    """As many bytes as a process may write stand for those that a disk has left."""
    script = (
        "import resource, sys, numpy as np; from mhla_diffusion.pipelines.videos import save_video; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900)); "
        "save_video(np.random.default_rng(0).integers(0, 255, (4, 64, 64, 3)).astype(np.uint8), sys.argv[1])"
    )
    run = subprocess.run([sys.executable, "-c", script, tmp_path / "a.mp4"], capture_output=True, text=True)
    assert run.returncode == 1 and "File too large" in run.stderr and "H.264" not in run.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_video_that_a_tool_has_scaled_is_read_whole(tmp_path):
    """ffmpeg keeps the comment, which then names a size that the video no longer has."""
    import av

    save_video(flat(6, 33, 47), tmp_path / "a.mp4", settings=SETTINGS)
    with av.open(str(tmp_path / "a.mp4")) as source, av.open(str(tmp_path / "b.mp4"), "w") as target:
        target.metadata["comment"] = source.metadata["comment"]
        stream = target.add_stream("libx264", rate=16)
        stream.height, stream.width, stream.pix_fmt = 80, 96, "yuv420p"
        for frame in source.decode(video=0):
            target.mux(stream.encode(frame.reformat(96, 80)))
        target.mux(stream.encode())
    assert read_video(tmp_path / "b.mp4").frames.shape == (6, 80, 96, 3)
    assert read_video(tmp_path / "a.mp4").frames.shape == (6, 33, 47, 3)


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine.txt").write_text("x")
    with pytest.raises(ValueError, match="is not empty"):
        save_video(flat(), tmp_path / "a")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["mine.txt"]


def test_settings_are_read_without_the_frames_and_others_videos_have_none(tmp_path):
    import av

    path = save_video(flat(), tmp_path / "a.mp4", settings=SETTINGS)
    assert read_video_settings(path)["prompt"] == SETTINGS["prompt"]
    (tmp_path / "b.mp4").write_bytes(b"no video")
    assert read_video_settings(tmp_path / "b.mp4") is None
    with av.open(str(tmp_path / "e.mkv"), "w") as container:  # a header with nothing behind it
        container.add_stream("libx264", rate=16)
        container.start_encoding()
    assert read_video_settings(tmp_path / "e.mkv") is None
    for broken in ("b.mp4", "b.gif", "gone.mp4", "e.mkv"):
        (tmp_path / "b.gif").write_bytes(b"no picture")
        with pytest.raises(ValueError, match="cannot be read"):
            read_video(tmp_path / broken)
    with av.open(str(tmp_path / "c.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height = 16, 16
        container.mux(stream.encode(av.VideoFrame.from_ndarray(flat(1, 16, 16)[0], format="rgb24")))
        container.mux(stream.encode())
    video = read_video(tmp_path / "c.mp4")
    assert video.settings is None and video.frames.shape == (1, 16, 16, 3) and video.fps == 10


def test_without_the_encoder_it_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ValueError, match=r'pip install "mhla_diffusion\[video\]"'):
        save_video(flat(), tmp_path / "a.mp4")
    assert save_video(flat(), tmp_path / "a.gif").exists()
