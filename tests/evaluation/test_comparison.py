"""Results side by side."""

import json

import pytest

from mhla_diffusion.cli import main


def result(
    path, value: float, protocol: str = "fid_adm", resize: str = "a", reference: str = "r", n: int = 9, **more
):
    values = {"fd": {"value": value, "n": n, "higher_is_better": False}, **more}
    content = {
        "schema_version": 1,
        "protocol": protocol,
        "values": values,
        "features": {"network": "inception", "resize": resize},
        "inputs": {"reference": {"listing_sha256": reference}},
    }
    path.write_text(json.dumps(content))
    return str(path)


def test_results_of_one_protocol_make_a_table(tmp_path, capsys):
    kid = {"value": 0.5, "std": 0.1, "n": 9, "higher_is_better": False}
    files = [result(tmp_path / "a.json", 1.25), result(tmp_path / "b.json", 2.5, n=8, kid=kid)]
    assert main(["eval", "compare", *files]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "fid_adm" and out[2] == "| result | fd (lower is better) | kid (lower is better) |"
    assert out[4:6] == [f"| {files[0]} | 1.25 |  |", f"| {files[1]} | 2.5 | 0.5 +- 0.1 |"]
    assert out[-1] == "fd is of 9, 8 samples: a Fréchet distance depends on the count"


def test_a_folder_stands_for_the_result_in_it(tmp_path, capsys):
    for name in "ab":
        (tmp_path / name).mkdir()
        result(tmp_path / name / "result.json", 1.25)
    assert main(["eval", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert f"| {tmp_path / 'a' / 'result.json'} | 1.25 |" in capsys.readouterr().out
    (tmp_path / "c").mkdir()
    assert main(["eval", "compare", str(tmp_path / "c")]) == 2
    assert f"there is no result {tmp_path / 'c' / 'result.json'}" in capsys.readouterr().err


def test_a_protocols_file_is_told_from_the_scorer_of_its_name(tmp_path, capsys):
    files = [result(tmp_path / f"{name}.json", 1, protocol="smoke") for name in "ab"]
    content = json.loads(open(files[0]).read()) | {"protocol_sha256": "1" * 64}
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert main(["eval", "compare", *files]) == 2
    assert "the other of mhla eval run smoke without one" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 9999,
        b"[1]",
        b'{"values": {}, "schema_version": 1}',
        b'{"values": {"fd": 3}, "schema_version": 1, "protocol": "x"}',
        b'{"values": [1], "schema_version": 1, "protocol": "x"}',
        b'{"values": {}, "schema_version": 9, "protocol": "x"}',
        b'{"values": {"fd": {"value": NaN}}, "schema_version": 1, "protocol": "x"}',
        b'{"values": {"fd": {"value": true}}, "schema_version": 1, "protocol": "x"}',
        b'{"values": {}, "schema_version": 1, "protocol": "x", "parts": [1]}',
        b'{"values": {}, "schema_version": 1, "protocol": "x", "features": []}',
    ],
)
def test_what_is_no_result_is_one_short_line(tmp_path, capsys, content):
    (tmp_path / "a.json").write_bytes(content)
    assert main(["eval", "compare", str(tmp_path / "a.json")]) == 2
    err = capsys.readouterr().err
    assert "a.json is no" in err and err.count("\n") == 1 and len(err) < 300


def test_other_weights_of_the_same_network_are_doubted(tmp_path, capsys):
    files = [result(tmp_path / f"{name}.json", 1) for name in "abc"]
    for file, sha256, kind in zip(files, ("1" * 64, "1" * 64, "2" * 64), (dict, list, list), strict=True):
        content = json.loads(open(file).read())
        weights = {"role": "dinov2", "sha256": sha256}
        content["features"]["weights"] = weights if kind is dict else [weights]
        open(file, "w").write(json.dumps(content))
    assert main(["eval", "compare", *files[:2]]) == 0
    assert "several files" not in capsys.readouterr().out
    assert main(["eval", "compare", *files]) == 0
    assert f"dinov2 is of several files ({'1' * 12}, {'2' * 12})" in capsys.readouterr().out


def test_counts_are_compared_of_metrics_that_the_first_result_lacks(tmp_path, capsys):
    files = [result(tmp_path / "a.json", 1)]
    files += [result(tmp_path / f"{n}.json", 1, kid={"value": 0.5, "n": n}) for n in (8, 9)]
    assert main(["eval", "compare", *files]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "kid is of 8, 9 samples"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"protocol": "fid_clean"}, "protocol fid_adm and fid_clean"),
        ({"resize": "b"}, "resize a and b"),
        ({"reference": "s"}, "reference r and s"),
    ],
)
def test_what_does_not_compare_is_refused(tmp_path, capsys, change, message):
    files = [result(tmp_path / "a.json", 1), result(tmp_path / "b.json", 1, **change)]
    assert main(["eval", "compare", *files]) == 2
    assert f"do not compare: {message}" in capsys.readouterr().err


def test_what_is_no_result_is_named(tmp_path, capsys):
    for content in ("{", "[]", '{"values": {}}', '{"values": [], "schema_version": 1}'):
        (tmp_path / "a.json").write_text(content)
        assert main(["eval", "compare", str(tmp_path / "a.json")]) == 2
        assert "no result of this version" in capsys.readouterr().err
    assert main(["eval", "compare", str(tmp_path / "absent.json")]) == 2
