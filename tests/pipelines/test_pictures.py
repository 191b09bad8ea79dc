import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mhla_diffusion.pipelines.pictures import (
    contact_sheet,
    read_settings,
    save_picture,
    slug,
    wrap,
    write_atomically,
)


def test_a_picture_carries_its_settings_and_has_them_beside_it(tmp_path):
    settings = {"prompt": "ein Wal – クジラ", "seed": 3, "guidance": 4.5}
    save_picture(Image.new("RGB", (8, 8), "teal"), tmp_path / "a.png", settings)
    assert read_settings(tmp_path / "a.png") == settings
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == settings
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.png"]


def test_a_foreign_or_broken_picture_has_no_settings(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "plain.png")
    assert read_settings(tmp_path / "plain.png") is None
    (tmp_path / "broken.png").write_bytes((tmp_path / "plain.png").read_bytes()[:20])
    assert read_settings(tmp_path / "broken.png") is None
    (tmp_path / "text.png").write_text("no picture")
    assert read_settings(tmp_path / "text.png") is None


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(file):
        file.write(b"half")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@given(st.text(max_size=200))
def test_a_slug_is_a_short_safe_file_name(text):
    name = slug(text)
    assert 0 < len(name) <= 40
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_slug_cuts_between_words():
    assert (
        slug("A 3D emoji of a red apple, on a sky blue background")
        == "a-3d-emoji-of-a-red-apple-on-a-sky-blue"
    )
    assert slug("クジラ") == "picture"


def test_a_contact_sheet_has_a_cell_per_picture():
    images = [Image.new("RGB", (16, 16), "red"), None, Image.new("RGBA", (32, 16), "blue")]
    sheet = contact_sheet(images, ["red", "failed", "blue " * 30], columns=2, cell=64)
    assert sheet.size == (2 * 72 + 8, 2 * (64 + 45 + 8) + 8)
    assert sheet.getpixel((8 + 32, 8 + 32)) == (255, 0, 0)
    assert sheet.getpixel((8 + 72 + 32, 8 + 32)) == (211, 211, 211)
    assert sheet.getpixel((8 + 32, 8 + 117 + 32)) == (0, 0, 255)
    with pytest.raises(ValueError, match="caption per picture"):
        contact_sheet(images, ["one"])


def test_lines_are_wrapped_at_words():
    assert wrap("aa bb cc dddddd", len, 5) == ["aa bb", "cc", "dddddd"]
