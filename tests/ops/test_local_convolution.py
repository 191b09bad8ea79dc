"""The depthwise convolution over a token grid: kernels against float64, gradients of first and second order."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from triton.runtime.errors import OutOfResources

from mhla_diffusion.ops import local_convolution as module
from mhla_diffusion.ops import local_kernels, triton_configs, triton_launch
from mhla_diffusion.ops.local_convolution import (
    local_convolution,
    local_convolution_op,
    local_convolution_reference,
    weight_gradient_op,
)

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def few_programs(device, monkeypatch):
    """The interpreter runs one program after another."""
    if device.type == "cpu":
        monkeypatch.setattr(local_kernels, "PROGRAMS", 27)


def inputs(device, batch=2, grid=(3, 5, 4), channels=6, dtype=torch.float32, bias=True, learn=True):
    """Image `(B, C, *grid)` that lies channels last, weight, bias."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(batch, *grid, channels, generator=draw).to(device, dtype).requires_grad_(learn)
    weight = (
        torch.randn(channels, 1, *(3,) * len(grid), generator=draw).to(device, dtype).requires_grad_(learn)
    )
    b = torch.randn(channels, generator=draw).to(device, dtype).requires_grad_(learn) if bias else None
    return x, weight, b


def kernel(x, weight, bias, op=local_convolution_op):
    """The operator on `(B, *grid, C)`, rows and columns alone as one frame."""
    if x.dim() == 4:
        return kernel(x[:, None], weight[:, :, None], bias, op)[:, 0]
    return op(x, weight, bias, False)


def truth(x, weight, bias):
    """In float64 on the CPU: for a grid of one token torch 2.11's own on a GPU reads memory it must not."""
    image, weight, bias = (
        None if each is None else each.cpu().double() for each in (x.movedim(-1, 1), weight, bias)
    )
    return local_convolution_reference(image, weight, bias).movedim(1, -1).to(x.device)


def error(got, expected):
    assert got.shape == expected.shape and got.isfinite().all()
    return float(((got - expected).norm() / expected.norm()).detach())


def leaves(tensors):
    return [x for x in tensors if x is not None]


SIZES = [
    {},
    {"bias": False},
    {"batch": 1, "grid": (1, 1, 1)},
    {"grid": (1, 6, 9)},
    {"batch": 1, "grid": (2, 6, 18), "channels": 3},
    {"grid": (5, 1, 16), "channels": 70},
    {"grid": (4, 3, 1)},
    {"grid": (6, 18)},
    {"grid": (4, 16), "channels": 64, "batch": 1},
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", SIZES)
def test_output_and_gradients_equal_float64(device, sizes, dtype, poisoned_buffers):
    arguments = inputs(device, **sizes, dtype=dtype)
    got, expected = kernel(*arguments), truth(*arguments)
    assert got.dtype == dtype and got.is_contiguous()
    assert error(got, expected) < TOLERANCE[dtype]
    grad = torch.randn(got.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    for ours, exact in zip(
        torch.autograd.grad(got, leaves(arguments), grad),
        torch.autograd.grad(expected, leaves(arguments), grad.double()),
        strict=True,
    ):
        assert ours.dtype == dtype
        assert error(ours, exact) < 2 * TOLERANCE[dtype]


def test_second_gradients_equal_torchs(device):
    arguments = inputs(device, batch=1, grid=(3, 4, 5), channels=2)
    found = []
    for out in (kernel(*arguments), truth(*arguments).float()):
        first = torch.autograd.grad(out.square().sum(), arguments, create_graph=True)
        found.append(torch.autograd.grad(sum(g.sin().sum() for g in first), arguments))
    for ours, exact in zip(*found, strict=True):
        assert error(ours, exact) < 1e-4


def test_values_cut_out_of_a_fused_projection_are_not_copied(device, monkeypatch):
    x, weight, bias = inputs(device, learn=False)
    expected = kernel(x, weight, bias)
    wide = torch.full((*x.shape[:-1], 3 * x.shape[-1]), float("nan"), device=device)
    wide[..., 6:12] = x
    monkeypatch.setattr(
        triton_launch, "contiguous", lambda x: x if x.is_contiguous() else pytest.fail("copied")
    )
    with triton_configs.override(replay=False):
        assert torch.equal(kernel(wide[..., 6:12], weight, bias), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.movedim(-1, 1).contiguous().movedim(1, -1),
        lambda x: torch.stack((x, x), dim=3)[:, :, :, 0],
        lambda x: x.flip(2).flip(2),
        lambda x: torch.nn.functional.pad(x, (0, 0, 2, 3))[:, :, :, 2:-3],
    ],
)
def test_any_memory_layout_gives_the_same(device, change):
    x, weight, bias = inputs(device, learn=False)
    assert torch.equal(kernel(change(x), weight, bias), kernel(x, weight, bias))
    grad = x.cos()
    assert torch.equal(weight_gradient_op(change(x), change(grad), 3), weight_gradient_op(x, grad, 3))


@pytest.mark.parametrize("spread", [lambda b: torch.stack((b, b), 1)[:, 0], lambda b: b[:1].expand(len(b))])
def test_a_bias_of_any_memory_layout(device, spread):
    x, weight, bias = inputs(device, learn=False)
    for _ in range(2):  # the second time replayed
        assert error(kernel(x, weight, spread(bias)), truth(x, weight, spread(bias))) < 1e-6


@pytest.mark.parametrize(
    "change",
    [
        {"weight": lambda w: w[:4]},
        {"weight": lambda w: w.repeat(2, 1, 1, 1, 1)},
        {"weight": lambda w: w.expand(-1, 6, -1, -1, -1)},
        {"weight": lambda w: w[:, :, 0]},
        {"bias": lambda b: b[:4]},
        {"bias": lambda b: b[:1]},
    ],
)
def test_a_weight_or_bias_for_other_channels_is_no_kernels(device, monkeypatch, change):
    """A kernel would read what lies behind them in memory."""
    given = dict(zip(("x", "weight", "bias"), inputs(device, learn=False), strict=True))
    given["x"] = given["x"].movedim(-1, 1)
    monkeypatch.setattr(module, "choose_backend", lambda *_: ("triton", "as on a GPU"))
    assert module._takes(**given)
    given |= {name: of(given[name]) for name, of in change.items()}
    assert not module._takes(**given)
    with pytest.raises((RuntimeError, ValueError)):
        local_convolution(**given)


def test_a_gradient_that_is_one_number_for_all(device):
    arguments = inputs(device)
    found = [torch.autograd.grad(out.sum(), arguments) for out in (kernel(*arguments), truth(*arguments))]
    for ours, exact in zip(*found, strict=True):
        assert error(ours, exact) < 1e-6


def test_offsets_of_64_bits(device, monkeypatch):
    monkeypatch.setattr(local_kernels, "FAR", 0)
    arguments = inputs(device, learn=False)
    x, weight, _ = arguments
    with triton_configs.override(replay=False):
        assert error(kernel(*arguments), truth(*arguments)) < 1e-6
        found = weight_gradient_op(x, x.cos(), 3)
    assert torch.equal(found, weight_gradient_op(x, x.cos(), 3)) and found.shape == weight.shape


@pytest.mark.parametrize("programs", [1, 100])
def test_a_weights_gradient_in_any_number_of_chunks(device, monkeypatch, programs):
    x, _, _ = inputs(device, learn=False)
    expected = weight_gradient_op(x, x.cos(), 3)
    monkeypatch.setattr(local_kernels, "PROGRAMS", programs)
    with triton_configs.override(replay=False):
        assert error(weight_gradient_op(x, x.cos(), 3), expected) < 1e-6


def test_the_operators_keep_torchs_rules(device):
    x, weight, bias = inputs(device, batch=1, grid=(1, 2, 2), channels=2)
    for flipped in (False, True):
        torch.library.opcheck(local_convolution_op, (x, weight, bias, flipped))
    torch.library.opcheck(module._plain_op, (x.detach(), weight.detach(), bias.detach(), False))
    torch.library.opcheck(weight_gradient_op, (x, x.detach().cos(), 3))
    torch.library.opcheck(module._plain_weight_gradient, (x.detach(), x.detach().cos(), 3))


def test_torch_takes_over_with_one_warning_where_the_kernels_cannot_run(device, monkeypatch, recwarn):
    def never_fits(*args, **constants):
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(triton_launch, "launch", never_fits)
    monkeypatch.setattr(triton_launch, "_step", {})
    monkeypatch.setattr(triton_launch, "_warned", set())
    arguments = inputs(device, channels=11)  # a width that no other test has: nothing is replayed
    for _ in range(2):
        got, expected = kernel(*arguments), truth(*arguments)
        assert error(got, expected) < 1e-6 and got.is_contiguous()
        # What remains is the rounding of torch's convolution, TF32 on a GPU.
        grads = (torch.autograd.grad(out.square().sum(), arguments) for out in (got, expected))
        assert all(error(ours, exact) < 1e-3 for ours, exact in zip(*grads, strict=True))
    messages = [str(w.message) for w in recwarn.list if "local convolution of 11 channels" in str(w.message)]
    assert len(messages) == 2  # itself, and the gradient of its weight
    assert all(
        message.endswith("continuing with plain torch") and "\n" not in message for message in messages
    )


def test_what_the_kernels_do_not_take_is_left_to_torch(device):
    x, weight, bias = (
        each.movedim(-1, 1) if each.dim() > 2 and each.shape[1] != 1 else each for each in inputs(device)
    )
    five = torch.randn(6, 1, 5, 5, 5, device=device)
    assert torch.equal(local_convolution(x, five, bias), local_convolution_reference(x, five, bias))
    with pytest.raises(RuntimeError):
        local_convolution(x, weight.bfloat16(), bias)
    assert local_convolution(x[:0], weight, bias).shape == (0, 6, 3, 5, 4)
    tangent = torch.func.jvp(lambda x: local_convolution(x, weight, bias), (x,), (x,))[1]
    assert error(tangent, local_convolution_reference(x, weight, None)) < 1e-5
    gradient = torch.func.grad(lambda x: local_convolution(x, weight, bias).square().sum())(x)
    (expected,) = torch.autograd.grad(local_convolution_reference(x, weight, bias).square().sum(), x)
    assert error(gradient, expected) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("grid", [(5, 33, 50), (33, 50)])
def test_on_the_gpu_the_kernels_are_taken_and_compile_into_one_graph(device, grid, dtype):
    torch.compiler.reset()  # a process compiles one function eight times at most: more would fall to other tests
    x, weight, bias = inputs(device, channels=96, grid=grid, dtype=dtype)
    expected = kernel(x, weight, bias).detach()
    assert error(expected, truth(x, weight, bias)) < TOLERANCE[dtype]
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(local_convolution, fullgraph=True, backend=counter, dynamic=False)
    with torch.no_grad():
        for call in (local_convolution, compiled):
            assert torch.equal(call(x.movedim(-1, 1), weight, bias).movedim(1, -1), expected)
    assert counter.frame_count == 1
    found = []
    for call in (local_convolution, compiled):
        out = call(x.movedim(-1, 1), weight, bias)
        # Over two axes torch's convolution has the faster gradients.
        assert torch.equal(out.movedim(1, -1), expected) or len(grid) == 2
        found.append(torch.autograd.grad(out.square().mean(), (x, weight, bias)))
    for ours, other in zip(*found, strict=True):
        assert error(other, ours) < TOLERANCE[dtype]


@pytest.mark.gpu
def test_under_autocast_the_weight_is_read_as_it_is(device):
    x, weight, bias = inputs(device, channels=32)
    with torch.autocast("cuda", torch.bfloat16):
        out = local_convolution(x.movedim(-1, 1), weight, bias)
    assert out.dtype == torch.bfloat16
    exact = truth(x.bfloat16(), weight, bias).movedim(-1, 1)
    assert error(out, exact) < 1e-2
    grads = torch.autograd.grad(out.float().square().sum(), (x, weight, bias))
    assert all(grad.dtype == torch.float32 for grad in grads)
    for ours, theirs in zip(grads, torch.autograd.grad(exact.square().sum(), (x, weight, bias)), strict=True):
        assert error(ours, theirs) < 2e-2
