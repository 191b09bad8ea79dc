"""Videos and captions on disk -> buckets of one length and size each, read on demand.

Pictures count as videos of one frame, so that one set can hold both.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps

from mhla_diffusion.pipelines.videos import Video, check_encoder, opened, rate_of, read_video, upright

from .buckets import Bucket, PictureSource, nearest_bucket, read_picture, warn_unreadable
from .config import DataConfig
from .picture_files import IMAGE_SUFFIXES, list_pictures

# What PIL raises for files cut short, broken inside, or without a picture; `opened` raises ValueError for videos.
UNREADABLE = (OSError, SyntaxError, ValueError, IndexError, ZeroDivisionError)
# How many of the frames that a file promises must be there: headers count some that are cut out when it is shown.
WHOLE = 0.95


class Measures(NamedTuple):
    """How many frames there are at the wanted rate, and how large they are shown."""

    frames: int
    height: int
    width: int


def is_picture(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES - {".gif"}


def in_memory(path: Path) -> bool:
    """GIFs and folders of frames, which are read whole."""
    return path.is_dir() or path.suffix.lower() == ".gif"


def frames_at(count: int, own: float, fps: float) -> int:
    """How many frames `count` frames of `own` a second are at `fps`; 0 takes them as they are."""
    return count if not fps else math.floor((count - 1) / own * fps + 1e-6) + 1


def measures_of(video: Video, fps: float) -> Measures:
    return Measures(frames_at(len(video.frames), video.fps, fps), *video.frames.shape[1:3])


def measured(path: Path, fps: float) -> Measures:
    """Of a video, a GIF, a folder of frames or a picture; no frame but the first is decoded."""
    if is_picture(path):
        with Image.open(path) as image:
            image = ImageOps.exif_transpose(image)
            return Measures(1, image.height, image.width)
    if in_memory(path):
        return measures_of(read_video(path), fps)
    with opened(path) as (container, stream):
        own, count = rate_of(stream), stream.frames
        first = next(container.decode(stream), None)
        if first is None:
            raise ValueError("none of its pictures can be decoded")
        height, width = upright(first).shape[:2]
    if not count:
        with opened(path) as (container, stream):
            count = sum(packet.size > 0 for packet in container.demux(stream))
    return Measures(frames_at(count, own, fps), height, width)


def fitted(array: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 `(height, width, 3)`, scaled to cover and cut to the centre."""
    image = Image.fromarray(np.ascontiguousarray(array))
    return np.asarray(ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS))


def read_clip(path: Path, size: tuple[int, int, int], fps: float) -> np.ndarray:
    """uint8 `(3, frames, height, width)`: the middle frames of a video, each cut to size.

    Raises one of `UNREADABLE` when the file is broken or ends before they do.
    """
    count, height, width = size
    if is_picture(path):
        return read_picture(path, height, width)[:, None]
    whole = read_video(path) if in_memory(path) else None
    found = measured(path, fps) if whole is None else measures_of(whole, fps)
    first = (found.frames - count) // 2
    wanted = [(first + i) / (fps or 1) for i in range(count)]  # seconds, or numbers of frames
    kept: list[np.ndarray] = []
    previous = None  # the frame that is shown until the next one
    for at, array in shown(path, fps) if whole is None else played(whole, fps):
        while len(kept) < count and at > wanted[len(kept)] + 1e-6:
            kept.append(fitted(previous, height, width))
        if len(kept) == count:
            break
        previous = array
    while len(kept) < count:
        kept.append(fitted(previous, height, width))
    return np.stack(kept).transpose(3, 0, 1, 2)


def played(video: Video, fps: float) -> Iterator[tuple[float, np.ndarray]]:
    """As `shown`, of a video in memory."""
    for index, array in enumerate(video.frames):
        yield (index / video.fps if fps else index), array


def shown(path: Path, fps: float) -> Iterator[tuple[float, np.ndarray]]:
    """(when, frame) in order: seconds from the first frame, or its number when all frames are taken."""
    with opened(path) as (container, stream):
        stream.thread_type = "AUTO"
        start, seen, reached = None, 0, 0.0
        for index, frame in enumerate(container.decode(stream)):
            time = index / rate_of(stream) if frame.time is None else frame.time
            start = time if start is None else start
            # By its time as well: some files count frames that only repeat the one before.
            seen, reached = index + 1, (time - start) * rate_of(stream) + 1
            yield (time - start if fps else index), upright(frame)
        if (
            max(seen, reached) if fps else seen
        ) < WHOLE * stream.frames:  # decoding with threads may end there without an error
            raise ValueError(f"only {seen} of its {stream.frames} frames are there")


def nearest_size(found: Measures, sizes: list[tuple[int, int, int]]) -> int | None:
    """Index of the bucket: the longest that the video fills, of these the nearest shape; None if it is too short."""
    lengths = [frames for frames, _, _ in sizes if frames <= found.frames]
    if not lengths:
        return None
    choice = [i for i, size in enumerate(sizes) if size[0] == max(lengths)]
    return choice[nearest_bucket(found.height, found.width, [sizes[i][1:] for i in choice])]


def check_sizes(config: DataConfig, latent_factor: int, frame_factor: int) -> list[tuple[int, int, int]]:
    """`data.sizes`; ValueError, with the nearest that works, for one that does not become whole tokens."""
    for size in config.sizes:
        frames = max(0, round((size[0] - 1) / frame_factor)) * frame_factor + 1
        right = [frames, *(max(1, round(side / latent_factor)) * latent_factor for side in size[1:])]
        if right != size:
            raise ValueError(
                f"recipe: data.sizes holds {size}: frames are a multiple of {frame_factor} and one, height and width "
                f"multiples of {latent_factor}; write {right}"
            )
    return [tuple(size) for size in config.sizes]


def digest_of(path: Path) -> bytes:
    """Of a file, or of all files of a folder of frames."""
    if path.is_dir():
        return b"".join(digest_of(inner) for inner in sorted(path.iterdir()) if inner.is_file())
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def open_videos(config: DataConfig, latent_factor: int, frame_factor: int) -> PictureSource:
    """A user's own videos. Unreadable and too short ones are named in a warning and left out.

    Raises:
        ValueError: no such folder, no videos, sizes that do not become whole tokens, or nothing is left.
    """
    root = Path(config.path)
    if not root.is_dir():
        raise ValueError(f"recipe: data.path = {config.path!r} is not a folder; give a folder of videos")
    sizes = check_sizes(config, latent_factor, frame_factor)
    members: list[list[tuple[Path, list[str]]]] = [[] for _ in sizes]
    digest = hashlib.sha256(json.dumps([sizes, config.fps, config.template]).encode())
    unreadable, short, why = [], [], ""
    for path, captions in list_pictures(root, config.template, videos=True):
        if not is_picture(path) and not in_memory(path):
            check_encoder()  # or its absence would pass for a broken file
        try:
            bucket = nearest_size(measured(path, config.fps), sizes)
        except UNREADABLE as error:
            unreadable.append(path)
            why = why or str(error)
            continue
        if bucket is None:
            short.append(path)
            continue
        members[bucket].append((path, captions))
        digest.update(digest_of(path) + json.dumps([str(path.relative_to(root)), captions]).encode())
    if not any(members):
        left_out = unreadable + short
        raise ValueError(
            f"none of the {len(left_out)} videos in {root} can be used, first {left_out[0]}; give mp4 files, and "
            "sizes of fewer frames in data.sizes"
        )
    warn_unreadable(unreadable, "unreadable videos", why)
    warn_unreadable(short, f"videos of fewer than {min(size[0] for size in sizes)} frames")
    buckets = [
        video_bucket(size, group, config.fps) for size, group in zip(sizes, members, strict=True) if group
    ]
    return PictureSource(lambda: buckets, digest.hexdigest())


def video_bucket(size: tuple[int, int, int], group: list[tuple[Path, list[str]]], fps: float) -> Bucket:
    def read(indices: list[int]) -> tuple[torch.Tensor, list[int]]:
        clips, kept, unreadable, why = [], [], [], ""
        for index in indices:
            try:
                clips.append(read_clip(group[index][0], size, fps))
                kept.append(index)
            except UNREADABLE as error:
                unreadable.append(group[index][0])
                why = why or str(error)
        warn_unreadable(unreadable, "unreadable videos", why)
        stacked = np.stack(clips) if clips else np.empty((0, 3, *size), np.uint8)
        return torch.from_numpy(stacked), kept

    return Bucket(*size[1:], [captions for _, captions in group], read)
