"""Checkpoints that are programs: what is in them is named, and never runs."""

import argparse
import os
import pickle
from pathlib import Path

import pytest
import torch

from mhla_diffusion.models.safe_pickle import load_pickle, state_of

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3, dtype=torch.int64)}


class Touch:
    """Unpickling it makes a file: a harmless stand-in for what a malicious checkpoint does."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def refused(path) -> str:
    with pytest.raises(ValueError) as caught:
        load_pickle(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_and_a_namespace_are_read(tmp_path, zipped):
    saved = {"ema": STATE, "args": argparse.Namespace(model="DiT-S/2", sizes=[1, 2]), "train_steps": 5}
    path = tmp_path / "a.pt"
    torch.save(saved, path, _use_new_zipfile_serialization=zipped)
    loaded = load_pickle(path)
    assert loaded["args"] == saved["args"]
    state, name = state_of(loaded, path)
    assert name == "ema" and state.keys() == STATE.keys()
    assert all(torch.equal(state[key], STATE[key]) for key in STATE)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("wrap", [lambda x: {"model": STATE, "extra": x}, lambda x: argparse.Namespace(a=x)])
def test_code_in_a_checkpoint_is_named_and_does_not_run(tmp_path, zipped, wrap):
    bait = tmp_path / "ran"
    torch.save(wrap(Touch(bait)), tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    message = refused(tmp_path / "a.pt")
    assert "system" in message and "was not run" in message
    assert not bait.exists()
    torch.load(tmp_path / "a.pt", weights_only=False)  # the bait works: it is the reader that left it alone
    assert bait.exists()


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_bare_pickle_with_code_does_not_run_either(tmp_path, protocol):
    bait, path = tmp_path / "ran", tmp_path / "a.pt"
    path.write_bytes(pickle.dumps({"a": Touch(bait)}, protocol=protocol))
    assert "posix.system" in refused(path)
    assert not bait.exists()


@pytest.mark.parametrize(
    ("thing", "name"),
    [
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (Path("a"), "pathlib"),
        (argparse.HelpFormatter, "argparse.HelpFormatter"),
        (argparse.Namespace(a=Path("a")), "pathlib"),
    ],
)
def test_other_classes_are_refused_by_name(tmp_path, thing, name):
    torch.save({"a": thing}, tmp_path / "a.pt")
    assert name in refused(tmp_path / "a.pt")


def test_the_namespace_is_allowed_for_one_load_only(tmp_path):
    torch.save(argparse.Namespace(a=1), tmp_path / "a.pt")
    load_pickle(tmp_path / "a.pt")
    assert argparse.Namespace not in torch.serialization.get_safe_globals()


def test_a_file_that_is_not_whole_is_said_to_be(tmp_path):
    path = tmp_path / "a.pt"
    path.touch()
    assert "is empty (0 bytes)" in refused(path)
    pages = {"a.weight": torch.zeros(64, 64)}  # PyTorch says something else of an archive over a page long
    for zipped in (True, False):
        for state in (STATE, pages):
            torch.save(state, path, _use_new_zipfile_serialization=zipped)
            whole = path.read_bytes()
            for length in (len(whole) - 1, len(whole) // 2, 20):
                path.write_bytes(whole[:length])
                assert "copy or download it again" in refused(path)
    path.write_text("<html>404 Not Found</html>")
    assert "copy or download it again" in refused(path)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in refused(path)


def test_the_weights_inside_are_found_by_name():
    path, other = Path("a.pt"), {"a.weight": torch.zeros(1)}
    assert state_of(STATE, path)[1] == ""
    assert state_of({"state_dict": STATE, "epoch": 3}, path)[1] == "state_dict"
    both = {"model": STATE, "ema": other}
    assert state_of(both, path) == (other, "ema")
    assert state_of(both, path, "model")[0].keys() == STATE.keys()
    assert state_of({"model": STATE, "ema": {}}, path)[1] == "model"  # an average that was never begun
    for prefix in (
        "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "model.diffusion_model.",
        "pipe.dit.", "model.",
    ):  # fmt: skip
        assert state_of({prefix + key: x for key, x in STATE.items()}, path)[0].keys() == STATE.keys()


@pytest.mark.parametrize(
    ("loaded", "name", "message"),
    [
        ([1], None, "holds a list"),
        ({}, None, "there are none"),
        ({"epoch": 3}, None, "entries are no tensors"),
        ({"model": {"a": 1.0}}, None, "entries are no tensors"),
        ({"model": {**STATE, 3: torch.zeros(1)}}, None, "entries are no tensors by name .3."),
        ({"model": STATE}, "ema", "no weights under 'ema': it has model"),
    ],
)
def test_a_checkpoint_without_weights_is_refused(loaded, name, message):
    with pytest.raises(ValueError, match=message) as caught:
        state_of(loaded, Path("a.pt"), name)
    assert "\n" not in str(caught.value)
