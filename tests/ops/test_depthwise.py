"""The gated depthwise convolution: its kernel against float64, and when torch computes it instead."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from triton.runtime.errors import OutOfResources

from mhla_diffusion.ops import depthwise_kernel, triton_launch
from mhla_diffusion.ops.depthwise import gated_depthwise, gated_depthwise_op, gated_depthwise_reference

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def inputs(device, batch=2, channels=5, rows=6, columns=7, dtype=torch.float32, bias=True):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(batch, rows, columns, 2 * channels, generator=draw).to(device, dtype).permute(0, 3, 1, 2)
    weight = torch.randn(2 * channels, 1, 3, 3, generator=draw).to(device, dtype)
    return x, weight, torch.randn(2 * channels, generator=draw).to(device, dtype) if bias else None


def truth(x, weight, bias):
    return gated_depthwise_reference(x.double(), weight.double(), None if bias is None else bias.double())


def kernel(x, weight, bias):
    return gated_depthwise_op(x.permute(0, 2, 3, 1), weight, bias).permute(0, 3, 1, 2)


def error(got, expected):
    assert got.shape == expected.shape and got.isfinite().all()
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"bias": False},
        {"batch": 1, "rows": 1, "columns": 1},
        {"rows": 9, "columns": 33, "channels": 3},
        {"rows": 4, "columns": 16, "channels": 64},
        {"rows": 5, "columns": 3, "channels": 70},
    ],
)
def test_the_kernel_equals_float64(device, sizes, dtype, poisoned_buffers):
    arguments = inputs(device, **sizes, dtype=dtype)
    got = kernel(*arguments)
    assert got.dtype == dtype and got.is_contiguous(memory_format=torch.channels_last)
    assert error(got, truth(*arguments)) < TOLERANCE[dtype]


def test_any_memory_layout_gives_the_same(device):
    x, weight, bias = inputs(device)
    expected = kernel(x, weight, bias)
    wide = torch.zeros(2, 12, 6, 8, device=device)
    wide[:, 1:11, :, :7] = x
    assert torch.equal(kernel(x, weight, bias.repeat_interleave(2)[::2]), expected)
    for other in (x.contiguous(), wide[:, 1:11, :, :7]):
        assert torch.equal(kernel(other, weight.to(memory_format=torch.channels_last), bias), expected)


def test_offsets_of_64_bits(device, monkeypatch):
    from mhla_diffusion.ops import triton_configs

    monkeypatch.setattr(depthwise_kernel, "FAR", 0)
    arguments = inputs(device)
    with triton_configs.override(replay=False):
        assert error(kernel(*arguments), truth(*arguments)) < 1e-6


def test_the_operator_keeps_torchs_rules(device):
    x, weight, bias = inputs(device)
    torch.library.opcheck(gated_depthwise_op, (x.permute(0, 2, 3, 1), weight, bias))


@pytest.mark.parametrize("bias", [True, False])
def test_torch_takes_over_with_one_warning_where_the_kernel_cannot_run(device, monkeypatch, recwarn, bias):
    def never_fits(*args, **constants):
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(triton_launch, "launch", never_fits)
    monkeypatch.setattr(triton_launch, "_step", {})
    monkeypatch.setattr(triton_launch, "_warned", set())
    arguments = inputs(device, channels=11, bias=bias)  # a width that no other test has: nothing is replayed
    for _ in range(2):
        got = kernel(*arguments)
        assert error(got, truth(*arguments)) < 1e-6 and got.is_contiguous(memory_format=torch.channels_last)
    (message,) = [str(w.message) for w in recwarn.list if "depthwise" in str(w.message)]
    assert "gated depthwise convolution of 22 channels in torch.float32" in message
    assert message.endswith("continuing with plain torch") and "\n" not in message


def test_gradients_are_those_of_the_convolution(device):
    x, weight, bias = (tensor.requires_grad_() for tensor in inputs(device))
    out = gated_depthwise(x, weight, bias)
    expected = gated_depthwise_reference(x, weight, bias)
    assert torch.equal(out, expected)
    grads = (torch.autograd.grad(y.square().sum(), (x, weight, bias)) for y in (out, expected))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_weights_of_another_dtype_and_empty_batches_are_left_to_torch(device):
    x, weight, bias = inputs(device)
    with pytest.raises(RuntimeError):
        gated_depthwise(x, weight.bfloat16(), bias)
    assert gated_depthwise(x[:0], weight, bias).shape == (0, 5, 6, 7)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_on_the_gpu_the_kernel_is_taken_and_compiles_into_one_graph(device, dtype):
    arguments = inputs(device, channels=96, rows=33, columns=50, dtype=dtype)
    with torch.no_grad():
        expected = gated_depthwise(*arguments)
        assert torch.equal(expected, kernel(*arguments))
        counter = CompileCounterWithBackend("inductor")
        compiled = torch.compile(gated_depthwise, fullgraph=True, backend=counter, dynamic=False)
        assert torch.equal(compiled(*arguments), expected)
    assert counter.frame_count == 1
    assert error(expected, truth(*arguments)) < TOLERANCE[dtype]
