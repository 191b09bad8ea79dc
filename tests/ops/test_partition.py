"""Partitions of token grids are made once for each grid, and what is refused stays refused."""

import numpy as np
import pytest
import torch

from mhla_diffusion.ops import partition
from mhla_diffusion.ops.partition import grid_partition

CPU = torch.device("cpu")


def test_a_grid_met_again_is_not_cut_again():
    first = grid_partition((4, 6), (2, 3), 24, CPU)
    assert grid_partition([4, 6], [2, 3], 24, CPU) is first
    assert grid_partition((6, 4), (2, 3), 24, CPU) is not first
    assert grid_partition((4, 6), (2, 2), 24, CPU).num_blocks == 4
    assert grid_partition((24,), (4,), 24, CPU).layout == (1, 1, 24, 1, 1, 4)


def test_numbers_that_equal_others_are_not_taken_for_them():
    assert grid_partition((1, 8), (1, 2), 8, CPU).num_blocks == 2
    with pytest.raises(ValueError, match="positive integer"):
        grid_partition((True, 8), (1, 2), 8, CPU)
    grid_partition((np.int64(3), np.int64(5)), (1, 5), 15, CPU)
    assert all(type(size) is int for size in grid_partition((3, 5), (1, 5), 15, CPU).layout)


def test_a_fault_is_told_each_time():
    for _ in range(2):
        with pytest.raises(ValueError, match=r"grid \(4, 6\) holds 24 tokens but q has 25"):
            grid_partition((4, 6), (2, 3), 25, CPU)
    with pytest.raises(ValueError, match="positive integer"):
        grid_partition((4.0, 6), (2, 3), 24, CPU)


def test_what_the_kernels_cannot_count_in_32_bits_has_no_layout():
    for tokens, blocks in (((1 << 20) + 4, 2048), (1 << 20, 2048)):  # uneven, even
        part = grid_partition((tokens,), (blocks,), tokens, CPU)
        assert part.layout is None and part.with_table(CPU).shape == (blocks, -(-tokens // blocks))
    assert grid_partition((1 << 20,), (2047,), 1 << 20, CPU).layout is not None


@pytest.mark.parametrize("form", ["states", "dual"])
@pytest.mark.parametrize("grid", [(22,), (23,)])
def test_blocks_too_large_for_index_arithmetic(make_call, monkeypatch, grid, form):
    partition._cached_grid_partition.cache_clear()
    monkeypatch.setattr(partition, "LARGEST_BLOCK", 8)
    call = make_call(grid, (2,), 8, batch=1)
    call.check(call.run("triton", form=form), 1e-5)
    partition._cached_grid_partition.cache_clear()
