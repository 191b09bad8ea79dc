"""Background, objects and crops, read from pictures whose truth is known."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mhla_diffusion.evaluation.emoji_world.reading import (
    HALF,
    PALETTE,
    Box,
    background_of,
    box_of,
    boxes_of,
    crop_of,
    foreground,
    merged,
    objects_of,
    regions,
    union,
)
from mhla_diffusion.training.emoji import BACKGROUNDS, load_sprites
from mhla_diffusion.training.emoji_scenes import ScenePainter, ScenePlanner


def canvas(name: str = "green", side: int = 64) -> torch.Tensor:
    return torch.tensor(PALETTE[name], dtype=torch.uint8)[:, None, None].repeat(1, side, side)


def paint(picture: torch.Tensor, left: int, top: int, width: int, height: int, rgb=(250, 20, 200)) -> None:
    picture[:, top : top + height, left : left + width] = torch.tensor(rgb, dtype=torch.uint8)[:, None, None]


def test_the_colours_are_those_that_pictures_are_made_with():
    assert PALETTE == BACKGROUNDS


@pytest.mark.parametrize("name", PALETTE)
def test_backgrounds_are_named_with_noise_and_something_on_them(name):
    draw = torch.Generator().manual_seed(0)
    noise = torch.randint(-10, 11, (3, 64, 64), generator=draw)
    picture = (canvas(name).int() + noise).clamp(0, 255).to(torch.uint8)
    paint(picture, 12, 12, 40, 40)
    found = background_of(picture)
    assert found.name == name and 0.5 < found.share < 0.7
    assert np.allclose(found.rgb, PALETTE[name], atol=3)
    assert abs(float(foreground(picture, found).float().mean()) - (40 / 64) ** 2) < 0.05


def flood(mask: np.ndarray) -> int:
    """Number of parts, by hand."""
    left, count = {tuple(map(int, place)) for place in np.argwhere(mask)}, 0
    while left:
        count += 1
        border = [left.pop()]
        while border:
            y, x = border.pop()
            near = {(y + i, x + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & left
            left -= near
            border += near
    return count


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 9), st.floats(0, 1))
def test_regions_are_those_of_a_flood(seed, height, width, share):
    mask = np.random.default_rng(seed).random((height, width)) < share
    labels = regions(torch.from_numpy(mask))
    assert int(labels.max()) == flood(mask)
    assert torch.equal(labels > 0, torch.from_numpy(mask))
    assert sorted(set(labels.flatten().tolist()) - {0}) == list(range(1, int(labels.max()) + 1))


def test_objects_are_counted_and_found():
    picture = canvas()
    places = [(4, 4), (40, 6), (8, 38)]
    for left, top in places:
        paint(picture, left, top, 18, 20)
    assert objects_of(picture) == [Box(4, 4, 22, 24), Box(40, 6, 58, 26), Box(8, 38, 26, 58)]
    assert objects_of(canvas()) == []


def test_parts_of_one_drawing_are_one_object_and_specks_are_none():
    picture = canvas("white")
    paint(picture, 10, 10, 12, 4)
    paint(picture, 10, 20, 12, 4)
    paint(picture, 60, 60, 2, 2)
    assert objects_of(picture) == [Box(10, 10, 22, 24)]


def nearest_pairs(boxes: list[Box], side: int) -> list[list[int]]:
    """What `merged` gives, pair by pair."""
    boxes, groups = list(boxes), [[i] for i in range(len(boxes))]

    def gap(a: Box, b: Box) -> float:
        whole = union(a, b)
        if max(whole.size) > HALF * side and whole not in (a, b):
            return float("inf")
        return max(max(a.left, b.left) - min(a.right, b.right), max(a.top, b.top) - min(a.bottom, b.bottom))

    while True:
        pairs = [(gap(boxes[i], boxes[j]), i, j) for i in range(len(boxes)) for j in range(i + 1, len(boxes))]
        if not pairs or min(pairs)[0] == float("inf"):
            return groups
        _, i, j = min(pairs)
        boxes[i], groups[i] = union(boxes[i], boxes[j]), groups[i] + groups[j]
        del boxes[j], groups[j]


@given(st.integers(0, 2**32), st.integers(0, 12))
def test_the_nearest_boxes_are_one_object_while_they_fit(seed, count):
    draw = np.random.default_rng(seed)
    corners, sizes = draw.integers(0, 50, (count, 2)), draw.integers(1, 14, (count, 2))
    boxes = [Box(*map(int, (*corner, *(corner + size)))) for corner, size in zip(corners, sizes, strict=True)]
    assert merged(boxes, 64, 64) == nearest_pairs(boxes, 64)


@given(st.integers(0, 2**32), st.floats(0, 1))
def test_boxes_of_parts(seed, share):
    labels = regions(torch.from_numpy(np.random.default_rng(seed).random((9, 7)) < share))
    assert boxes_of(labels) == [box_of(labels == n) for n in range(1, int(labels.max()) + 1)]


def test_a_picture_full_of_specks_is_read():
    """As a model that is hardly trained draws; comparing every pair again and again would take hours."""
    picture = canvas("white", 256)
    picture[:, torch.rand(256, 256, generator=torch.Generator().manual_seed(0)) < 0.03] = 0
    paint(picture, 30, 40, 60, 50)
    found = objects_of(picture)
    assert any(box.left <= 30 and box.right >= 90 and box.top <= 40 and box.bottom >= 90 for box in found)


def test_drawings_that_touch_are_cut_where_they_are_thin():
    picture = canvas()
    paint(picture, 2, 20, 28, 28)
    paint(picture, 30, 30, 3, 3)
    paint(picture, 33, 20, 28, 28)
    assert len(objects_of(picture)) == 2
    solid = canvas()
    paint(solid, 2, 2, 60, 60)
    assert objects_of(solid) == [Box(2, 2, 62, 62)]


def test_real_scenes_are_read_right():
    sprites = load_sprites("assets/emoji_sample.tar", "train")
    planner = ScenePlanner(sprites, seed=3)
    scenes = [planner.plan(sample) for sample in range(60)]
    pictures = torch.from_numpy(ScenePainter(sprites, 64).paint(scenes)).permute(0, 3, 1, 2)
    named = [background_of(picture).name for picture in pictures]
    assert named == [scene.truth["background"] for scene in scenes]
    right = [
        len(objects_of(picture)) == len(scene.pastes) for picture, scene in zip(pictures, scenes, strict=True)
    ]
    assert sum(right) >= 57


def test_a_crop_is_the_object_on_white_in_the_middle():
    picture = canvas("dark blue")
    paint(picture, 10, 20, 30, 10)
    background = background_of(picture)
    crop = crop_of(picture, Box(10, 20, 40, 30), background, side=70)
    assert crop.shape == (3, 70, 70) and crop.dtype == torch.uint8
    assert (crop[:, :20] > 250).all() and (crop[:, 50:] > 250).all()
    seen = box_of(crop[1] < 128)
    assert abs(seen.left + seen.right - 70) <= 2 and abs(seen.top + seen.bottom - 70) <= 2
    assert abs(seen.size[0] / seen.size[1] - 3) < 0.3


def test_what_is_no_picture_is_refused():
    with pytest.raises(ValueError, match="give a uint8 picture"):
        background_of(torch.zeros(3, 8, 8))
    with pytest.raises(ValueError, match="give a uint8 picture"):
        background_of(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
