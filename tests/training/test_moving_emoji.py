"""Clips of moving emoji: the plan is a function of its number, the pixels show what the plan says."""

import dataclasses
import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from mhla_diffusion.training.config import DataConfig
from mhla_diffusion.training.data import open_source
from mhla_diffusion.training.emoji_sprites import Sprites, load_sprites
from mhla_diffusion.training.moving_emoji import (
    CLIP_BACKGROUNDS,
    DIRECTIONS,
    MOTIONS,
    ClipPainter,
    ClipPlanner,
    MovingEmoji,
    caption_of,
    is_heldout,
    path_of,
    turns_visibly,
    visible_backgrounds,
)

SAMPLE = Path(__file__).resolve().parents[2] / "assets" / "emoji_sample.tar"
DIGESTS = ["848bb8e829d858c0", "363fadb6517a1089", "21d2de09a8a7af77"]


@pytest.fixture(scope="module")
def sprites():
    return load_sprites(SAMPLE, "train")


@pytest.fixture(scope="module")
def planner(sprites):
    return ClipPlanner(sprites, seed=3)


def test_a_clip_is_a_function_of_seed_split_and_number(sprites, planner):
    plans = [planner.plan(number) for number in range(40)]
    again = ClipPlanner(sprites, seed=3)
    assert [again.plan(number) for number in reversed(range(40))] == plans[::-1]
    other = ClipPlanner(sprites, seed=4)
    assert [other.plan(number) for number in range(40)] != plans
    assert len({plan.caption for plan in plans}) > 30


def test_plans_stay_what_they_were():
    """The shipped model and the published figures are of just these clips."""
    digests = []
    for split, styles, seed in (("train", ["flat"], 0), ("heldout", ["flat", "noto"], 3), ("val", ["3d"], 1)):
        source = MovingEmoji(SAMPLE, split, seed=seed, styles=styles)
        plans = source.plans(range(200))
        records = json.dumps([plan.truth() for plan in plans])
        digests.append(
            hashlib.sha256(records.encode() + source.planner.sprites.rgba.tobytes()).hexdigest()[:16]
        )
    assert digests == DIGESTS


def test_only_the_asked_for_styles_are_read(sprites):
    """A clip's sprite is a place among them, so their order must be that of the file."""
    some = load_sprites(SAMPLE, "train", ["noto", "flat"])
    places = [i for i, record in enumerate(sprites.records) if record["style"] in ("flat", "noto")]
    assert some.records == sprites.select(places).records
    assert np.array_equal(some.rgba, sprites.rgba[places])
    with pytest.raises(ValueError, match="holds no drawing of train in the styles oil, chalk; it has"):
        load_sprites(SAMPLE, "train", ["oil", "chalk"])
    with pytest.raises(ValueError, match="styles are \\['oil'\\]; choose from 3d"):
        MovingEmoji(SAMPLE, styles=["oil"])


def test_pairs_held_out_are_never_in_train(sprites):
    train, heldout = (ClipPlanner(sprites, split) for split in ("train", "heldout"))
    pairs = {
        split: {(p.key, p.motion) for p in map(planner.plan, range(600))}
        for split, planner in (("train", train), ("heldout", heldout))
    }
    assert pairs["heldout"] and not pairs["train"] & pairs["heldout"]
    assert {key for key, _ in pairs["heldout"]} <= {key for key, _ in pairs["train"]}
    record = {"style": "flat", "key": "1f680"}
    assert 0 < sum(is_heldout(record | {"key": f"{i:x}"}, "up") for i in range(800)) / 800 < 0.2


def test_emoji_never_seen_are_a_split_of_their_own(sprites):
    val = MovingEmoji(SAMPLE, "val", styles=["flat", "noto"])
    seen = {record["concept"] for record in sprites.records}
    assert all(plan.concept not in seen for plan in val.plans(range(20)))


def test_motions_are_about_equally_frequent_and_said_in_the_caption(planner):
    plans = [planner.plan(number) for number in range(1200)]
    counts = Counter(plan.motion for plan in plans)
    assert counts.keys() == MOTIONS.keys() and min(counts.values()) > 40
    for plan in plans[:100]:
        assert f" {MOTIONS[plan.motion]} on a" in plan.caption
        assert plan.caption.endswith(f"{plan.background} background")
    assert any(" flat " in plan.caption for plan in plans)
    assert any(" flat " not in f" {plan.caption}" for plan in plans)
    named = ClipPlanner(load_sprites(SAMPLE, "train"), "heldout")
    assert all(" flat " in f" {named.plan(number).caption}" for number in range(50))


def test_the_caption_of_the_readme():
    record = {"style": "flat", "concept": "rocket", "group": "travel-places", "subgroup": "transport-air"}
    assert caption_of(record, "up", "blue") == "a flat rocket moving up on a blue background"
    assert (
        caption_of(record, "down and left", "orange", False)
        == "a rocket moving down and left on an orange background"
    )


def square(colour=(255, 0, 0), size=16) -> Sprites:
    """A square that fills its sprite, its left half in another colour, so that turns can be seen."""
    rgba = np.full((1, size, size, 4), 255, np.uint8)
    rgba[0, ..., :3] = colour
    rgba[0, :, : size // 2, 1] = 200
    record = {"style": "flat", "key": "1", "concept": "rocket", "group": "objects", "subgroup": "tool",
              "tags": [], "split": "train", "caption": ""}  # fmt: skip
    return Sprites(rgba, [record])


def boxes(video: torch.Tensor, rgb) -> np.ndarray:
    """Middle x, y and width of what is not background, for each frame, in shares."""
    far = (video.float() - torch.tensor(rgb).view(3, 1, 1, 1)).abs().sum(0) > 150
    rows = []
    for frame in far:
        y, x = np.nonzero(frame.numpy())
        rows.append(
            [(x.mean() + 0.5) / frame.shape[1], (y.mean() + 0.5) / frame.shape[0], np.sqrt(len(x)) / 64]
        )
    return np.array(rows)


@pytest.mark.parametrize("motion", MOTIONS)
def test_pixels_show_the_plan(motion):
    sprites = square()
    planner = ClipPlanner(sprites, "train")
    plan = next(p for p in map(planner.plan, range(200)) if p.background in ("black", "dark blue"))
    plan = dataclasses.replace(
        plan,
        **{"height": 0.0, "bounces": 0.0, "turn": 0.0} | path_of(motion, np.random.default_rng(5)),
        motion=motion,
    )
    video = ClipPainter(sprites).paint([plan])
    assert video.shape == (1, 3, 17, 64, 64) and video.dtype == torch.uint8
    seen, pose = boxes(video[0], CLIP_BACKGROUNDS[plan.background]), plan.pose(17)
    assert np.abs(seen[:, :2] - pose[:, :2]).max() < 0.02
    assert np.abs(seen[:, 2] - pose[:, 2]).max() < 0.04
    if motion in DIRECTIONS:
        way = np.sign(np.round(seen[-1, :2] - seen[0, :2], 2))
        assert tuple(way.astype(int)) == DIRECTIONS[motion]
    if motion == "spin":  # a quarter turn clockwise brings the left half to the top
        quarter = int(np.argmin(np.abs(pose[:, 3] - np.pi / 2)))
        x, y = (pose[quarter, :2] * 64).astype(int)
        assert video[0, 1, quarter, y - 4, x] > 150 > video[0, 1, quarter, y + 4, x]


def test_the_whole_sprite_stays_inside(planner):
    for plan in map(planner.plan, range(4000)):
        pose = plan.pose(17)
        half = pose[:, 2] / 2
        assert ((pose[:, :2] - half[:, None]) > -1e-5).all() and (
            (pose[:, :2] + half[:, None]) < 1 + 1e-5
        ).all()


def test_sprites_stand_out_from_their_background(planner):
    red, ball = square((220, 60, 60)), square((9, 9, 9))
    ball.rgba[..., :3] = 9
    names = list(CLIP_BACKGROUNDS)
    colours = planner.sprites.rgba[..., None, :3].astype(np.int64)
    squares = np.square(colours - np.array(list(CLIP_BACKGROUNDS.values()))).sum(-1)
    solid = planner.sprites.rgba[..., 3] > 127
    shown = ((squares > 70**2) & solid[..., None]).sum((1, 2)) >= 0.7 * solid.sum((1, 2))[:, None]
    assert np.array_equal(visible_backgrounds(planner.sprites.rgba), shown)
    assert not visible_backgrounds(ball.rgba)[0, names.index("black")]
    assert visible_backgrounds(red.rgba)[0, names.index("dark blue")]
    assert turns_visibly(red.rgba)[0] and not turns_visibly(ball.rgba)[0]
    assert all(
        visible_backgrounds(planner.sprites.rgba[plan.sprite][None])[0, names.index(plan.background)]
        for plan in map(planner.plan, range(30))
    )


def test_batches_and_sizes(planner):
    painter = ClipPainter(planner.sprites)
    plans = [planner.plan(number) for number in range(3)]
    together = painter.paint(plans, 5, 32, 48)
    assert together.shape == (3, 3, 5, 32, 48)
    for i, plan in enumerate(plans):
        assert torch.equal(painter.paint([plan], 5, 32, 48)[0], together[i])
    assert painter.paint(plans[:1], 1, 64, 64).shape == (1, 3, 1, 64, 64)


def test_as_a_data_set():
    config = DataConfig(kind="moving-emoji", path=str(SAMPLE), sizes=[[9, 32, 32], [5, 32, 32]], clips=6)
    source = open_source(config, 4, seed=1, frame_factor=4)
    long, short = source.open()
    assert len(long.captions) == 6 and long.captions != short.captions
    pixels, kept = long.read([2, 4])
    assert kept == [2, 4] and pixels.shape == (2, 3, 9, 32, 32)
    direct = MovingEmoji(SAMPLE, seed=1).clips([2, 4], (9, 32, 32))
    assert torch.equal(pixels, direct[0]) and [plan.caption for plan in direct[1]] == [
        long.captions[i][0] for i in (2, 4)
    ]
    prints = {
        open_source(dataclasses.replace(config, **change), 4, seed, frame_factor=4).fingerprint
        for change, seed in (
            ({}, 1),
            ({}, 2),
            ({"clips": 7}, 1),
            ({"split": "heldout"}, 1),
            ({"styles": ["noto"]}, 1),
        )
    }
    assert len(prints) == 5 and source.fingerprint in prints
    elsewhere = open_source(config, 4, seed=1, frame_factor=4, device=torch.device("meta"))
    assert (
        elsewhere.open()[0].read([0])[0].device.type == "meta" and elsewhere.fingerprint == source.fingerprint
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "test"}, "split 'test' is unknown; choose from train, heldout, val"),
        ({"styles": ["oil"]}, "choose from 3d"),
        ({"seed": -1}, "give 0 or more"),
    ],
)
def test_faults_are_named(sprites, arguments, message):
    with pytest.raises(ValueError, match=message):
        ClipPlanner(sprites, **arguments)


def test_a_data_set_of_clips_is_for_models_of_videos():
    config = DataConfig(kind="moving-emoji", path=str(SAMPLE), sizes=[[9, 32, 32]])
    with pytest.raises(ValueError, match="is not for a model of pictures"):
        open_source(config, 4, seed=1)
    bad = dataclasses.replace(config, sizes=[[8, 32, 32]])
    with pytest.raises(ValueError, match=r"write \[9, 32, 32\]"):
        open_source(bad, 4, seed=1, frame_factor=4)
