"""Angles that follow from the places of the tokens: the same as a table of them, on every backend."""

import pytest
import torch

from mhla_diffusion.mixing import initial_mixing
from mhla_diffusion.ops import GridRope, mhla_attention
from mhla_diffusion.ops.rotation import angle_tables, three_axes

BLOCKS = (2, 2, 3)


def frequencies(axes: int, dim: int) -> torch.Tensor:
    """Each pair follows one axis, the last pair all of them."""
    found = torch.zeros(axes, dim // 2)
    for pair in range(dim // 2):
        found[pair % axes, pair] = 100.0 ** (-pair / dim)
    found[:, -1] = 0.3
    return found


def tables(grid, turns, dtype=torch.float64):
    axes = (torch.arange(size, dtype=dtype, device=turns.device) for size in grid)
    places = torch.cartesian_prod(*axes).view(-1, len(grid))
    angle = places @ turns.to(dtype)
    return angle.cos(), angle.sin()


def arguments(grid, dim, dtype, device, batch=2, heads=2):
    generator = torch.Generator().manual_seed(3)
    count = torch.Size(grid).numel()
    tensors = [torch.randn(batch, count, heads, dim, generator=generator) for _ in range(4)]
    mixing = initial_mixing(BLOCKS[: len(grid)]) + 0.1
    leaves = [x.to(device, dtype).requires_grad_() for x in tensors[:3]] + [
        mixing.to(device).requires_grad_()
    ]
    return leaves, tensors[3].to(device, dtype)


def outcome(grid, dim, dtype, device, rope, **options):
    leaves, grad = arguments(grid, dim, dtype, device)
    out = mhla_attention(*leaves, grid=grid, block_grid=BLOCKS[: len(grid)], rope=rope, **options)
    return [out, *torch.autograd.grad(out, leaves, grad)]


@torch.no_grad()
def errors(got, want):
    return max(float((a.double().cpu() - b.cpu()).norm() / b.norm()) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", ["reference", "eager", "triton"])
@pytest.mark.parametrize("grid", [(13,), (4, 6), (5, 7), (3, 5, 7)])
def test_places_give_the_angles_of_a_table_in_float32(device, grid, backend):
    turns = frequencies(len(grid), 16)
    want = outcome(grid, 16, torch.float64, "cpu", tables(grid, turns), backend="reference")
    got = outcome(grid, 16, torch.float32, device, GridRope(turns.to(device)), backend=backend)
    assert errors(got, want) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [32, 72, 128])
@pytest.mark.parametrize("normalizer", ["paper", "none"])
def test_places_in_half_precision_on_the_gpu(dtype, dim, normalizer):
    if dtype == torch.float16 and normalizer == "none":
        normalizer = "paper"
    grid, turns = (11, 30, 52), frequencies(3, dim)
    want = outcome(
        grid,
        dim,
        torch.float64,
        "cuda",
        tables(grid, turns.cuda()),
        normalizer=normalizer,
        backend="reference",
    )
    got = outcome(grid, dim, dtype, "cuda", GridRope(turns.cuda()), normalizer=normalizer, backend="triton")
    assert errors(got, [x.cpu() for x in want]) < 1e-2


@pytest.mark.gpu
def test_angles_far_from_the_origin_on_the_gpu():
    """A thousand radians: the approximate sine still has the angle to 1e-4."""
    grid, turns = (1000,), torch.ones(1, 16)
    q, k, v = torch.randn(3, 1, 1000, 2, 32, device="cuda", dtype=torch.bfloat16)
    call = {"grid": grid, "block_grid": (4,), "normalizer": "none"}
    mixing = initial_mixing((4,)).cuda()
    want = mhla_attention(
        *(x.double() for x in (q, k, v)),
        mixing.double(),
        backend="reference",
        rope=GridRope(turns.cuda()),
        **call,
    )
    got = mhla_attention(q, k, v, mixing, rope=GridRope(turns.cuda()), backend="triton", **call)
    assert float((got.double() - want).norm() / want.norm()) < 1e-2


def test_fewer_axes_get_leading_ones():
    turns = torch.rand(2, 4)
    padded = three_axes(turns)
    assert padded.shape == (3, 4) and torch.equal(padded[1:], turns) and not padded[0].any()
    assert three_axes(turns) is padded  # kept as long as the frequencies are unchanged
    turns.zero_()
    assert not three_axes(turns).any()
    assert three_axes(padded) is padded


def test_tables_are_kept(make_call):
    from mhla_diffusion.ops.partition import grid_partition

    turns = three_axes(torch.rand(2, 4))
    part = grid_partition((4, 6), (2, 2), 24, None)
    assert angle_tables((turns, None), part)[0] is angle_tables((turns, None), part)[0]
    assert angle_tables(None, part) is None


def test_no_more_tables_are_kept_than_a_program_comes_back_to():
    from mhla_diffusion.ops.derived import _KEPT, MOST
    from mhla_diffusion.ops.partition import grid_partition

    turns = three_axes(torch.rand(2, 4))
    parts = [grid_partition((rows, 6), (2, 2), 6 * rows, None) for rows in range(2, 4 + MOST)]
    made = [angle_tables((turns, None), part) for part in parts]
    assert len(_KEPT[turns][1]) == MOST
    assert angle_tables((turns, None), parts[-1])[0] is made[-1][0]
    assert angle_tables((turns, None), parts[0])[0] is not made[0][0]  # made anew, and equal
    assert torch.equal(angle_tables((turns, None), parts[0])[0], made[0][0])


def test_what_does_not_fit_is_named(device):
    q = torch.randn(1, 24, 2, 8, device=device)
    mixing = initial_mixing((2, 2)).to(device)
    options = {"grid": (4, 6), "block_grid": (2, 2)}
    with pytest.raises(ValueError, match=r"frequencies of shape \(3, 4\).*give \(2, 4\)"):
        mhla_attention(q, q, q, mixing, rope=GridRope(torch.ones(3, 4, device=device)), **options)
    table = torch.arange(24, device=device).view(4, 6)
    with pytest.raises(ValueError, match="pass grid= and block_grid="):
        mhla_attention(q, q, q, mixing, table, rope=GridRope(torch.ones(2, 4, device=device)))


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_one_graph(device, backend):
    turns = GridRope(frequencies(2, 16).to(device))

    def call(q, k, v, mixing):
        return mhla_attention(q, k, v, mixing, grid=(4, 6), block_grid=(2, 2), rope=turns, backend=backend)

    (q, k, v, mixing), _ = arguments((4, 6), 16, torch.float32, device)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(q, k, v, mixing), call(q, k, v, mixing), atol=1e-5)


@pytest.mark.parametrize("grid", [(4, 6), (3, 5, 7)])
def test_frequencies_may_be_learned_in_plain_torch(device, grid):
    """The kernels have no gradient for them, and say so."""
    turns = frequencies(len(grid), 16).to(device)
    options = {"grid": grid, "block_grid": BLOCKS[: len(grid)], "normalizer": "none"}

    def learned(dtype, backend):
        leaf = turns.to(dtype, copy=True).requires_grad_()
        leaves, grad = arguments(grid, 16, dtype, device)
        out = mhla_attention(*leaves, **options, rope=GridRope(leaf), backend=backend)
        return torch.autograd.grad(out, leaf, grad)

    (want,) = learned(torch.float64, "reference")
    assert errors(learned(torch.float32, "eager"), [want]) < 1e-4
    (leaves, grad), moved = arguments(grid, 16, torch.float64, device), []
    for step in (1e-6, -1e-6):
        nudged = turns.double()
        nudged[0, -1] += step
        out = mhla_attention(*leaves, **options, rope=tables(grid, nudged), backend="reference")
        moved.append((out * grad).sum())
    assert torch.allclose((moved[0] - moved[1]) / 2e-6, want[0, -1], rtol=1e-5)
    with pytest.raises(ValueError, match="rope requires a gradient, and the Triton kernels compute none"):
        learned(torch.float32, "triton")


@torch.no_grad()
def test_learned_frequencies_may_change_without_a_trace(device):
    turns = torch.nn.Parameter(frequencies(2, 16).to(device))
    leaves, _ = arguments((4, 6), 16, torch.float32, device)

    def out():
        return mhla_attention(
            *leaves, grid=(4, 6), block_grid=BLOCKS[:2], rope=GridRope(turns), backend="eager"
        )

    before = out()
    turns.data.mul_(2)
    assert not torch.allclose(out(), before)
