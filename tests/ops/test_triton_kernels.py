"""The Triton kernels against the float64 reference: output and every gradient.

Without a GPU they run in float32 under Triton's interpreter, on tiny shapes. The tests marked `gpu` add half precision
and larger shapes.
"""

import pytest
import torch

from mhla_diffusion.evaluation.timing import peak_extra_bytes
from mhla_diffusion.mixing import initial_mixing
from mhla_diffusion.ops import GridRope, mhla_attention
from mhla_diffusion.ops.partition import Partition
from mhla_diffusion.ops.registration import triton_core
from mhla_diffusion.ops.states_launch import mix
from mhla_diffusion.ops.triton_configs import Config, MixConfig, override

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
all_dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "fp16", "bf16"])
half_dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


# An element that a kernel leaves unwritten shows.
pytestmark = pytest.mark.usefixtures("poisoned_buffers")

TINY = [
    ((1,), (1,), "paper"),
    ((1,), (1,), "none"),
    ((7,), (1,), "paper"),
    ((7,), (3,), "paper"),
    ((7,), (3,), "none"),
    ((4,), (4,), "paper"),  # one token in every block
    ((4, 4), (2, 2), "official"),
    ((3, 5), (2, 2), "paper"),
    ((2, 3, 5), (1, 2, 3), "paper"),
]


@pytest.mark.parametrize(("grid", "block_grid", "normalizer"), TINY)
def test_tiny_grids_in_float32(make_call, grid, block_grid, normalizer):
    call = make_call(grid, block_grid, 8, 12, batch=1, normalizer=normalizer)
    call.check(call.run("triton"), 1e-5)


@pytest.mark.parametrize("dim", [8, 12, 32, 64, 72, 128])
def test_head_dims_with_rotation_in_float32(make_call, dim):
    call = make_call((5,), (2,), dim, batch=1, heads=1, rope=True)
    call.check(call.run("triton"), 1e-5)


@pytest.mark.parametrize("normalizer", ["paper", "none", "official"])
@pytest.mark.parametrize("rope", [False, True])
def test_per_head_mixing_and_rotation_in_float32(make_call, normalizer, rope):
    call = make_call((2, 4), (2, 2), 8, normalizer=normalizer, per_head=True, rope=rope)
    call.check(call.run("triton"), 1e-5)


@pytest.mark.parametrize("rope", [False, True])
def test_rectangular_mixing_in_float32(make_call, rope):
    call = make_call((3, 3), (2, 2), 8, 4, batch=1, key_blocks=(7, 3), rope=rope)
    call.check(call.run("triton"), 1e-5)


def test_output_norm_gate_and_local_branch_in_float32(make_call):
    call = make_call((3, 3), (2, 2), 8, 12, batch=1, normalizer="none", epilogue=True)
    call.check(call.run("triton"), 1e-5)


def test_blocks_longer_than_a_run_of_tiles_in_float32(make_call):
    call = make_call((600,), (1,), 4, batch=1, heads=1)
    call.check(call.run("triton"), 1e-5)


def test_value_dims_wider_than_a_tile_in_float32(make_call):
    call = make_call((5,), (2,), 8, 80, batch=1, heads=1)
    call.check(call.run("triton"), 1e-5)


def test_transposed_views_in_float32(make_call):
    call = make_call((5,), (2,), 8, batch=1, rope=True)
    expected = call.run("triton")
    for name in ("q", "k", "v"):
        call.tensors[name] = call.tensors[name].transpose(1, 2).contiguous().transpose(1, 2)
    call.grad = call.grad.transpose(-1, -2).contiguous().transpose(-1, -2)
    for name, x in call.run("triton").items():
        # A GPU loads other strides in other widths, so its sums may differ in the last bit.
        assert torch.allclose(x, expected[name], rtol=1e-5, atol=1e-6), name


def test_runs_are_deterministic(make_call):
    call = make_call((5, 4), (2, 2), 16, rope=True)
    first, second = call.run("triton"), call.run("triton")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_ids_outside_the_sequence_are_padding_and_forgotten_tokens_read_zero(device):
    q, k, v = torch.randn(3, 1, 5, 1, 8, generator=torch.Generator().manual_seed(0)).to(device).unbind()
    q.requires_grad_()
    table = torch.tensor([[0, 1, 99], [-7, 2, 3]], device=device)  # token 4 is in no block
    part = Partition(table, 2, 3, 5, None, None, False, False)
    mixing = torch.tensor([[0.75, 0.25], [0.5, 0.5]], device=device)
    out = triton_core(q, k, v, mixing, part, part)
    clean = torch.tensor([[0, 1], [2, 3]], device=device)
    four = Partition(clean, 2, 2, 4, None, None, True, True)
    expected = triton_core(q[:, :4], k[:, :4], v[:, :4], mixing, four, four)
    assert torch.equal(out[:, :4], expected) and (out[:, 4] == 0).all()
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert torch.isfinite(gradient).all() and (gradient[:, 4] == 0).all()


# Tiles of 16, 32 and 64 tokens and runs of several tiles: each length of tile is a kernel of its own.
GPU_GRIDS = [
    ((1,), (1,)),
    ((7,), (3,)),
    ((16, 16), (4, 4)),
    ((14, 14), (4, 4)),
    ((6, 10, 13), (3, 5, 10)),
    ((5, 7, 11), (2, 3, 4)),
    ((13, 12), (3, 2)),
    ((16, 16), (1, 1)),
    ((20, 21), (1, 1)),
]


@pytest.mark.gpu
@all_dtypes
@pytest.mark.parametrize("normalizer", ["paper", "none"])
@pytest.mark.parametrize(("grid", "block_grid"), GPU_GRIDS)
def test_grids_on_the_gpu(make_call, grid, block_grid, normalizer, dtype):
    # Float16 without a denominator is only allowed with an output norm.
    epilogue = normalizer == "none"
    call = make_call(grid, block_grid, 64, dtype=dtype, normalizer=normalizer, epilogue=epilogue)
    call.check(call.run("triton"), TOLERANCE[dtype])


# The models gate, normalise and add the local branch to a float32 result of the kernels; the gradient that comes
# back is float32 as well. 16 x 16 tokens in 8 heads of 32 are the shipped pipeline's training step.
@pytest.mark.gpu
@half_dtypes
@pytest.mark.parametrize("normalizer", ["paper", "none"])
@pytest.mark.parametrize(("grid", "batch"), [((16, 16), 8), ((64, 64), 1)])
def test_the_models_epilogue_on_the_gpu(make_call, grid, batch, normalizer, dtype):
    call = make_call(
        grid, (4, 4), 32, batch=batch, heads=8, dtype=dtype, normalizer=normalizer, epilogue=True
    )
    call.check(call.run("triton"), TOLERANCE[dtype])


@pytest.mark.gpu
@half_dtypes
@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("branch", ["norm_weight", "gate", "local"])
def test_one_branch_after_the_core_on_the_gpu(make_call, branch, rope, dtype):
    call = make_call((16, 16), (4, 4), 32, heads=8, batch=8, dtype=dtype, rope=rope, epilogue=True)
    for name in {"norm_weight", "gate", "local"} - {branch}:
        del call.tensors[name]
    call.check(call.run("triton"), TOLERANCE[dtype])


@pytest.mark.gpu
@half_dtypes
def test_the_training_step_of_the_shipped_pipeline_on_the_gpu(make_call, dtype):
    call = make_call((16, 16), (4, 4), 32, heads=8, batch=8, dtype=dtype)
    call.check(call.run("triton"), TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(dim, dtype) for dim in (8, 12, 32, 64, 72, 128, 256) for dtype in (torch.float32, torch.bfloat16)]
    + [(64, torch.float16), (128, torch.float16)],
)
def test_head_dims_on_the_gpu(make_call, dim, dtype):
    call = make_call((24, 25), (2, 1), dim, dtype=dtype, rope=True, per_head=True)
    call.check(call.run("triton"), TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 128), (128, 32), (32, 256)])
def test_different_key_and_value_dims_on_the_gpu(make_call, dim, value_dim):
    call = make_call((14, 14), (4, 4), dim, value_dim, dtype=torch.bfloat16, key_blocks=(77, 6))
    call.check(call.run("triton"), 1e-2)


@pytest.mark.gpu
@half_dtypes
def test_the_released_denominator_on_the_gpu(make_call, dtype):
    call = make_call((16, 16), (4, 4), 64, dtype=dtype, normalizer="official")
    call.check(call.run("triton"), TOLERANCE[dtype])


@pytest.mark.gpu
@half_dtypes
def test_wans_default_size_on_the_gpu(make_call, dtype):
    call = make_call((21, 30, 52), (3, 5, 10), 128, batch=1, heads=2, dtype=dtype, rope=True)
    expected = call.run("eager", torch.float32)
    for name, x in call.run("triton").items():
        error = (x.double() - expected[name].double()).norm() / expected[name].double().norm()
        assert error <= 1e-2, f"{name}: {error:.2e}"


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("normalizer", ["paper", "none"])
@pytest.mark.parametrize("tokens", [40, 50, 64])
def test_whole_tiles_and_a_shorter_one_in_float32(make_call, tokens, normalizer, rope):
    """Blocks of 32 + 8, 32 + 18 and 32 + 32 tokens in tiles of 32: the first ends in a tile of 16."""
    tiles = dict.fromkeys(("summarise", "read_out", "query_gradients", "key_gradients"), Config(32, 16, 4, 1))
    call = make_call((tokens,), (1,), 8, batch=1, heads=1, normalizer=normalizer, rope=rope)
    with override(**tiles):
        call.check(call.run("triton", form="states"), 1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(5, 5), (20, 9), (30, 24), (33, 20)])
@pytest.mark.parametrize("per_head", [False, True])
def test_mixing_all_rows_in_a_program_in_float32(device, rows, columns, per_head):
    generator = torch.Generator().manual_seed(4)
    matrix = torch.rand(*([2] if per_head else []), rows, columns, generator=generator).to(device)
    states = torch.randn(1, 2, columns, 44, generator=generator).to(device)
    with override(mix=MixConfig(16, 16, 16, 4, 1, 16)):
        got = mix(matrix, states, states[..., :4], 11)
    want = matrix.double() @ states.double()
    assert ((got - want).norm() / want.norm()) < 1e-6


@pytest.mark.parametrize(
    ("rows", "columns", "config", "in_place"),
    [
        (20, 20, MixConfig(32, 16, 16, 4, 1), True),
        (20, 20, MixConfig(16, 16, 16, 4, 1, 16), True),
        (20, 20, MixConfig(16, 16, 16, 4, 1), False),  # two programs read a state
        (40, 40, MixConfig(16, 16, 16, 4, 1, 16), False),
        (5, 20, MixConfig(32, 16, 16, 4, 1), False),  # the result is smaller
    ],
)
def test_states_that_are_needed_no_more_may_be_overwritten(device, rows, columns, config, in_place):
    generator = torch.Generator().manual_seed(4)
    matrix = torch.rand(rows, columns, generator=generator).to(device)
    states = torch.randn(2, 2, columns, 44, generator=generator).to(device)
    want = matrix.double() @ states.double()
    kept = states.clone()
    with override(mix=config):
        got = mix(matrix, states, states[..., :4], 11, overwrite=True)
    assert ((got - want).norm() / want.norm()) < 1e-6
    assert (got.data_ptr() == states.data_ptr()) == in_place
    assert in_place or torch.equal(states, kept)


@pytest.mark.gpu
def test_without_gradients_the_states_are_held_once(device):
    """DiT-XL/2's shape at 512 px: 16 blocks."""
    q, k, v = (torch.randn(16, 1024, 16, 72, device=device).bfloat16() for _ in range(3))
    mixing = initial_mixing((4, 4)).float().to(device)

    def call():
        return mhla_attention(q, k, v, mixing, grid=(32, 32), block_grid=(4, 4), form="states")

    states = 16 * 16 * 16 * (72 * 72 + 72) * 2
    assert states <= peak_extra_bytes(call, device) < 1.3 * states


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [MixConfig(64, 128, 64, 8, 2), MixConfig(64, 256, 32, 4, 3), MixConfig(128, 128, 32, 8, 3, 64)]
)
def test_mixing_of_half_precision_states_on_the_gpu(config):
    matrix = torch.rand(150, 150, device="cuda")
    states = torch.randn(2, 3, 150, 16512, device="cuda").bfloat16()
    with override(mix=config):
        got = mix(matrix, states, states[..., :128], 128)
    want = matrix.double() @ states.double()
    assert ((got.double() - want).norm() / want.norm()) < 3e-3  # the result's own rounding is 1.7e-3


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
    with override(**dict.fromkeys(("summarise", "read_out"), Config(16, 16, 4, 1))):
        got = mhla_attention(q, k, v, initial_mixing((2, 2)).to(device), backend="triton", **options, **steps)
    exact = {name: double(x) for name, x in steps.items()}
    want = mhla_attention(
        *(x.double() for x in (q, k, v)), initial_mixing((2, 2)).to(device), backend="reference", **options, **exact
    )  # fmt: skip
    assert ((got - want).norm() / want.norm()) < 1e-5


def double(x):
    return (x[0].double(), x[1]) if isinstance(x, tuple) else x.double()
