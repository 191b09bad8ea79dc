"""Steps fused into the Triton kernels, options of the states form: each against its definition in float64."""

import math

import pytest
import torch
from no_host_read import no_waiting_for_the_gpu

from mhla_diffusion.blocks import block_table
from mhla_diffusion.ops import derived, mhla_attention, triton_configs
from mhla_diffusion.ops.derived import interleaved_angles

pytestmark = pytest.mark.usefixtures("poisoned_buffers")

GATE_BIAS = 1.2784645


@pytest.fixture
def inputs(device):
    def make(grid=(3, 5), dim=8, value_dim=12, heads=2, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, generator=generator).to(device, dtype)

        tokens = math.prod(grid)
        q, k = (random(2, tokens, heads, dim) for _ in range(2))
        v, gate, local = (random(2, tokens, heads, value_dim) for _ in range(3))
        mixing = torch.rand(4, 4, generator=generator).to(device)
        return {"q": q, "k": k, "v": v, "mixing": mixing}, {
            "query_norm": (1 + 0.1 * random(heads, dim), 1e-6),
            "key_norm": (1 + 0.1 * random(dim), 1e-5),
            "norm_weight": 1 + 0.1 * random(value_dim),
            "gate": gate,
            "local": local,
        }

    return make


def check(tensors, options, tolerance=1e-5, backend="triton", grid=(3, 5), **more) -> None:
    common = {"grid": grid, "block_grid": (2, 2), "normalizer": "none", **more}

    def double(x):
        if isinstance(x, tuple):
            return tuple(map(double, x))
        return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    truth = mhla_attention(
        **{n: double(x) for n, x in tensors.items()},
        **{n: double(x) for n, x in {**options, **common}.items()},
        backend="reference",
    )
    out = mhla_attention(**tensors, **options, **common, backend=backend)
    error = (out.double() - truth).norm() / truth.norm()
    assert out.dtype == tensors["q"].dtype and error <= tolerance, f"relative error {error:.2e}"


EACH = ["query_norm", "key_norm", "norm_weight", "gate", "local"]


@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("names", [*[[name] for name in EACH], EACH], ids=lambda names: "+".join(names))
@pytest.mark.parametrize("normalizer", ["none", "paper"])
def test_each_step_alone_and_all_together(inputs, names, normalizer, backend):
    tensors, options = inputs()
    check(tensors, {name: options[name] for name in names}, normalizer=normalizer, backend=backend)


@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_the_gate_may_be_activated_in_the_store(inputs, backend):
    tensors, options = inputs()
    check(tensors, {"gate": options["gate"], "gate_bias": GATE_BIAS}, backend=backend)


def test_both_norms_over_all_heads_with_rotation_and_a_table(inputs, device):
    tensors, options = inputs()
    weight, _ = options["query_norm"]
    angles = torch.randn(15, 4, device=device)
    common = {
        "query_norm": options["query_norm"],
        "key_norm": (weight + 1, 1e-6),
        "rope": (angles.cos(), angles.sin()),
    }
    check(tensors, common)
    check(tensors, common, grid=None, block_grid=None, block_table=block_table((3, 5), (2, 2), device))


def test_an_output_norm_over_more_channels_than_a_tile(inputs):
    tensors, options = inputs(value_dim=80)
    check(tensors, {name: options[name] for name in ("norm_weight", "gate")})


def test_with_gradients_the_steps_are_taken_apart(inputs):
    tensors, options = inputs()
    names = ("q", "k", "v", "mixing")

    def gradients(dtype, backend):
        leaves = {n: tensors[n].to(dtype).detach().requires_grad_() for n in names}
        weights = {
            n: (options[n][0].to(dtype).requires_grad_(), options[n][1]) for n in ("query_norm", "key_norm")
        }
        gate = options["gate"].to(dtype).detach().requires_grad_()
        out = mhla_attention(
            **leaves,
            **weights,
            gate=gate,
            gate_bias=GATE_BIAS,
            grid=(3, 5),
            block_grid=(2, 2),
            backend=backend,
        )
        return torch.autograd.grad(out.sum(), [*leaves.values(), gate, *[w for w, _ in weights.values()]])

    for got, truth in zip(
        gradients(torch.float32, "triton"), gradients(torch.float64, "reference"), strict=True
    ):
        assert (got - truth).norm() <= 2e-5 * truth.norm()


def test_wrong_norms_gates_and_choices_are_refused_in_one_line(inputs, device):
    tensors, options = inputs()
    common = {**tensors, "grid": (3, 5), "block_grid": (2, 2)}
    for changes, message in (
        (
            {"query_norm": (torch.ones(3, device=device), 1e-6)},
            r"give \(8,\) for a norm over each head or \(2, 8\)",
        ),
        ({"gate_bias": 1.0}, "without a gate"),
        ({"summary_dtype": torch.float16}, "torch.float32 or torch.bfloat16"),
        ({"form": "fast"}, "choose one of auto, states, dual"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            mhla_attention(**common, **changes)
        assert "\n" not in str(error.value)


def test_blocks_cut_into_chunks_give_the_same(make_call):
    call = make_call((40,), (2,), 8, batch=1, heads=1, rope=True)
    with triton_configs.override(chunk_count=4):
        call.check(call.run("triton"), 1e-5)


def test_heads_in_groups_give_the_same(make_call):
    call = make_call((3, 5), (2, 2), 8, heads=4)
    expected = call.run("triton")
    with triton_configs.override(head_group=2):
        assert all(torch.equal(x, expected[name]) for name, x in call.run("triton").items())


@pytest.mark.parametrize("heads", [1, 6, 12, 16])
def test_head_groups_divide_the_heads(heads):
    assert all(heads % triton_configs.head_group(heads, size) == 0 for size in (1, 5 << 20, 1 << 30))


def test_the_rotation_is_brought_into_shape_once(monkeypatch):
    monkeypatch.setattr(derived, "_KEPT", type(derived._KEPT)())
    angles = torch.randn(5, 4)
    rope, x = (angles.cos(), angles.sin()), torch.ones(1)
    first = interleaved_angles(rope, x.dtype)
    assert torch.equal(first[:, 0::2], rope[0]) and torch.equal(first[:, 1::2], rope[1])
    assert interleaved_angles(rope, x.dtype) is first
    assert interleaved_angles(rope, torch.bfloat16).dtype == torch.float16
    rope[1].zero_()  # written to: made again
    assert (interleaved_angles(rope, x.dtype)[:, 1::2] == 0).all()
    rope[0].zero_()
    assert (interleaved_angles(rope, x.dtype) == 0).all()
    with torch.inference_mode():
        fresh = (rope[0] + 1, rope[1] + 1)
        assert interleaved_angles(fresh, x.dtype) is not interleaved_angles(fresh, x.dtype)


# Float32's own configurations cut the value channels into tiles instead.
WIDE = dict.fromkeys(
    ("summarise", "read_out", "query_gradients", "key_gradients"), triton_configs.Config(16, 64, 4, 1)
)


@pytest.mark.parametrize("normalizer", ["paper", "none"])
@pytest.mark.parametrize(("dim", "value_dim"), [(72, 72), (40, 72), (72, 16), (20, 40)])
def test_head_dims_in_two_parts(make_call, dim, value_dim, normalizer):
    call = make_call((5,), (2,), dim, value_dim, batch=1, rope=dim != 20, normalizer=normalizer)
    with triton_configs.override(**WIDE):
        call.check(call.run("triton"), 1e-5)


def test_fused_steps_over_head_dims_in_two_parts(inputs):
    tensors, options = inputs(dim=72, value_dim=72)
    with triton_configs.override(**WIDE):
        check(tensors, options)
        check(tensors, {"gate": options["gate"], "gate_bias": GATE_BIAS}, normalizer="paper")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("dim", [32, 72, 128])
@pytest.mark.parametrize("grid", [(6, 40), (7, 41)])
def test_every_step_on_the_gpu(inputs, grid, dim, dtype):
    tensors, options = inputs(grid, dim, dim, dtype=dtype)
    check(tensors, options, 1e-2, grid=grid)
    check(tensors, {"gate": options["gate"], "gate_bias": GATE_BIAS}, 1e-2, grid=grid, normalizer="paper")


@pytest.mark.gpu
@pytest.mark.parametrize("summary_dtype", [torch.bfloat16, torch.float32])
def test_summaries_may_be_kept_in_either_dtype_on_the_gpu(make_call, summary_dtype):
    call = make_call((21, 30), (3, 5), 64, dtype=torch.bfloat16, rope=True, summary_dtype=summary_dtype)
    call.check(call.run("triton"), 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("as_table", [False, True])
def test_offsets_beyond_32_bits_on_the_gpu(device, as_table):
    tokens, heads, dim = 1 << 20, 16, 132
    q = torch.zeros(1, tokens, heads, dim, device=device, dtype=torch.bfloat16)
    q[:, -64:] = 1
    where = {"grid": (1024, 1024), "block_grid": (8, 8)}
    if as_table:
        where = {"block_table": block_table(**where).to(device)}
    mixing = torch.eye(64, device=device)
    out = mhla_attention(q, q, q, mixing, **where, backend="triton", form="states")
    assert out.numel() > 2**31
    # The last block attends to itself: 64 tokens of ones among zeros, whose weight is feature_eps.
    assert (out[:, -64:].float() - 1).abs().max() <= 1e-2 and (out[:, :64] == 0).all()


@pytest.mark.gpu
def test_two_backward_runs_are_bit_equal_on_the_gpu(make_call):
    for form in ("states", "dual"):
        call = make_call((32, 32), (4, 4), 72, dtype=torch.bfloat16, batch=8, heads=8)
        first, second = call.run("triton", form=form), call.run("triton", form=form)
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["states", "dual"])
def test_a_cuda_graph_replays_the_same(make_call, form):
    call = make_call((32, 32), (4, 4), 32, dtype=torch.bfloat16)
    expected = mhla_attention(**call.tensors, **call.options, form=form)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            mhla_attention(**call.tensors, **call.options, form=form)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = mhla_attention(**call.tensors, **call.options, form=form)
        graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_a_call_never_waits_for_the_device(make_call):
    call = make_call((32, 32), (4, 4), 64, dtype=torch.bfloat16, rope=True, normalizer="none")
    call.run("triton")
    with no_waiting_for_the_gpu():
        call.run("triton")


def test_an_output_norm_beside_the_spare_channel(inputs):
    tensors, options = inputs(dim=72, value_dim=72)
    with triton_configs.override(**WIDE):
        check(tensors, {name: options[name] for name in ("norm_weight", "local")}, normalizer="paper")
