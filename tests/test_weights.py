import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import save_file

from mhla_diffusion.weights import (
    check_safetensors,
    find_pipeline,
    fingerprint,
    known_pipelines,
    search_places,
)


@pytest.fixture(autouse=True)
def no_weights_variable(monkeypatch):
    monkeypatch.delenv("MHLA_WEIGHTS", raising=False)


def make_pipeline(folder):
    """The least that counts as a pipeline folder: an index, one component with weights."""
    (folder / "transformer").mkdir(parents=True)
    index = {
        "_class_name": "SanaPipeline",
        "transformer": ["diffusers", "SanaTransformer2DModel"],
        "extra": [None, None],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "transformer" / "config.json").write_text("{}")
    save_file({"a": torch.arange(6.0), "b": torch.zeros(0)}, folder / "transformer" / "model.safetensors")
    return folder


def test_a_path_comes_before_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("MHLA_WEIGHTS", str(tmp_path / "store"))
    stored = make_pipeline(tmp_path / "store" / "toy")
    assert find_pipeline("toy") == stored
    here = make_pipeline(tmp_path / "here" / "toy")
    monkeypatch.chdir(here.parent)
    assert find_pipeline("toy").resolve() == here
    assert find_pipeline(stored) == stored


def test_an_installed_package_is_searched(tmp_path, monkeypatch):
    make_pipeline(tmp_path / "toy_weights_package")
    (tmp_path / "toy_weights_package" / "__init__.py").touch()
    info = tmp_path / "toy_weights_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-weights-package\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[mhla_diffusion.pipelines]\ntoy = toy_weights_package\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert find_pipeline("toy") == tmp_path / "toy_weights_package"
    assert known_pipelines()["toy"] == tmp_path / "toy_weights_package"


@pytest.mark.parametrize(
    ("content", "named"), [("{", "not valid JSON"), ("[]", "no JSON object"), ("", "not valid JSON")]
)
@pytest.mark.parametrize("file", ["model_index.json", "transformer/config.json"])
def test_a_broken_json_file_is_named(tmp_path, file, content, named):
    folder = make_pipeline(tmp_path / "toy")
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=named) as error:
        find_pipeline(folder)
    assert str(folder / file) in str(error.value)


def test_a_shard_that_is_not_there_is_named(tmp_path):
    folder = make_pipeline(tmp_path / "toy")
    listing = {"weight_map": {"a": "model.safetensors", "c": "model-00002-of-00002.safetensors"}}
    (folder / "transformer" / "model.safetensors.index.json").write_text(json.dumps(listing))
    with pytest.raises(ValueError, match="lacks the weights model-00002-of-00002.safetensors"):
        find_pipeline(folder)
    for weight_map in ([], 3, {}, {"a": None}):
        (folder / "transformer" / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": weight_map})
        )
        with pytest.raises(ValueError, match="lacks the weight_map of model.safetensors.index.json"):
            find_pipeline(folder)


def test_an_unknown_pipeline_names_every_place_and_what_to_type(tmp_path, monkeypatch):
    monkeypatch.setenv("MHLA_WEIGHTS", str(tmp_path))
    with pytest.raises(ValueError) as error:
        find_pipeline("nowhere")
    message = str(error.value)
    assert all(str(place.path) in message for place in search_places("nowhere"))
    assert len(search_places("nowhere")) >= 3 and len(search_places(str(tmp_path / "nowhere"))) == 1
    assert "MHLA_WEIGHTS" in message and "clone the repository" in message and "\n" not in message


def test_a_folder_that_is_no_pipeline_is_named_for_what_it_is(tmp_path):
    with pytest.raises(ValueError, match="not a pipeline folder"):
        find_pipeline(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="single model"):
        find_pipeline(tmp_path)


def test_a_missing_component_is_named(tmp_path):
    folder = make_pipeline(tmp_path / "toy")
    shutil.rmtree(folder / "transformer")
    with pytest.raises(ValueError, match="lacks the component folder transformer/"):
        find_pipeline(folder)


@pytest.mark.parametrize("kept", [0, 5, 8, 40, -1])
def test_a_cut_weight_file_is_named(tmp_path, kept):
    folder = make_pipeline(tmp_path / "toy")
    path = folder / "transformer" / "model.safetensors"
    check_safetensors(path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match="model.safetensors"):
        find_pipeline(folder)


def test_a_file_with_more_than_its_header_says_and_a_pointer_are_refused(tmp_path):
    path = make_pipeline(tmp_path / "toy") / "transformer" / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content + b"\0")
    with pytest.raises(ValueError, match="header promises"):
        check_safetensors(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match="git lfs pull"):
        check_safetensors(path)
    path.write_bytes((2).to_bytes(8, "little") + b"[]")
    with pytest.raises(ValueError, match="no readable safetensors header"):
        check_safetensors(path)


def test_the_fingerprint_follows_contents_not_the_place(tmp_path):
    first, second = make_pipeline(tmp_path / "a"), make_pipeline(tmp_path / "b")
    assert fingerprint(first) == fingerprint(second)
    (second / "README.md").write_text("a card")
    assert fingerprint(first) == fingerprint(second)
    save_file({"a": torch.arange(6.0) + 1}, second / "transformer" / "model.safetensors")
    assert fingerprint(first) != fingerprint(second)
