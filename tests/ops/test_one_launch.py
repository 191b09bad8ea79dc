"""The forward pass of the states form in one launch equals its definition, whatever the order of its programs."""

import pytest
import torch

from mhla_diffusion.mixing import initial_mixing
from mhla_diffusion.ops import mhla_attention
from mhla_diffusion.ops.rotation import GridRope
from mhla_diffusion.ops.states_kernels import place_of
from mhla_diffusion.ops.triton_configs import ForwardConfig, override

SMALL = ForwardConfig(16, 1, 16, 64, 16, 1, 16, 1, 128, 4)  # several tiles of everything


@pytest.mark.parametrize("lines_per_round", [1, 4, 6])
@pytest.mark.parametrize("normalizer", ["paper", "none"])
@pytest.mark.parametrize("grid", [(5,), (6, 7), (3, 5, 7)])
def test_rounds_of_every_size_in_float32(make_call, grid, normalizer, lines_per_round):
    call = make_call(grid, (2, 3, 2)[: len(grid)], 12, heads=3, normalizer=normalizer)
    with override(forward=SMALL, lines_per_round=lines_per_round):
        call.check(call.run("triton", form="states"), 1e-5)


@pytest.mark.parametrize("dims", [(8, 20), (72, 72), (32, 32)])
def test_head_dims_in_float32(make_call, dims):
    call = make_call((6, 7), (2, 3), *dims)
    with override(forward=SMALL):
        call.check(call.run("triton", form="states"), 1e-5)


@pytest.mark.parametrize(
    "options",
    [{"as_table": True}, {"per_head": True}, {"key_blocks": (23, 4)}, {"rope": True, "normalizer": "none"}],
    ids=lambda options: "-".join(options),
)
def test_options_in_float32(make_call, options):
    call = make_call((6, 7), (2, 3), 16, **options)
    with override(forward=SMALL):
        call.check(call.run("triton", form="states"), 1e-5)


def test_long_blocks_in_chunks_in_float32(make_call):
    call = make_call((150,), (2,), 8)
    with override(forward=SMALL, chunk_count=4):
        call.check(call.run("triton", form="states"), 1e-5)


def test_everything_fused_in_float32(device):
    generator = torch.Generator().manual_seed(5)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(device)

    q, k, v, gate, local = (random(1, 15, 2, 16) for _ in range(5))
    options = {
        "grid": (3, 5), "block_grid": (2, 2), "normalizer": "none", "gate_bias": 1.2,
        "rope": GridRope(torch.rand(2, 8, generator=generator).to(device)),
    }  # fmt: skip
    steps = {"gate": gate, "local": local, "norm_weight": random(16)}
    steps |= {name: (random(2, 16), 1e-6) for name in ("query_norm", "key_norm")}
    with override(forward=SMALL):
        got = mhla_attention(q, k, v, initial_mixing((2, 2)).to(device), backend="triton", **options, **steps)
    exact = {name: double(x) for name, x in steps.items()}
    want = mhla_attention(
        *(x.double() for x in (q, k, v)), initial_mixing((2, 2)).to(device), backend="reference", **options, **exact
    )  # fmt: skip
    assert ((got - want).norm() / want.norm()) < 1e-5


def double(x):
    return (x[0].double(), x[1]) if isinstance(x, tuple) else x.double()


@pytest.mark.parametrize(
    ("lines", "group", "counts"), [(7, 2, (3, 4, 5)), (1, 1, (2, 1, 2)), (6, 6, (1, 2, 3))]
)
def test_a_program_waits_only_for_programs_with_smaller_tickets(lines, group, counts):
    """Every program of every line comes up exactly once, after all programs of its line's step before."""
    last = -(-lines // group) * group
    seen: dict[tuple[int, int], int] = {}
    found = set()
    for ticket in range(last * sum(counts)):
        step, line, item = (int(x) for x in place_of.fn(ticket, lines, group, *counts))
        assert 0 <= step < 3 and 0 <= line < last and 0 <= item < counts[step]
        assert step == 0 or seen[line, step - 1] == counts[step - 1]
        seen[line, step] = seen.get((line, step), 0) + 1
        found.add((step, line, item))
    assert len(found) == last * sum(counts)


@pytest.mark.gpu
@pytest.mark.parametrize("lines_per_round", [1, 3, 12])
@pytest.mark.parametrize("normalizer", ["paper", "none"])
def test_one_launch_gives_what_three_give_bit_for_bit_on_the_gpu(make_call, normalizer, lines_per_round):
    call = make_call(
        (21, 30, 50), (3, 5, 10), 128, batch=1, heads=12, normalizer=normalizer, rope=True, dtype=torch.bfloat16
    )  # fmt: skip
    tensors = call.tensors
    with torch.no_grad(), override(lines_per_round=lines_per_round):
        got = [mhla_attention(**tensors, backend="triton", form="states", **call.options) for _ in range(5)]
    with torch.no_grad(), override(forward=None):
        want = mhla_attention(**tensors, backend="triton", form="states", **call.options)
    for out in got:
        assert (out.float() - want.float()).norm() <= 2e-3 * want.float().norm()
        assert torch.equal(out, got[0])
