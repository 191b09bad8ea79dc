"""Partition of token grids into blocks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mhla_diffusion.blocks import (
    block_centres,
    block_distances,
    block_edges,
    block_table,
    check_block_table,
    effective_block_grid,
)

grids = st.integers(1, 3).flatmap(
    lambda axes: st.tuples(
        st.tuples(*[st.integers(1, 9)] * axes),
        st.tuples(*[st.integers(1, 6)] * axes),
    )
)


@given(grids)
def test_every_token_is_in_exactly_one_block_of_any_grid(case):
    grid, block_grid = case
    table = block_table(grid, block_grid)
    check_block_table(table, math.prod(grid))
    assert table.dtype == torch.int64 and table.shape[0] == math.prod(effective_block_grid(grid, block_grid))
    sizes = (table >= 0).sum(dim=1)
    assert sizes.min() >= 1 and sizes.max() == table.shape[1]
    # Padding stands at the end of a row, the ids before it rise.
    for row, size in zip(table.tolist(), sizes.tolist(), strict=True):
        assert row[size:] == [-1] * (len(row) - size) and row[:size] == sorted(row[:size])


@given(grids)
def test_a_block_is_the_box_between_its_edges(case):
    grid, block_grid = case
    blocks = effective_block_grid(grid, block_grid)
    table = block_table(grid, block_grid)
    edges = [block_edges(length, count) for length, count in zip(grid, blocks, strict=True)]
    for index, row in enumerate(table.tolist()):
        position = torch.unravel_index(torch.tensor(index), blocks)
        box = [range(e[p], e[p + 1]) for e, p in zip(edges, position, strict=True)]
        tokens = torch.cartesian_prod(*[torch.tensor(list(r)) for r in box]).reshape(-1, len(grid))
        strides = [math.prod(grid[axis + 1 :]) for axis in range(len(grid))]
        assert [t for t in row if t >= 0] == (tokens * torch.tensor(strides)).sum(dim=1).tolist()


def test_edges_are_balanced():
    assert block_edges(52, 10) == [0, 5, 10, 15, 20, 26, 31, 36, 41, 46, 52]
    for length in range(1, 30):
        for count in range(1, length + 1):
            edges = block_edges(length, count)
            sizes = {b - a for a, b in zip(edges, edges[1:], strict=False)}
            assert len(edges) == count + 1 and edges[-1] == length and max(sizes) - min(sizes) <= 1


def test_wan_default_size_has_ragged_blocks():
    table = block_table((21, 30, 52), (3, 5, 10))
    check_block_table(table, 21 * 30 * 52)
    sizes = (table >= 0).sum(dim=1)
    assert table.shape == (150, 7 * 6 * 6) and set(sizes.tolist()) == {7 * 6 * 5, 7 * 6 * 6}


def test_an_axis_shorter_than_its_blocks_has_one_block_per_token():
    assert effective_block_grid((1, 30, 52), (3, 5, 10)) == (1, 5, 10)
    assert block_table((1, 2), (3, 5)).tolist() == [[0], [1]]


def test_tables_are_cached_and_can_be_saved_for_backward():
    with torch.inference_mode():
        table = block_table((3, 11), (2, 4))
    assert not table.is_inference()
    assert block_table([3, 11], [2, 4], device="cpu") is table


def test_integers_of_any_kind_are_taken():
    table = block_table(np.array([4, 6]), (np.int64(2), np.uint8(3)))
    assert torch.equal(table, block_table((4, 6), (2, 3)))
    assert effective_block_grid([np.int32(4), 6], torch.tensor([2, 9])) == (2, 6)


def test_centres_and_distances_have_unit_spacing():
    assert block_centres((2, 2)).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    distances = block_distances((3, 5, 10))
    assert distances.shape == (150, 150) and distances.dtype == torch.float64
    assert distances[0, -1] == pytest.approx(math.sqrt(4 + 16 + 81))
    assert torch.equal(distances, distances.T)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: block_edges(3, 4), "between 1 and 3 blocks"),
        (lambda: block_edges(3, 0), "between 1 and 3 blocks"),
        (lambda: block_table((4, 4), (2,)), "give one block count for each of the 2 axes"),
        (lambda: block_table((4, 0), (2, 2)), "one positive integer for each axis"),
        (lambda: block_table((4, 4.0), (2, 2)), "one positive integer for each axis"),
        (lambda: block_table((), ()), "one positive integer for each axis"),
        (lambda: check_block_table(torch.tensor([[0, 1], [2, 5]]), 4), "token id 5, allowed are 0..3"),
        (lambda: check_block_table(torch.tensor([[0, -2]]), 1), "token id -2"),
        (lambda: check_block_table(torch.tensor([[0, 1], [1, -1]]), 2), "token 1 2 times"),
        (lambda: check_block_table(torch.tensor([[0, 1], [-1, -1]]), 3), "token 2 0 times"),
        (lambda: check_block_table(torch.tensor([0, 1]), 2), "give an int64"),
        (lambda: check_block_table(torch.zeros(2, 2), 4), "give an int64"),
    ],
)
def test_wrong_input_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
