"""Scenes: one to four sprites on a coloured canvas, a caption that says what is where, and the ground truth.

Four kinds, all without overlap:
``place``     "a flat emoji of a whale in the top left corner on a green background"
``count``     "a flat emoji of three whales on a green background"
``relation``  "two noto style lemons left of a flat whale on a green background" (several styles), or
             "a flat emoji of two lemons left of a whale on a green background" (one style)
``list``      "a flat emoji of a lemon, an owl and a rocket on a green background"
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .emoji_nouns import noun_of, noun_phrase, plural
from .emoji_sources import STYLES
from .emoji_sprites import BACKGROUNDS, COLOURS, Sprites, colour_of, on_background, resized

KINDS = ("place", "count", "relation", "list")
SCENE_STREAM = 2  # second word of the seed; 1 is for single sprites
SHARES = (0.25, 0.2, 0.4, 0.15)  # of KINDS
WHITE_SHARE = 0.15
WHITE_NAMED = 0.25  # how often a white background is mentioned
MIXED_SHARE = 0.35  # of scenes with several objects: each drawn in a style of its own
CELLS = ((0, 0), (1, 0), (0, 1), (1, 1))  # quarters of the canvas, as (column, row)
PLACES = {  # name -> the corner of a cell of half the canvas, in quarters of the canvas (x, y)
    "in the top left corner": (0, 0),
    "in the top right corner": (2, 0),
    "in the bottom left corner": (0, 2),
    "in the bottom right corner": (2, 2),
    "at the top": (1, 0),
    "at the bottom": (1, 2),
    "on the left": (0, 1),
    "on the right": (2, 1),
    "in the middle": (1, 1),
}
RELATIONS = {  # name -> cells of the first object and of the second
    "left of": ((0, 2), (1, 3)),
    "right of": ((1, 3), (0, 2)),
    "above": ((0, 1), (2, 3)),
    "below": ((2, 3), (0, 1)),
}


@dataclass(frozen=True)
class Scene:
    """A planned picture. ``pastes``: (sprite index, x, y) of each sprite, all ``side`` pixels wide."""

    caption: str
    truth: dict
    side: int
    pastes: tuple[tuple[int, int, int], ...]


class ScenePlanner:
    """Plans scenes out of the given sprites only; scene ``sample`` is a function of (seed, sample).

    Raises ValueError when no sprite can stand for an object of a scene, or the canvas is too small.
    """

    def __init__(self, sprites: Sprites, *, seed: int = 0, canvas: int = 64):
        if canvas < 16 or canvas % 8:
            raise ValueError(f"canvas is {canvas}; give a multiple of 8 from 16 on, e.g. 64 or 128")
        self.records, self.seed, self.canvas = sprites.records, seed, canvas
        self.nouns = [noun_of(record) for record in sprites.records]
        fit = [i for i, noun in enumerate(self.nouns) if noun]
        if not fit:
            raise ValueError(
                "none of the sprites can stand for an object of a scene; give some animals or food"
            )
        self.pools = {}  # style -> sprites; "" -> all of them
        for i in fit:
            self.pools.setdefault(self.records[i]["style"], []).append(i)
        # A style with fewer than four emoji could not fill a list.
        self.pools = {s: p for s, p in self.pools.items() if len({self.records[i]["key"] for i in p}) >= 4}
        self.pools[""] = fit
        self.max_objects = min(4, len({self.records[i]["key"] for i in fit}))

    def plan(self, sample: int, kind: str | None = None) -> Scene:
        """Scene number ``sample``; ``kind`` is drawn unless given. Raises ValueError for an unknown kind."""
        rng = np.random.default_rng((self.seed, SCENE_STREAM, sample))
        drawn = KINDS[rng.choice(len(KINDS), p=SHARES)]
        if kind is not None and kind not in KINDS:
            raise ValueError(f"kind {kind!r} is unknown; choose from {', '.join(KINDS)}")
        kind = kind or drawn
        if kind in ("relation", "list") and self.max_objects < 2:
            kind = "count"
        side = self.canvas // 2 if rng.random() < 0.6 else self.canvas * 3 // 8
        objects, counts, cells, relation = getattr(self, f"_{kind}")(rng)
        background = "white" if rng.random() < WHITE_SHARE else COLOURS[rng.integers(len(COLOURS))]
        named = background != "white" or rng.random() < WHITE_NAMED
        return self._scene(rng, kind, side, objects, counts, cells, relation, background, named)

    def _choose(self, rng: np.random.Generator, number: int, mixed: bool, max_words: int = 9) -> list[int]:
        """``number`` sprites of different emoji, of one style unless ``mixed``; of short names if it can."""
        styles = [style for style in self.pools if style]
        pool = self.pools["" if mixed or not styles else styles[rng.integers(len(styles))]]
        short = [i for i in pool if len(self.nouns[i].split()) <= max_words]
        pool = short if len({self.records[i]["key"] for i in short}) >= number else pool
        chosen, keys = [], set()
        while len(chosen) < number:
            i = pool[rng.integers(len(pool))]
            if self.records[i]["key"] not in keys:
                keys.add(self.records[i]["key"])
                chosen.append(i)
        return chosen

    def _quarters(self, cells) -> list[tuple[int, int]]:
        return [(2 * CELLS[cell][0], 2 * CELLS[cell][1]) for cell in cells]

    def _place(self, rng):
        name = list(PLACES)[rng.integers(len(PLACES))]
        return self._choose(rng, 1, False), [1], [[PLACES[name]]], name

    def _count(self, rng):
        (sprite,) = self._choose(rng, 1, False)
        count = int(rng.integers(2, 5)) if plural(self.nouns[sprite]) else 1
        return [sprite], [count], [self._quarters(rng.permutation(4)[:count])], None

    def _relation(self, rng):
        objects = self._choose(rng, 2, rng.random() < MIXED_SHARE)
        name = list(RELATIONS)[rng.integers(len(RELATIONS))]
        counts, cells = [], []
        for sprite, free in zip(objects, RELATIONS[name], strict=True):
            counts.append(2 if plural(self.nouns[sprite]) and rng.random() < 0.35 else 1)
            cells.append(self._quarters(rng.permutation(free)[: counts[-1]]))
        return objects, counts, cells, name

    def _list(self, rng):
        number, mixed = int(rng.integers(2, self.max_objects + 1)), rng.random() < MIXED_SHARE
        if mixed:
            number = min(number, 3)  # four objects with a style each would be too long a caption
        objects = self._choose(rng, number, mixed, max_words=2)
        return objects, [1] * number, [[q] for q in self._quarters(rng.permutation(4)[:number])], None

    def _scene(self, rng, kind, side, objects, counts, cells, relation, background, named) -> Scene:
        styles = [self.records[i]["style"] for i in objects]
        one_style = len(set(styles)) == 1
        phrases = [
            noun_phrase(self.nouns[i], n, "" if one_style else STYLES[self.records[i]["style"]].adjective)
            for i, n in zip(objects, counts, strict=True)
        ]
        if kind == "place":
            words = f"{phrases[0]} {relation}"
        elif kind == "relation":
            words = f"{phrases[0]} {relation} {phrases[1]}"
        else:
            words = " and ".join(filter(None, (", ".join(phrases[:-1]), phrases[-1])))
        caption = STYLES[styles[0]].phrase.format(words) if one_style else words
        quarter, slack = self.canvas // 4, self.canvas // 2 - side
        pastes, described = [], []
        for i, places in zip(objects, cells, strict=True):
            boxes = []
            for column, row in places:
                x, y = (int(v) for v in np.array((column, row)) * quarter + rng.integers(0, slack + 1, 2))
                pastes.append((i, x, y))
                boxes.append([x, y, x + side, y + side])
            record = self.records[i]
            described.append(
                {
                    "concept": record["concept"],
                    "key": record["key"],
                    "style": record["style"],
                    "count": len(boxes),
                    "place": relation if kind == "place" else None,
                    "boxes": boxes,
                }
            )
        truth = {
            "kind": kind,
            "canvas": self.canvas,
            "background": background,
            "rgb": list(BACKGROUNDS[background]),
            "objects": described,
            "relation": relation if kind == "relation" else None,  # of the first object to the second
        }
        return Scene(caption + (background_phrase(background) if named else ""), truth, side, tuple(pastes))


def background_phrase(background: str) -> str:
    """``" on an orange background"``. Raises ValueError for an unknown background."""
    colour_of(background)
    return f" on {'an' if background[0] in 'aeio' else 'a'} {background} background"


class ScenePainter:
    """Draws planned scenes; keeps the sprites in the two sizes that a canvas needs."""

    def __init__(self, sprites: Sprites, canvas: int):
        self.canvas = canvas
        self.tiles = {side: resized(sprites.rgba, side) for side in (canvas // 2, canvas * 3 // 8)}

    def paint(self, scenes: list[Scene]) -> np.ndarray:
        """``(K, canvas, canvas, 3)`` uint8."""
        colours = np.array([scene.truth["rgb"] for scene in scenes], np.uint8)
        shape = (len(scenes), self.canvas, self.canvas, 3)
        pictures = np.broadcast_to(colours[:, None, None], shape).copy()
        for side, tiles in self.tiles.items():
            pastes = [(k, *paste) for k, s in enumerate(scenes) if s.side == side for paste in s.pastes]
            if pastes:
                k, sprite, x, y = np.array(pastes).T
                step = np.arange(side)
                rows, columns = (y[:, None] + step)[:, :, None], (x[:, None] + step)[:, None, :]
                pictures[k[:, None, None], rows, columns] = on_background(tiles[sprite], colours[k])
        return pictures


def compose(
    sprites: Sprites, sample: int, *, seed: int = 0, canvas: int = 64, kind: str | None = None
) -> tuple[np.ndarray, str, dict]:
    """One scene of the given sprites: picture ``(canvas, canvas, 3)`` uint8, caption, ground truth.

    The ground truth is a dict for JSON: kind, canvas, background (name) and rgb, objects (concept, key,
    style, count, place, boxes as [x0, y0, x1, y1]), and the relation of the first object to the second. The
    picture is the background colour outside the boxes. For many scenes use :class:`ScenePlanner` and
    :class:`ScenePainter`.

    Args:
        sample: number of the scene; with ``seed`` it fixes everything.
        kind: one of ``KINDS``; drawn when None.

    Raises:
        ValueError: unknown kind, canvas no multiple of 8, or no sprite that can stand for an object.
    """
    scene = ScenePlanner(sprites, seed=seed, canvas=canvas).plan(sample, kind)
    used = list(dict.fromkeys(index for index, _, _ in scene.pastes))
    local = Scene(
        scene.caption, scene.truth, scene.side, tuple((used.index(i), x, y) for i, x, y in scene.pastes)
    )
    return ScenePainter(sprites.select(used), canvas).paint([local])[0], scene.caption, scene.truth
