"""Batches go to a GPU and come back without waiting, and arrive as they were."""

import pytest
import torch

from mhla_diffusion.training.transfer import Gathered, upload


def gathered(parts, capacity):
    rows = Gathered(capacity)
    for part in parts:
        rows.add(part)
    return rows.whole()


@pytest.mark.parametrize("lengths", [[5], [3, 3, 1], [1, 4]])
def test_rows_are_one_tensor_in_order(lengths):
    values = torch.arange(sum(lengths) * 6.0).view(-1, 2, 3)
    whole = gathered([part.transpose(1, 2) for part in values.split(lengths)], 9)
    assert whole.is_contiguous() and torch.equal(whole, values.transpose(1, 2))


def test_what_was_given_may_change_afterwards():
    part = torch.ones(2, 3)
    rows = Gathered(4)
    rows.add(part)
    part.zero_()
    assert torch.equal(rows.whole(), torch.ones(2, 3))


def test_nothing_gathered_is_none():
    assert Gathered(3).whole() is None


def test_on_the_cpu_nothing_is_copied():
    tensor = torch.ones(3)
    assert upload(tensor, "cpu") is tensor


@pytest.mark.gpu
def test_a_gpu_gives_the_same_while_it_is_busy():
    values = torch.randn(7, 64, 300)
    work = torch.randn(4096, 4096, device="cuda")
    parts = []

    def computed():
        for part in values.split(2):
            there = upload(part, "cuda")
            for _ in range(20):
                work.copy_(work @ work / 4096)
            parts.append(there * 2)
            yield parts[-1].transpose(1, 2)

    whole = gathered(computed(), 7)
    assert whole.device.type == "cpu" and whole.is_contiguous()
    assert torch.equal(whole, values.transpose(1, 2) * 2)
