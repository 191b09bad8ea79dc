"""Factors against the dense float64 definitions, and figures against theirs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusion.blocks import block_table
from mhla_diffusion.evaluation.diagnostics.entropy import row_entropy
from mhla_diffusion.evaluation.diagnostics.matrices import MixedMatrix, SoftmaxMatrix
from mhla_diffusion.evaluation.diagnostics.spectrum import of_singular_values, spectrum
from mhla_diffusion.mixing import initial_mixing
from mhla_diffusion.ops import mhla_attention


def mixed(grid=(7, 9), blocks=(3, 2), width=5, seed=0, signed=False) -> tuple[MixedMatrix, torch.Tensor]:
    """Factors of a ragged partition, and the same matrix written out."""
    draw = torch.Generator().manual_seed(seed)
    tokens = math.prod(grid)
    q, k = (torch.randn(tokens, width, generator=draw, dtype=torch.float64) for _ in range(2))
    if not signed:
        q, k = q.relu() + 1e-6, k.relu() + 1e-6
    table = block_table(grid, blocks)
    count = len(table)
    mixing = initial_mixing(blocks, dtype=torch.float64) + 0.05 * torch.rand(
        count, count, generator=draw, dtype=torch.float64
    )
    denominator = 1 + torch.rand(tokens, generator=draw, dtype=torch.float64)
    dense = torch.empty(tokens, tokens, dtype=torch.float64)
    owner = {int(token): b for b, row in enumerate(table) for token in row if token >= 0}
    for i in range(tokens):
        for j in range(tokens):
            dense[i, j] = mixing[owner[i], owner[j]] * (q[i] @ k[j]) / denominator[i]
    return MixedMatrix(q, k, mixing, table, denominator), dense


def softmax(tokens=40, width=6, seed=0) -> tuple[SoftmaxMatrix, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k = (2 * torch.randn(tokens, width, generator=draw, dtype=torch.float64) for _ in range(2))
    return SoftmaxMatrix(q, k, width**-0.5), torch.softmax(q @ k.T * width**-0.5, dim=1)


CASES = {
    "mhla": mixed(),
    "linear": mixed(blocks=(1, 1)),
    "signed": mixed(signed=True),
    "wide head": mixed(grid=(6, 6), blocks=(3, 3), width=12),  # blocks of fewer tokens than channels
    "video": mixed(grid=(3, 4, 5), blocks=(2, 2, 2)),
    "softmax": softmax(),
}


@pytest.fixture(params=CASES, name="case")
def _case(request):
    return CASES[request.param]


def test_rows_and_products_are_those_of_the_dense_matrix(case, monkeypatch):
    matrix, dense = case
    monkeypatch.setattr("mhla_diffusion.evaluation.diagnostics.matrices.TILE_NUMBERS", 7 * matrix.tokens)
    ids = torch.tensor([3, 0, len(dense) - 1])
    x = torch.randn(len(dense), 4, dtype=torch.float64)
    torch.testing.assert_close(matrix.rows(ids), dense[ids], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(matrix.times(x), dense @ x, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(matrix.transposed_times(x), dense.T @ x, rtol=1e-11, atol=1e-12)


def test_the_core_has_the_singular_values_of_the_dense_matrix(case):
    matrix, dense = case
    wanted = torch.linalg.svdvals(dense)
    found = torch.linalg.svdvals(matrix.core())[: len(wanted)]
    assert matrix.core().shape == (matrix.core_size, matrix.core_size)
    torch.testing.assert_close(found, wanted[: len(found)], rtol=1e-9, atol=1e-14 * float(wanted[0]))
    assert float(wanted[len(found) :].abs().sum()) < 1e-12 * float(wanted[0])
    assert int(torch.linalg.matrix_rank(dense)) <= matrix.rank_bound <= len(dense)


def test_sums_of_powers_are_exact(case):
    matrix, dense = case
    s = torch.linalg.svdvals(dense)
    assert matrix.squares() == pytest.approx(float((s**2).sum()), rel=1e-12)
    if matrix.fourth_powers() is not None:
        assert matrix.fourth_powers() == pytest.approx(float((s**4).sum()), rel=1e-12)


def test_figures_follow_their_definitions(case):
    matrix, dense = case
    s = torch.linalg.svdvals(dense)
    p = s / s.sum()
    found = spectrum(matrix, threshold=1e-4, thresholds=(0.1,))
    assert found.rank == int((s > 1e-4 * s[0]).sum()) and found.ranks == {0.1: int((s > 0.1 * s[0]).sum())}
    assert found.effective_rank == pytest.approx(math.exp(-float((p * p.clamp(min=1e-300).log()).sum())))
    assert found.participation_ratio == pytest.approx(float((s**2).sum() ** 2 / (s**4).sum()))
    assert found.stable_rank == pytest.approx(float((s**2).sum() / s[0] ** 2))
    assert found.errors == {} and found.largest == pytest.approx(float(s[0]))


def test_estimates_lie_within_their_stated_errors(case):
    matrix, _ = case
    exact = spectrum(matrix, threshold=1e-2, thresholds=())
    found = spectrum(matrix, threshold=1e-2, thresholds=(), exact_limit=1, probes=64, steps=40)
    assert found.stable_rank == pytest.approx(exact.stable_rank, rel=1e-9)
    for name, error in found.errors.items():
        assert abs(getattr(found, name) - getattr(exact, name)) <= 4 * error + 1e-6 * matrix.tokens, name
        assert error < 0.1 * getattr(exact, name), name
    assert "64 probes" in found.method


def test_an_estimate_of_a_matrix_that_is_nearly_of_rank_one_does_not_drown():
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.rand(400, 16, generator=draw) + 0.5 for _ in range(2))
    table = block_table((20, 20), (4, 5))
    matrix = MixedMatrix(q, k, initial_mixing((4, 5)), table, torch.full((400,), 400.0))
    exact = spectrum(matrix, threshold=1e-4)
    found = spectrum(matrix, threshold=1e-4, exact_limit=1, probes=8, steps=50)
    assert exact.stable_rank < 1.5 and exact.rank > 150
    for name in ("rank", "effective_rank"):
        assert found.errors[name] < 0.05 * getattr(exact, name)
        assert getattr(found, name) == pytest.approx(getattr(exact, name), rel=0.06), name


def test_entropy_is_that_of_the_dense_rows(case, monkeypatch):
    matrix, dense = case
    monkeypatch.setattr("mhla_diffusion.evaluation.diagnostics.matrices.TILE_NUMBERS", 7 * matrix.tokens)
    p = dense.abs() / dense.abs().sum(dim=1, keepdim=True)
    wanted = -(p * p.clamp(min=1e-300).log()).sum(dim=1)
    found = row_entropy(matrix)
    assert found.mean == pytest.approx(float(wanted.mean()), rel=1e-12)
    assert found.std == pytest.approx(float(wanted.std()), rel=1e-9)
    assert (found.rows, found.empty, found.error) == (len(dense), 0, 0.0)
    assert found.relative == pytest.approx(found.mean / math.log(len(dense)))
    assert found.negative == pytest.approx(
        float((-dense.clamp(max=0)).sum(1).div(dense.abs().sum(1)).mean()), abs=1e-15
    )
    sampled = row_entropy(matrix, max_rows=25)
    assert abs(sampled.mean - found.mean) < 5 * sampled.error and sampled.rows == 25


def test_rows_of_the_operator_sum_to_one_and_give_its_output():
    grid, blocks, width = (6, 7), (2, 3), 8
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 42, 1, width, generator=draw, dtype=torch.float64) for _ in range(3))
    mixing = initial_mixing(blocks, dtype=torch.float64)
    out = mhla_attention(q, k, v, mixing, grid=grid, block_grid=blocks, backend="reference")
    qf, kf = q[0, :, 0].relu() + 1e-6, k[0, :, 0].relu() + 1e-6
    table = block_table(grid, blocks)
    whole = MixedMatrix(qf, kf, mixing, table, torch.ones(42))
    matrix = MixedMatrix(qf, kf, mixing, table, whole.times(torch.ones(42, 1, dtype=torch.float64))[:, 0])
    ones = matrix.times(torch.ones(42, 1, dtype=torch.float64))
    torch.testing.assert_close(ones, torch.ones_like(ones))
    torch.testing.assert_close(matrix.times(v[0, :, 0]), out[0, :, 0], rtol=1e-5, atol=1e-6)


def test_a_collapsed_mixing_is_found_by_its_bound():
    matrix, _ = mixed(grid=(8, 8), blocks=(4, 4), width=2)
    flat = MixedMatrix(matrix.q, matrix.k, torch.ones(16, 16), matrix.table, torch.ones(64))
    assert flat.rank_bound == 32 and flat.mixing_rank_bound() == 2
    assert spectrum(flat).rank <= 2 < spectrum(matrix).rank <= 32
    draw = torch.Generator().manual_seed(0)
    one = torch.rand(16, 1, generator=draw) @ torch.rand(
        1, 16, generator=draw
    )  # of rank 1, but for float32's rounding
    assert MixedMatrix(matrix.q, matrix.k, one, matrix.table, torch.ones(64)).mixing_rank_bound() == 2


def test_a_layer_that_attends_to_nothing_has_rank_zero():
    matrix = MixedMatrix(
        torch.zeros(4, 2), torch.zeros(4, 2), torch.ones(1, 1), block_table((4,), (1,)), torch.ones(4)
    )
    assert spectrum(matrix).rank == 0 and row_entropy(matrix).empty == 4


@given(st.integers(1, 60), st.integers(0, 5))
@settings(max_examples=15, deadline=None)
def test_soft_ranks_lie_between_one_and_the_count(count, seed):
    s = torch.rand(count, generator=torch.Generator().manual_seed(seed)) + 0.01
    found = of_singular_values(s, 1e-6)
    for value in (found.effective_rank, found.participation_ratio, found.stable_rank):
        assert 1 - 1e-9 <= value <= count * (1 + 1e-9)
    assert found.rank == count
    same = of_singular_values(torch.full((count,), 0.3), 1e-6)
    assert same.effective_rank == pytest.approx(count) and same.participation_ratio == pytest.approx(count)


@pytest.mark.parametrize("threshold", [0, 1e-9, 1.0, float("nan")])
def test_thresholds_that_mean_nothing_are_refused(threshold):
    with pytest.raises(ValueError, match="rank threshold"):
        spectrum(softmax()[0], threshold=threshold)


def test_what_is_not_finite_is_refused():
    matrix, _ = softmax()
    matrix.q[0] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        spectrum(matrix)
    with pytest.raises(ValueError, match="at least 2"):
        row_entropy(matrix, max_rows=1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_figures_are_the_same_on_a_gpu(name):
    matrix, _ = CASES[name]
    if isinstance(matrix, SoftmaxMatrix):
        there = SoftmaxMatrix(matrix.q.cuda(), matrix.k.cuda(), 1.0)
    else:
        parts = (matrix.q, matrix.k, matrix.mixing, matrix.table, torch.ones(matrix.tokens))
        there = MixedMatrix(*(part.cuda() for part in parts))
    for options in ({}, {"exact_limit": 1, "probes": 8, "steps": 20}):
        ours, theirs = spectrum(matrix, **options), spectrum(there, **options)
        assert theirs.effective_rank == pytest.approx(ours.effective_rank, rel=1e-6)
        assert theirs.rank == pytest.approx(ours.rank, rel=1e-6)
    assert row_entropy(there, max_rows=20).mean == pytest.approx(
        row_entropy(matrix, max_rows=20).mean, rel=1e-9
    )
