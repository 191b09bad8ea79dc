"""Which prompt belongs to which picture."""

import json

import pytest
import torch
from PIL import Image

from mhla_diffusion.evaluation.picture_sets import open_pictures
from mhla_diffusion.evaluation.text_image.prompts import prompts_of
from mhla_diffusion.pipelines.pictures import SETTINGS_KEY

NAMES = ("b", "a", "c")


@pytest.fixture
def folder(tmp_path):
    from PIL.PngImagePlugin import PngInfo

    (tmp_path / "p").mkdir()
    for name in NAMES:
        info = PngInfo()
        info.add_text(SETTINGS_KEY, json.dumps({"prompt": f"a picture of {name}"}))
        Image.new("RGB", (8, 8)).save(tmp_path / "p" / f"{name}.png", pnginfo=info)
    return tmp_path


def write(folder, name, content):
    path = folder / name
    path.write_text(content)
    return str(path)


def test_pictures_carry_their_prompts(folder):
    found = prompts_of(open_pictures(folder / "p"), None)
    assert found.texts == [f"a picture of {name}" for name in "abc"]
    assert found.about["count"] == 3 and len(found.about["sha256"]) == 64


def test_a_tar_has_captions():
    pictures = open_pictures("assets/emoji_sample.tar", background="white")
    found = prompts_of(pictures, None)
    assert len(found.texts) == len(pictures) and all("emoji of" in text for text in found.texts)


def test_files_of_prompts(folder):
    pictures = open_pictures(folder / "p")
    mjhq = {name: {"prompt": f"P {name}", "category": "x"} for name in NAMES}
    lines = [json.dumps({"file": f"{name}.png", "prompt": f"P {name}"}) for name in NAMES]
    captions = [json.dumps({"image": name, "caption": f"P {name}"}) for name in NAMES]
    for file in (
        write(folder, "meta_data.json", json.dumps(mjhq)),
        write(folder, "a.jsonl", "\n".join(lines)),
        write(folder, "b.jsonl", "\n".join(captions)),
        write(folder, "c.txt", "P a\nP b\n\nP c\n"),
        write(folder, "marked.txt", "\ufeffP a\r\nP b\r\nP c\r\n"),
    ):
        assert prompts_of(pictures, file).texts == ["P a", "P b", "P c"], file
    assert prompts_of(pictures, str(folder / "meta_data.json"), keyed=True).texts[0] == "P a"


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.txt", "one\n", {}, "1 prompts for 3 pictures"),
        ("a.json", '{"a": "x", "b": "y"}', {}, "c.png is not named"),
        ("a.json", '{"a": "x", "b": "y", "c": "z", "d": "w"}', {}, "3 of 4 expected pictures found"),
        ("a.json", "[1, 2]", {}, "cannot be read as prompts"),
        ("a.jsonl", "{", {}, "cannot be read as prompts"),
        ("a.json", '{"a": "x", "b": 3, "c": "z"}', {}, "cannot be read as prompts"),
        ("a.jsonl", '{"file": "a", "prompt": 3}', {}, "the prompt of a is 3: give text"),
        (
            "a.jsonl",
            '{"file": "a", "prompt": "x"}\n{"file": "a", "prompt": "y"}',
            {},
            "a has two prompts, 'x' and 'y'",
        ),
        ("a.csv", "x", {}, "is no file of prompts"),
        ("a.txt", "a\nb\nc\n", {"keyed": True}, "is no file of prompts"),
    ],
)
def test_what_does_not_pair_is_refused(folder, name, content, options, message):
    pictures = open_pictures(folder / "p")
    with pytest.raises(ValueError, match=message) as error:
        prompts_of(pictures, write(folder, name, content), **options)
    assert "\n" not in str(error.value)


def test_a_file_in_another_code_is_named_without_its_content(folder):
    (folder / "latin.txt").write_bytes(b"caf\xe9\n" * 3)
    with pytest.raises(ValueError, match=r"latin.txt is no text in UTF-8 \(byte 3\)") as error:
        prompts_of(open_pictures(folder / "p"), str(folder / "latin.txt"))
    assert len(str(error.value)) < 200


def test_a_part_may_be_scored(folder):
    file = write(folder, "a.json", '{"a": "x", "b": "y", "c": "z", "d": "w"}')
    assert prompts_of(open_pictures(folder / "p"), file, whole=False).texts == ["x", "y", "z"]
    lines = write(folder, "a.txt", "x\ny\nz\n")
    assert prompts_of(open_pictures(folder / "p", limit=2), lines, whole=False).texts == ["x", "y"]
    assert prompts_of(open_pictures(folder / "p", limit=2), write(folder, "b.txt", "x\ny\n")).texts == [
        "x",
        "y",
    ]
    with pytest.raises(ValueError, match="1 prompts for 3 pictures"):
        prompts_of(open_pictures(folder / "p", limit=2), write(folder, "c.txt", "x\n"))


def test_pictures_without_prompts_are_refused(folder):
    with pytest.raises(ValueError, match="carries no prompt: give --prompts"):
        prompts_of(open_pictures(torch.zeros(2, 3, 8, 8, dtype=torch.uint8)), None)
    with pytest.raises(ValueError, match="picture 0 carries no prompt: draw it again"):
        prompts_of(open_pictures(torch.zeros(2, 3, 8, 8, dtype=torch.uint8)), None, advice="draw it again")
    with pytest.raises(ValueError, match="needs the file of its prompts"):
        prompts_of(open_pictures(folder / "p"), None, keyed=True)
    with pytest.raises(ValueError, match="there is no file"):
        prompts_of(open_pictures(folder / "p"), str(folder / "none.json"))
    Image.new("RGB", (8, 8)).save(folder / "p" / "a.jpg")
    file = write(folder, "a.json", '{"a": "x", "b": "y", "c": "z"}')
    with pytest.raises(ValueError, match="two pictures are named a"):
        prompts_of(open_pictures(folder / "p"), file)
