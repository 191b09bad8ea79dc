"""The measured motion is the true one, on clips whose truth is known."""

import math

import numpy as np
import pytest
import torch

from mhla_diffusion.evaluation.moving.captions import asked_of
from mhla_diffusion.evaluation.moving.tracking import COLOURS, MOTIONS, track
from mhla_diffusion.training.emoji import Sprites
from mhla_diffusion.training.moving_emoji import CLIP_BACKGROUNDS, Clip, ClipPainter, path_of
from mhla_diffusion.training.moving_emoji import MOTIONS as TRAINED


def sprite() -> Sprites:
    """A red arrow with a blue foot: no turn leaves it as it is."""
    rgba = np.zeros((1, 64, 64, 4), np.uint8)
    rgba[0, 12:30, 8:56] = (230, 60, 40, 255)
    rgba[0, 30:56, 26:38] = (40, 60, 200, 255)
    return Sprites(rgba, [{"key": "a", "concept": "arrow", "style": "flat", "split": "train"}])


def clips(
    motion: str, count: int = 2, background: str = "yellow", frames: int = 17
) -> tuple[torch.Tensor, list[Clip]]:
    draw = np.random.default_rng(list(TRAINED).index(motion))
    plans = [
        Clip("", 0, "a", "arrow", "flat", motion, background, **path_of(motion, draw)) for _ in range(count)
    ]
    return ClipPainter(sprite()).paint(plans, frames).permute(0, 2, 1, 3, 4), plans  # (n, F, 3, H, W)


def test_the_words_and_colours_are_those_of_the_set():
    assert set(MOTIONS) == set(TRAINED) and COLOURS == CLIP_BACKGROUNDS
    for name, phrase in TRAINED.items():
        asked = asked_of(f"a flat arrow {phrase} on a sky blue background")
        assert (asked.motion, asked.background) == (name, "sky blue")


@pytest.mark.parametrize("motion", MOTIONS)
def test_every_motion_is_found_and_measured(motion):
    videos, plans = clips(motion)
    for frames, plan in zip(videos, plans, strict=True):
        found = track(frames)
        assert (found.name, found.background) == (motion, "yellow")
        if motion == "spin":
            assert found.turned == pytest.approx(plan.turn, abs=0.1)
        elif motion != "bounce":
            wanted = [b - a for a, b in zip(plan.start, plan.end, strict=True)]
            # The arrow's middle is not its tile's: it moves with the size.
            assert found.moved == pytest.approx(
                wanted, abs=0.02 if motion not in ("grow", "shrink") else 0.05
            )
            assert found.grown == pytest.approx(math.log(plan.sides[1] / plan.sides[0]), abs=0.1)


@pytest.mark.parametrize("background", COLOURS)
def test_every_background_is_named(background):
    if background in ("red", "dark blue", "blue"):  # of which the arrow itself has much
        return
    assert track(clips("left", 1, background)[0][0]).background == background


def test_what_does_not_move_is_still_and_an_empty_video_is_nothing():
    frames = clips("up", 1)[0][0]
    assert track(frames[:1].expand(9, -1, -1, -1).contiguous()).name == "still"
    empty = torch.tensor(COLOURS["green"], dtype=torch.uint8)[None, :, None, None].expand(9, 3, 64, 64)
    assert (track(empty.contiguous()).name, track(empty.contiguous()).background) == ("nothing", "green")
    noise = (
        frames.float() + 6 * torch.randn(frames.shape, generator=torch.Generator().manual_seed(0))
    ).clamp(0, 255)
    assert track(noise.to(torch.uint8)).name == "up"
    flipped = track(frames.flip(0))
    assert flipped.name == "down"


def test_frames_that_are_none_are_refused():
    for frames in (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(5, 3, 8, 8)):
        with pytest.raises(ValueError, match="give at least 3 uint8 frames"):
            track(frames)


def six_arms(start: tuple[float, float]) -> torch.Tensor:
    """A star of six arms that a sixth of a turn hardly changes, moving up and left, `(17, 3, 64, 64)`."""
    rows, columns = torch.meshgrid(*[(torch.arange(64.0) - 31.5)] * 2, indexing="ij")
    frames = []
    for step in range(17):
        y, x = (rows - start[1] + 1.9 * step, columns - start[0] + 1.9 * step)
        arms = [(x * math.cos(a) + y * math.sin(a), y * math.cos(a) - x * math.sin(a)) for a in SIXTHS]
        edges = [
            (1.7 - across.abs()).clamp(0, 1) * (along + 0.5).clamp(0, 1) * (13.5 - along).clamp(0, 1)
            for along, across in arms
        ]
        inside = torch.stack(edges).amax(0)[None]  # soft, as drawings are
        frames.append(inside * STAR + (1 - inside) * GROUND)
    return torch.stack(frames).to(torch.uint8)


SIXTHS = [k * math.pi / 3 for k in range(6)]
STAR, GROUND = (torch.tensor(c)[:, None, None] for c in ((80.0, 160.0, 240.0), (150.0, 100.0, 60.0)))


@pytest.mark.parametrize("offset", range(8))
def test_a_snowflake_that_moves_along_does_not_spin(offset):
    """Of a pair of frames the wrong sixth of a turn may fit a little better; the other pairs know better."""
    found = track(six_arms((15 + 0.31 * offset, 15 + 0.17 * offset)))
    assert found.name == "up and left" and abs(found.turned) < 0.1
