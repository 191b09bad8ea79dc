"""The dual form against the float64 reference and against the states form, and the rule that chooses between them."""

import pytest
import torch

from mhla_diffusion.mixing import initial_mixing
from mhla_diffusion.ops import mhla_attention, triton_configs
from mhla_diffusion.ops.dispatch import dual_obstacle, form_costs
from mhla_diffusion.ops.partition import grid_partition
from mhla_diffusion.ops.registration import (
    mhla_dual,
    mhla_dual_backward,
    mhla_dual_output,
    mhla_forward,
    mhla_forward_output,
)

pytestmark = pytest.mark.usefixtures("poisoned_buffers")


GRIDS = [
    ((1,), (1,)),
    ((7,), (3,)),
    ((4,), (4,)),
    ((16,), (2,)),  # runs of 8 slots share a coefficient
    ((4, 8), (1, 2)),  # runs of 16
    ((2, 4, 6), (1, 2, 1)),  # 24 tokens in a block: runs of 8
    ((3, 5), (2, 2)),
    ((2, 3, 5), (1, 2, 3)),
]


@pytest.mark.parametrize("normalizer", ["paper", "none"])
@pytest.mark.parametrize(("grid", "block_grid"), GRIDS)
def test_grids(make_call, grid, block_grid, normalizer):
    call = make_call(grid, block_grid, 8, 12, batch=1, normalizer=normalizer)
    call.check(call.run("triton", form="dual"), 1e-5)


@pytest.mark.parametrize("dim", [12, 32, 72])
@pytest.mark.parametrize("grid", [(16,), (15,)])
def test_head_dims_with_rotation(make_call, dim, grid):
    call = make_call(grid, (2,), dim, batch=1, heads=1, rope=True, normalizer="none")
    call.check(call.run("triton", form="dual"), 1e-5)


def test_a_head_dim_in_two_parts_with_a_denominator(make_call):
    call = make_call((16,), (2,), 72, 40, batch=1, heads=1)
    call.check(call.run("triton", form="dual"), 1e-5)


@pytest.mark.parametrize(("grid", "block_grid"), [((16, 3), (2, 1)), ((40,), (1,)), ((10, 8), (5, 1))])
def test_more_tokens_than_a_tile_and_matrices_per_head(make_call, grid, block_grid):
    call = make_call(grid, block_grid, 8, per_head=True)
    call.check(call.run("triton", form="dual"), 1e-5)


def test_a_table_and_other_blocks_for_the_keys(make_call):
    call = make_call((3, 5), (2, 2), 8, batch=1, as_table=True)
    call.check(call.run("triton", form="dual"), 1e-5)
    call = make_call((3, 3), (2, 2), 8, 4, batch=1, key_blocks=(7, 3))
    call.check(call.run("triton", form="dual"), 1e-5)


def test_offsets_of_64_bits(make_call, monkeypatch):
    from mhla_diffusion.ops import dual_launch

    monkeypatch.setattr(dual_launch, "FAR", 0)
    for grid in ((16,), (5,)):
        call = make_call(grid, (2,), 8, batch=1)
        with triton_configs.override(replay=False):
            call.check(call.run("triton", form="dual"), 1e-5)


def test_more_pairs_of_runs_than_32_bits_count_are_the_states_forms():
    from mhla_diffusion.ops.dual_launch import has_dual_backward

    many, few = (
        grid_partition((tokens,), (8,), tokens, torch.device("cpu")) for tokens in (1 << 19, 1 << 18)
    )
    assert has_dual_backward(few, few)
    assert not has_dual_backward(many, few) and not has_dual_backward(few, many)


def test_fused_steps_around_it(make_call):
    call = make_call((3, 5), (2, 2), 8, batch=1, epilogue=True)
    truth = call.run("reference", torch.float64)["out"]
    with torch.no_grad():
        out = mhla_attention(**call.tensors, **call.options, backend="triton", form="dual")
    assert (out - truth).norm() <= 1e-5 * truth.norm()


def test_runs_are_deterministic_and_strides_free(make_call):
    call = make_call((16,), (2,), 8, batch=1)
    first = call.run("triton", form="dual")
    for name in ("q", "k", "v"):
        call.tensors[name] = call.tensors[name].transpose(1, 2).contiguous().transpose(1, 2)
    again = call.run("triton", form="dual")
    assert all(torch.allclose(first[name], again[name], rtol=1e-5, atol=1e-6) for name in first)
    assert all(torch.equal(x, again[name]) for name, x in call.run("triton", form="dual").items())


@pytest.mark.filterwarnings("default:the MHLA kernels:UserWarning")
def test_where_no_configuration_fits_torch_takes_over(make_call, monkeypatch, recwarn):
    from triton.runtime.errors import OutOfResources

    from mhla_diffusion.ops import triton_launch

    def never_fits(*args, **constants):
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(triton_launch, "_step", {})
    monkeypatch.setattr(triton_launch, "_warned", set())
    monkeypatch.setattr(triton_launch, "launch", never_fits)
    call = make_call((16,), (2,), 8, 12, batch=1)
    with triton_configs.override(replay=False):
        call.check(call.run("triton", form="dual"), 1e-5)
    (message,) = [str(w.message) for w in recwarn.list if "MHLA" in str(w.message)]
    assert message.endswith("continuing with plain torch")


def test_what_the_dual_form_cannot_take_is_said(device):
    q = torch.ones(1, 4, 1, 8, device=device)
    common = {"grid": (4,), "block_grid": (2,), "backend": "triton", "form": "dual"}
    with pytest.raises(
        ValueError, match="divides by those without rotation; use form='auto' or 'states'"
    ) as error:
        mhla_attention(q, q, q, initial_mixing((2,)).to(device), rope=(q[0, :, 0, :4],) * 2, **common)
    assert "\n" not in str(error.value)
    q = torch.ones(1, 4, 1, 136, device=device)
    with pytest.raises(ValueError, match="up to 128, not 136"):
        mhla_attention(q, q, q, initial_mixing((2,)).to(device), **common)


@pytest.mark.parametrize("dim", [8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128])
def test_head_dims_are_padded_little(dim):
    first, rest = triton_configs.head_parts(dim)
    assert (
        first + rest >= dim
        and first >= 16
        and rest in (0, 16, 32, 64)
        and first + rest <= max(16, dim * 1.34)
    )


def form_of(shape, grid, block_grid):
    q = torch.empty(shape, device="meta", dtype=torch.bfloat16)
    part = grid_partition(grid, block_grid, shape[1], q.device)
    assert not dual_obstacle(q, q, None, "paper", part, part)
    costs = form_costs(q, q, part, part, 2)
    return min(costs, key=costs.get)


def test_the_cost_rule_at_the_shapes_it_must_get_right():
    assert form_of((32, 256, 16, 72), (16, 16), (4, 4)) == "dual"
    assert form_of((1, 31500, 12, 128), (21, 30, 50), (3, 5, 10)) == "states"
    assert form_of((2, 16384, 36, 32), (128, 128), (8, 8)) == "states"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(dim, torch.bfloat16) for dim in (32, 64, 72, 128)] + [(32, torch.float16), (32, torch.float32)],
)
@pytest.mark.parametrize(("grid", "block_grid"), [((16, 16), (4, 4)), ((32, 32), (4, 4)), ((13, 17), (3, 4))])
def test_both_forms_on_the_gpu(make_call, grid, block_grid, dim, dtype):
    call = make_call(grid, block_grid, dim, dtype=dtype)
    for form in ("dual", "states"):
        call.check(call.run("triton", form=form), 1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("grid", [(5,), (16,)])
def test_opcheck(device, grid):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, *grid, 2, 8, generator=generator).to(device).requires_grad_() for _ in range(3))
    mixing = initial_mixing((2,)).to(device).requires_grad_()
    layout = grid_partition(grid, (2,), grid[0], device).layout
    turns, options = (None,) * 4, (1e-6, 0.0, True, True, torch.float32, layout, layout, torch.float32)
    arguments = (q, k, v, mixing, None, None, *turns, *options)
    torch.library.opcheck(mhla_dual, arguments)
    out, den = mhla_dual(*arguments)
    tensors = [x.detach() for x in (torch.ones_like(out), q, k, v, mixing, out, den)]
    torch.library.opcheck(mhla_dual_backward, (*tensors, None, None, *turns, *options[:4], *options[5:]))
    alone = (*tensors[1:5], None, None, *turns, *options)
    torch.library.opcheck(mhla_dual_output, alone)
    assert torch.equal(mhla_dual_output(*alone), out)


def test_opcheck_of_the_fused_steps(device):
    q, k, v, gate = torch.randn(4, 1, 5, 2, 8, generator=torch.Generator().manual_seed(0)).to(device)
    layout = grid_partition((5,), (2,), 5, device).layout
    mixing = initial_mixing((2,)).to(device)
    arguments = (
        q,
        k,
        v,
        mixing,
        None,
        None,
        *(None,) * 4,
        1e-6,
        0.0,
        True,
        True,
        torch.float32,
        layout,
        layout,
    )
    fused = {
        "query_norm": torch.ones(2, 8, device=device), "key_norm": torch.ones(8, device=device), "gate": gate,
        "gate_bias": 1.0, "norm_weight": torch.ones(8, device=device),
    }  # fmt: skip
    torch.library.opcheck(mhla_forward, arguments, fused)
    torch.library.opcheck(mhla_forward_output, arguments, fused)
