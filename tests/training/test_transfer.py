"""Batches go to a GPU and come back without waiting, and arrive as they were."""

import pytest
import torch

from mhla_diffusion.training.transfer import fetched, upload


def test_batches_come_in_order_with_what_was_beside_them():
    values = torch.arange(30.0).view(5, 2, 3)
    batches = ((part.transpose(1, 2), number) for number, part in enumerate(values.split(2)))
    tensors, notes = zip(*fetched(batches), strict=True)
    assert notes == (0, 1, 2) and all(tensor.is_contiguous() for tensor in tensors)
    assert torch.equal(torch.cat(tensors), values.transpose(1, 2))
    assert list(fetched([])) == []


def test_the_next_is_begun_before_one_is_handed_out():
    begun = []

    def batches():
        for number in range(3):
            begun.append(number)
            yield torch.ones(1), number

    assert [(number, len(begun)) for _, number in fetched(batches())] == [(0, 2), (1, 3), (2, 3)]


def test_on_the_cpu_nothing_is_copied():
    tensor = torch.ones(3)
    assert upload(tensor, "cpu") is tensor


@pytest.mark.gpu
def test_a_gpu_gives_the_same_while_it_is_busy():
    values = torch.randn(7, 64, 300)
    work = torch.randn(4096, 4096, device="cuda")

    def batches():
        for number, part in enumerate(values.split(2)):
            there = upload(part, "cuda")
            for _ in range(20):
                work.copy_(work @ work / 4096)
            yield (there * 2).transpose(1, 2), number

    tensors = [tensor.clone() for tensor, _ in fetched(batches())]
    assert all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
    assert torch.equal(torch.cat(tensors), values.transpose(1, 2) * 2)
