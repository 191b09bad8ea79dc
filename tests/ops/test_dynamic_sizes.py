"""One compiled function serves many resolutions: it is compiled for kinds of grids, not for each."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from mhla_diffusion.blocks import block_table
from mhla_diffusion.mixing import BlockMixing
from mhla_diffusion.ops import mhla_attention

# Blocks that divide them and blocks that do not, short ones and long ones.
GRIDS = [(4, 4), (3, 5), (6, 4), (7, 3), (8, 8), (5, 6), (9, 7)]
KINDS = 5  # the first grid as constants; even or ragged, blocks of whole tiles or not; the rest is room for releases


def inputs_of(grid: tuple[int, int], device) -> torch.Tensor:
    """q, k, v of 8 channels, the first one active in every query and key.

    Without it some queries have next to no feature, and their gradient is what is left of terms that cancel after a
    division by almost nothing: plain float32 torch alone is then up to 5e-5 from float64, here no more than 2e-6.
    """
    inputs = torch.randn(3, 1, grid[0] * grid[1], 1, 8, generator=torch.Generator().manual_seed(grid[0]))
    inputs[:2, ..., 0] = inputs[:2, ..., 0].abs() + 0.5
    return inputs.to(device)


def check(compiled, call, arguments, mixing) -> None:
    """Output and gradients against plain torch, which is not compiled."""
    inputs = [x.requires_grad_() for x in arguments[:3]]
    results = []
    for function, choice in ((compiled, {}), (call, {"backend": "eager"})):
        out = function(*inputs, *arguments[3:], **choice)
        gradients = torch.autograd.grad(out.square().sum(), (*inputs, mixing.weight))
        results.append([out.detach(), *gradients])
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() <= 2e-5 * want.norm()


@pytest.mark.parametrize(("backend", "dynamic"), [("eager", None), ("eager", True), ("triton", None)])
def test_a_new_resolution_is_no_new_graph(device, backend, dynamic):
    torch.compiler.reset()
    mixing = BlockMixing((2, 2)).to(device)

    def call(q, k, v, grid, backend=backend):
        return mhla_attention(q, k, v, mixing(), grid=grid, block_grid=(2, 2), backend=backend)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=dynamic)
    for grid in GRIDS:
        q, k, v = inputs_of(grid, device)
        check(compiled, call, (q, k, v, grid), mixing)
    assert counter.frame_count <= KINDS < len(GRIDS)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_new_table_is_no_new_graph(device, backend):
    torch.compiler.reset()
    mixing = BlockMixing((2, 2)).to(device)

    def call(q, k, v, table, backend=backend):
        return mhla_attention(q, k, v, mixing(), table, backend=backend)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    for grid in GRIDS:
        q, k, v = inputs_of(grid, device)
        check(compiled, call, (q, k, v, block_table(grid, (2, 2), device)), mixing)
    assert counter.frame_count <= KINDS < len(GRIDS)


@pytest.mark.gpu
def test_a_new_resolution_is_no_new_graph_at_the_models_shapes(device):
    torch.compiler.reset()
    mixing = BlockMixing((8, 8)).to(device)

    def call(q, k, v, grid):
        return mhla_attention(q, k, v, mixing(), grid=grid, block_grid=(8, 8))

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for grid in ((32, 32), (40, 24), (64, 64), (30, 33), (47, 21), (96, 40), (61, 67), (128, 128)):
        shape = (3, 1, grid[0] * grid[1], 4, 64)
        q, k, v = torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_()
        out, want = compiled(q, k, v, grid), call(q, k, v, grid)
        assert torch.equal(out, want)
        assert torch.isfinite(torch.autograd.grad(out.float().sum(), mixing.weight)[0]).all()
    assert counter.frame_count <= KINDS + 1
