"""Building the emoji set: sources, rendering, splits, the file. Nothing here needs a network."""

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mhla_diffusion.training import emoji_build as build
from mhla_diffusion.training.emoji import load_sprites
from mhla_diffusion.training.emoji_sources import (
    ATTRIBUTION_STYLES,
    DEFAULT_STYLES,
    NAMES,
    STYLES,
    Drawing,
    Package,
    drawings,
    fetch,
    normal_key,
    read_meanings,
    read_members,
    style_caption,
    with_article,
)

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "assets" / "emoji_sample.tar"
SQUARE = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 8 8" width="8" height="8">'
    '<rect x="0" y="0" width="4" height="8" fill="#ff0000"/></svg>'
)


def pack(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


@pytest.fixture
def meanings(tmp_path):
    entries = [
        {"hexcode": "1F433", "label": "spouting whale", "tags": ["animal"], "group": 3, "subgroup": 8},
        {"hexcode": "1F449", "label": "hand pointing right", "tags": [], "group": 1, "subgroup": 2,
         "skins": [{"hexcode": "1F449-1F3FB", "label": "hand pointing right: light skin tone"}]},
        {"hexcode": "0031-FE0F-20E3", "label": "keycap: 1", "group": 7, "subgroup": 9},
        {"hexcode": "1F3FB", "label": "light skin tone", "group": 2, "subgroup": 5},
    ]  # fmt: skip
    groups = {
        "groups": {"1": "people-body", "2": "component", "3": "animals-nature", "7": "symbols"},
        "subgroups": {"2": "hand", "5": "skin-tone", "8": "animal-marine", "9": "keycap"},
    }
    files = {"package/en/data.json": entries, "package/meta/groups.json": groups}
    return read_meanings(pack(tmp_path / "names.tgz", files))


def test_meanings_leave_skin_tones_and_components_out(meanings):
    assert set(meanings) == {"1f433", "1f449", "31-20e3"}
    assert meanings["31-20e3"].name == "keycap, 1" and meanings["31-20e3"].tags == ()
    assert (meanings["1f433"].group, meanings["1f433"].subgroup) == ("animals-nature", "animal-marine")


def test_icons_are_found_by_code_or_by_name_and_mirrored_where_their_alias_says_so(tmp_path, meanings):
    icons = {
        "icons": {"whale": {"body": "<g/>"}, "spouting-whale": {"body": "<g/>", "width": 32},
                  "left": {"body": "<p/>"}},
        "aliases": {"hand-pointing-right": {"parent": "left", "hFlip": True}},
        "width": 16, "height": 16,
    }  # fmt: skip
    by_code = {"1f433": "whale", "1f449": "hand-pointing-right", "1f600": "whale", "31-20e3": "missing"}
    tarball = pack(tmp_path / "a.tgz", {"package/icons.json": icons, "package/chars.json": by_code})
    found = {drawing.key: drawing.source for drawing in drawings("noto", tarball, meanings)}
    assert set(found) == {"1f433", "1f449"}
    assert 'viewBox="0 0 16 16"' in found["1f433"] and "scale(-1 1)" not in found["1f433"]
    assert 'translate(16 0) scale(-1 1)"><p/></g>' in found["1f449"]
    tarball = pack(tmp_path / "b.tgz", {"package/icons.json": icons, "package/chars.json": {}})
    found = {drawing.key: drawing.source for drawing in drawings("blob", tarball, meanings)}
    assert set(found) == {"1f433", "1f449"} and 'width="32"' in found["1f433"]


def test_pictures_are_found_by_file_name_once_each(tmp_path, meanings):
    files = {f"package/assets/{code}.webp": code.encode() for code in ("1f433", "1f433-fe0f", "1f600")}
    found = list(drawings("3d", pack(tmp_path / "a.tgz", files), meanings))
    assert [(drawing.key, drawing.source) for drawing in found] == [("1f433", b"1f433-fe0f")]


def test_members_are_read_in_memory_whatever_their_paths(tmp_path):
    path = tmp_path / "evil.tgz"
    with tarfile.open(path, "w:gz") as archive:
        link = tarfile.TarInfo("package/link.webp")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        member = tarfile.TarInfo("../../outside.webp")
        member.size = 4
        archive.addfile(member, io.BytesIO(b"data"))
    assert read_members(path, ".webp") == {"../../outside.webp": b"data"}
    assert sorted(tmp_path.rglob("*")) == [path]


def test_keys_and_articles():
    assert normal_key("2764-FE0F") == "2764" and normal_key("0023-fe0f-20e3") == "23-20e3"
    assert with_article("whale", "animals-nature") == "a whale"
    assert with_article("umbrella", "travel-places") == "an umbrella"
    assert with_article("unicorn", "animals-nature") == "a unicorn"
    assert with_article("grapes", "food-drink") == "grapes"
    assert with_article("bus", "travel-places") == "a bus"
    assert with_article("woman singer", "people-body") == "woman singer"
    assert style_caption("noto", "flag, Norway", "flags") == "a noto style emoji of the flag of norway"


def test_styles_that_ask_for_credit_are_off_by_default():
    assert DEFAULT_STYLES == ("3d", "gradient", "flat", "noto", "blob")
    assert {STYLES[style].package.licence for style in DEFAULT_STYLES} == {"MIT", "Apache-2.0"}
    assert ATTRIBUTION_STYLES == ("twemoji", "fxemoji", "openmoji")
    notices = (ROOT / "THIRD_PARTY_NOTICES.md").read_text()
    for package in (NAMES, *(STYLES[style].package for style in DEFAULT_STYLES)):
        assert f"`{package.name}` {package.version} | {package.licence} |" in notices


def test_an_svg_is_drawn_where_it_says():
    rgba = build.render_svg(SQUARE, 16)
    assert rgba.shape == (16, 16, 4) and rgba.dtype == np.uint8
    assert (rgba[:, :8] == (255, 0, 0, 255)).all() and (rgba[:, 8:] == 0).all()
    mirrored = SQUARE.replace("<rect", '<g transform="translate(8 0) scale(-1 1)"><rect').replace(
        "/></", "/></g></"
    )
    assert (build.render_svg(mirrored, 16) == rgba[:, ::-1]).all()


def test_a_drawing_that_cannot_be_drawn_is_reported_not_raised():
    empty = SQUARE.replace('width="4"', 'width="0"')
    for source in (empty, "no drawing", b"no picture"):
        assert isinstance(build.render((Drawing("flat", "1f433", source), 16)), str)
    rgba, webp = build.render((Drawing("flat", "1f433", SQUARE), 16))
    assert (np.asarray(Image.open(io.BytesIO(webp)).convert("RGBA")) == rgba).all()


def test_fitting_keeps_the_aspect_and_hides_no_colour():
    wide = Image.new("RGBA", (32, 16), (0, 200, 0, 255))
    rgba = build.fit_square(wide, 16)
    assert (rgba[4:12] == (0, 200, 0, 255)).all() and (rgba[:4] == 0).all() and (rgba[12:] == 0).all()
    half = Image.new("RGBA", (16, 16), (255, 255, 255, 0))
    half.paste((10, 20, 30, 255), (0, 0, 7, 16))
    edge = build.fit_square(half, 8)[0, 3]
    assert edge.tolist() == [10, 20, 30, 128]  # half covered, and its colour is the drawing's


def test_splits_are_a_function_of_key_and_style():
    keys = [f"1f{i:03x}" for i in range(400) for _ in range(3)]
    styles = ["3d", "flat", "noto"] * 400
    rgba = np.random.default_rng(0).integers(0, 256, (1200, 4, 4, 4), np.uint8)
    split = build.assign_splits(keys, styles, rgba)
    assert build.assign_splits(keys, styles, rgba) == split
    rows = list(zip(keys, styles, split, strict=True))
    val = {key for key, _, part in rows if part == "val"}
    assert 8 < len(val) < 40 and all(part == "val" for key, _, part in rows if key in val)
    heldout = [(key, style) for key, style, part in rows if part == "heldout"]
    assert 20 < len(heldout) < 120 and {style for _, style in heldout} == {"flat", "noto"}
    assert {key for key, _ in heldout} <= {key for key, _, part in rows if part == "train"}
    # Of drawings that all look the same, none is held out.
    assert "heldout" not in build.assign_splits(keys, styles, np.full_like(rgba, 7))


def test_the_sample_has_the_splits_of_the_rule():
    sample = load_sprites(SAMPLE)
    keys = [record["key"] for record in sample.records]
    split = build.assign_splits(keys, [record["style"] for record in sample.records], sample.rgba)
    assert split == [record["split"] for record in sample.records]


def test_the_file_has_the_same_bytes_each_time_and_no_half_is_left(tmp_path):
    sample = load_sprites(SAMPLE)
    with tarfile.open(SAMPLE) as archive:
        facts = json.load(archive.extractfile("manifest.json"))

    def samples(broken=False):
        for i, (record, rgba) in enumerate(zip(sample.records, sample.rgba, strict=True)):
            if broken and i == 5:
                raise RuntimeError("power cut")
            yield record, build.encode(rgba)

    first, second = tmp_path / "a" / "set.tar", tmp_path / "b.tar"
    build.write_set(first, facts, samples())
    build.write_set(second, facts, samples())
    assert first.read_bytes() == second.read_bytes()
    again = load_sprites(first)
    assert again.records == sample.records and (again.rgba == sample.rgba).all()
    with pytest.raises(RuntimeError, match="power cut"):
        build.write_set(first, facts, samples(broken=True))
    assert first.read_bytes() == second.read_bytes() and list(first.parent.iterdir()) == [first]


def as_npz(path, sample, **changes):
    columns = ("key", "style", "caption", "concept", "group", "subgroup", "split")
    arrays = {name: np.array([record[name] for record in sample.records]) for name in columns}
    arrays["tags"] = np.array([", ".join(record["tags"]) for record in sample.records])
    np.savez(path, rgba=sample.rgba, **(arrays | changes))
    return path


def test_comparing_finds_what_differs_and_nothing_else(tmp_path):
    sample = load_sprites(SAMPLE)
    assert build.compare(SAMPLE, as_npz(tmp_path / "same.npz", sample)) == []
    split = np.array([record["split"] for record in sample.records])
    split[3] = "val"
    (line,) = build.compare(SAMPLE, as_npz(tmp_path / "split.npz", sample, split=split))
    assert line.startswith("split: 1 differ")
    sample.rgba[2, 30, 30] = (1, 2, 3, 255)
    sample.rgba[4][sample.rgba[4, ..., 3] == 0] = (9, 9, 9, 0)  # colours that nobody sees
    (line,) = build.compare(SAMPLE, as_npz(tmp_path / "pixels.npz", sample))
    assert line.startswith("pixels: 1 drawings differ")
    lines = build.compare(SAMPLE, as_npz(tmp_path / "fewer.npz", load_sprites(SAMPLE, "train")))
    assert [line.split(":")[0] for line in lines] == ["only here"]


def test_a_sample_of_a_set_is_cut_by_concept():
    records = load_sprites(SAMPLE).records
    assert build.pick_sample(records, 64) == list(range(64))
    assert {records[i]["concept"] for i in build.pick_sample(records, 5)} == {build.SAMPLE_CONCEPTS[0]}


def program(*arguments, **environment):
    command = [sys.executable, str(ROOT / "train" / "build_emoji.py"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={"PYTHONPATH": str(ROOT), **environment}
    )


def test_without_npm_one_line_says_so(tmp_path):
    result = program("--out", str(tmp_path / "set.tar"), PATH="")
    assert result.returncode == 2 and result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("npm is not installed") and "install Node.js" in line
    assert not (tmp_path / "set.tar").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--styles", "flat,cubist"], "--styles: 'cubist' is unknown; choose from 3d,gradient,flat,"),
        (["--size", "4"], "--size: 4 is not between 8 and 512"),
        (["--workers", "0"], "--workers: 0 is not 1 or more"),
    ],
)
def test_a_bad_option_is_one_line(tmp_path, capsys, arguments, message):
    assert build.main(["--out", str(tmp_path / "set.tar"), *arguments]) == 2
    line = capsys.readouterr().err
    assert line.startswith(message) and line.count("\n") == 1


def test_a_package_that_is_not_the_pinned_one_is_refused(tmp_path):
    package = Package("@some/pictures", "1.0.0", "MIT", "Nobody", "AAAA")
    assert package.filename == "some-pictures-1.0.0.tgz"
    (tmp_path / package.filename).write_bytes(b"something else")
    with pytest.raises(RuntimeError, match="is not the pinned @some/pictures@1.0.0: delete it"):
        fetch(package, tmp_path)
