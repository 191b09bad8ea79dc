"""Plain torch against the float64 reference: output and every gradient."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mhla_diffusion.blocks import block_table
from mhla_diffusion.mixing import initial_mixing
from mhla_diffusion.ops import mhla_attention

GRIDS = [
    ((1,), (1,)),
    ((7,), (1,)),
    ((7,), (3,)),
    ((7,), (7,)),  # one token in every block
    ((16, 16), (4, 4)),
    ((16, 16), (1, 1)),
    ((14, 14), (4, 4)),
    ((6, 10, 13), (3, 5, 10)),  # (21, 30, 52) cut down: the last axis is ragged as Wan's default width is
    ((5, 7, 11), (2, 3, 4)),
    ((1, 6, 10), (3, 2, 5)),  # one frame for three blocks of frames
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def is_even(grid, block_grid):
    return all(length % min(length, count) == 0 for length, count in zip(grid, block_grid, strict=True))


CASES = [
    (grid, block_grid, normalizer)
    for grid, block_grid in GRIDS
    for normalizer in ("paper", "none", "official")
    if normalizer != "official" or is_even(grid, block_grid)
]


@dtypes
@pytest.mark.parametrize(("grid", "block_grid", "normalizer"), CASES)
def test_grids_and_normalisers(make_call, grid, block_grid, normalizer, dtype):
    call = make_call(grid, block_grid, 16, 12, dtype=dtype, normalizer=normalizer)
    call.check(call.run("eager"), TOLERANCE[dtype])


@dtypes
@pytest.mark.parametrize("dim", [8, 12, 32, 64, 72, 128])
def test_head_dims_with_rotation_on_a_ragged_grid(make_call, dim, dtype):
    call = make_call((5, 7), (2, 3), dim, dtype=dtype, rope=True, as_table=True)
    call.check(call.run("eager"), TOLERANCE[dtype])


@dtypes
@pytest.mark.parametrize("normalizer", ["paper", "none", "official"])
@pytest.mark.parametrize("per_head", [False, True])
def test_rotation_and_per_head_mixing(make_call, normalizer, per_head, dtype):
    call = make_call((4, 6), (2, 3), 16, 24, dtype=dtype, normalizer=normalizer, per_head=per_head, rope=True)
    call.check(call.run("eager"), TOLERANCE[dtype])


@dtypes
@pytest.mark.parametrize("normalizer", ["paper", "none"])
@pytest.mark.parametrize("grid", [(4, 6), (5, 7)])
def test_output_norm_gate_and_local_branch(make_call, normalizer, grid, dtype):
    call = make_call(grid, (2, 3), 8, 12, dtype=dtype, normalizer=normalizer, epilogue=True)
    call.check(call.run("eager"), TOLERANCE[dtype])


@dtypes
@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_rectangular_mixing_for_cross_attention(make_call, rope, per_head, dtype):
    call = make_call((5, 6), (2, 3), 16, key_blocks=(11, 4), dtype=dtype, rope=rope, per_head=per_head)
    call.check(call.run("eager"), TOLERANCE[dtype])


def test_float64_is_computed_in_float64(make_call):
    call = make_call((5, 6), (2, 4), 8, dtype=torch.float64, rope=True)
    call.check(call.run("eager"), 1e-12)


def test_a_table_and_a_grid_give_the_same(make_call, device):
    for grid in ((4, 6), (5, 7)):
        call = make_call(grid, (2, 3), 8)
        table = block_table(grid, (2, 3)).to(device)
        other = call.run("eager", grid=None, block_grid=None, block_table=table)
        for name, x in call.run("eager").items():
            assert torch.allclose(x, other[name], atol=1e-5, rtol=1e-5), name


def test_one_block_is_plain_linear_attention():
    q, k, v = torch.randn(3, 2, 50, 3, 16, generator=torch.Generator().manual_seed(1))
    phi_q, phi_k = torch.relu(q.double()) + 1e-6, torch.relu(k.double()) + 1e-6
    out = torch.einsum("bnhd,bmhd,bmhe->bnhe", phi_q, phi_k, v.double())
    out = out / torch.einsum("bnhd,bmhd->bnh", phi_q, phi_k)[..., None]
    got = mhla_attention(q, k, v, initial_mixing((1, 1)), grid=(5, 10), block_grid=(1, 1))
    assert (got - out).norm() <= 1e-6 * out.norm()


def test_stock_sanas_numerics_where_no_feature_is_active():
    # Feature eps 0 and denominator eps 1e-15: a query without an active feature yields 0, others are unchanged.
    q, k, v = torch.randn(3, 1, 6, 1, 8, generator=torch.Generator().manual_seed(2))
    q[:, 2] = -1.0
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = mhla_attention(
        q, k, v, torch.ones(1, 1), grid=(6,), block_grid=(1,), feature_eps=0.0, denominator_eps=1e-15
    )
    assert (out[:, 2] == 0).all() and (out[:, 1] != 0).any()
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize(
    ("backend", "scale"),
    [
        ("eager", 1e-30),
        ("eager", 1e-20),
        ("eager", 1e20),
        ("eager", 1e30),
        ("triton", 1e-20),
        ("triton", 1e20),
    ],
)
def test_gradients_with_denominators_whose_square_leaves_float32(make_call, backend, scale):
    call = make_call((3, 5), (2, 2), 8)
    call.tensors["mixing"] *= scale
    result = call.run(backend)
    truth = call.run("reference", torch.float64)
    for name, want in truth.items():
        assert (result[name].double() - want).norm() <= 1e-5 * want.norm(), name


@pytest.mark.parametrize(
    "as_view", [lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x[:, :, :2]]
)
@pytest.mark.parametrize("grid", [(4, 4), (3, 5)])
def test_views_give_exactly_what_their_copies_give(as_view, grid):
    tokens = math.prod(grid)
    q, k, v = (
        as_view(x) for x in torch.randn(3, 1, tokens, 4, 8, generator=torch.Generator().manual_seed(3))
    )
    mixing = initial_mixing((2, 2))
    expected = mhla_attention(
        q.contiguous(), k.contiguous(), v.contiguous(), mixing, grid=grid, block_grid=(2, 2)
    )
    assert not v.is_contiguous()
    assert torch.equal(mhla_attention(q, k, v, mixing, grid=grid, block_grid=(2, 2)), expected)


grids = st.integers(1, 3).flatmap(
    lambda axes: st.tuples(st.tuples(*[st.integers(1, 6)] * axes), st.tuples(*[st.integers(1, 4)] * axes))
)


@given(grids, st.integers(0, 1000))
def test_any_grid_equals_the_reference(case, seed):
    grid, block_grid = case
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, math.prod(grid), 2, 6, generator=generator)
    blocks = len(block_table(grid, block_grid))
    mixing = torch.rand(blocks, blocks, generator=generator) + 0.1
    got = mhla_attention(q, k, v, mixing, grid=grid, block_grid=block_grid)
    table = block_table(grid, block_grid)
    truth = mhla_attention(q.double(), k.double(), v.double(), mixing, table, backend="reference")
    assert (got - truth).norm() <= 1e-5 * truth.norm()


@given(grids, st.integers(0, 1000))
def test_order_inside_a_block_does_not_matter(case, seed):
    grid, block_grid = case
    generator = torch.Generator().manual_seed(seed)
    tokens = math.prod(grid)
    q, k, v = torch.randn(3, 1, tokens, 2, 6, generator=generator, dtype=torch.float64)
    table = block_table(grid, block_grid)
    mixing = torch.rand(len(table), len(table), generator=generator) + 0.1
    out = mhla_attention(q, k, v, mixing, table)
    shuffled = table[:, torch.randperm(table.shape[1], generator=generator)]
    assert torch.allclose(mhla_attention(q, k, v, mixing, shuffled.contiguous()), out, rtol=1e-9, atol=1e-12)
    # Tokens that swap places inside their block swap their outputs and change nothing else.
    order = torch.arange(tokens)
    for row in table:
        ids = row[row >= 0]
        order[ids] = ids[torch.randperm(len(ids), generator=generator)]
    moved = mhla_attention(q[:, order], k[:, order], v[:, order], mixing, table)
    assert torch.allclose(moved, out[:, order], rtol=1e-9, atol=1e-12)


@given(grids, st.integers(2, 4))
def test_an_item_of_a_batch_equals_its_single_run(case, batch):
    grid, block_grid = case
    q, k, v = torch.randn(3, batch, math.prod(grid), 2, 6, generator=torch.Generator().manual_seed(batch))
    blocks = len(block_table(grid, block_grid))
    mixing = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(4)) + 0.1
    whole = mhla_attention(q, k, v, mixing, grid=grid, block_grid=block_grid)
    for i in range(batch):
        one = slice(i, i + 1)
        single = mhla_attention(q[one], k[one], v[one], mixing, grid=grid, block_grid=block_grid)
        assert torch.allclose(whole[one], single, rtol=1e-4, atol=1e-6)
