"""Custom operators: schema, fake kernels, autograd registration, torch.compile."""

import os
import shutil
import sysconfig

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mhla_diffusion.blocks import block_table
from mhla_diffusion.mixing import BlockMixing, initial_mixing
from mhla_diffusion.ops import mhla_attention, triton_configs
from mhla_diffusion.ops.registration import mhla_backward, mhla_forward, mhla_forward_output


def forward_arguments(device, divide: bool, rope: bool):
    q, k, v = torch.randn(3, 1, 5, 2, 8, generator=torch.Generator().manual_seed(0)).to(device)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    mixing = initial_mixing((2,)).to(device).requires_grad_()
    table = block_table((5,), (2,), device)
    angles = torch.randn(5, 4, device=device)
    turns = (angles.cos(), angles.sin()) * 2 if rope else (None,) * 4
    return (q, k, v, mixing, table, table, *turns, 1e-6, 0.0, divide, True, torch.float32)


@pytest.mark.parametrize(("divide", "rope"), [(True, True), (False, False)])
def test_opcheck(device, divide, rope):
    arguments = forward_arguments(device, divide, rope)
    torch.library.opcheck(mhla_forward, arguments)
    out, state = mhla_forward(*arguments)
    q, k, v, mixing, *rest = arguments
    detached = [x.detach() for x in (torch.ones_like(out), q, k, v, mixing, state)]
    torch.library.opcheck(mhla_backward, (*detached, *rest[:-1]))
    torch.library.opcheck(mhla_backward, (*detached[:-1], None, *rest[:-1]))
    alone = (*detached[1:5], *rest)
    torch.library.opcheck(mhla_forward_output, alone)
    assert torch.equal(mhla_forward_output(*alone), out)
    torch.library.opcheck(torch.ops.mhla_diffusion.mhla_forward_plain.default, alone)
    torch.library.opcheck(torch.ops.mhla_diffusion.mhla_backward_plain.default, (*detached, *rest[:-1]))


class Seen(TorchDispatchMode):
    """Names of our operators that run within it."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "mhla_diffusion":
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("form", "name"), [("states", "mhla"), ("dual", "mhla_dual")])
def test_an_eager_call_leaves_the_custom_operators_out_and_gives_the_same(make_call, form, name, monkeypatch):
    """A host spends more time in them than in all else that it does for a call."""
    call = make_call((6, 4), (3, 2), 8, batch=1, normalizer="none")
    with Seen() as seen:
        eager = call.run("triton", form=form)
    forward = "mhla_forward" if form == "states" else "mhla_dual"
    assert seen.names == {f"{forward}_plain", f"{name}_backward_plain"}
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with Seen() as seen:
        custom = call.run("triton", form=form)
    assert forward in seen.names and f"{forward}_plain" not in seen.names
    assert eager.keys() == custom.keys()
    assert all(torch.equal(eager[part], x) for part, x in custom.items())


@pytest.mark.parametrize("form", ["states", "dual"])
def test_eager_gradients_are_checkpointed_kept_elsewhere_and_batched(make_call, form):
    call = make_call((3, 2), (2, 2), 16, batch=1, normalizer="none")

    def run(*tensors):
        named = dict(zip(call.tensors, tensors, strict=True))
        return mhla_attention(**named, **call.options, backend="triton", form=form)

    def leaves():
        return [x.detach().requires_grad_() for x in call.tensors.values()]

    inputs = leaves()
    out = run(*inputs)
    expected = torch.autograd.grad(out, inputs, call.grad, retain_graph=True)
    both = torch.autograd.grad(out, inputs, torch.stack([call.grad, -call.grad]), is_grads_batched=True)
    assert all(
        torch.equal(pair[0], x) and torch.equal(pair[1], -x) for pair, x in zip(both, expected, strict=True)
    )
    for reentrant in (False, True):
        inputs = leaves()
        checkpoint(run, *inputs, use_reentrant=reentrant).backward(call.grad)
        assert all(torch.equal(leaf.grad, x) for leaf, x in zip(inputs, expected, strict=True))
    inputs = leaves()
    with torch.autograd.graph.save_on_cpu():
        run(*inputs).backward(call.grad)
    assert all(torch.equal(leaf.grad, x) for leaf, x in zip(inputs, expected, strict=True))


@pytest.mark.parametrize(("grid", "block_grid", "kept"), [((40,), (2,), True), ((10,), (5,), False)])
@pytest.mark.parametrize("normalizer", ["paper", "none"])
def test_states_are_kept_where_they_are_small_and_computed_again_elsewhere(
    make_call, grid, block_grid, kept, normalizer
):
    """Blocks of 20 tokens and of 2, head dims of 8."""
    call = make_call(grid, block_grid, 8, batch=1, normalizer=normalizer)
    size = 8 * 8 + (8 if normalizer == "paper" else 0)
    sizes = []

    def pack(x):
        sizes.append(x.shape[-1])
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = call.run("triton")
    assert (size in sizes) == kept
    call.check(result, 1e-5)
    for choice in (True, False):
        with triton_configs.override(keep_states=choice):
            again = call.run("triton")
        assert all(torch.equal(x, again[name]) for name, x in result.items())


def compare_compiled(device, call, inputs, compiler: str, parameter) -> None:
    compiled = torch.compile(call, fullgraph=True, backend=compiler)
    out, expected = compiled(*inputs), call(*inputs)
    assert (out - expected).norm() <= 1e-5 * expected.norm()
    got = torch.autograd.grad(out.square().sum(), (*inputs, parameter))
    truth = torch.autograd.grad(expected.square().sum(), (*inputs, parameter))
    for a, b in zip(got, truth, strict=True):
        assert (a - b).norm() <= 2e-5 * b.norm()


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize(("dim", "grid"), [(64, (2, 4)), (128, (3, 3))])
def test_one_graph_forward_and_backward(device, backend, dim, grid):
    torch.compiler.reset()
    tokens = grid[0] * grid[1]
    mixing = BlockMixing((2, 2)).to(device)
    angles = torch.randn(tokens, dim // 2, device=device)
    rope = (angles.cos(), angles.sin())

    def call(q, k, v):
        return mhla_attention(q, k, v, mixing(), grid=grid, block_grid=(2, 2), rope=rope, backend=backend)

    inputs = [torch.randn(1, tokens, 1, dim, device=device, requires_grad=True) for _ in range(3)]
    # The graph and its autograd are what is tested here; code generation has its own test below.
    compare_compiled(device, call, inputs, "aot_eager", mixing.weight)


def test_a_table_argument_and_a_smaller_grid_compile(device):
    torch.compiler.reset()
    mixing = BlockMixing((3, 2)).to(device)
    table = block_table((1, 5), (3, 2), device)

    def call(q, k, v):
        return mhla_attention(
            q, k, v, mixing((1, 2)), table, norm_weight=torch.ones(8, device=device), gate=v
        )

    inputs = [torch.randn(1, 5, 2, 8, device=device, requires_grad=True) for _ in range(3)]
    with pytest.warns(UserWarning, match="interpolated"):
        call(*inputs)
    compare_compiled(device, call, inputs, "aot_eager", mixing.weight)


def test_several_grids_through_one_compiled_function(device):
    torch.compiler.reset()
    mixing = BlockMixing((2, 2)).to(device)

    def call(q, k, v, grid):
        return mhla_attention(q, k, v, mixing(), grid=grid, block_grid=(2, 2))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for grid in ((4, 4), (3, 5), (6, 2), (7, 3)):
        q, k, v = torch.randn(3, 1, grid[0] * grid[1], 2, 8, device=device)
        assert torch.allclose(compiled(q, k, v, grid), call(q, k, v, grid), atol=1e-5)


def test_generated_code_equals_eager(device):
    # Generating code for a CPU takes a C++ compiler and Python's headers; without them the same graph runs uncompiled.
    headers = os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
    compiler = "inductor" if shutil.which("g++") and headers else "aot_eager"
    torch.compiler.reset()
    mixing = BlockMixing((2, 2)).to(device)

    def call(q, k, v):
        return mhla_attention(q, k, v, mixing(), grid=(3, 4), block_grid=(2, 2))

    inputs = [torch.randn(1, 12, 1, 64, device=device, requires_grad=True) for _ in range(3)]
    compare_compiled(device, call, inputs, compiler, mixing.weight)


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float32), (128, torch.bfloat16)])
def test_generated_code_equals_eager_on_the_gpu(device, dim, dtype):
    torch.compiler.reset()
    mixing = BlockMixing((4, 4)).to(device)

    def call(q, k, v):
        return mhla_attention(q, k, v, mixing(), grid=(30, 33), block_grid=(4, 4), backend="triton")

    inputs = [torch.randn(2, 990, 4, dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(call, fullgraph=True)
    out, expected = compiled(*inputs), call(*inputs)
    assert torch.equal(out, expected)
    got = torch.autograd.grad(out.float().square().sum(), (*inputs, mixing.weight))
    truth = torch.autograd.grad(expected.float().square().sum(), (*inputs, mixing.weight))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for a, b in zip(got, truth, strict=True):
        assert (a.float() - b.float()).norm() <= tolerance * b.float().norm()
