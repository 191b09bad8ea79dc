"""The coefficient matrix: initialisation, interpolation, clipping, precision."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mhla_diffusion.blocks import block_distances
from mhla_diffusion.mixing import (
    INITS,
    BlockMixing,
    clip_mixings,
    initial_mixing,
    interpolate_mixing,
    learnable_mixings,
    mean_occupancy,
)


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("block_grid", [(1,), (1, 1, 1), (2,), (4, 4), (3, 5, 10)])
def test_rows_of_every_initialisation_sum_to_one(init, block_grid):
    matrix = initial_mixing(block_grid, init=init, dtype=torch.float64)
    assert matrix.min() >= 0 and torch.allclose(
        matrix.sum(dim=1), torch.ones(len(matrix), dtype=torch.float64)
    )
    if math.prod(block_grid) == 1:
        assert matrix.tolist() == [[1.0]]


class NoFloat64ButOnTheCPU(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        wrong = getattr(out, "dtype", None) == torch.float64 and out.device.type != "cpu"
        assert not wrong, f"{function.name()} makes a float64 tensor"
        return out


def test_a_default_device_without_float64_is_asked_for_none():
    """Such as Apple's. The meta device stands for it."""
    with NoFloat64ButOnTheCPU():
        with torch.device("meta"):
            mixing = BlockMixing((2, 3, 4))
            assert initial_mixing((2, 3, 4)).device.type == mixing.weight.device.type == "meta"
            assert mixing((1, 2, 4)).shape == (8, 8)
        # What was kept from there serves other devices.
        assert interpolate_mixing(initial_mixing((2, 3, 4)), (2, 3, 4), (1, 2, 4)).sum() > 0


@pytest.mark.parametrize("init", INITS)
def test_columns_sum_to_one_with_column_normalisation(init):
    matrix = initial_mixing((3, 4), init=init, normalization="column", dtype=torch.float64)
    assert torch.allclose(matrix.sum(dim=0), torch.ones(12, dtype=torch.float64))
    assert initial_mixing((1, 1), init=init, normalization="column").tolist() == [[1.0]]


def test_linear_row_is_the_papers_formula():
    distance = block_distances((4, 4))
    expected = 1 - distance / distance.amax(dim=1, keepdim=True)
    expected = expected / expected.sum(dim=1, keepdim=True)
    assert torch.allclose(initial_mixing((4, 4), dtype=torch.float64), expected)
    assert (expected == 0).sum() == 16  # the furthest block of each row


def test_linear_column_is_the_released_codes_formula():
    matrix = initial_mixing((3, 5, 10), normalization="column", dtype=torch.float64)
    distance = block_distances((3, 5, 10))
    expected = 1 - distance / distance.max()
    assert torch.allclose(matrix, expected / expected.sum(dim=0))
    assert (matrix == 0).sum() == 8  # opposite corners only
    assert 0.78 < matrix.sum(dim=1).min() < 0.79 and 1.17 < matrix.sum(dim=1).max() < 1.19


@pytest.mark.parametrize("init", ["linear", "cos", "exp", "gaussian", "local"])
def test_closer_blocks_never_weigh_less(init):
    row = initial_mixing((9,), init=init)[4]
    assert (row[4:].diff() <= 0).all() and (row[:5].diff() >= 0).all() and row[4] > row[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: initial_mixing((2,), init="triangle"), "choose one of linear, cos"),
        (lambda: BlockMixing((2,), normalization="rows"), "choose one of row, column"),
        (lambda: interpolate_mixing(torch.eye(4), (2, 2), (2,)), "number of axes"),
        (lambda: interpolate_mixing(torch.eye(4), (5,), (2,)), r"expected \(5, 5\)"),
        (
            lambda: interpolate_mixing(torch.eye(4), (2, 2), (0, 2)),
            r"to_block_grid=\(0, 2\): give one positive",
        ),
        (lambda: interpolate_mixing(torch.eye(4), (2, 2), (2.5, 2)), r"to_block_grid=\(2.5, 2\)"),
        (lambda: BlockMixing((2.5, 2)), r"block_grid=\(2.5, 2\): give one positive integer for each axis"),
    ],
)
def test_wrong_input_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


block_grids = st.integers(1, 3).flatmap(
    lambda axes: st.tuples(st.tuples(*[st.integers(1, 5)] * axes), st.tuples(*[st.integers(1, 5)] * axes))
)


@given(block_grids)
def test_interpolation_keeps_row_sums_and_sign(case):
    source, target = case
    matrix = initial_mixing(source, dtype=torch.float64)
    result = interpolate_mixing(matrix, source, target)
    assert result.shape == (math.prod(target),) * 2 and result.min() >= 0
    assert torch.allclose(result.sum(dim=1), torch.ones(len(result), dtype=torch.float64))
    uniform = initial_mixing(source, init="uniform", dtype=torch.float64)
    assert torch.allclose(interpolate_mixing(uniform, source, target).sum(dim=1), result.sum(dim=1))
    assert interpolate_mixing(matrix, source, source) is matrix


def test_interpolation_carries_each_row_to_its_place():
    matrix = torch.arange(16.0).view(4, 4)
    one_axis_gone = interpolate_mixing(matrix, (2, 2), (1, 2))
    # Rows: mean over the vanished axis. Columns: shares of the two key blocks are added up.
    rows = matrix.view(2, 2, 4).mean(dim=0)
    assert torch.allclose(one_axis_gone, rows[:, :2] + rows[:, 2:])
    heads = torch.stack([matrix, matrix.T])
    assert torch.allclose(interpolate_mixing(heads, (2, 2), (1, 2))[0], one_axis_gone)


def test_interpolated_locality_stays_local():
    smaller = interpolate_mixing(initial_mixing((8,), dtype=torch.float64), (8,), (4,))
    assert (smaller.argmax(dim=1) == torch.arange(4)).all()
    larger = interpolate_mixing(initial_mixing((3,), init="exp", dtype=torch.float64), (3,), (6,))
    assert (larger[0].diff() <= 0).all() and larger[0, 0] > larger[0, -1]


def test_module_is_learnable_or_frozen_shared_or_per_head():
    assert BlockMixing((2, 3)).weight.shape == (6, 6)
    per_head = BlockMixing((2, 3), num_heads=5, learnable=False)
    assert per_head.weight.shape == (5, 6, 6) and not per_head.weight.requires_grad
    assert torch.equal(per_head()[4], initial_mixing((2, 3)))


def test_smaller_effective_grid_interpolates_and_says_so_once(recwarn):
    mixing = BlockMixing((3, 2))
    assert mixing((3, 2)) is not None and not recwarn.list
    matrix = mixing((1, 2))
    assert matrix.shape == (2, 2) and torch.allclose(matrix.sum(dim=1), torch.ones(2))
    mixing((1, 2))
    assert [str(w.message) for w in recwarn.list] == [
        "the token grid holds only (1, 2) of the (3, 2) blocks: "
        "the mixing matrix is interpolated over the block centres"
    ]
    matrix.sum().backward()
    assert mixing.weight.grad is not None


def test_clip_bounds_the_weights_and_never_empties_a_row():
    mixing = BlockMixing((4,))
    with torch.no_grad():
        mixing.weight.copy_(
            torch.tensor(
                [[-1.0, 0.5, 2.0, 0.1], [-3.0, -1.0, -2.0, -4.0], [0, 0, 0, 0], [0.1, 0.2, 0.3, 0.4]]
            )
        )
    before = mixing.weight
    mixing.clip_()
    assert mixing.weight is before
    assert mixing.weight.tolist() == [
        [0.0, 0.5, 1.0, pytest.approx(0.1)],
        [0.0, 0.25, 0.0, 0.0],
        [0.25, 0.0, 0.0, 0.0],
        pytest.approx([0.1, 0.2, 0.3, 0.4]),
    ]
    assert mixing.occupancy().item() == pytest.approx(8 / 16)


def test_clip_mixings_leaves_frozen_ones_alone_and_reports_the_mean():
    model = torch.nn.ModuleList([BlockMixing((4,)), BlockMixing((1,)), BlockMixing((2,), learnable=False)])
    with torch.no_grad():
        for mixing in model:
            mixing.weight.fill_(-0.5)
    mixings = learnable_mixings(model)
    clip_mixings(mixings)
    occupancy = mean_occupancy(mixings)
    assert occupancy.ndim == 0 and occupancy.item() == pytest.approx(12 / 16)
    assert model[1].weight.item() == 1.0 and (model[2].weight == -0.5).all()
    assert learnable_mixings(torch.nn.Linear(2, 2)) == [] and mean_occupancy([]) is None


def test_clipping_together_equals_clipping_each():
    torch.manual_seed(0)
    mixings = [BlockMixing((2, 2), num_heads=heads) for heads in (None, 3, None, 3)]
    with torch.no_grad():
        for mixing in mixings:
            mixing.weight.uniform_(-1.5, 1.0)
            mixing.weight[..., 0, :] -= 2  # a row that would be empty
    expected = [copy.deepcopy(mixing).clip_().weight for mixing in mixings]
    clip_mixings(mixings)
    assert all(torch.equal(mixing.weight, weight) for mixing, weight in zip(mixings, expected, strict=True))


def test_loading_never_clips():
    mixing = BlockMixing((2,))
    outside = torch.tensor([[-0.5, 2.0], [0.3, 1.5]])
    mixing.load_state_dict({"weight": outside})
    assert torch.equal(mixing(), outside)


@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.to(torch.bfloat16)])
def test_casting_the_model_never_rounds_the_coefficients(cast):
    model = torch.nn.Sequential(BlockMixing((3, 4)), torch.nn.Linear(2, 2))
    cast(model)
    assert model[1].weight.dtype != torch.float32
    assert model[0].weight.dtype == torch.float32 and torch.equal(model[0](), initial_mixing((3, 4)))
    assert model.double()[0].weight.dtype == torch.float64 and model[0]().dtype == torch.float32


def test_meta_construction_and_materialisation():
    with torch.device("meta"):
        mixing = BlockMixing((2, 2))
    mixing.to_empty(device="cpu").reset_parameters()
    assert torch.equal(mixing(), initial_mixing((2, 2)))
