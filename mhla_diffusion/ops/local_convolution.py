"""A depthwise convolution over the token grid, MHLA's local branch, as one operator with gradients of any order."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from .backends import choose_backend, is_ordinary_call, wants_gradient
from .plain_operators import differentiable, plain_operator
from .replay import computed, on_its_device, replayed

__all__ = ["local_convolution", "local_convolution_op", "local_convolution_reference", "weight_gradient_op"]


def local_convolution_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `local_convolution` computes, by torch's convolution in x's dtype."""
    convolve = F.conv2d if x.dim() == 4 else F.conv3d
    return convolve(x, weight, bias, padding=[size // 2 for size in weight.shape[2:]], groups=x.shape[1])


def _torch(x: Tensor, weight: Tensor, bias: Tensor | None, flipped: bool) -> Tensor:
    """The kernel's result where it does not compile."""
    weight = (weight.flip(2, 3, 4) if flipped else weight).to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    return local_convolution_reference(x.movedim(-1, 1), weight, bias).movedim(1, -1).contiguous()


def _torch_weight_gradient(x: Tensor, grad: Tensor, depth: int) -> Tensor:
    shape = (x.shape[-1], 1, depth, 3, 3)
    return torch.nn.grad.conv3d_weight(
        x.movedim(-1, 1).float(),
        shape,
        grad.movedim(-1, 1).float(),
        padding=(depth // 2, 1, 1),
        groups=shape[0],
    )


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, flipped: bool) -> Tensor:
    """x `(B, frames, rows, columns, C)`, weight `(C, 1, 1 or 3, 3, 3)`, bias `(C,)` -> as x, contiguous, in its dtype.

    flipped: with the taps in the opposite order, which is the transposed convolution.
    """
    from .local_kernels import start_local

    out = start_local(x, weight, bias, flipped)
    return _torch(x, weight, bias, flipped) if out is None else out


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, flipped: bool) -> Tensor:
    return x.new_empty(x.shape)


_plain_op = plain_operator("local_convolution_output", _convolve, _fake)
local_convolution_op = torch.library.custom_op(
    "mhla_diffusion::local_convolution", on_its_device(replayed(_convolve)), mutates_args=()
)
local_convolution_op.register_fake(_fake)


def _taps_last(sums: Tensor, depth: int) -> Tensor:
    """(chunks, taps, C) -> (C, 1, depth, 3, 3)"""
    return sums.sum(dim=0).t().contiguous().view(-1, 1, depth, 3, 3)


def _weight_gradient(x: Tensor, grad: Tensor, depth: int) -> Tensor:
    """Sum over tokens n of `grad[n] * x[n + tap]`: float32 `(C, 1, depth, 3, 3)` of two `(B, *grid, C)`."""
    from .local_kernels import start_weight_gradient

    sums = start_weight_gradient(x, grad, depth)
    if sums is None:
        return _torch_weight_gradient(x, grad, depth)
    return computed(_SHAPED[depth], sums)


_SHAPED = {depth: functools.partial(_taps_last, depth=depth) for depth in (1, 3)}


def _fake_weight_gradient(x: Tensor, grad: Tensor, depth: int) -> Tensor:
    return x.new_empty(x.shape[-1], 1, depth, 3, 3, dtype=torch.float32)


weight_gradient_op = torch.library.custom_op(
    "mhla_diffusion::local_convolution_weight_gradient",
    on_its_device(replayed(_weight_gradient)),
    mutates_args=(),
)
weight_gradient_op.register_fake(_fake_weight_gradient)
_plain_weight_gradient = plain_operator(
    "local_convolution_weight_gradient_output", _weight_gradient, _fake_weight_gradient
)


def _setup_context(ctx, inputs, output) -> None:
    x, weight, bias, ctx.flipped = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias = None if bias is None else bias.dtype


def _backward(ctx, grad):
    """`out[n] = sum of weight[tap] * x[n + tap]`, or x[n - tap] where flipped: each is the other's transpose."""
    x, weight = ctx.saved_tensors
    further = torch.is_grad_enabled()  # gradients of these gradients
    convolve, of_weight = (
        (local_convolution_op, weight_gradient_op) if further else (_plain_op, _plain_weight_gradient)
    )
    dx = dweight = dbias = None
    if ctx.needs_input_grad[0]:
        dx = convolve(grad, weight, None, not ctx.flipped)
    if ctx.needs_input_grad[1]:
        pair = (grad, x) if ctx.flipped else (x, grad)
        dweight = of_weight(*pair, weight.shape[2]).to(weight.dtype)
    if ctx.bias is not None and ctx.needs_input_grad[2]:
        dbias = grad.sum(dim=(0, 1, 2, 3), dtype=torch.float32).to(ctx.bias)
    return dx, dweight, dbias, None


local_convolution_op.register_autograd(_backward, setup_context=_setup_context)
_learning = differentiable(local_convolution_op, _plain_op, _setup_context, _backward)


def _setup_weight_gradient(ctx, inputs, output) -> None:
    x, grad, _ = inputs
    ctx.save_for_backward(x, grad)


def _weight_gradient_backward(ctx, cotangent):
    x, grad = ctx.saved_tensors
    dx = local_convolution_op(grad, cotangent, None, True) if ctx.needs_input_grad[0] else None
    dgrad = local_convolution_op(x, cotangent, None, False) if ctx.needs_input_grad[1] else None
    return dx, dgrad, None


weight_gradient_op.register_autograd(_weight_gradient_backward, setup_context=_setup_weight_gradient)


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernels compute this call: plain tensors on one GPU, three taps on each axis."""
    if x.numel() == 0 or choose_backend("auto", x.device, x.dtype, 1)[0] != "triton":
        return False
    channels, taps = x.shape[1], (3,) * (x.dim() - 2)
    if tuple(weight.shape) != (channels, 1, *taps) or (bias is not None and tuple(bias.shape) != (channels,)):
        return False  # other numbers of taps, or what torch refuses
    return is_ordinary_call(x, weight, bias)


def local_convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Depthwise convolution of odd size over the token grid, zeros around: MHLA's local branch (CPE).

    On a CUDA device with three taps on each axis by Triton kernels, sums in float32; otherwise by torch's convolution,
    which is faster over two axes where gradients are wanted.
    Under autocast x is cast as torch's convolution would, the weight is read as it is.

    Args:
        x: `(B, C, rows, columns)` or `(B, C, frames, rows, columns)`, best channels last in memory.
        weight: `(C, 1, *taps)`, odd numbers of taps. bias: `(C,)` or None.

    Returns:
        As x; channels last in memory where the kernels ran.
    """
    flat, learning = x.dim() == 4, wants_gradient(x, weight, bias)
    if (flat and learning) or not _takes(x, weight, bias):
        return local_convolution_reference(x, weight, bias)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if flat:
        x, weight = x[:, :, None], weight[:, :, None]
    convolve = _learning if learning else _plain_op
    out = convolve(x.movedim(1, -1), weight, bias, False).movedim(-1, 1)
    return out[:, :, 0] if flat else out
