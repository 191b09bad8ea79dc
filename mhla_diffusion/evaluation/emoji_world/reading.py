"""What stands in a picture on a plain background: its colour by name, and where objects are. No weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# The colours that captions of the emoji set name, as they are laid under the drawings.
PALETTE: dict[str, tuple[int, int, int]] = {
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
NEAR = 40.0  # how far (in 0..255, Euclidean) a pixel of a background may be from its colour
DIFFERENT = 32.0  # from which distance to the background on a pixel belongs to an object
BORDER_WEIGHT = 4.0  # of a pixel in the outer sixteenth, when the background is looked for
SMALLEST = 1 / 256  # share of the picture below which a spot is no object
MOST_PARTS = 300  # of so many connected parts objects are put together
HALF = 0.52  # an object of a scene with several is at most about this wide; parts within it belong together
WIDE = 0.56  # from this width on a region may be several objects that touch
VALLEY = 0.4  # it is cut where its profile falls below this share of its height on both sides


class Background(NamedTuple):
    """Nearest named colour, the colour itself (0..255), and the share of the picture near it."""

    name: str
    rgb: tuple[float, float, float]
    share: float


class Box(NamedTuple):
    """Pixels: left, top, right, bottom (the last two excluded)."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def size(self) -> tuple[int, int]:
        return self.right - self.left, self.bottom - self.top


def background_of(picture: Tensor, palette: Mapping[str, tuple[int, int, int]] = PALETTE) -> Background:
    """Background of a uint8 picture `(3, H, W)`: the named colour that most pixels are near, the border counting more.

    Raises ValueError for another shape or type.
    """
    if picture.dtype != torch.uint8 or picture.ndim != 3 or len(picture) != 3:
        raise ValueError(
            f"got {picture.dtype} {tuple(picture.shape)}: give a uint8 picture (3, height, width)"
        )
    height, width = picture.shape[1:]
    pixels = picture.float()
    colours = torch.tensor(list(palette.values()), dtype=torch.float32)
    distance = (pixels[None] - colours[:, :, None, None]).square().sum(1).sqrt()  # (colours, H, W)
    weight = torch.full((height, width), BORDER_WEIGHT)
    edge = max(1, min(height, width) // 16)
    weight[edge:-edge, edge:-edge] = 1
    nearness = torch.exp(-((distance / NEAR) ** 2))
    best = int((nearness * weight).sum((1, 2)).argmax())
    near = distance[best] < 2 * NEAR
    if not near.any():
        near = torch.ones_like(near)
    rgb = pixels[:, near].median(1).values
    share = ((pixels - rgb[:, None, None]).square().sum(0).sqrt() < DIFFERENT).float().mean()
    return Background(list(palette)[best], tuple(rgb.tolist()), float(share))


def foreground(picture: Tensor, background: Background) -> Tensor:
    """Bool `(H, W)`: pixels that are not the background's colour."""
    rgb = torch.tensor(background.rgb)[:, None, None]
    return (picture.float() - rgb).square().sum(0).sqrt() >= DIFFERENT


def regions(mask: Tensor) -> Tensor:
    """Connected parts of a bool mask `(H, W)`, corners touching included: int64 labels, 0 outside, in raster order."""
    numbers = torch.arange(1, mask.numel() + 1, dtype=torch.float32).reshape(mask.shape) * mask
    while True:
        # Every pixel takes the largest number around it until nothing changes; parts are then told by theirs.
        spread = F.max_pool2d(numbers[None, None], 3, 1, 1)[0, 0] * mask
        if torch.equal(spread, numbers):
            break
        numbers = spread
    return torch.unique(torch.cat([torch.zeros(1), numbers.flatten()]), return_inverse=True)[1][1:].reshape(
        mask.shape
    )


def box_of(mask: Tensor) -> Box:
    rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
    return Box(int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)


def objects_of(picture: Tensor, background: Background | None = None) -> list[Box]:
    """Boxes of the objects, in reading order.

    Parts that are near each other are one object as long as it stays within half the picture, as every drawing of a
    scene does; a wider region is cut where it is thin.
    """
    mask = foreground(picture, background or background_of(picture))
    height, width = mask.shape
    least = max(1, round(SMALLEST * mask.numel()))
    found = largest(regions(mask))
    groups = merged(boxes_of(found), width, height)
    object_of = torch.zeros(int(found.max()) + 1, dtype=torch.int64)
    for number, group in enumerate(groups, 1):
        object_of[torch.tensor(group) + 1] = number
    found = object_of[found]
    parts = (piece for n in range(1, len(groups) + 1) for piece in cut(found == n, width, height))
    boxes = [box_of(part) for part in parts if int(part.sum()) >= least]
    return sorted(boxes, key=lambda box: (box.top + box.bottom, box.left + box.right))


def largest(labels: Tensor, most: int = MOST_PARTS) -> Tensor:
    """Labels of the `most` largest parts alone, numbered anew in their order: more is noise, whatever stands in it."""
    sizes = torch.bincount(labels.flatten())[1:]
    if len(sizes) <= most:
        return labels
    kept = sizes.argsort(descending=True, stable=True)[:most].sort().values + 1
    numbers = torch.zeros(len(sizes) + 1, dtype=torch.int64)
    numbers[kept] = torch.arange(1, most + 1)
    return numbers[labels]


def boxes_of(labels: Tensor) -> list[Box]:
    """The box of each part, in the order of the labels."""
    count = int(labels.max())
    places = labels.nonzero()  # (pixels, 2): row, column
    owner = (labels[labels > 0] - 1)[:, None].expand(-1, 2)
    first = torch.full((count, 2), labels.numel()).scatter_reduce_(0, owner, places, "amin")
    last = torch.full((count, 2), -1).scatter_reduce_(0, owner, places, "amax") + 1
    return [Box(x0, y0, x1, y1) for (y0, x0), (y1, x1) in zip(first.tolist(), last.tolist(), strict=True)]


def union(a: Box, b: Box) -> Box:
    return Box(min(a.left, b.left), min(a.top, b.top), max(a.right, b.right), max(a.bottom, b.bottom))


def gaps_between(box: np.ndarray, others: np.ndarray, width: int, height: int) -> np.ndarray:
    """Free pixels to each of the other boxes, along the axis where they are further apart; negative when they overlap.

    Infinite where the two cannot be one object: their common box is above half the picture, and in neither of them.
    """
    gaps = np.maximum(box[:2], others[:, :2]) - np.minimum(box[2:], others[:, 2:])  # (n, 2): across, down
    whole = np.concatenate([np.minimum(box[:2], others[:, :2]), np.maximum(box[2:], others[:, 2:])], axis=1)
    fits = (whole[:, 2:] - whole[:, :2] <= (HALF * width, HALF * height)).all(1)
    inside = (whole == box).all(1) | (whole == others).all(1)
    return np.where(fits | inside, gaps.max(1), np.inf)


def merged(boxes: Sequence[Box], width: int, height: int) -> list[list[int]]:
    """Numbers of the boxes that are one object: the two nearest become one as long as any two can (`gaps_between`)."""
    edges, groups = np.array(boxes, dtype=np.int64).reshape(-1, 4), [[i] for i in range(len(boxes))]
    gaps = np.full((len(boxes), len(boxes)), np.inf)  # of i and j > i
    for i in range(len(boxes)):
        gaps[i, i + 1 :] = gaps_between(edges[i], edges[i + 1 :], width, height)
    while np.isfinite(gaps).any():
        i, j = np.unravel_index(gaps.argmin(), gaps.shape)
        groups[i] += groups[j]
        groups[j] = []
        edges[i] = *np.minimum(edges[i, :2], edges[j, :2]), *np.maximum(edges[i, 2:], edges[j, 2:])
        new = gaps_between(edges[i], edges, width, height)
        new[[number for number, group in enumerate(groups) if not group]] = np.inf
        gaps[j], gaps[:, j] = np.inf, np.inf
        gaps[i, i + 1 :], gaps[:i, i] = new[i + 1 :], new[:i]
    return [group for group in groups if group]


def cut(part: Tensor, width: int, height: int) -> list[Tensor]:
    """The part, or its pieces where it is wider than one object and thin in between."""
    box = box_of(part)
    for axis, (length, limit) in enumerate(zip(box.size, (width, height), strict=True)):
        if length <= WIDE * limit:
            continue
        profile = part.sum(axis).float()  # of columns for axis 0
        start = (box.left, box.top)[axis]
        profile = profile[start : start + length]
        third = length // 3
        place = third + int(profile[third : length - third].argmin())
        lower = min(float(profile[:place].max()), float(profile[place:].max()))
        if float(profile[place]) <= VALLEY * lower:
            first, second = part.clone(), part.clone()
            if axis == 0:
                first[:, start + place :], second[:, : start + place] = False, False
            else:
                first[start + place :], second[: start + place] = False, False
            return [piece for half in (first, second) if half.any() for piece in cut(half, width, height)]
    return [part]


def crop_of(
    picture: Tensor, box: Box, background: Background, side: int = 128, margin: float = 0.08
) -> Tensor:
    """The object in a box, its background made white, in the middle of a square: uint8 `(3, side, side)`."""
    clean = picture.clone()
    clean[:, ~foreground(picture, background)] = 255
    inside = clean[:, box.top : box.bottom, box.left : box.right].float()
    length = round(max(box.size) * (1 + 2 * margin))
    square = torch.full((3, length, length), 255.0)
    left, top = (length - box.size[0]) // 2, (length - box.size[1]) // 2
    square[:, top : top + box.size[1], left : left + box.size[0]] = inside
    square = F.interpolate(square[None], (side, side), mode="bicubic", align_corners=False, antialias=True)[0]
    return square.clamp(0, 255).round().to(torch.uint8)
