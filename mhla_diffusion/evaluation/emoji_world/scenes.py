"""Scenes with known truth, and the verdict on a picture of one: GenEval's rules, a background and a place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..geneval.judge import Detection, judge
from ..text_image.protocols import SCENE_TASKS
from .reading import PALETTE, Background

TASKS = SCENE_TASKS
LIST = Path(__file__).resolve().parents[3] / "eval" / "prompts" / "emoji_scenes.jsonl"
PLACES = {  # name -> third of the picture (column, row) that the object's middle lies in
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
WHOLE = ("single_object", "colors")  # tasks of one drawing that fills the picture; its parts are not counted
EDGES = (3 / 8, 5 / 8)  # of those thirds; objects stand at a quarter, a half or three quarters


@dataclass(frozen=True)
class Scene:
    """A prompt and what its picture must show; `include` and `exclude` are GenEval's."""

    prompt: str
    tag: str
    include: list[dict]
    exclude: list[dict] = field(default_factory=list)
    background: str | None = None
    place: str | None = None

    @property
    def objects(self) -> int:
        return sum(requirement["count"] for requirement in self.include)

    @property
    def names(self) -> list[str]:
        return [requirement["class"] for requirement in self.include]


class SceneVerdict(NamedTuple):
    """`correct` takes all that the task asks, `found` is the share of asked objects that are there.

    The others are read from pixels alone, None where nothing is asked.
    """

    correct: bool
    reasons: tuple[str, ...]
    found: float
    background: bool | None
    count: bool | None
    place: bool | None


def read_scenes(path: Path | None = None) -> dict[str, Scene]:
    """Prompt -> scene, of a .jsonl (default: the repository's). Raises ValueError for a file that is none."""
    path = path or LIST
    if not path.is_file():
        raise ValueError(f"there is no list of scenes {path}: give --prompts path/to/emoji_scenes.jsonl")
    scenes = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip():
                scene = Scene(**json.loads(line))
                check_scene(scene)
                scenes[scene.prompt] = scene
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no list of scenes ({error})") from None
    if not scenes:
        raise ValueError(f"{path} lists no scene")
    return scenes


def check_scene(scene: Scene) -> None:
    for value, known, what in (
        (scene.tag, TASKS, "task"),
        (scene.background, (None, *PALETTE), "background"),
        (scene.place, (None, *PLACES), "place"),
    ):
        if value not in known:
            raise ValueError(f"{scene.prompt!r} has an unknown {what} {value!r}")
    if not scene.include:
        raise ValueError(f"{scene.prompt!r} asks for no object")
    judge([], scene.include, scene.exclude)


def place_of(box: Sequence[float], size: tuple[int, int]) -> str:
    """Name of the ninth of a picture of (width, height) in which a box has its middle."""
    cell = []
    for axis in (0, 1):
        middle = (box[axis] + box[axis + 2]) / 2 / size[axis]
        cell.append(sum(middle >= edge for edge in EDGES))
    return next(name for name, where in PLACES.items() if where == tuple(cell))


def name_objects(
    boxes: Sequence[Sequence[float]], ranked: Sequence[Sequence[str]], asked: Sequence[str]
) -> list[Detection]:
    """A detection for each box: the asked concept that stands first among the box's nearest, else the nearest."""
    found = []
    for box, names in zip(boxes, ranked, strict=True):
        name = next((name for name in names if name in asked), names[0])
        found.append(Detection(name, 1.0, tuple(float(edge) for edge in box)))
    return found


def judge_scene(
    scene: Scene,
    background: Background,
    detections: Sequence[Detection],
    size: tuple[int, int],
    count: int | None = None,
) -> SceneVerdict:
    """The verdict on a picture of (width, height). `count`: objects in it, if the detections are not one for each."""
    right, reasons = judge(detections, scene.include, scene.exclude)
    reasons = list(reasons)
    colour = None if scene.background is None else scene.background == background.name
    if scene.tag == "colors" and not colour:
        reasons.append(f"expected a {scene.background} background, found {background.name}")
    counted = None
    if scene.tag not in WHOLE:
        counted = (len(detections) if count is None else count) == scene.objects
    place = None
    if scene.place is not None:
        seen = [place_of(each.box, size) for each in detections]
        place = scene.place in seen
        named = [place_of(each.box, size) for each in detections if each.name == scene.names[0]]
        if scene.place not in named:
            reasons.append(f"expected {scene.names[0]} {scene.place}, found {', '.join(named) or 'none'}")
    names = [each.name for each in detections]
    there = sum(min(names.count(each["class"]), each["count"]) for each in scene.include)
    return SceneVerdict(not reasons, tuple(reasons), there / scene.objects, colour, counted, place)
