"""Strides, lengths and sizes that kernels get wrong first: every path against the float64 reference."""

import pytest
import torch
from no_host_read import no_waiting_for_the_gpu

from mhla_diffusion.blocks import block_table
from mhla_diffusion.ops import mhla_attention

pytestmark = pytest.mark.usefixtures("poisoned_buffers")

DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 1e-2)],
    ids=["fp32", "fp16", "bf16"],
)  # fmt: skip


def odd_rows(x):
    """Rows one element apart from each other, so that nearly none is aligned."""
    return x.new_empty(*x.shape[:-1], x.shape[-1] + 1)[..., 1:].copy_(x)


def every_third_channel(x):
    return x.new_empty(*x.shape[:-1], 3 * x.shape[-1] + 1)[..., 1::3].copy_(x)


def every_second_token(x):
    return x.new_empty(x.shape[0], 2 * x.shape[1] + 1, *x.shape[2:])[:, 1::2].copy_(x)


def all_axes_reversed(x):
    return x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)


def one_item_for_all(x):
    return x[:1].expand(x.shape)


VIEWS = [odd_rows, every_third_channel, every_second_token, all_axes_reversed, one_item_for_all]


def as_views(call, view) -> None:
    for name in ("q", "k", "v"):
        call.tensors[name] = view(call.tensors[name])
    call.grad = view(call.grad)
    assert not call.tensors["q"].is_contiguous()


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_views_with_odd_strides(make_call, view, backend):
    call = make_call((2, 5), (2, 2), 8, rope=True, normalizer="none")
    as_views(call, view)
    call.check(call.run(backend), 1e-5)


@pytest.mark.parametrize("form", ["states", "dual"])
@pytest.mark.parametrize(("tokens", "blocks"), [(13, 3), (17, 16)])
def test_prime_lengths(make_call, tokens, blocks, form):
    call = make_call((tokens,), (blocks,), 8, batch=1)
    call.check(call.run("triton", form=form), 1e-5)
    call.check(call.run("eager"), 1e-5)


def last_block_of_one(call, block_size: int):
    """Whole blocks and at the end a single token, as a table."""
    tokens = call.tensors["q"].shape[1]
    table = torch.full((-(-tokens // block_size), block_size), -1)
    table.view(-1)[:tokens] = torch.arange(tokens)
    assert (table[-1] >= 0).sum() == 1
    call.options = {"block_table": table.to(call.tensors["q"].device)}
    return call


@pytest.mark.parametrize("form", ["states", "dual"])
def test_a_last_block_of_one_token(make_call, form):
    call = last_block_of_one(make_call((9,), (3,), 8), 4)
    call.check(call.run("triton", form=form), 1e-5)
    call.check(call.run("eager"), 1e-5)


TABLES = {
    "transposed": lambda table: table.t().contiguous().t(),
    "cut from a wider one": lambda table: torch.cat((table, table.new_full(table.shape, -1)), 1)[
        :, : table.shape[1]
    ],
    "every second row": lambda table: table.repeat_interleave(2, dim=0)[::2],
    "int32": lambda table: table.int().t().contiguous().t(),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("backend", "form"), [("triton", "states"), ("triton", "dual"), ("eager", "auto")])
def test_tables_with_other_strides(make_call, name, backend, form):
    call = make_call((3, 5), (2, 2), 8, as_table=True)
    call.options["block_table"] = TABLES[name](call.options["block_table"])
    assert not call.options["block_table"].is_contiguous()
    call.check(call.run(backend, form=form), 1e-5)
    call = make_call((3, 3), (2, 2), 8, key_blocks=(7, 3))
    call.options["key_block_table"] = TABLES[name](call.options["key_block_table"])
    call.check(call.run(backend, form=form), 1e-5)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("form", ["states", "dual"])
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_views_with_odd_strides_on_the_gpu(make_call, view, form, dtype, tolerance):
    call = make_call((12, 16), (3, 4), 40, heads=3, dtype=dtype)
    as_views(call, view)
    call.check(call.run("triton", form=form), tolerance)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("form", ["states", "dual"])
@pytest.mark.parametrize(
    ("grid", "block_grid"), [((1009,), (7,)), ((31, 37), (5, 3)), ((7, 11, 13), (2, 3, 5))]
)
def test_prime_lengths_on_the_gpu(make_call, grid, block_grid, form, dtype, tolerance):
    call = make_call(grid, block_grid, 72, heads=3, dtype=dtype)
    call.check(call.run("triton", form=form), tolerance)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("form", ["states", "dual"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_a_last_block_of_one_token_on_the_gpu(make_call, block_size, form, dtype, tolerance):
    call = last_block_of_one(make_call((4 * block_size + 1,), (5,), 32, dtype=dtype), block_size)
    call.check(call.run("triton", form=form), tolerance)


@pytest.mark.gpu
@DTYPES
def test_every_fused_step_writes_all_of_its_output_on_the_gpu(make_call, dtype, tolerance):
    call = make_call((31, 37), (5, 3), 72, heads=3, dtype=dtype, rope=True, normalizer="none", epilogue=True)
    norm = 1 + 0.1 * torch.randn(3, 72, generator=torch.Generator().manual_seed(5)).to(call.grad.device)
    call.options |= {"query_norm": (norm, 1e-6), "key_norm": (norm, 1e-6), "gate_bias": 1.0}
    truth = call.run("reference", torch.float64)["out"]
    with torch.no_grad():
        out = mhla_attention(**call.tensors, **call.options, backend="triton", form="states")
    assert (out.double() - truth).norm() <= tolerance * truth.norm()


@pytest.mark.gpu
def test_gradients_beyond_32_bits_of_tokens_on_the_gpu(device):
    """The last block's tokens lie beyond 2^31 elements; it reads only itself, so it can be computed alone."""
    side, blocks, heads, dim = 1024, 8, 16, 132
    last = block_table((side, side), (blocks, blocks), device)[-1]
    generator = torch.Generator(device).manual_seed(0)
    x = torch.zeros(1, side * side, heads, dim, device=device, dtype=torch.bfloat16)
    assert x.numel() > 2**31
    x[:, last] = torch.randn(1, len(last), heads, dim, generator=generator, device=device).to(x.dtype)
    x.requires_grad_()
    mixing = torch.eye(blocks**2, device=device)
    out = mhla_attention(x, x, x, mixing, grid=(side, side), block_grid=(blocks, blocks), form="states")
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    alone = x.detach()[:, last].requires_grad_()
    grid = (side // blocks, side // blocks)
    expected = mhla_attention(
        alone, alone, alone, torch.ones(1, 1, device=device), grid=grid, block_grid=(1, 1), form="states"
    )
    (wanted,) = torch.autograd.grad(expected, alone, torch.ones_like(expected))
    for got, want in ((out[:, last], expected), (gradient[:, last], wanted)):
        assert (got.float() - want.float()).norm() <= 1e-2 * want.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["states", "dual"])
def test_a_batch_beyond_32_bits_on_the_gpu(device, form):
    batch, heads, dim = 16400, 8, 64  # the states of all blocks are beyond 2^31 elements as well
    x = torch.randn(1, 256, heads, dim, device=device, dtype=torch.bfloat16).expand(batch, -1, -1, -1)
    x = x.contiguous().requires_grad_()
    assert x.numel() > 2**31
    mixing = torch.eye(4, device=device) + 0.1
    options = {"grid": (16, 16), "block_grid": (2, 2), "form": form, "backend": "triton"}
    out = mhla_attention(x, x, x, mixing, **options)
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    alone = x.detach()[-1:].requires_grad_()
    expected = mhla_attention(alone, alone, alone, mixing, **options)
    (wanted,) = torch.autograd.grad(expected, alone, torch.ones_like(expected))
    for got, want in ((out[-1:], expected), (gradient[-1:], wanted)):
        assert (got.float() - want.float()).norm() <= 1e-2 * want.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["states", "dual"])
def test_items_2_31_elements_apart_on_the_gpu(make_call, form):
    call = make_call((16, 16), (2, 2), 64, dtype=torch.bfloat16)
    expected = call.run("triton", form=form)
    for name in ("q", "k", "v"):
        x = call.tensors[name]
        apart = x.new_empty(2**31 + x[0].numel()).as_strided(x.shape, (2**31, *x.stride()[1:]))
        call.tensors[name] = apart.copy_(x)
    got = call.run("triton", form=form)
    assert all(torch.equal(got[name], expected[name]) for name in got)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["states", "dual"])
def test_a_cuda_graph_replays_gradients_on_new_inputs(make_call, form):
    call, other = (make_call((32, 32), (4, 4), 64, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    leaves = [x.requires_grad_() for x in call.tensors.values()]

    def both():
        out = mhla_attention(*leaves, **call.options, form=form)
        return out, *torch.autograd.grad(out, leaves, call.grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = both()
    with torch.no_grad():
        for leaf, new in zip(leaves, other.tensors.values(), strict=True):
            leaf.copy_(new)
        call.grad.copy_(other.grad)
    graph.replay()
    expected = other.run("triton", form=form)
    for got, want in zip(results, expected.values(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"form": "dual"}, {"fused": True}, {"as_table": True}, {"compiled": True}]
)
def test_no_path_waits_for_the_device(make_call, options):
    options = dict(options)
    fused, compiled = options.pop("fused", False), options.pop("compiled", False)
    call = make_call((32, 32), (4, 4), 64, dtype=torch.bfloat16, as_table=options.pop("as_table", False))
    if fused:
        norm = (torch.ones(2, 64, device=call.grad.device), 1e-6)
        call.options |= {"query_norm": norm, "key_norm": norm, "gate": call.grad, "gate_bias": 1.0}
    torch.compiler.reset()
    attend = torch.compile(mhla_attention, fullgraph=True) if compiled else mhla_attention

    def run():
        leaves = [x.detach().requires_grad_(not fused) for x in call.tensors.values()]
        out = attend(*leaves, **call.options, **options)
        return out if fused else torch.autograd.grad(out, leaves, call.grad)

    run()
    with no_waiting_for_the_gpu():
        run()


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["states", "dual"])
def test_autocast_changes_nothing_on_the_gpu(make_call, form):
    call = make_call((32, 32), (4, 4), 64, dtype=torch.bfloat16)
    plain = call.run("triton", form=form)
    with torch.autocast("cuda", dtype=torch.float16):
        cast = call.run("triton", form=form)
    assert all(
        torch.equal(cast[name], plain[name]) and cast[name].dtype == plain[name].dtype for name in plain
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("grid", "options"),
    [((21, 30), {"rope": True, "normalizer": "none"}), ((31, 37), {}), ((40, 40), {"epilogue": True})],
)
def test_two_backward_runs_are_bit_equal_whatever_the_grid_on_the_gpu(make_call, grid, options):
    for dtype in (torch.bfloat16, torch.float32):
        call = make_call(grid, (3, 5), 64, dtype=dtype, heads=6, batch=3, **options)
        first, second = call.run("triton"), call.run("triton")
        assert all(torch.equal(first[name], second[name]) for name in first)
