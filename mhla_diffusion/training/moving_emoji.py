"""Clips of moving emoji: a sprite on a plain background that moves, bounces, spins, grows or shrinks, with a caption.

A clip is planned as a function of (seed, split, number) alone, and rendered in batches on any device. What is true of
it (sprite, motion, background, path) stays beside it.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from .buckets import Bucket, PictureSource
from .clips import check_sizes
from .config import DataConfig
from .emoji_nouns import noun_of, noun_phrase
from .emoji_scenes import background_phrase
from .emoji_sources import STYLES
from .emoji_sprites import BACKGROUNDS, Sprites, load_sprites, resized
from .transfer import upload

SPLITS = ("train", "heldout", "val")
DEFAULT_STYLES = ("flat",)
BLUE = {"blue": (50, 110, 220)}
CLIP_BACKGROUNDS = BACKGROUNDS | BLUE  # "on a blue background" is what people write
DIRECTIONS = {  # name -> the way, x to the right and y down
    "up": (0, -1),
    "down": (0, 1),
    "left": (-1, 0),
    "right": (1, 0),
    "up and left": (-1, -1),
    "up and right": (1, -1),
    "down and left": (-1, 1),
    "down and right": (1, 1),
}
MOTIONS = {**{name: f"moving {name}" for name in DIRECTIONS}, "bounce": "bouncing", "spin": "spinning",
           "grow": "growing", "shrink": "shrinking"}  # fmt: skip
CLIP_STREAM = 3  # second word of the seed; 1 and 2 are for single sprites and scenes
HELDOUT_ONE_IN = 8  # of a sprite's motions, how rarely one is kept out of train
STYLE_NAMED = 0.9  # how often a caption of train says the style

# Shares of the canvas, unless another unit is said.
SIDE = (0.4, 0.52)  # of a sprite that keeps its size
SMALL, LARGE = (0.24, 0.32), (0.56, 0.68)  # at the ends of growing and shrinking
TRAVEL = (0.32, 0.5)  # along each axis that the motion follows
HEIGHT, BOUNCES = (0.28, 0.44), (1.5, 2.5)  # how high and how often
TURN = (np.pi, 1.6 * np.pi)  # radians, clockwise

TILE = 40  # pixels: sprites are kept at about the size they are shown in
ALIKE = 70.0  # distance of colours below which a pixel cannot be told from the background
SHOWN = 0.7  # share of a sprite that must differ from a background
ASYMMETRY = 12.0  # mean change of a sprite, of 255, under a quarter turn below which spinning cannot be seen


@dataclass(frozen=True)
class Clip:
    """A planned clip and what is true of it. Places and sizes are shares of the canvas, angles radians."""

    caption: str
    sprite: int
    key: str
    concept: str
    style: str
    motion: str
    background: str
    start: tuple[float, float]  # middle of the sprite in the first frame, x and y
    end: tuple[float, float]  # and in the last; of a bounce both lie on the ground
    sides: tuple[float, float]  # first and last
    height: float = 0.0
    bounces: float = 0.0
    turn: float = 0.0

    def truth(self) -> dict:
        """The same as a dict for JSON."""
        return asdict(self)

    def pose(self, frames: int) -> np.ndarray:
        """float32 `(frames, 4)`: x, y, side, angle."""
        time = np.linspace(0, 1, frames) if frames > 1 else np.zeros(1)
        x, y = (a + (b - a) * time for a, b in zip(self.start, self.end, strict=True))
        y = y - self.height * np.abs(np.sin(np.pi * self.bounces * time))
        side = self.sides[0] + (self.sides[1] - self.sides[0]) * time
        return np.stack([x, y, side, self.turn * time], 1).astype(np.float32)


def is_heldout(record: dict, motion: str) -> bool:
    """Whether a sprite is never shown with this motion in `train`; the same in every build."""
    return zlib.crc32(f"{record['style']}/{record['key']}/{motion}".encode()) % HELDOUT_ONE_IN == 0


def visible_backgrounds(rgba: np.ndarray) -> np.ndarray:
    """bool `(N, backgrounds)`: on which backgrounds each sprite `(N, S, S, 4)` uint8 can be seen as a whole."""
    visible = np.empty((len(rgba), len(CLIP_BACKGROUNDS)), bool)
    solid = rgba[..., 3] > 127
    enough = SHOWN * solid.sum((1, 2)).clip(1)
    colours = rgba[..., :3].astype(np.float32)
    lengths = np.square(colours).sum(-1)
    for number, rgb in enumerate(CLIP_BACKGROUNDS.values()):
        other = np.array(rgb, np.float32)
        # Squared distances, multiplied out: whole numbers below 2**24, so float32 has them exactly.
        far = lengths - 2 * (colours @ other) + other @ other > ALIKE**2
        visible[:, number] = (far & solid).sum((1, 2)) >= enough
    return visible


def turns_visibly(rgba: np.ndarray) -> np.ndarray:
    """bool `(N,)`: whether a quarter turn and a half turn change the sprite."""
    premultiplied = rgba[..., :3].astype(np.float32) * (rgba[..., 3:] / 255)
    covered = (rgba[..., 3] > 0).mean((1, 2)).clip(0.01)
    quarter, half = (
        np.abs(premultiplied - np.rot90(premultiplied, k, (1, 2))).mean((1, 2, 3)) / covered for k in (1, 2)
    )
    return np.minimum(quarter, half) > ASYMMETRY


class ClipPlanner:
    """Plans the clips of one split; clip `number` is a function of (seed, split, number).

    `train`: sprites of the set's `train`, each without the motions that are held out. `heldout`: the same sprites with
    just those motions. `val`: sprites of the set's `val`, whose emoji was never seen, with any motion.

    Raises ValueError for an unknown split or style, or when no sprite is left.
    """

    def __init__(
        self, sprites: Sprites, split: str = "train", *, seed: int = 0, styles: Sequence[str] = DEFAULT_STYLES
    ):
        check_split(split)
        check_styles(styles)
        if seed < 0:
            raise ValueError(f"seed is {seed}; give 0 or more")
        own = [record["split"] == ("val" if split == "val" else "train") for record in sprites.records]
        fits = [
            i
            for i, record in enumerate(sprites.records)
            if own[i] and record["style"] in styles and noun_of(record)
        ]
        if not fits:
            raise ValueError(
                f"none of the sprites is of {split} and of the styles {', '.join(styles)}, and can stand for an object"
            )
        self.seed, self.split = seed, split
        self.sprites = sprites.select(fits)
        seen, turning = visible_backgrounds(self.sprites.rgba), turns_visibly(self.sprites.rgba)
        names = list(CLIP_BACKGROUNDS)
        self.choices: list[tuple[int, list[str], list[str]]] = []  # sprite, motions, backgrounds
        for i, record in enumerate(self.sprites.records):
            motions = [name for name in MOTIONS if name != "spin" or turning[i]]
            if split != "val":
                motions = [name for name in motions if is_heldout(record, name) == (split == "heldout")]
            backgrounds = [names[k] for k in np.flatnonzero(seen[i])]
            if motions and backgrounds:
                self.choices.append((i, motions, backgrounds))
        if not self.choices:
            raise ValueError(f"no sprite of {split} can be shown: give a set with more drawings")

    def plan(self, number: int) -> Clip:
        """Clip `number`, 0 or more."""
        rng = np.random.default_rng((self.seed, CLIP_STREAM, SPLITS.index(self.split), number))
        index, motions, backgrounds = self.choices[rng.integers(len(self.choices))]
        # The motion first: a sprite has few backgrounds at times, and all motions should be equally frequent.
        motion = motions[rng.integers(len(motions))]
        background = backgrounds[rng.integers(len(backgrounds))]
        record = self.sprites.records[index]
        named = self.split != "train" or rng.random() < STYLE_NAMED
        return Clip(
            caption=caption_of(record, motion, background, named),
            sprite=index,
            key=record["key"],
            concept=record["concept"],
            style=record["style"],
            motion=motion,
            background=background,
            **path_of(motion, rng),
        )


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; choose from {', '.join(SPLITS)}")


def check_styles(styles: Sequence[str]) -> None:
    if not styles or any(style not in STYLES for style in styles):
        raise ValueError(f"styles are {list(styles)}; choose from {', '.join(STYLES)}")


def caption_of(record: dict, motion: str, background: str, with_style: bool = True) -> str:
    """`"a flat rocket moving up on a blue background"`."""
    noun = noun_phrase(noun_of(record), 1, STYLES[record["style"]].adjective if with_style else "")
    return f"{noun} {MOTIONS[motion]}{phrase_of(background)}"


def phrase_of(background: str) -> str:
    return " on a blue background" if background in BLUE else background_phrase(background)


def path_of(motion: str, rng: np.random.Generator) -> dict:
    """A path that leaves no part of the sprite outside the canvas; fields of `Clip`."""

    def within(low: float, high: float) -> float:
        return float(rng.uniform(low, max(low, high)))  # rounding may turn a single place around

    side = within(*SIDE)
    if motion in DIRECTIONS:
        start, end = [], []
        for way in DIRECTIONS[motion]:
            travel = way * min(within(*TRAVEL), 1 - side)
            # The sprite's middle stays half its side away from the borders, on the whole way.
            first = within(side / 2 + max(0.0, -travel), 1 - side / 2 - max(0.0, travel))
            start.append(first)
            end.append(first + travel)
        return {"start": tuple(start), "end": tuple(end), "sides": (side, side)}
    if motion == "bounce":
        height = min(within(*HEIGHT), 1 - side)
        ground = (within(side / 2, 1 - side / 2), within(side / 2 + height, 1 - side / 2))
        return {
            "start": ground,
            "end": ground,
            "sides": (side, side),
            "height": height,
            "bounces": within(*BOUNCES),
        }
    if motion == "spin":
        room = side * 2**0.5 / 2  # half a diagonal: corners turn, too
        middle = tuple(within(room, 1 - room) for _ in range(2))
        return {"start": middle, "end": middle, "sides": (side, side), "turn": within(*TURN)}
    small, large = within(*SMALL), within(*LARGE)
    middle = tuple(within(large / 2, 1 - large / 2) for _ in range(2))
    return {"start": middle, "end": middle, "sides": (small, large) if motion == "grow" else (large, small)}


class ClipPainter:
    """Renders planned clips on a device; sprites stay there as premultiplied float tiles `(N, 4, TILE, TILE)`."""

    def __init__(self, sprites: Sprites, device: torch.device | str = "cpu"):
        tiles = torch.from_numpy(resized(sprites.rgba, TILE)).to(device).permute(0, 3, 1, 2).float() / 255
        self.tiles = torch.cat([tiles[:, :3] * tiles[:, 3:], tiles[:, 3:]], 1)
        self.device = torch.device(device)

    @torch.no_grad()
    def paint(
        self, clips: Sequence[Clip], frames: int = 17, height: int = 64, width: int = 64
    ) -> torch.Tensor:
        """uint8 `(len(clips), 3, frames, height, width)` on the painter's device.

        Drawn twice as large and averaged down, so that edges move by fractions of a pixel. On a GPU the clips are not
        drawn yet when this returns.
        """
        count = len(clips)
        poses = torch.from_numpy(np.stack([clip.pose(frames) for clip in clips]))
        poses = upload(poses, self.device).flatten(0, 1)
        x, y, side, angle = poses.unbind(1)
        cos, sin = angle.cos() / side, angle.sin() / side
        dx, dy = 1 - 2 * x, 1 - 2 * y  # from the sprite's middle to the canvas's, where the canvas is [-1, 1]
        theta = torch.stack([cos, sin, cos * dx + sin * dy, -sin, cos, cos * dy - sin * dx], 1).view(-1, 2, 3)
        which = torch.tensor([clip.sprite for clip in clips])
        which = upload(which, self.device).repeat_interleave(frames)
        grid = F.affine_grid(theta, [len(theta), 4, 2 * height, 2 * width], align_corners=False)
        drawn = F.grid_sample(self.tiles[which], grid, align_corners=False, padding_mode="zeros")
        drawn = F.avg_pool2d(drawn, 2)
        rgb = torch.tensor([CLIP_BACKGROUNDS[clip.background] for clip in clips])
        rgb = upload(rgb, self.device) / 255
        rgb = rgb.repeat_interleave(frames, 0)[:, :, None, None]
        pixels = drawn[:, :3] + rgb * (1 - drawn[:, 3:])
        levels = (pixels.clamp(0, 1) * 255 + 0.5).to(torch.uint8)
        return levels.view(count, frames, 3, height, width).transpose(1, 2).contiguous()


class MovingEmoji:
    """All clips of one split: `plans(numbers)` and `clips(numbers)`, from the file of `train/build_emoji.py`."""

    def __init__(
        self,
        path,
        split: str = "train",
        *,
        seed: int = 0,
        styles: Sequence[str] = DEFAULT_STYLES,
        device: torch.device | str = "cpu",
    ):
        check_split(split)
        check_styles(styles)
        sprites = load_sprites(path, "val" if split == "val" else "train", styles)
        self.planner = ClipPlanner(sprites, split, seed=seed, styles=styles)
        self.painter = ClipPainter(self.planner.sprites, device)

    def plans(self, numbers: Sequence[int]) -> list[Clip]:
        return [self.planner.plan(number) for number in numbers]

    def clips(
        self, numbers: Sequence[int], size: tuple[int, int, int] = (17, 64, 64)
    ) -> tuple[torch.Tensor, list[Clip]]:
        """uint8 `(n, 3, frames, height, width)` on the painter's device, and what is true of each."""
        plans = self.plans(numbers)
        return self.painter.paint(plans, *size), plans


def open_moving_emoji(
    config: DataConfig,
    seed: int,
    latent_factor: int,
    frame_factor: int,
    device: torch.device | str | None = None,
) -> PictureSource:
    """`data.clips` clips of `data.split` in the sizes of `data.sizes`, as a data set of videos.

    `device`: where they are drawn; None: the GPU when there is one. With several sizes, each has `data.clips` clips of
    its own.
    """
    check_split(config.split)
    sizes = check_sizes(config, latent_factor, frame_factor)
    with open(config.path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(json.dumps([sizes, config.split, config.clips, config.styles, seed]).encode())
    own = Path(__file__)
    for module in sorted([own, *own.parent.glob("emoji*.py")]):
        digest.update(module.read_bytes())  # another way to draw is another data set

    def make() -> list[Bucket]:
        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        source = MovingEmoji(config.path, config.split, seed=seed, styles=config.styles, device=where)
        buckets = []
        for place, size in enumerate(sizes):
            numbers = range(place * config.clips, (place + 1) * config.clips)
            plans = source.plans(numbers)

            def read(indices: list[int], size=size, plans=plans) -> tuple[torch.Tensor, list[int]]:
                return source.painter.paint([plans[i] for i in indices], *size), indices

            buckets.append(Bucket(*size[1:], [[plan.caption] for plan in plans], read))
        return buckets

    return PictureSource(make, digest.hexdigest())
