"""Data sets in buckets of one shape each, and what reads pictures into them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from mhla_diffusion.pipelines.pictures import on_white

Captions = list[list[str]]  # per picture: one or several captions, one of which is drawn each time


@dataclass
class Bucket:
    """Pictures of one size, or videos of one length and size.

    `read(indices)` gives uint8 `(n, 3, height, width)`, of videos `(n, 3, frames, height, width)`, and the indices that
    were readable.
    """

    height: int
    width: int
    captions: Captions
    read: Callable[[list[int]], tuple[torch.Tensor, list[int]]]


@dataclass
class PictureSource:
    """A data set before encoding; `fingerprint` changes with the pictures, the captions and every setting of them.

    `open()` gives the buckets; a set whose latents are in the cache is never opened.
    """

    open: Callable[[], list[Bucket]]
    fingerprint: str


def nearest_bucket(height: int, width: int, sizes: list[tuple[int, int]]) -> int:
    """Index of the size whose aspect ratio is closest by ratio, so tall and wide pictures are treated alike."""
    ratio = math.log(height / width)
    return min(range(len(sizes)), key=lambda i: abs(math.log(sizes[i][0] / sizes[i][1]) - ratio))


def read_picture(path: Path, height: int, width: int) -> np.ndarray:
    """uint8 `(3, height, width)`: upright, on white where transparent, scaled to cover and cut to the centre."""
    with Image.open(path) as image:
        image = on_white(ImageOps.exif_transpose(image))
        image = ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)
    return np.asarray(image).transpose(2, 0, 1)


def warn_unreadable(paths: list[Path], what: str = "unreadable pictures", why: str = "") -> None:
    """`why`: what is wrong with the first of them."""
    if paths:
        names = ", ".join(str(path) for path in paths[:10]) + (", ..." if len(paths) > 10 else "")
        reason = f" (the first: {why})" if why else ""
        warnings.warn(f"{len(paths)} {what} are left out: {names}{reason}", stacklevel=3)
