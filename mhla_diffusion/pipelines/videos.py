"""Videos on disk: mp4, GIF or a folder of frames, each with its settings inside or beside it."""

import errno
import importlib.util
import json
import math
import numbers
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageSequence

from mhla_diffusion.pipelines.pictures import on_white, write_atomically

# Constant quality of H.264: 0 is lossless, 18 looks like the original, 51 is the worst.
QUALITY = 18
# How far floats may stray outside of [0, 1] by rounding.
SLACK = 1e-3
# Browsers show frames that are shorter than two hundredths of a second for a tenth of one.
FASTEST_GIF = 50
# Outside of these the container cannot hold the rate.
SLOWEST, FASTEST = 0.01, 1000
FRAME_NAME = "frame_{:05d}.png"
FRAME_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}  # of folders that others made, too
# BT.709, limited range: what players take a video for whose file says so.
COLOURS = {"colorspace": 1, "color_primaries": 1, "color_trc": 1, "color_range": 1}


@dataclass
class Video:
    """Frames uint8 `(F, H, W, 3)`, how many of them a second has, and the settings stored with them (or None)."""

    frames: np.ndarray
    fps: float
    settings: dict[str, Any] | None


def as_frames(video) -> np.ndarray:
    """Any one video as uint8 frames `(F, H, W, 3)`.

    Args:
        video: a list of pictures or arrays, or one array, `(F, H, W, 3)`; tensors may have the channels in front,
            `(F, 3, H, W)`, as Diffusers' "pt" output. One channel is grey, transparent pictures are put on white. uint8
            is taken as it is, floats in [0, 1] are scaled. A batch of one video counts as that video.

    Raises ValueError for anything else: an empty video, frames of different sizes, a batch of several videos, other
    numbers of channels, and values that are not finite or outside [0, 1], with the first such frame.
    """
    if hasattr(video, "detach"):
        video = array_of(video)
    if not isinstance(video, np.ndarray):
        if not isinstance(video, Iterable):
            raise ValueError(f"the video is {video!r}: give a list of frames or an array of them")
        video = stacked(list(video))
    if video.ndim == 5:
        if len(video) != 1:
            raise ValueError(
                f"this is a batch of {len(video)} videos: save them one by one, for example frames[0]"
            )
        video = video[0]
    if video.ndim != 4 or video.shape[-1] not in (1, 3) or 0 in video.shape:
        raise ValueError(
            f"a video of shape {video.shape}: give frames x height x width x 3 (or 1 for grey), at least one frame"
        )
    if np.issubdtype(video.dtype, np.floating):
        video = scaled(video)
    elif video.dtype != np.uint8:
        raise ValueError(f"frames of dtype {video.dtype}: give uint8 in [0, 255] or floats in [0, 1]")
    return np.ascontiguousarray(video if video.shape[-1] == 3 else video.repeat(3, axis=-1))


def array_of(frame) -> np.ndarray:
    """An array with channels last, of a picture, an array, or a tensor with its channels in front or last."""
    if isinstance(frame, Image.Image):
        return np.asarray(on_white(frame))
    if hasattr(frame, "detach"):
        frame = frame.detach().cpu()
        if frame.is_floating_point():
            frame = frame.float()  # NumPy has no bfloat16
        if frame.ndim >= 3 and frame.shape[-3] in (1, 3) and frame.shape[-1] not in (1, 3):
            frame = frame.movedim(-3, -1)
        return frame.numpy()
    return np.asarray(frame)


def stacked(frames: list) -> np.ndarray:
    if not frames:
        raise ValueError("the video has no frames: give at least one")
    if isinstance(frames[0], (list, tuple)):
        if len(frames) > 1:
            raise ValueError(
                f"this is a batch of {len(frames)} videos: save them one by one, for example frames[0]"
            )
        return stacked(list(frames[0]))
    arrays = [array_of(frame) for frame in frames]
    for index, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise ValueError(
                f"frame {index} has shape {array.shape}, frame 0 {arrays[0].shape}: give frames of one size"
            )
        if (array.dtype == np.uint8) != (
            arrays[0].dtype == np.uint8
        ):  # stacked, one kind would pass for the other
            raise ValueError(
                f"frame {index} is of dtype {array.dtype}, frame 0 of {arrays[0].dtype}: give all as uint8 or all as "
                "floats"
            )
    return np.stack(arrays)


def scaled(video: np.ndarray) -> np.ndarray:
    """uint8 of floats in [0, 1]."""
    for index, frame in enumerate(video):
        if not np.isfinite(frame).all():
            raise ValueError(
                f"frame {index} holds values that are infinite or NaN: there is nothing to show in it"
            )
        if frame.min() < -SLACK or frame.max() > 1 + SLACK:
            raise ValueError(
                f"frame {index} holds floats from {frame.min():.3g} to {frame.max():.3g}: give floats in [0, 1], or "
                "uint8 for values up to 255"
            )
    return (video.astype(np.float32).clip(0, 1) * 255).round().astype(np.uint8)


def check_fps(fps) -> None:
    """Raise ValueError unless `fps` is a number that a video can have."""
    number = isinstance(fps, numbers.Real) and not isinstance(fps, bool) and math.isfinite(fps)
    if not number or not SLOWEST <= fps <= FASTEST:
        raise ValueError(
            f"fps is {fps!r}: give the frames of a second, from {SLOWEST} to {FASTEST}, for example 16"
        )


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a program has hidden it
        return False


def check_encoder() -> None:
    """Raise ValueError, with what to type, when the library that writes mp4 is not installed."""
    if not is_installed("av"):
        raise ValueError(
            'mp4 files need PyAV: pip install "mhla_diffusion[video]" (GIFs and folders of frames need nothing more)'
        )


def save_video(
    video,
    path: str | Path,
    *,
    fps: float = 16,
    settings: dict[str, Any] | None = None,
    quality: int = QUALITY,
    beside: bool = True,
) -> Path:
    """Write a video as `path` says: `.mp4` (H.264), `.gif`, or without a suffix a folder of numbered PNGs.

    `settings` and the video's own measures (under "video") go into the file's comment and into a JSON beside it; into
    `settings.json` in a folder. The video is written last, and appears whole or not at all.

    Args:
        video: see `as_frames`.
        fps: frames a second. GIFs count in hundredths of a second, and keep the whole duration.
        quality: of H.264, from 0 (lossless) to 51. An odd width or height has its last column or row twice in the mp4,
            since H.264 wants even sides; `read_video` takes it off again.
        beside: whether the JSON is written.

    Returns the path. Raises ValueError for what cannot be written.
    """
    path, frames = Path(path), as_frames(video)
    check_fps(fps)
    count, height, width = frames.shape[:3]
    if not isinstance(settings, dict | None):
        raise ValueError(f"the settings are {settings!r}: give a dict, such as {{'seed': 3}}")
    if "video" in (settings or {}):
        raise ValueError('settings hold "video" already, where the size is stored: give that another name')
    fps = int(fps) if fps == int(fps) else float(fps)
    settings = {**(settings or {}), "video": {"frames": count, "height": height, "width": width, "fps": fps}}
    try:
        text = json.dumps(settings, ensure_ascii=False, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the settings cannot be stored as JSON ({error}): give texts and finite numbers"
        ) from error
    write = {".mp4": write_mp4, ".gif": write_gif, "": write_folder}.get(path.suffix.lower())
    if write is None:
        raise ValueError(
            f"{path} ends in {path.suffix}: give a name ending in .mp4 or .gif, or one without a suffix"
        )
    if write is write_mp4:
        check_encoder()
        if not isinstance(quality, int) or isinstance(quality, bool) or not 0 <= quality <= 51:
            raise ValueError(
                f"quality is {quality!r}: give a whole number from 0 (lossless) to 51, for example 18"
            )
    if write is write_gif and fps > FASTEST_GIF:
        raise ValueError(f"fps is {fps}: a GIF shows at most {FASTEST_GIF} frames a second, write an mp4")
    path.parent.mkdir(parents=True, exist_ok=True)
    if beside and write is not write_folder:
        write_atomically(path.with_suffix(".json"), lambda file: file.write(f"{text}\n".encode()))
    write(frames, path, fps, settings, quality)
    return path


def write_mp4(frames: np.ndarray, path: Path, fps: float, settings: dict[str, Any], quality: int) -> None:
    import av

    odd = ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0))
    frames = np.pad(frames, odd, mode="edge")

    def encode(file) -> None:
        # By name: the index is moved to the front of the file, so that a browser can begin before it has all.
        with av.open(file.name, "w", format="mp4", options={"movflags": "faststart"}) as container:
            container.metadata["comment"] = json.dumps(settings, ensure_ascii=False)
            stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
            stream.height, stream.width = frames.shape[1:3]
            stream.pix_fmt = "yuv420p"
            stream.options = {"crf": str(quality)}
            for name, value in COLOURS.items():
                setattr(stream.codec_context, name, value)
            for array in frames:
                frame = av.VideoFrame.from_ndarray(array, format="rgb24")
                converted = frame.reformat(
                    format="yuv420p",
                    dst_colorspace=COLOURS["colorspace"],
                    src_color_range=2,  # pictures use all of 0 to 255
                    dst_color_range=COLOURS["color_range"],
                )
                container.mux(stream.encode(converted))
            container.mux(stream.encode())

    try:
        write_atomically(path, encode)
    except av.error.FFmpegError as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise  # the disk's fault, and told as such
        height, width = frames.shape[1:3]
        raise ValueError(f"{path}: H.264 does not take frames of {height} x {width} ({error})") from error


def write_gif(frames: np.ndarray, path: Path, fps: float, settings: dict[str, Any], quality: int) -> None:
    ends = [round(100 * index / fps) for index in range(len(frames) + 1)]
    lengths = [10 * (end - start) for start, end in zip(ends[:-1], ends[1:], strict=True)]
    # Dots of dithering would flicker from frame to frame.
    images = [Image.fromarray(frame).quantize(dither=Image.Dither.NONE) for frame in frames]
    comment = json.dumps(settings).encode("ascii")
    write_atomically(
        path,
        lambda file: images[0].save(
            file,
            format="GIF",
            save_all=True,
            append_images=images[1:],
            duration=lengths,
            loop=0,
            comment=comment,
        ),
    )


def write_folder(frames: np.ndarray, path: Path, fps: float, settings: dict[str, Any], quality: int) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: give the name of a folder for the frames")
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"{path} is not empty: give a new folder for the frames")
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        for index, frame in enumerate(frames):
            Image.fromarray(frame).save(part / FRAME_NAME.format(index))
        text = json.dumps(settings, ensure_ascii=False, indent=2)
        (part / "settings.json").write_text(f"{text}\n", encoding="utf-8")
        if path.is_dir():
            path.rmdir()
        part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def read_video(path: str | Path) -> Video:
    """Read a video that `save_video` wrote, another mp4 or GIF, or a folder of numbered pictures, upright.

    Raises ValueError when it cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        return read_folder(path)
    if path.suffix.lower() == ".gif":
        return read_gif(path)
    with opened(path) as (container, stream):
        settings = parsed(container.metadata.get("comment"))
        frames = np.stack([upright(frame) for frame in container.decode(stream)])
        fps = rate_of(stream)
    own, sides = measures(settings), frames.shape[1:3]
    stored = own.get("height"), own.get("width")
    # Tools that change a video's size keep its comment.
    if all(side in (found, found - 1) for side, found in zip(stored, sides, strict=True)):
        frames = frames[:, : stored[0], : stored[1]]
    return Video(frames, fps, settings)


@contextmanager
def opened(path: Path) -> Iterator[tuple]:
    """A video's container and its stream of pictures, of PyAV.

    Whatever is wrong with the file, also while it is read, is a ValueError of one line.
    """
    check_encoder()
    import av

    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ValueError("it holds no pictures")
            yield container, container.streams.video[0]
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a video ({' '.join(str(error).split())})") from error


def upright(frame) -> np.ndarray:
    """uint8 `(H, W, 3)` of a frame of PyAV as players show it: a phone stores how it was held beside the frames."""
    return np.rot90(frame.to_ndarray(format="rgb24"), round(getattr(frame, "rotation", 0) / 90))


def rate_of(stream) -> float:
    """Frames a second of a stream of PyAV; ValueError where the file tells none."""
    rate = stream.average_rate or stream.guessed_rate
    if not rate:
        raise ValueError("it does not tell how many frames a second has")
    return float(rate)


def read_gif(path: Path) -> Video:
    try:
        with Image.open(path) as image:
            settings = parsed(image.info.get("comment"))
            images, ends = [], [0]
            for frame in ImageSequence.Iterator(image):
                images.append(np.asarray(on_white(frame)))
                # Browsers show frames without a duration for a tenth of a second.
                ends.append(ends[-1] + (frame.info.get("duration") or 100))
    except OSError as error:
        raise ValueError(f"{path} cannot be read as a GIF ({error})") from error
    own = measures(settings)
    count = own.get("frames", len(images))
    fps = own.get("fps") or 1000 * len(images) / max(ends[-1], 1)
    # Equal frames in a row are stored as one that is shown for longer.
    middles = [(index + 0.5) * ends[-1] / count for index in range(count)]
    shown = [max(0, np.searchsorted(ends, middle, side="right") - 1) for middle in middles]
    return Video(np.stack([images[min(index, len(images) - 1)] for index in shown]), fps, settings)


def read_folder(path: Path) -> Video:
    names = [name for name in path.iterdir() if name.suffix.lower() in FRAME_SUFFIXES]
    if not names:
        raise ValueError(f"{path} holds no frames: number them, as {FRAME_NAME.format(0)} or 1.jpg and so on")
    # By the numbers in their names, so that 10.jpg comes after 9.jpg.
    names.sort(key=lambda name: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name.name)])
    stored = path / "settings.json"
    settings = parsed(stored.read_bytes()) if stored.is_file() else None
    frames = stacked([Image.open(name) for name in names])
    return Video(frames, measures(settings).get("fps", 16), settings)


def parsed(text: str | bytes | None) -> dict[str, Any] | None:
    """The settings in a comment, or None if it holds none."""
    try:
        settings = json.loads(text)
    except (TypeError, ValueError):
        return None
    return settings if isinstance(settings, dict) else None


def measures(settings: dict[str, Any] | None) -> dict[str, Any]:
    """What `save_video` noted of the video itself: frames, height, width and fps; nothing for others' videos."""
    own = (settings or {}).get("video")
    return own if isinstance(own, dict) else {}


def read_video_settings(path: str | Path) -> dict[str, Any] | None:
    """Settings stored inside an mp4, or None if it has none or cannot be read. No frame is decoded."""
    check_encoder()
    try:
        with opened(Path(path)) as (container, _):
            return parsed(container.metadata.get("comment"))
    except ValueError:
        return None
