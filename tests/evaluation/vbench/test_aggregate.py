"""VBench's totals: the official script's numbers to 12 digits, and result files of all kinds."""

import json
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhla_diffusion.cli import main
from mhla_diffusion.evaluation.vbench.aggregate import aggregate, read_results, totals
from mhla_diffusion.evaluation.vbench.dimensions import DIMENSIONS, members

# What the official script prints for these raw scores.
GOLDEN = [
    ([0.7] * 16, 0.48654428953604145, 1.1837731427693945, 0.6259900601827121),
    ([1.0] * 16, 1.0013194352816994, 1.6912550769609966, 1.1393065636175588),
    ([0.05 * (i + 1) for i in range(16)], -0.39771809333633457, 1.1116926380690895, -0.09583594705524975),
]
NOTHING = (-0.7145977172038273, -0.00035137034434293746, -0.5717484478319304)


@pytest.mark.parametrize(("raw", "quality", "semantic", "total"), GOLDEN)
def test_the_official_numbers(raw, quality, semantic, total):
    found = totals(dict(zip(DIMENSIONS, raw, strict=True)))
    assert found == pytest.approx({"quality": quality, "semantic": semantic, "total": total}, rel=1e-12)


def test_the_table_has_the_weights_of_the_published_totals():
    assert len(DIMENSIONS) == 16 and len(members("quality")) == 7 and len(members("semantic")) == 9
    assert sum(d.weight for d in members("quality").values()) == 6.5
    # A published row: (4 * 85.23 + 75.65) / 5 = 83.31
    assert round((4 * 85.23 + 75.65) / 5, 2) == 83.31


@given(absent=st.sets(st.sampled_from(sorted(DIMENSIONS)), min_size=1))
def test_no_total_without_every_dimension(absent):
    raw = {name: 0.5 for name in DIMENSIONS if name not in absent}
    found = totals(raw)
    assert found["total"] is None
    for group in ("quality", "semantic"):
        assert (found[group] is None) == bool(absent & members(group).keys())
    zero = totals(raw, missing="zero")
    assert zero == totals(raw | dict.fromkeys(absent, 0.0))


def test_nothing_at_all_as_the_official_script_has_it():
    found = totals({}, missing="zero")
    assert (found["quality"], found["semantic"], found["total"]) == pytest.approx(NOTHING, rel=1e-12)
    with pytest.raises(ValueError, match="missing='skip'"):
        totals({}, missing="skip")


def result_file(path, **scores):
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = {
        name: [value, [{"video_path": "a.mp4", "video_results": value}] * 3] for name, value in scores.items()
    }
    path.write_text(json.dumps(entries))
    return path


def test_files_of_every_kind_are_merged(tmp_path):
    names = list(DIMENSIONS)
    folder = tmp_path / "folder"
    result_file(folder / "one" / "a_eval_results.json", **dict.fromkeys(names[:5], 0.7))
    result_file(folder / "b_eval_results.json", **dict.fromkeys(names[5:8], 0.7))
    (folder / "b_full_info.json").write_text("[]")
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        archive.writestr("scores.json", json.dumps({name.replace("_", " "): 0.7 for name in names[8:15]}))
    single = result_file(tmp_path / "d.json", **{names[15]: 0.7})
    raw = read_results([folder, tmp_path / "c.zip", single])
    assert raw.values == dict.fromkeys(names, 0.7) and len(raw.sources) == 4
    assert raw.videos[names[0]] == 3 and names[9] not in raw.videos
    found = aggregate(raw)
    assert found["total"] == pytest.approx(GOLDEN[0][3], rel=1e-12) and found["warnings"] == []
    assert list(found["values"]) == names and found["missing"] == []


def test_a_zip_of_vbenchs_folder_has_more_than_results_in_it(tmp_path):
    """Its lists of videos, settings of ours, and what macOS puts beside each file."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("out/a_eval_results.json", json.dumps({"scene": 0.5}))
        archive.writestr("out/a_full_info.json", "[]")
        archive.writestr("out/scene_run.json", "{}")
        archive.writestr("__MACOSX/out/._a_eval_results.json", b"\x00\x05\xff")
        archive.extractall(tmp_path / "a")
    for path in (tmp_path / "a.zip", tmp_path / "a"):
        assert read_results([path]).values == {"scene": 0.5}


def test_scores_out_of_100_are_taken_as_such_and_named(tmp_path):
    """Case: imaging quality is 72.9 for a video and 0.729 for the set."""
    raw = read_results([result_file(tmp_path / "a.json", imaging_quality=72.9, scene=0.5)])
    assert raw.values["imaging_quality"] == pytest.approx(0.729) and raw.rescaled == {"imaging_quality": 72.9}
    found = aggregate(raw)
    assert all(0 <= row["value"] <= 1 for row in found["values"].values())
    assert found["warnings"][0] == "imaging_quality: 72.9 is out of 100, taken as 0.729"
    assert found["rescaled"] == {"imaging_quality": 72.9} and found["total"] is None


def test_a_score_that_rounding_puts_above_1_is_not_out_of_100(tmp_path):
    raw = read_results([result_file(tmp_path / "a.json", subject_consistency=1.0000002)])
    assert raw.values == {"subject_consistency": 1.0000002} and raw.rescaled == {}


def test_a_file_of_two_scales_is_doubted(tmp_path):
    raw = read_results([result_file(tmp_path / "a.json", scene=55.0, dynamic_degree=0.4, imaging_quality=70)])
    assert "scene are out of 100, dynamic_degree is 0.4" in aggregate(raw)["warnings"][2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"scene": NaN}', "scene is nan: no video was scored"),
        ('{"overall_consistency": 324.1}', r"outside \[-1, 1\]: are that dimension's weights"),
        ('{"overall_consistency": -1.1}', r"outside \[-1, 1\]"),
        ('{"scene": -0.1}', r"outside \[0, 1\]"),
        ('{"scene": true}', "no number"),
        ('{"scene": []}', "no number"),
        ('{"scenes": 0.5}', "no dimension of VBench, did you mean scene?"),
        ('{"camera": 0.5}', "no dimension of VBench: they are subject_consistency"),
        ("[]", "no scores by dimension"),
        ("{", "not valid JSON"),
    ],
)
def test_a_broken_result_is_named(tmp_path, content, message):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        read_results([tmp_path])
    assert "a.json" in str(error.value)


def test_a_cosine_may_be_negative(tmp_path):
    assert read_results([result_file(tmp_path / "a.json", temporal_style=-0.02)]).values == {
        "temporal_style": -0.02
    }


def test_what_holds_no_results_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with zipfile.ZipFile(tmp_path / "empty.zip", "w"):
        pass
    (tmp_path / "broken.zip").write_text("no zip")
    for name, message in {
        "absent": "there is no",
        "empty": "no result files",
        "empty.zip": "holds no .json",
        "broken.zip": "cannot be read",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_results([tmp_path / name])
    with pytest.raises(ValueError, match="no result files: give"):
        read_results([])
    one, two = (result_file(tmp_path / f"{value}.json", scene=value) for value in (0.1, 0.2))
    with pytest.raises(ValueError, match=r"scene is 0.2, another file says 0.1"):
        read_results([one, two])


def test_the_command(tmp_path, capsys):
    file = result_file(tmp_path / "a.json", **dict.fromkeys(members("quality"), 0.7))
    assert main(["eval", "vbench", "aggregate", str(file), "--out", str(tmp_path / "out.json")]) == 0
    out, err = capsys.readouterr()
    assert "48.65" in out and out.count("none") == 2 and "no total: 9 of 16" in err
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["total"] is None and len(found["inputs"][0]["sha256"]) == 64
    assert main(["eval", "vbench", "aggregate", str(file), "--missing", "zero"]) == 0
    assert "none" not in capsys.readouterr().out
    assert main(["eval", "vbench", "aggregate", str(tmp_path / "absent")]) == 2
