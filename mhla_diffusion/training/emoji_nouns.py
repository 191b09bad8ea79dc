"""Noun phrases for scenes: which emoji can stand for an object, and how their names read in the plural."""

from __future__ import annotations

import re

from .emoji_sources import NOUN_GROUPS, article, is_plural

NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four"}
MAX_WORDS = 5  # longer names make captions that no longer fit a text encoder of 32 tokens

# Whole scenes, maps and clock faces look or read badly as one object among others.
_LEFT_OUT_GROUPS = frozenset(("place-other", "place-map", "place-geographic"))
_LEFT_OUT = re.compile(
    "o’clock|-thirty|^locked|^unlocked|^hourglass|^construction$|^high voltage$|^milky way$"
    "|^heart exclamation$|^heart decoration$"
)
# Food by weight, games, places that exist once: names that take neither an article nor a number well.
_UNCOUNTED = frozenset(
    name.strip()
    for name in """
    bread, cooked rice, curry rice, meat on bone, cooking, popcorn, bacon, baguette bread, canned food,
    salt, butter, falafel, fondue, coral, garlic, broccoli, spaghetti, dango, oden, sushi, shaved ice,
    soft ice cream, ice cream, custard, sake, mate, ice, bubble tea, pouring liquid, thread, yarn,
    bowling, tennis, field hockey, ice hockey, ping pong, badminton, lacrosse, fire, fog, light rail,
    metro, wood, soap, dna, money with wings, statue of liberty, tokyo tower, kaaba, luggage, skis,
    speaker low volume, speaker medium volume, speaker high volume, fork and knife, wind face, microbe,
    film frames, performing arts, mahjong red dragon, cricket game, joker
    """.split(",")
)
_HEAD_ENDS = re.compile(
    " (?:with|without|of|in|on|at|behind|over|to|from|tilted|facing|increasing|decreasing|fluttering|savoring"
    "|blowing|screaming|holding|exhaling|vomiting)\\b"
)
_IRREGULAR = {
    "mouse": "mice", "ox": "oxen", "goose": "geese", "wolf": "wolves", "leaf": "leaves", "knife": "knives",
    "scarf": "scarves", "snowman": "snowmen", "fish": "fish", "blowfish": "blowfish", "shrimp": "shrimp",
    "jellyfish": "jellyfish", "squid": "squid", "sheaf": "sheaves", "die": "dice", "deer": "deer",
    "moose": "moose", "bison": "bison", "potato": "potatoes", "tomato": "tomatoes", "volcano": "volcanoes",
}  # fmt: skip


def noun_of(record: dict) -> str | None:
    """The emoji's name as a noun (lower case), or None when it cannot stand for an object of a scene.

    Objects, animals, plants, food, vehicles and buildings can, and so can faces, cats and hearts.
    """
    noun = record["concept"].lower()
    if record["group"] == "smileys-emotion":
        fits = _HEAD_ENDS.split(noun)[0].split()[-1] in ("face", "cat", "monkey", "heart")
    else:
        fits = record["group"] in NOUN_GROUPS and record["subgroup"] not in _LEFT_OUT_GROUPS
    if not fits or noun in _UNCOUNTED or _LEFT_OUT.search(noun) or len(noun.split()) > MAX_WORDS:
        return None
    return noun


def plural(noun: str) -> str | None:
    """``"cloud with rain"`` -> ``"clouds with rain"``; None for pairs of things and for plurals."""
    head = _HEAD_ENDS.split(noun)[0]
    rest = noun[len(head) :]
    if " and " in head or is_plural(head):
        return None
    *before, last = head.split(" ")
    if last in _IRREGULAR:
        last = _IRREGULAR[last]
    elif re.search(r"(?:s|x|z|ch|sh)$", last):
        last += "es"
    elif re.search(r"[^aeiou]y$", last):
        last = last[:-1] + "ies"
    else:
        last += "s"
    return " ".join([*before, last]) + rest


def noun_phrase(noun: str, count: int, adjective: str = "") -> str:
    """``("whale", 2, "flat")`` -> ``"two flat whales"``; one of a thing gets an article, a plural none."""
    if count > 1:
        words = [NUMBERS[count], adjective, plural(noun)]
    elif is_plural(_HEAD_ENDS.split(noun)[0]):
        words = [adjective, noun]
    else:
        words = [article((adjective or noun).lower().replace("3d", "three-d")), adjective, noun]
    return " ".join(word for word in words if word)
