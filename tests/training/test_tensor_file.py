"""Tensors written piece by piece are read as those written at once."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mhla_diffusion.training.tensor_file import GrowingTensorFile, TensorsInMemory

TENSORS = {
    "0": torch.randn(7, 3, 2),
    "1": torch.arange(5),
    "2": torch.randint(0, 255, (3, 1), dtype=torch.uint8),
    "3": torch.randn(2, 4).half(),
}


def fill(out):
    for name, tensor in TENSORS.items():
        for part in tensor.split(2):
            out.append(name, part)


def test_a_file_is_read_as_any_other(tmp_path):
    path = tmp_path / "x.safetensors"
    with GrowingTensorFile(path) as out:
        fill(out)
    memory = TensorsInMemory()
    fill(memory)
    for read in (load_file(path), memory.tensors()):
        assert list(read) == list(TENSORS)
        for name, tensor in TENSORS.items():
            assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
    with safe_open(path, "pt") as file:
        assert file.get_slice("0").get_shape() == [7, 3, 2]
        assert torch.equal(file.get_slice("0")[5:], TENSORS["0"][5:])


def test_an_error_leaves_no_file_that_can_be_read(tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(RuntimeError, match="stop"), GrowingTensorFile(path) as out:
        fill(out)
        raise RuntimeError("stop")
    with pytest.raises(Exception, match="header|Header"):
        load_file(path)


def test_too_many_tensors_are_refused(tmp_path):
    with (
        pytest.raises(ValueError, match="1000 tensors are too many"),
        GrowingTensorFile(tmp_path / "x") as out,
    ):
        for number in range(1000):
            out.append(str(number), torch.ones(1))


def test_pieces_in_memory_are_copies():
    memory, piece = TensorsInMemory(), torch.ones(2)
    memory.append("0", piece)
    piece.zero_()
    assert torch.equal(memory.tensors()["0"], torch.ones(2))
