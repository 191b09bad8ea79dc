"""Verdicts on scenes, and the list that the repository ships."""

import json
from collections import Counter

import pytest

from mhla_diffusion.evaluation.emoji_world.reading import Background
from mhla_diffusion.evaluation.emoji_world.scenes import (
    LIST,
    PLACES,
    TASKS,
    Scene,
    judge_scene,
    name_objects,
    place_of,
    read_scenes,
)
from mhla_diffusion.training import emoji_scenes

GREEN = Background("green", (85, 175, 85), 0.7)
SIZE = (64, 64)
BOXES = {"left": (4, 20, 28, 44), "right": (36, 20, 60, 44), "corner": (2, 2, 26, 26)}


def seen(*objects):
    boxes = [BOXES[place] for place, _ in objects]
    return name_objects(boxes, [[name] for _, name in objects], [name for _, name in objects])


def test_an_object_is_the_asked_concept_that_is_nearest_among_its_nearest():
    boxes = [(0, 0, 9, 9), (9, 9, 20, 20)]
    ranked = [["lime", "lemon", "pear"], ["whale", "shark"]]
    assert [each.name for each in name_objects(boxes, ranked, ["lemon", "pear"])] == ["lemon", "whale"]


def test_counting_takes_the_exact_number():
    scene = Scene("p", "counting", [{"class": "cup", "count": 2}], [{"class": "cup", "count": 3}], "green")
    two = judge_scene(scene, GREEN, seen(("left", "cup"), ("right", "cup")), SIZE)
    assert two.correct and two.count and two.background and two.place is None
    one = judge_scene(scene, GREEN, seen(("left", "cup")), SIZE)
    assert not one.correct and not one.count and (two.found, one.found) == (1, 0.5)
    three = judge_scene(scene, GREEN, seen(("left", "cup"), ("right", "cup"), ("corner", "cup")), SIZE)
    assert not three.correct and "expected cup<3" in three.reasons[0]
    other = judge_scene(scene, GREEN, seen(("left", "cup"), ("right", "dog")), SIZE)
    assert not other.correct and other.count  # the number alone is right


def test_the_background_counts_in_its_own_task_only():
    asked = [{"class": "cup", "count": 1}]
    red = Background("red", (220, 60, 60), 0.7)
    colors = Scene("p", "colors", asked, background="green")
    right = judge_scene(colors, GREEN, seen(("left", "cup")), SIZE)
    assert right.correct and right.count is None
    wrong = judge_scene(colors, red, seen(("left", "cup")), SIZE)
    assert not wrong.correct and wrong.reasons == ("expected a green background, found red",)
    other = judge_scene(Scene("p", "two_object", asked, background="green"), red, seen(("left", "cup")), SIZE)
    assert other.correct and other.background is False


def test_positions_and_places():
    pair = [{"class": "dog", "count": 1}, {"class": "cup", "count": 1, "position": ["left of", 0]}]
    scene = Scene("p", "position", pair)
    assert judge_scene(scene, GREEN, seen(("left", "cup"), ("right", "dog")), SIZE).correct
    assert not judge_scene(scene, GREEN, seen(("right", "cup"), ("left", "dog")), SIZE).correct
    place = Scene("p", "place", [{"class": "cup", "count": 1}], place="on the left")
    assert judge_scene(place, GREEN, seen(("left", "cup")), SIZE).correct
    wrong = judge_scene(place, GREEN, seen(("right", "cup")), SIZE)
    assert not wrong.correct and wrong.reasons == ("expected cup on the left, found on the right",)
    name_only = judge_scene(place, GREEN, seen(("left", "dog")), SIZE)
    assert not name_only.correct and name_only.place


@pytest.mark.parametrize("name", PLACES)
def test_places_are_those_of_the_scenes(name):
    assert PLACES.keys() == emoji_scenes.PLACES.keys()
    x, y = (16 * part for part in emoji_scenes.PLACES[name])
    assert place_of((x, y, x + 32, y + 32), SIZE) == name
    assert place_of((x + 8, y, x + 32, y + 24), SIZE) == name  # a smaller one anywhere in its cell


def test_the_shipped_list():
    scenes = read_scenes()
    assert Counter(scene.tag for scene in scenes.values()) == dict.fromkeys(TASKS, 50)
    for scene in scenes.values():
        assert (scene.tag in ("single_object",)) == (scene.background is None)
        assert (scene.tag == "place") == (scene.place is not None)
        assert 1 <= scene.objects <= 4
    prompts = LIST.with_suffix(".txt").read_text().splitlines()
    assert prompts == list(scenes)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "p", "tag": "size", "include": [{"class": "a", "count": 1}]}, "unknown task 'size'"),
        ({"prompt": "p", "tag": "place", "include": [], "place": "under"}, "unknown place 'under'"),
        ({"prompt": "p", "tag": "place", "include": [{"class": "a"}]}, "no requirement"),
        ({"prompt": "p", "tag": "place", "include": []}, "asks for no object"),
        ({"prompt": "p", "tag": "place", "include": ["a whale"]}, "no list of scenes"),
        ({"prompt": "p"}, "missing"),
    ],
)
def test_what_is_no_scene_is_refused(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    with pytest.raises(ValueError, match=message):
        read_scenes(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="there is no list"):
        read_scenes(tmp_path / "b.jsonl")
