"""Protocol files: what they say, what they include, and how a mistake in one is named."""

import pytest

from mhla_diffusion.evaluation.protocols.files import known_protocols, load_protocol
from mhla_diffusion.evaluation.protocols.schema import Unreadable

GOOD = """
protocol: mine
version: 1.0
summary: what it is
samples: {kind: pictures, count: 9, size: [40, 40]}
reference: {kind: pictures}
parts:
  - {scorer: smoke, metrics: [fd, kid]}
published:
  - {name: another, values: {fd: 2}}
"""


def write(folder, text, name="mine.yaml"):
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_becomes_a_protocol(tmp_path):
    found = load_protocol(write(tmp_path, GOOD))
    assert (found.protocol, found.version, found.file) == ("mine", "1.0", "mine.yaml")
    assert found.samples.count == 9 and found.samples.size == (40, 40) and found.samples.other_count == "warn"
    assert found.parts[0].metrics == ("fd", "kid") and found.published[0].values == {"fd": 2.0}


def test_the_hash_is_of_what_decides_the_numbers(tmp_path):
    first = load_protocol(write(tmp_path, GOOD)).sha256
    words = GOOD.replace("what it is", "other words").replace("{fd: 2}", "{fd: 3}") + "# a comment\n"
    assert load_protocol(write(tmp_path, words)).sha256 == first
    assert load_protocol(write(tmp_path, GOOD.replace("count: 9", "count: 8"))).sha256 != first
    assert load_protocol(write(tmp_path, GOOD.replace("1.0", "1.1"))).sha256 != first


def test_what_is_included_is_overridden_field_by_field(tmp_path, monkeypatch):
    write(tmp_path, GOOD)
    path = write(
        tmp_path, "include: mine\nprotocol: larger\nsamples: {size: [80, 80]}\npublished: []\n", "larger.yaml"
    )
    monkeypatch.setenv("MHLA_PROTOCOLS", str(tmp_path))
    found = load_protocol("larger")
    assert found.samples.size == (80, 80) and found.samples.count == 9 and found.published == ()
    assert known_protocols()["larger"] == path


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("samples:", "sample:", "there is no field sample, did you mean samples?"),
        ("count: 9", "cuont: 9", "there is no field samples.cuont, did you mean count?"),
        ("count: 9", "count: many", "samples.count is 'many': give a whole number"),
        ("count: 9", "count: 1", "samples.count 1 is below samples.least 2"),
        ("count: 9", "count: true", "samples.count is True"),
        ("[40, 40]", "[40]", "samples.size is [40]: give 2 entries"),
        ("kind: pictures, count", "kind: picture, count", "samples.kind is 'picture': give one of pictures"),
        ("version: 1.0", "", "version is missing"),
        ("scorer: smoke, ", "", "parts[0].scorer is missing"),
        ("  - {scorer: smoke, metrics: [fd, kid]}", "  []", "parts is empty"),
        ("[fd, kid]", "[]", "parts[0].metrics is empty: name some, or leave it out"),
        ("{fd: 2}", "{fd: good}", "published[0].values.fd is 'good': give a number"),
        ("{fd: 2}", "{fd: .nan}", "give a number"),
        ("summary: what it is", "summary: [a]", "summary is ['a']: give text"),
        ("protocol: mine", "protocol: [mine", "is no YAML"),
    ],
)
def test_mistakes_are_named(tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(Unreadable) as caught:
        load_protocol(write(tmp_path, GOOD.replace(old, new, 1)))
    assert message in str(caught.value) and "mine.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path):
    for text, message in (("", "holds no protocol"), ("- a", "holds no protocol")):
        with pytest.raises(Unreadable, match=message):
            load_protocol(write(tmp_path, text))
    with pytest.raises(Unreadable, match="there is no protocol file"):
        load_protocol(tmp_path / "nothing.yaml")
    with pytest.raises(Unreadable, match="no protocol is called 'emojy', did you mean emoji?"):
        load_protocol("emojy")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Unreadable, match="is no YAML"):
        load_protocol(tmp_path / "b.yaml")


def test_circles_are_refused(tmp_path):
    write(tmp_path, "include: b.yaml\n", "a.yaml")
    write(tmp_path, "include: a.yaml\n", "b.yaml")
    with pytest.raises(Unreadable, match="includes itself"):
        load_protocol(tmp_path / "a.yaml")
    with pytest.raises(Unreadable, match="include is 3"):
        load_protocol(write(tmp_path, "include: 3\n"))


def test_yaml_that_would_run_code_does_not(tmp_path):
    with pytest.raises(Unreadable, match="is no YAML"):
        load_protocol(write(tmp_path, GOOD + "drawing: !!python/object/apply:os.getcwd []\n"))
