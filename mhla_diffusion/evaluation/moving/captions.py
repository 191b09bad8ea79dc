"""What a clip must show: the motion and the background that its caption names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .tracking import COLOURS, DIRECTIONS

PHRASES = {**{f"moving {name}": name for name in DIRECTIONS}, "bouncing": "bounce", "spinning": "spin",
           "growing": "grow", "shrinking": "shrink"}  # fmt: skip
_MOTION = re.compile("|".join(sorted(map(re.escape, PHRASES), key=len, reverse=True)))
_BACKGROUND = re.compile(rf"\bon an? ({'|'.join(sorted(COLOURS, key=len, reverse=True))}) background\b")


@dataclass(frozen=True)
class Asked:
    """A caption and what its clip must show; `background` None: any."""

    prompt: str
    motion: str
    background: str | None


def asked_of(caption: str) -> Asked:
    """What a caption names. Raises ValueError when it names no motion.

    "a flat rocket moving up on a blue background": motion "up", background "blue".
    """
    text = caption.lower()
    background = _BACKGROUND.search(text)
    found = _MOTION.findall(text[: background.start()] if background else text)
    if not found:
        raise ValueError(f"the caption {caption!r} names no motion: {', '.join(PHRASES)}")
    last = PHRASES[found[-1]]  # nouns come before
    return Asked(caption, last, background[1] if background else None)
