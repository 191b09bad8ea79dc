"""Videos from disk: which bucket each goes into, which frames are read, and what is said of those that do not fit."""

import json
import struct
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from mhla_diffusion.pipelines.videos import read_video, save_video
from mhla_diffusion.training import clips as clips_module
from mhla_diffusion.training.clips import Measures, measured, nearest_size, open_videos, read_clip
from mhla_diffusion.training.config import DataConfig
from mhla_diffusion.training.data import open_source


def counting(frames: int, height: int = 16, width: int = 24) -> np.ndarray:
    """uint8 (F, H, W, 3): frame i is grey of 10 i, dark on the left and bright on the right."""
    video = np.full((frames, height, width, 3), 0, np.uint8)
    video += (10 * np.arange(frames, dtype=np.uint8))[:, None, None, None]
    return video


def numbers(clip: np.ndarray) -> list[int]:
    """Which frame each frame of (3, F, H, W) is."""
    return [round(frame.mean() / 10) for frame in clip.transpose(1, 0, 2, 3).astype(float)]


def config(path, sizes, **options) -> DataConfig:
    return DataConfig(kind="videos", path=str(path), sizes=sizes, **options)


def write_captions(folder, names: list[str]) -> None:
    lines = [json.dumps({"file": name, "caption": f"a clip called {name}"}) for name in names]
    (folder / "captions.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "frames"])
def test_the_middle_frames_are_read_at_the_wanted_rate(tmp_path, name):
    path = save_video(counting(20), tmp_path / name, fps=20, quality=0)
    assert measured(path, 0) == (20, 16, 24) and measured(path, 10) == (10, 16, 24)
    assert measured(path, 40) == (39, 16, 24)
    assert numbers(read_clip(path, (5, 16, 24), 0)) == [7, 8, 9, 10, 11]
    assert numbers(read_clip(path, (5, 16, 24), 10)) == [4, 6, 8, 10, 12]
    assert numbers(read_clip(path, (9, 8, 8), 40)) == [7, 8, 8, 9, 9, 10, 10, 11, 11]
    clip = read_clip(path, (20, 8, 8), 0)
    assert clip.shape == (3, 20, 8, 8) and clip.dtype == np.uint8 and numbers(clip) == list(range(20))


def test_frames_are_scaled_to_cover_and_cut_to_the_centre(tmp_path):
    video = np.zeros((2, 16, 64, 3), np.uint8)
    video[:, :, 24:40] = 200
    path = save_video(video, tmp_path / "wide.gif", fps=10)
    clip = read_clip(path, (1, 8, 8), 0)
    assert clip.shape == (3, 1, 8, 8) and clip.min() > 180


def test_a_video_is_read_as_it_was_held(tmp_path):
    video = np.zeros((3, 16, 32, 3), np.uint8)
    video[:, :, :8] = 250  # bright on the left
    path = save_video(video, tmp_path / "held.mp4", quality=0)
    data = bytearray(path.read_bytes())
    matrix = data.index(b"tkhd") + 4 + 40
    for by, edge in ((90, "top"), (270, "bottom")):
        turn = (0, 1, -1, 0) if by == 90 else (0, -1, 1, 0)  # clockwise
        a, b, c, d = (x << 16 for x in turn)
        data[matrix : matrix + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
        path.write_bytes(data)
        assert measured(path, 0) == (3, 32, 16)
        clip = read_clip(path, (1, 32, 16), 0)[:, 0]
        bright, dark = (clip[:, :8], clip[:, 8:]) if edge == "top" else (clip[:, -8:], clip[:, :-8])
        assert bright[:, 1:-1].min() > 230 and dark[:, 2:-2].max() < 20
        assert np.array_equal(read_video(path).frames[1, :, :].transpose(2, 0, 1), clip)


def test_the_longest_bucket_that_is_filled_and_then_the_nearest_shape():
    sizes = [(17, 32, 64), (17, 64, 32), (5, 48, 48), (1, 32, 64)]
    for found, expected in (
        (Measures(40, 100, 220), 0),
        (Measures(17, 220, 100), 1),
        (Measures(16, 100, 220), 2),
        (Measures(1, 500, 500), 3),
    ):
        assert nearest_size(found, sizes) == expected
    assert nearest_size(Measures(4, 48, 48), sizes[:3]) is None


def test_a_set_of_videos_and_pictures_becomes_buckets(tmp_path):
    save_video(counting(12), tmp_path / "long.mp4", fps=8)
    save_video(counting(6), tmp_path / "short.gif", fps=8)
    save_video(counting(6, 24, 16), tmp_path / "tall", fps=8)
    Image.new("RGB", (24, 16), (200, 0, 0)).save(tmp_path / "still.png")
    write_captions(tmp_path, ["long.mp4", "short.gif", "tall", "still.png"])
    wanted = config(tmp_path, [[9, 16, 24], [5, 16, 24], [5, 24, 16], [1, 16, 24]])
    source = open_source(wanted, 8, 0, frame_factor=4)
    shapes = [tuple(bucket.read([0])[0].shape) for bucket in source.open()]
    assert shapes == [(1, 3, 9, 16, 24), (1, 3, 5, 16, 24), (1, 3, 5, 24, 16), (1, 3, 1, 16, 24)]
    assert [bucket.captions for bucket in source.open()] == [
        [[f"a clip called {name}"]] for name in ("long.mp4", "short.gif", "tall", "still.png")
    ]
    assert open_source(wanted, 8, 0, frame_factor=4).fingerprint == source.fingerprint
    for other in (config(tmp_path, wanted.sizes, fps=8), config(tmp_path, wanted.sizes[:3] + [[1, 24, 16]])):
        assert open_source(other, 8, 0, frame_factor=4).fingerprint != source.fingerprint
    Image.new("RGB", (16, 24), (200, 0, 0)).save(tmp_path / "tall" / "frame_00002.png")
    assert open_videos(wanted, 8, 4).fingerprint != source.fingerprint

    flipped = open_source(config(tmp_path, wanted.sizes, flip=True), 8, 0, frame_factor=4)
    pictures, kept = flipped.open()[0].read([0, 1])
    assert kept == [0, 1] and torch.equal(pictures[1], pictures[0].flip(-1))


def test_class_folders_hold_videos_too(tmp_path):
    (tmp_path / "red_ball").mkdir()
    save_video(counting(5), tmp_path / "red_ball" / "a.gif", fps=8)
    (bucket,) = open_videos(config(tmp_path, [[5, 16, 24]], template="a video of a {}"), 8, 4).open()
    assert bucket.captions == [["a video of a red ball"]]


def test_what_cannot_be_used_is_named(tmp_path):
    import av  # here, so that a machine without it still collects its own tests

    save_video(counting(9), tmp_path / "good.mp4", fps=8)
    save_video(counting(3), tmp_path / "short.mp4", fps=8)
    (tmp_path / "broken.mp4").write_bytes((tmp_path / "good.mp4").read_bytes()[:200])
    (tmp_path / "text.mp4").write_text("no video")
    with av.open(str(tmp_path / "empty.mkv"), "w") as container:  # a header with nothing behind it
        container.add_stream("libx264", rate=16)
        container.start_encoding()
    write_captions(tmp_path, ["good.mp4", "short.mp4", "broken.mp4", "text.mp4", "empty.mkv"])
    with pytest.warns(UserWarning) as caught:
        (bucket,) = open_videos(config(tmp_path, [[5, 16, 24]]), 8, 4).open()
    said = " ".join(str(warning.message) for warning in caught)
    assert "3 unreadable videos are left out" in said
    assert all(name in said for name in ("broken.mp4", "text.mp4", "empty.mkv"))
    assert "(the first: " in said and "broken.mp4 cannot be read as a video" in said
    assert "1 videos of fewer than 5 frames are left out" in said and "short.mp4" in said
    assert len(bucket.captions) == 1
    (tmp_path / "good.mp4").write_bytes(b"gone")
    with pytest.warns(UserWarning, match="1 unreadable videos are left out"):
        clips, kept = bucket.read([0])
    assert kept == [] and clips.shape == (0, 3, 5, 16, 24)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the error says it all
        with pytest.raises(ValueError, match="none of the 5 videos in .* can be used, first .*good.mp4"):
            open_videos(config(tmp_path, [[5, 16, 24]]), 8, 4)


def test_a_video_cut_short_is_not_filled_up_with_its_last_frame(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (20, 40, 56, 3)).astype(np.uint8)
    whole = save_video(noise, tmp_path / "whole.mp4", fps=16).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    assert measured(tmp_path / "cut.mp4", 16).frames == 20  # as its header promises
    with pytest.raises(ValueError, match="cut.mp4 cannot be read as a video .*of its 20 frames are there"):
        read_clip(tmp_path / "cut.mp4", (17, 32, 48), 16)


def test_frames_of_a_gif_without_a_duration_are_shown_for_a_tenth_of_a_second(tmp_path):
    first, *more = (Image.fromarray(frame) for frame in counting(11))
    first.save(tmp_path / "a.gif", save_all=True, append_images=more, duration=0)
    assert measured(tmp_path / "a.gif", 10).frames == 11


def test_faults_of_the_recipe_are_named_with_what_to_write(tmp_path):
    with pytest.raises(ValueError, match=r"data.sizes holds \[80, 16, 30\].* write \[81, 16, 32\]"):
        open_videos(config(tmp_path, [[80, 16, 30]]), 16, 4)
    with pytest.raises(ValueError, match="'videos' is not for a model of pictures"):
        open_source(config(tmp_path, [[5, 16, 16]]), 8, 0)
    with pytest.raises(ValueError, match='not for a model of videos; write "videos" or .*data.sizes'):
        open_source(DataConfig(path=str(tmp_path)), 8, 0, frame_factor=4)
    with pytest.raises(ValueError, match="does not exist; give a folder of videos"):
        open_source(config(tmp_path / "nowhere", [[5, 16, 16]]), 8, 0, frame_factor=4)
    with pytest.raises(ValueError, match="holds no videos with captions"):
        open_videos(config(tmp_path, [[5, 16, 16]]), 8, 4)


def test_what_is_transparent_is_white_in_videos_as_in_pictures(tmp_path):
    frames = []
    for shift in range(5):
        pixels = np.zeros((16, 24, 4), np.uint8)  # black where nothing is seen of it
        pixels[4:12, shift : shift + 8] = (200, 0, 0, 255)
        frames.append(Image.fromarray(pixels))
    frames[0].save(
        tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=100, disposal=2, loop=0
    )
    (tmp_path / "frames").mkdir()
    for number, frame in enumerate(frames):
        frame.save(tmp_path / "frames" / f"{number}.png")
    frames[0].save(tmp_path / "still.png")
    for name in ("a.gif", "frames", "still.png"):
        clip = read_clip(tmp_path / name, (1, 16, 24), 0)
        assert (clip[:, :, 0, 0] == 255).all() and clip[0].min() >= 200 and clip[1].min() == 0


def test_a_folder_of_others_frames_is_read_in_the_order_of_their_numbers(tmp_path):
    (tmp_path / "own").mkdir()
    for number, frame in enumerate(counting(12), 1):
        Image.fromarray(frame).save(tmp_path / "own" / f"{number}.PNG", format="PNG")
    (tmp_path / "own" / "notes.txt").write_text("not a frame")
    assert numbers(read_clip(tmp_path / "own", (12, 16, 24), 0)) == list(range(12))


@pytest.mark.parametrize("name", ["a.gif", "frames"])
def test_a_video_in_memory_is_read_once(tmp_path, monkeypatch, name):
    path = save_video(counting(9), tmp_path / name, fps=8)
    reads = []
    monkeypatch.setattr(clips_module, "read_video", lambda path: reads.append(path) or read_video(path))
    assert numbers(read_clip(path, (5, 16, 24), 0)) == [2, 3, 4, 5, 6] and reads == [path]
