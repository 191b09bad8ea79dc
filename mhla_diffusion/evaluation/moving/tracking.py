"""Which way one object on a plain background moves, from the pixels alone: no network, no knowledge of the object.

Every pixel that differs from the background belongs to the object. Its middle is followed over the frames, its extent
(root mean square distance from the middle), and its angle, by circular correlation of its picture in polar coordinates.

Shape names: F frames, H rows, W columns. Places are shares of the canvas, x to the right and y down.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..emoji_world.reading import DIFFERENT, PALETTE, background_of

COLOURS = {**PALETTE, "blue": (50, 110, 220)}  # what captions of clips name; "blue" is none of pictures'
DIRECTIONS = ("right", "down and right", "down", "down and left", "left", "up and left", "up", "up and right")
MOTIONS = (*DIRECTIONS, "bounce", "spin", "grow", "shrink")

# Where one kind of motion ends and the next begins. The clips of the set move by 0.32 to 0.5 along an axis, bounce by
# 0.28 to 0.44 at least three times up or down, change their size 1.75 times or more, and turn by 180 degrees or more.
MOVED = 0.12  # of the canvas
GROWN = math.log(1.35)
BOUNCED, BACK_AND_FORTH = 0.12, 1.8  # of the canvas; way along y over the part of it that remains
TURNED = math.radians(90)
ANGLES, RADII = 96, 12
AS_GOOD = 0.2  # share of a fit that a whole turn has to be better by; a sixth: 3 %
SMALLEST = 1 / 400  # share of a frame below which there is no object


@dataclass(frozen=True)
class Motion:
    """What was measured. `name`: one of `MOTIONS`, "still", or "nothing" where there is no object to follow.

    moved: (x, y) from the first frame to the last, by a straight line through all. grown: log of the last extent over
    the first. turned: radians, clockwise. way: along y, back and forth. background: its name.
    """

    name: str
    background: str
    moved: tuple[float, float] = (0.0, 0.0)
    grown: float = 0.0
    turned: float = 0.0
    way: float = 0.0


def track(frames: Tensor) -> Motion:
    """The motion in uint8 frames `(F, 3, H, W)`. Raises ValueError for fewer than 3, or another type."""
    if frames.dtype != torch.uint8 or frames.ndim != 4 or frames.shape[1] != 3 or len(frames) < 3:
        raise ValueError(
            f"got {frames.dtype} of shape {tuple(frames.shape)}: give at least 3 uint8 frames (F, 3, H, W)"
        )
    found = [background_of(frame, COLOURS) for frame in frames]
    name = Counter(each.name for each in found).most_common(1)[0][0]
    rgb = torch.tensor([each.rgb for each in found if each.name == name]).median(dim=0).values
    pixels = frames.float() - rgb[:, None, None]
    weight = (pixels.square().sum(1).sqrt() - DIFFERENT).clamp(
        0, DIFFERENT
    ) / DIFFERENT  # (F, H, W), soft at edges
    mass = weight.sum((1, 2))
    seen = mass > SMALLEST * weight[0].numel()
    if int(seen.sum()) < max(3, len(frames) // 2):
        return Motion("nothing", name)
    times = torch.arange(len(frames), dtype=torch.float64)[seen] / (len(frames) - 1)
    middles, extent = places(weight[seen], mass[seen])
    x, y = middles.double().unbind(1)
    moved = (slope(times, x), slope(times, y))
    grown = slope(times, extent.double().log())
    way = float(y.diff().abs().sum())
    turned = turn(pixels[seen] * weight[seen, None], middles, extent)
    return Motion(classify(moved, grown, turned, y, way), name, moved, grown, turned, way)


def places(weight: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Middle `(F, 2)` of each frame's object, x and y as shares of the canvas, and extent `(F,)` in the same unit."""
    _, height, width = weight.shape
    x = (torch.arange(width) + 0.5) / width
    y = (torch.arange(height) + 0.5) / height
    middles = torch.stack([weight.sum(1) @ x, weight.sum(2) @ y], dim=1) / mass[:, None]
    around = (x[None] - middles[:, :1]).square()[:, None] + (y[None] - middles[:, 1:]).square()[:, :, None]
    return middles, ((weight * around).sum((1, 2)) / mass).sqrt()


def slope(times: Tensor, values: Tensor) -> float:
    """Change from time 0 to 1 of the straight line through the values."""
    centred = times - times.mean()
    return float((centred * values).sum() / centred.square().sum())


def polar(pixels: Tensor, middles: Tensor, extent: Tensor) -> Tensor:
    """`(F, 3, RADII, ANGLES)`: each frame around its middle, out to twice its mean extent."""
    radius = torch.linspace(0.15, 2.0, RADII) * extent.mean()
    angle = torch.arange(ANGLES) * (2 * math.pi / ANGLES)
    x = radius[:, None] * angle.cos()
    y = radius[:, None] * angle.sin()
    grid = torch.stack([x, y], dim=-1)[None] + middles[:, None, None]  # shares of the canvas
    return F.grid_sample(pixels, 2 * grid - 1, align_corners=False, padding_mode="zeros")


def turn(pixels: Tensor, middles: Tensor, extent: Tensor, apart: int = 2) -> float:
    """Radians by which the object turns in all, clockwise: the best fitting angle between frames `apart`, added up."""
    rings = polar(pixels, middles, extent)
    rings = rings - rings.mean(dim=-1, keepdim=True)
    spectrum = torch.fft.rfft(rings, dim=-1)
    apart = min(apart, len(rings) - 1)
    first, second = spectrum[:-apart:apart], spectrum[apart::apart]
    radius = torch.linspace(0.15, 2.0, RADII)[:, None]  # outer rings hold more of the picture
    cross = (second * first.conj() * radius).sum((1, 2))  # (pairs, frequencies)
    fit = torch.fft.irfft(cross, n=ANGLES)
    # Objects with a symmetry fit two angles almost alike. All pairs together decide, so that none strays, and of what
    # is as good as equal it is the smaller: a quarter and more between two frames is another symmetry, too.
    bins = torch.fft.fftfreq(ANGLES, 1 / ANGLES)
    fit = fit + fit.mean(dim=0)
    top = fit.amax(dim=1, keepdim=True)
    plausible = (fit - AS_GOOD * top * bins.abs() / ANGLES).masked_fill(bins.abs() > ANGLES / 5, -math.inf)
    best = plausible.argmax(dim=1)
    left, right = (fit.gather(1, ((best + step) % ANGLES)[:, None])[:, 0] for step in (-1, 1))
    top = fit.gather(1, best[:, None])[:, 0]
    curve = left - 2 * top + right
    # The top of a parabola through three neighbours, where there are three.
    peak = torch.where(torch.isfinite(curve) & (curve < 0), 0.5 * (left - right) / curve, 0.0)
    return float(((bins[best] + peak.clamp(-0.5, 0.5)) * (2 * math.pi / ANGLES)).sum())


def classify(moved: tuple[float, float], grown: float, turned: float, y: Tensor, way: float) -> str:
    """The motion's name from its measures; y `(F,)` are the heights of the middle."""
    if abs(grown) > GROWN:
        return "grow" if grown > 0 else "shrink"
    if abs(turned) > TURNED:  # before the way of the middle, which lies off the axis of some objects
        return "spin"
    if float(y.max() - y.min()) > BOUNCED and way > BACK_AND_FORTH * abs(float(y[-1] - y[0])) + 0.05:
        return "bounce"
    if math.hypot(*moved) > MOVED:
        eighth = round(math.atan2(moved[1], moved[0]) / (math.pi / 4)) % 8
        return DIRECTIONS[eighth]
    return "still"
