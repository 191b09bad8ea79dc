"""GenEval's score from files of detections, as typed."""

import json

import pytest

from mhla_diffusion.cli import main
from mhla_diffusion.evaluation.geneval.judge import TASKS, Detection
from mhla_diffusion.evaluation.geneval.records import Found, read_detections, read_records, write_detections

RECORDS = [
    {"tag": "single_object", "prompt": "a photo of a cup", "include": [{"class": "cup", "count": 1}]},
    {
        "tag": "two_object",
        "prompt": "a photo of a cup and a dog",
        "include": [{"class": "cup", "count": 1}, {"class": "dog", "count": 1}],
    },
    {
        "tag": "counting",
        "prompt": "a photo of two cups",
        "include": [{"class": "cup", "count": 2}],
        "exclude": [{"class": "cup", "count": 3}],
    },
    {
        "tag": "colors",
        "prompt": "a photo of a red cup",
        "include": [{"class": "cup", "count": 1, "color": "red"}],
    },
    {
        "tag": "position",
        "prompt": "a photo of a cup left of a dog",
        "include": [{"class": "dog", "count": 1}, {"class": "cup", "count": 1, "position": ["left of", 0]}],
    },
    {
        "tag": "color_attr",
        "prompt": "a photo of a red cup and a black dog",
        "include": [
            {"class": "cup", "count": 1, "color": "red"},
            {"class": "dog", "count": 1, "color": "black"},
        ],
    },
]
CUP = Detection("cup", 0.95, (0, 0, 10, 10), "red")
DOG = Detection("dog", 0.95, (50, 0, 60, 10), "black")


@pytest.fixture
def place(tmp_path):
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
    return tmp_path


def run(place, *more, samples="det.jsonl"):
    command = ["eval", "run", "geneval", "--samples", str(place / samples), "--out", str(place / "a.json")]
    return main([*command, "--prompts", str(place / "metadata.jsonl"), *more])


def whole() -> list[Found]:
    """Four pictures of each prompt: all right but two of `counting`, which show three cups."""
    found = []
    for index in range(6):
        for sample in range(4):
            objects = [CUP, DOG]
            if index == 2:
                objects = [CUP, CUP._replace(score=0.92)] + [CUP._replace(score=0.91)] * (sample > 1)
            found.append(Found(f"{index:05d}/samples/{sample:04d}.png", objects))
    return found


def test_a_whole_set(place, capsys):
    write_detections(place / "det.jsonl", whole(), {"detector": "by hand", "official": True})
    assert run(place) == 0
    out, err = capsys.readouterr()
    assert "geneval " in out and "prompts have pictures" not in err and "may not compare" not in err
    result = json.loads((place / "a.json").read_text())
    assert result["values"]["geneval"]["value"] == pytest.approx((5 + 0.5) / 6)
    assert list(result["values"]) == ["geneval", *TASKS]
    assert (
        result["values"]["counting"] | {"value": 0.5, "n": 4, "prompts": 1, "prompts_right": 1.0}
        == (result["values"]["counting"])
    )
    assert result["settings"]["reasons"][0].startswith(
        "00002/samples/0002.png (a photo of two cups): expected"
    )
    assert result["features"]["detector"] == "by hand" and len(result["inputs"]["prompts"]["sha256"]) == 64


def test_the_protocol_of_a_file_gives_the_same(place):
    write_detections(place / "det.jsonl", whole(), {"detector": "by hand", "official": True})
    assert run(place) == 0
    command = ["eval", "run", "--protocol", "geneval", "--samples", str(place / "det.jsonl")]
    assert main([*command, "--prompts", str(place / "metadata.jsonl"), "--out", str(place / "out")]) == 0
    found = json.loads((place / "out" / "result.json").read_text())
    assert found["values"] == json.loads((place / "a.json").read_text())["values"]


def test_a_part_has_no_overall_score_and_says_what_is_missing(place, capsys):
    write_detections(place / "det.jsonl", whole()[:6], {})
    assert run(place) == 0
    err = capsys.readouterr().err
    assert "2 of 6 prompts have pictures, the first without is 'a photo of two cups'" in err
    assert "2, 4 pictures of a prompt, published are 4" in err
    assert "no overall score: no picture of counting, colors, position, color_attr" in err
    assert "not known to be of GenEval's own detector" in err
    assert "geneval" not in json.loads((place / "a.json").read_text())["values"]


def test_pictures_may_carry_their_prompts_and_files_survive_a_round(place):
    found = [Found("any/name.png", [CUP, DOG], "a photo of a cup left of a dog")]
    write_detections(place / "det.jsonl", found, {"detector": "x"})
    again, about = read_detections(place / "det.jsonl")
    assert again == found and about["detector"] == "x" and len(about["sha256"]) == 64
    assert run(place) == 0
    assert json.loads((place / "a.json").read_text())["values"]["position"]["value"] == 1


def test_detections_need_no_line_about_their_maker(place):
    row = {
        "image": "00000/samples/0000.png",
        "detections": [{"class": "cup", "score": 1, "box": [0, 0, 1, 1]}],
    }
    (place / "det.jsonl").write_text(json.dumps(row) + "\n\n")
    found, about = read_detections(place / "det.jsonl")
    assert found[0].detections == [Detection("cup", 1.0, (0.0, 0.0, 1.0, 1.0))] and set(about) == {
        "file",
        "sha256",
    }


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([Found("x/a.png", [])], "carries no prompt, and no number of one"),
        ([Found("00009/samples/0000.png", [])], "carries no prompt, and no number of one"),
        ([Found("a.png", [], "a photo of a hat")], "which GenEval's list does not have"),
        ([Found("00000/a.png", []), Found("00000/a.png", [])], "is there 2 times"),
        ([Found("00003/a.png", [CUP._replace(color=None)])], "00003/a.png: a cup has no colour"),
    ],
)
def test_what_does_not_pair_is_one_line(place, capsys, found, message):
    write_detections(place / "det.jsonl", found, {})
    assert run(place) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "line 1, is no picture"),
        (
            '{"image": "a", "detections": [{"class": "a", "score": 1, "box": [3, 0, 1, 1]}]}',
            "left, top, right",
        ),
        (
            '{"image": "a", "detections": [{"class": "a", "score": 1, "box": [NaN, 0, 1, 1]}]}',
            "left, top, right",
        ),
        ('{"image": "a", "detections": [{"class": "a", "score": NaN, "box": [0, 0, 1, 1]}]}', "not in"),
        ('{"image": "a", "detections": [{"class": "a", "score": 95, "box": [0, 0, 1, 1]}]}', "not in"),
        ('{"image": 3, "detections": []}', "is no text"),
        ('{"image": "", "detections": []}', "is no text"),
        ('{"about": "mmdet"}', "line 1, is no picture"),
        ('{"image": "caf\udce9"}', "no text in UTF-8"),
        ("", "holds no picture"),
    ],
)
def test_what_are_no_detections_is_refused(place, line, message):
    (place / "det.jsonl").write_bytes(line.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message):
        read_detections(place / "det.jsonl")


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        '{"tag": "size", "prompt": "a", "include": []}',
        '{"tag": "colors", "prompt": "a", "include": [{}]}',
    ],
)
def test_what_are_no_prompts_is_refused(place, line):
    (place / "metadata.jsonl").write_text("\n" + line)
    with pytest.raises(ValueError, match="line 2, is no prompt of GenEval"):
        read_records(place / "metadata.jsonl")


def test_other_mistakes(place, capsys):
    (place / "det.jsonl").write_text("")
    command = ["eval", "run", "geneval", "--samples", str(place / "det.jsonl")]
    assert main(command) == 2
    assert "GenEval's prompts are needed" in capsys.readouterr().err
    assert run(place, "--random-weights") == 2
    assert run(place, "--weights", "dinov2=x") == 2
    assert run(place, samples="none.jsonl") == 2
    assert "there is no file of detections" in capsys.readouterr().err
