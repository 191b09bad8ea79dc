"""The emoji set as training data: reading, backgrounds, captions, scenes, splits."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mhla_diffusion.training import emoji
from mhla_diffusion.training.emoji_nouns import noun_phrase, plural
from mhla_diffusion.training.emoji_scenes import KINDS, PLACES, RELATIONS, ScenePainter, ScenePlanner
from mhla_diffusion.training.emoji_sources import STYLES

ASSETS = Path(__file__).resolve().parents[2] / "assets"
SAMPLE = ASSETS / "emoji_sample.tar"


@pytest.fixture(scope="module")
def sprites():
    return emoji.load_sprites(SAMPLE)


@pytest.fixture(scope="module")
def train():
    return emoji.load_sprites(SAMPLE, "train")


def captions_of(split, **options):
    options = {"backgrounds": 2, "compositions": 40, "size": 32, "seed": 1} | options
    return emoji.materialise(SAMPLE, split, **options)


def test_the_sample_is_small_and_spans_styles_and_splits(sprites):
    assert len(sprites) == 64 and sprites.rgba.shape == (64, 64, 64, 4) and sprites.rgba.dtype == np.uint8
    assert {record["style"] for record in sprites.records} == {"3d", "gradient", "flat", "noto", "blob"}
    assert {record["split"] for record in sprites.records} == {"train", "val", "heldout"}
    assert SAMPLE.stat().st_size < 250_000
    for record in sprites.records:
        assert set(record) == {"key", "caption", "concept", "style", "tags", "group", "subgroup", "split"}
        assert record["caption"].startswith(STYLES[record["style"]].phrase.removesuffix("{}"))
    assert not sprites.rgba[sprites.rgba[..., 3] == 0].any()
    assert (sprites.rgba[..., 3] > 16).mean((1, 2)).min() > 0.02


def test_in_the_sample_heldout_concepts_are_known_and_val_concepts_are_not(sprites):
    keys = {
        split: {record["key"] for record in sprites.records if record["split"] == split}
        for split in ("train", "val", "heldout")
    }
    assert keys["heldout"] <= keys["train"]
    assert keys["val"].isdisjoint(keys["train"] | keys["heldout"])


def test_the_sample_names_packages_and_licences():
    with tarfile.open(SAMPLE) as archive:
        facts = json.load(archive.extractfile("manifest.json"))
    assert facts["images"] == 64 and sum(facts["splits"].values()) == 64
    assert {origin["licence"] for origin in facts["styles"].values()} == {"MIT", "Apache-2.0"}
    for style, origin in facts["styles"].items():
        assert (origin["package"], origin["version"]) == (
            STYLES[style].package.name,
            STYLES[style].package.version,
        )


def test_splits_are_read_one_by_one(sprites):
    parts = [emoji.load_sprites(SAMPLE, split) for split in ("train", "val", "heldout")]
    assert sum(map(len, parts)) == 64
    both = emoji.load_sprites(SAMPLE, ["val", "heldout"])
    assert len(both) == len(parts[1]) + len(parts[2])
    assert all(record["split"] != "train" for record in both.records)


@pytest.mark.parametrize(
    ("name", "splits", "message"),
    [
        ("nothing.tar", None, "build it with: python train/build_emoji.py"),
        ("cut.tar", None, "not a whole emoji set"),
        ("text.tar", None, "not a whole emoji set"),
        ("foreign.tar", None, "not a whole emoji set"),
        ("whole.tar", "test", "split 'test' is unknown; choose from train, val, heldout"),
    ],
)
def test_a_bad_file_or_split_is_one_line(tmp_path, name, splits, message):
    whole = SAMPLE.read_bytes()
    (tmp_path / "whole.tar").write_bytes(whole)
    (tmp_path / "cut.tar").write_bytes(whole[:100_000])
    (tmp_path / "text.tar").write_text("no archive")
    with tarfile.open(tmp_path / "foreign.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("../escape.webp"), io.BytesIO())
    with pytest.raises(ValueError, match=message) as caught:
        emoji.load_sprites(tmp_path / name, splits)
    assert "\n" not in str(caught.value)
    assert not (tmp_path.parent / "escape.webp").exists()


def test_a_background_shows_where_a_sprite_is_transparent():
    rgba = np.zeros((2, 1, 3, 4), np.uint8)
    rgba[0, 0] = [[10, 20, 30, 255], [10, 20, 30, 0], [255, 0, 0, 128]]
    on_white = emoji.on_background(rgba, "white")
    assert on_white[0, 0].tolist() == [[10, 20, 30], [255, 255, 255], [255, 127, 127]]
    each = emoji.on_background(rgba, np.array([[0, 0, 0], [1, 2, 3]]))
    assert each[0, 0].tolist() == [[10, 20, 30], [0, 0, 0], [128, 0, 0]]
    assert each[1, 0].tolist() == [[1, 2, 3]] * 3


def test_backgrounds_are_rounded_as_the_real_numbers_are(sprites):
    rgb = emoji.BACKGROUNDS["sky blue"]
    alpha = sprites.rgba[..., 3:].astype(np.float64) / 255
    exact = sprites.rgba[..., :3] * alpha + np.array(rgb) * (1 - alpha)
    assert np.abs(emoji.on_background(sprites.rgba, rgb) - exact).max() <= 0.5 + 1e-9


@pytest.mark.parametrize("colour", ["mauve", (1, 2), (0, 0, 256), (0, -1, 0)])
def test_an_unknown_background_is_refused(sprites, colour):
    with pytest.raises(ValueError, match="background"):
        emoji.on_background(sprites.rgba[:1], colour)


def test_resizing_averages_colours_by_their_alpha():
    rgba = np.zeros((1, 4, 4, 4), np.uint8)
    rgba[0, :, :2] = (200, 100, 50, 255)
    rgba[0, :, 2:] = (0, 255, 0, 0)  # hidden green must not bleed in
    small = emoji.resized(rgba, 2)
    assert small.shape == (1, 2, 2, 4)
    visible = small[small[..., 3] > 0]
    assert len(visible) and (np.abs(visible[:, :3].astype(int) - (200, 100, 50)) <= 1).all()
    assert emoji.resized(rgba, 4) is rgba


def test_plain_captions():
    record = {"caption": "a flat emoji of a whale", "tags": ["animal", "whale"]}
    assert emoji.caption_of(record) == "a flat emoji of a whale"
    assert emoji.caption_of(record, "sky blue") == "a flat emoji of a whale on a sky blue background"
    assert emoji.caption_of(record, "orange") == "a flat emoji of a whale on an orange background"
    with pytest.raises(ValueError, match="background 'mauve' is unknown"):
        emoji.caption_of(record, "mauve")


def test_varied_captions_are_of_the_kinds_promised():
    record = {"caption": "a flat emoji of a whale", "tags": ["animal", "ocean", "whale"]}
    rng = np.random.default_rng(0)
    seen = {emoji.caption_of(record, "white", rng) for _ in range(400)}
    bases = ("a flat emoji of a whale", "an emoji of a whale", "a whale")
    plain = {base + end for base in bases for end in ("", " on a white background")}
    tagged = {
        f"{bases[0]}{end}, {tags}"
        for end in ("", " on a white background")
        for tags in ("animal, ocean", "ocean, animal")
    }
    assert seen == plain | tagged
    untagged = {emoji.caption_of(record, "white", rng, tag_captions=False) for _ in range(50)}
    assert untagged == {"a flat emoji of a whale", "a flat emoji of a whale on a white background"}


@pytest.mark.parametrize(
    ("noun", "many"),
    [
        ("lemon", "lemons"),
        ("cloud with rain", "clouds with rain"),
        ("fallen leaf", "fallen leaves"),
        ("cherry", "cherries"),
        ("cactus", "cactuses"),
        ("tropical fish", "tropical fish"),
        ("grapes", None),
        ("bow and arrow", None),
    ],
)
def test_plurals(noun, many):
    assert plural(noun) == many


def test_noun_phrases():
    assert noun_phrase("whale", 1, "flat") == "a flat whale"
    assert noun_phrase("owl", 1) == "an owl"
    assert noun_phrase("owl", 1, "3D") == "a 3D owl"
    assert noun_phrase("owl", 1, "outlined") == "an outlined owl"
    assert noun_phrase("grapes", 1, "glossy") == "glossy grapes"
    assert noun_phrase("lemon", 3, "noto style") == "three noto style lemons"


@given(
    sample=st.integers(0, 10**6), kind=st.sampled_from([None, *KINDS]), canvas=st.sampled_from([32, 64, 128])
)
def test_the_ground_truth_agrees_with_the_picture_and_the_caption(train, sample, kind, canvas):
    picture, caption, truth = emoji.compose(train, sample, seed=3, canvas=canvas, kind=kind)
    assert picture.shape == (canvas, canvas, 3) and picture.dtype == np.uint8
    assert json.loads(json.dumps(truth)) == truth
    assert tuple(truth["rgb"]) == emoji.BACKGROUNDS[truth["background"]]
    assert truth["background"] == "white" or f"{truth['background']} background" in caption
    outside = np.ones((canvas, canvas), bool)
    cells = set()
    for described in truth["objects"]:
        assert described["count"] == len(described["boxes"])
        for x0, y0, x1, y1 in described["boxes"]:
            assert 0 <= x0 < x1 <= canvas and 0 <= y0 < y1 <= canvas
            assert outside[y0:y1, x0:x1].all()  # no overlap
            outside[y0:y1, x0:x1] = False
            assert (picture[y0:y1, x0:x1] != truth["rgb"]).any()  # something is drawn there
            cells.add((x0 // (canvas // 2), y0 // (canvas // 2)))
    assert (picture[outside] == truth["rgb"]).all()
    if truth["kind"] in ("count", "relation", "list"):  # each sprite in a quarter of its own
        assert len(cells) == sum(described["count"] for described in truth["objects"])
    if truth["kind"] == "relation":
        first, second = (np.array(described["boxes"]) for described in truth["objects"])
        axis = 0 if truth["relation"] in ("left of", "right of") else 1
        if truth["relation"] in ("right of", "below"):
            first, second = second, first
        assert first[:, axis + 2].max() <= second[:, axis].min()
        assert f" {truth['relation']} " in caption
    if truth["kind"] == "place":
        assert truth["objects"][0]["place"] in caption
    if truth["objects"][0]["count"] > 1:
        assert ("two", "three", "four")[truth["objects"][0]["count"] - 2] in caption.split()


def test_places_are_where_they_say(train):
    names = {}
    for sample in range(120):
        _, _, truth = emoji.compose(train, sample, canvas=64, kind="place")
        (described,) = truth["objects"]
        x0, y0, x1, y1 = described["boxes"][0]
        names.setdefault(described["place"], []).append(((x0 + x1) / 128, (y0 + y1) / 128))
    assert set(names) == set(PLACES)
    for name, centres in names.items():
        x, y = np.mean(centres, 0)
        assert (x < 0.4) == ("left" in name) and (x > 0.6) == ("right" in name)
        assert (y < 0.4) == ("top" in name) and (y > 0.6) == ("bottom" in name)


def test_scenes_depend_on_seed_and_sample_only(train):
    planner = ScenePlanner(train, seed=5)
    scenes = [planner.plan(sample) for sample in range(30)]
    again = ScenePlanner(train, seed=5)
    assert [again.plan(sample) for sample in reversed(range(30))] == scenes[::-1]
    assert [ScenePlanner(train, seed=6).plan(sample) for sample in range(30)] != scenes
    together = ScenePainter(train, 64).paint(scenes)
    for sample in (0, 11, 29):
        picture, caption, truth = emoji.compose(train, sample, seed=5)
        assert (picture == together[sample]).all()
        assert (caption, truth) == (scenes[sample].caption, scenes[sample].truth)
    assert {scene.truth["kind"] for scene in scenes} == set(KINDS)
    assert {scene.truth["relation"] for scene in map(planner.plan, range(200))} == {None, *RELATIONS}


def test_scenes_refuse_what_they_cannot_do(train):
    with pytest.raises(ValueError, match="kind 'heap' is unknown; choose from place, count, relation, list"):
        emoji.compose(train, 0, kind="heap")
    with pytest.raises(ValueError, match="canvas is 60; give a multiple of 8"):
        emoji.compose(train, 0, canvas=60)
    flags = emoji.Sprites(train.rgba[:1], [train.records[0] | {"group": "flags"}])
    with pytest.raises(ValueError, match="none of the sprites"):
        emoji.compose(flags, 0)
    _, _, truth = emoji.compose(train.select([0]), 0, kind="list")  # one emoji: no list can be made
    assert truth["kind"] == "count"


def test_materialise_makes_every_picture_with_its_caption(train):
    images, captions = captions_of("train")
    count = len(train)
    assert images.shape == (count * 3 + 40, 3, 32, 32) and images.dtype == torch.uint8
    assert len(captions) == len(images) and len(set(captions)) > count
    white = torch.from_numpy(emoji.on_background(emoji.resized(train.rgba, 32), "white")).permute(0, 3, 1, 2)
    assert torch.equal(images[: count * 3 : 3], white)
    for i in range(count):
        for j in (1, 2):
            caption = captions[3 * i + j]
            (name,) = [name for name in emoji.BACKGROUNDS if f" {name} background" in caption]
            transparent = torch.from_numpy(train.rgba[i, ::2, ::2, 3] == 0)
            corner = images[3 * i + j][:, 0, 0].tolist()
            assert not transparent[0, 0] or corner == list(emoji.BACKGROUNDS[name])
            assert name != "white"


def test_materialise_is_a_function_of_its_arguments():
    images, captions = captions_of("train")
    again, texts = captions_of("train")
    assert torch.equal(images, again) and captions == texts
    other, texts = captions_of("train", seed=2)
    assert not torch.equal(images, other) and captions != texts
    # More scenes or fewer leave the others as they are.
    fewer, texts = captions_of("train", compositions=7)
    assert torch.equal(fewer, images[: len(fewer)]) and texts == captions[: len(fewer)]


def test_plain_splits_for_evaluation(sprites):
    images, captions = captions_of("heldout", backgrounds=0, compositions=0, tag_captions=False, size=64)
    wanted = [record["caption"] for record in sprites.records if record["split"] == "heldout"]
    assert captions == wanted and len(images) == len(wanted)


def test_no_drawing_of_another_split_gets_in(tmp_path, sprites):
    from mhla_diffusion.training.emoji_build import encode, write_set

    # The same set with all drawings outside train painted over: train's pictures must not change.
    painted = sprites.rgba.copy()
    outside = [i for i, record in enumerate(sprites.records) if record["split"] != "train"]
    painted[outside] = (255, 0, 255, 255)
    facts = {"images": 64, "size": 64, "splits": {}}
    write_set(tmp_path / "painted.tar", facts, zip(sprites.records, map(encode, painted), strict=True))
    options = {"size": 32, "backgrounds": 1, "compositions": 60}
    images, captions = emoji.materialise(SAMPLE, "train", **options)
    same, texts = emoji.materialise(tmp_path / "painted.tar", "train", **options)
    assert torch.equal(images, same) and captions == texts
    unseen = {sprites.records[i]["concept"] for i in outside if sprites.records[i]["split"] == "val"}
    assert not any(concept in caption for concept in unseen for caption in captions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backgrounds": 99}, "backgrounds is 99; give 0 to 11"),
        ({"compositions": -1}, "compositions is -1"),
        ({"seed": -1}, "seed -1"),
        ({"size": 4}, "size is 4"),
        ({"split": "all"}, "split 'all' is unknown"),
    ],
)
def test_materialise_refuses_what_it_cannot_do(options, message):
    with pytest.raises(ValueError, match=message):
        emoji.materialise(SAMPLE, **options)


def test_the_fixed_prompts():
    prompts = emoji.fixed_prompts()
    assert [entry["split"] for entry in prompts] == ["train"] * 12 + ["heldout"] * 12
    assert prompts[0]["prompt"] == "a 3D emoji of a red apple"
    assert len({entry["prompt"] for entry in prompts}) == 24
    assert {entry["style"] for entry in prompts[12:]} == {"flat", "noto", "blob"}
    for entry in prompts:
        assert entry["prompt"].startswith(STYLES[entry["style"]].phrase.removesuffix("{}"))
    with pytest.raises(ValueError, match="no prompt list"):
        emoji.fixed_prompts(ASSETS / "nothing.json")


def test_fixed_prompts_that_lie_in_the_sample_have_its_split(sprites):
    splits = {(record["key"], record["style"]): record for record in sprites.records}
    known = [entry for entry in emoji.fixed_prompts() if (entry["key"], entry["style"]) in splits]
    assert known
    for entry in known:
        record = splits[entry["key"], entry["style"]]
        assert (record["caption"], record["split"]) == (entry["prompt"], entry["split"])
