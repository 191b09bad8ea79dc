"""Sprites of the emoji set: reading the file, coloured backgrounds, other sizes."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

SPLITS = ("train", "val", "heldout")
BUILD_HINT = "python train/build_emoji.py --out data/emoji64.tar"

BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "black": (16, 16, 16),
    "grey": (170, 170, 170),
    "red": (220, 60, 60),
    "orange": (245, 150, 50),
    "yellow": (250, 225, 100),
    "green": (85, 175, 85),
    "sky blue": (135, 206, 235),
    "dark blue": (35, 60, 140),
    "purple": (140, 90, 190),
    "pink": (250, 170, 200),
    "brown": (140, 95, 65),
}
COLOURS = tuple(name for name in BACKGROUNDS if name != "white")


@dataclass
class Sprites:
    """Drawings with straight alpha and what is known of each.

    ``rgba``: ``(N, S, S, 4)`` uint8. ``records``: N dicts with key (code points), caption, concept, style,
    tags (list), group, subgroup, split.
    """

    rgba: np.ndarray
    records: list[dict]

    def __len__(self) -> int:
        return len(self.records)

    def select(self, indices: Iterable[int]) -> Sprites:
        """The drawings at ``indices``, in that order."""
        indices = list(indices)
        return Sprites(self.rgba[indices], [self.records[i] for i in indices])


def load_sprites(
    path: str | Path,
    splits: str | Sequence[str] | None = None,
    styles: Sequence[str] | None = None,
) -> Sprites:
    """Reads a set written by ``train/build_emoji.py``, wholly in memory.

    Args:
        splits: one or some of train, val, heldout; None for all.
        styles: names of drawing styles; None for all.

    Raises:
        ValueError: the file is missing or broken, or holds nothing of a split or style; or a split is unknown.
    """
    path = Path(path)
    wanted = SPLITS if splits is None else (splits,) if isinstance(splits, str) else tuple(splits)
    for split in wanted:
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is unknown; choose from {', '.join(SPLITS)}")
    if not path.is_file():
        raise ValueError(f"no emoji set at {path}; build it with: {BUILD_HINT}")
    records, pictures = [], []
    try:
        with tarfile.open(path, "r:") as archive:
            files = {member.name: archive.extractfile(member).read() for member in archive if member.isreg()}
        facts = json.loads(files["manifest.json"])
        for i in range(facts["images"]):
            record = json.loads(files[f"{i:06d}.json"])
            webp = files[f"{i:06d}.webp"]
            if record["split"] in wanted and (styles is None or record["style"] in styles):
                records.append(record)
                pictures.append(_decode(webp, facts["size"]))
    except (tarfile.TarError, OSError, KeyError, TypeError, ValueError) as fault:
        hint = f"{path} is not a whole emoji set ({fault}); build it with: {BUILD_HINT}"
        raise ValueError(hint) from fault
    if not records:
        drawn = "" if styles is None else f" in the styles {', '.join(styles)}"
        raise ValueError(f"{path} holds no drawing of {', '.join(wanted)}{drawn}; it has {facts['splits']}")
    return Sprites(np.stack(pictures), records)


def _decode(webp: bytes, size: int) -> np.ndarray:
    with Image.open(io.BytesIO(webp), formats=["WEBP"]) as picture:
        if picture.size != (size, size):  # before any pixel is decoded
            raise ValueError(f"a picture of {picture.size} where {size} x {size} was announced")
        return np.asarray(picture.convert("RGBA"))


def colour_of(background: str) -> tuple[int, int, int]:
    """RGB of a background by its name. Raises ValueError for a name that is not in ``BACKGROUNDS``."""
    if background not in BACKGROUNDS:
        raise ValueError(f"background {background!r} is unknown; choose from {', '.join(BACKGROUNDS)}")
    return BACKGROUNDS[background]


def on_background(rgba: np.ndarray, rgb: str | Sequence[int] | np.ndarray) -> np.ndarray:
    """Lays sprites on plain colours.

    Args:
        rgba: ``(..., S, S, 4)`` uint8, straight alpha.
        rgb: a name of ``BACKGROUNDS``, one colour ``(3,)``, or one per sprite ``(..., 3)``; 0 to 255.

    Returns:
        ``(..., S, S, 3)`` uint8, correctly rounded.
    """
    colour = np.asarray(colour_of(rgb) if isinstance(rgb, str) else rgb)
    if colour.shape[-1:] != (3,) or colour.min() < 0 or colour.max() > 255:
        raise ValueError(f"a background is a name or three numbers from 0 to 255, not {rgb!r}")
    colour = colour[..., None, None, :].astype(np.uint16)
    alpha = rgba[..., 3:].astype(np.uint16)
    return ((rgba[..., :3] * alpha + colour * (255 - alpha) + 127) // 255).astype(np.uint8)


def resized(rgba: np.ndarray, size: int, chunk: int = 1024) -> np.ndarray:
    """``(N, S, S, 4)`` -> ``(N, size, size, 4)`` uint8; colours are averaged by their alpha."""
    if rgba.shape[1] == size:
        return rgba
    out = np.empty((len(rgba), size, size, 4), np.uint8)
    for start in range(0, len(rgba), chunk):
        pixels = torch.from_numpy(rgba[start : start + chunk]).permute(0, 3, 1, 2).float() / 255
        pixels[:, :3] *= pixels[:, 3:]
        pixels = torch.nn.functional.interpolate(pixels, (size, size), mode="bilinear", antialias=True)
        alpha = pixels[:, 3:].clamp(0, 1)
        pixels[:, :3] = (pixels[:, :3] / alpha.clamp_min(1e-3)).clamp(0, 1)
        levels = (pixels * 255 + 0.5).to(torch.uint8)
        levels *= levels[:, 3:] > 0  # wholly transparent pixels are black, as in the file
        out[start : start + chunk] = levels.permute(0, 2, 3, 1).numpy()
    return out
