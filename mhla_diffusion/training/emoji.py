"""The emoji set as training pictures: sprites on coloured backgrounds and composed scenes, with captions.

The file is built by ``train/build_emoji.py``. Every choice is a function of (seed, sample): two runs see the
same.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import torch

from .emoji_scenes import (
    WHITE_NAMED,
    ScenePainter,
    ScenePlanner,
    background_phrase,
    compose,
)
from .emoji_sprites import (
    BACKGROUNDS,
    COLOURS,
    Sprites,
    colour_of,
    load_sprites,
    on_background,
    resized,
)

__all__ = [
    "BACKGROUNDS",
    "Sprites",
    "caption_of",
    "colour_of",
    "compose",
    "fixed_prompts",
    "load_sprites",
    "materialise",
    "on_background",
    "resized",
]

PROMPTS = Path(__file__).resolve().parents[2] / "assets" / "emoji_prompts.json"
SINGLE_STREAM = 1  # second word of the seed; scenes have a stream of their own

# How often a caption is the set's own, gets two keywords, loses its style, loses "an emoji of" as well.
PLAIN, WITH_TAGS, WITHOUT_STYLE = 0.7, 0.15, 0.1


def caption_of(
    record: dict,
    background: str = "white",
    rng: np.random.Generator | None = None,
    tag_captions: bool = True,
) -> str:
    """A caption of one sprite on a background.

    Without ``rng`` it is the plain one: "a flat emoji of a whale" on white, "a flat emoji of a whale on a
    sky blue background" on a colour. With it, white is named sometimes, and with ``tag_captions`` some
    captions get two of the emoji's keywords (", animal, ocean") or do without the style ("an emoji of a
    whale", "a whale").
    """
    caption = record["caption"]
    if rng is None:
        return caption + (background_phrase(background) if background != "white" else "")
    roll, named = rng.random(2)
    tags = [tag for tag in record["tags"] if tag.lower() not in caption.lower()]
    order = rng.permutation(len(tags))[:2]
    noun = caption.partition(" emoji of ")[2]
    extra = ""
    if tag_captions and roll >= PLAIN:
        if roll < PLAIN + WITH_TAGS:
            extra = "".join(f", {tags[i]}" for i in order)
        else:
            caption = f"an emoji of {noun}" if roll < PLAIN + WITH_TAGS + WITHOUT_STYLE else noun
    if background != "white" or named < WHITE_NAMED:
        caption += background_phrase(background)
    return caption + extra


def materialise(
    path: str | Path,
    split: str = "train",
    size: int = 64,
    seed: int = 0,
    backgrounds: int = 4,
    compositions: int = 20000,
    tag_captions: bool = True,
) -> tuple[torch.Tensor, list[str]]:
    """All training pictures of one split, in memory.

    Each sprite on white and on ``backgrounds`` different colours, then ``compositions`` scenes made of the
    same sprites; no other split is touched. With 0, 0 and no ``tag_captions`` it is the plain split on white.

    Returns:
        ``(K, 3, size, size)`` uint8 with K = sprites * (1 + backgrounds) + compositions, and K captions.
        Picture ``i * (1 + backgrounds)`` is sprite i on white.

    Raises:
        ValueError: missing or broken file, unknown split, more backgrounds than colours, or negative numbers.
    """
    if not 0 <= backgrounds <= len(COLOURS):
        raise ValueError(f"backgrounds is {backgrounds}; give 0 to {len(COLOURS)}, the colours beside white")
    if compositions < 0 or seed < 0:
        raise ValueError(f"compositions is {compositions} and seed {seed}; both are 0 or more")
    if size < 8:
        raise ValueError(f"size is {size}; give the side of the pictures in pixels, e.g. 64")
    sprites = load_sprites(path, split)
    each = 1 + backgrounds
    images = np.empty((len(sprites) * each + compositions, 3, size, size), np.uint8)
    captions = []
    names = []
    for record in sprites.records:
        sample = zlib.crc32(
            f"{record['style']}/{record['key']}".encode()
        )  # stays when the file's order changes
        rng = np.random.default_rng((seed, SINGLE_STREAM, sample))
        colours = ["white", *(COLOURS[i] for i in rng.permutation(len(COLOURS))[:backgrounds])]
        names += colours
        if tag_captions or backgrounds:
            captions += [caption_of(record, colour, rng, tag_captions) for colour in colours]
        else:
            captions.append(caption_of(record))
    rgb = np.array([BACKGROUNDS[name] for name in names], np.uint8)
    pixels = resized(sprites.rgba, size)
    chunk = 128  # pictures at a time: the sums of a composite take eight times a picture's room
    for start in range(0, len(sprites), chunk):
        part = pixels[start : start + chunk].repeat(each, axis=0)
        first = start * each
        laid = on_background(part, rgb[first : first + len(part)])
        images[first : first + len(part)] = laid.transpose(0, 3, 1, 2)
    if compositions:
        planner, painter = ScenePlanner(sprites, seed=seed, canvas=size), ScenePainter(sprites, size)
        for start in range(0, compositions, chunk):
            scenes = [planner.plan(i) for i in range(start, min(start + chunk, compositions))]
            first = len(sprites) * each + start
            images[first : first + len(scenes)] = painter.paint(scenes).transpose(0, 3, 1, 2)
            captions += [scene.caption for scene in scenes]
    return torch.from_numpy(images), captions


def fixed_prompts(path: str | Path = PROMPTS) -> list[dict]:
    """The 24 prompts that sample grids and contact sheets use: dicts with prompt, key, style, split.

    12 are captions of ``train``, 12 of ``heldout`` (the emoji was shown in other styles only). The file lies
    in the repository's ``assets/``; ValueError when it is not there, as in an installed wheel.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no prompt list at {path}; take assets/emoji_prompts.json from the repository")
    return json.loads(path.read_text(encoding="utf-8"))
