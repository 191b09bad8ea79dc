"""VBench's temporal flickering, the one dimension without a network: how little neighbouring frames differ."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ..faults import InsufficientSamples
from .check import decoded


def flickering(frames: Iterable[np.ndarray]) -> float:
    """(255 - mean absolute difference of neighbouring frames) / 255, float64, of uint8 frames `(H, W, 3)`.

    Raises InsufficientSamples for fewer than two frames, ValueError for frames of other types or different sizes.
    """
    last, differences = None, []
    for frame in frames:
        if frame.dtype != np.uint8 or frame.ndim != 3:
            raise ValueError(f"a frame is {frame.dtype} {frame.shape}: give uint8 (height, width, 3)")
        if last is not None:
            if frame.shape != last.shape:
                raise ValueError(f"frames of {last.shape} and {frame.shape}: give frames of one size")
            differences.append(np.abs(frame.astype(np.int16) - last.astype(np.int16)).mean(dtype=np.float64))
        last = frame
    if not differences:
        raise InsufficientSamples("a video of fewer than 2 frames cannot flicker: give longer ones")
    return float((255 - np.mean(differences)) / 255)


def flickering_of_videos(paths: Iterable[Path]) -> list:
    """VBench's entry for the dimension: `[mean over videos, [{video_path, video_results}, ...]]`.

    The published protocol takes it of still videos only, which a filter chooses by optical flow.
    """
    rows = []
    for path in paths:
        try:
            rows.append({"video_path": str(path), "video_results": flickering(decoded(path))})
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    if not rows:
        raise InsufficientSamples("there are no videos: give a folder with some")
    return [float(np.mean([row["video_results"] for row in rows])), rows]
