"""A gated depthwise convolution, the middle of SANA's feed-forward, as one operator."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .backends import choose_backend, is_plain_call
from .plain_operators import plain_operator

__all__ = ["gated_depthwise", "gated_depthwise_op", "gated_depthwise_reference"]


def gated_depthwise_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `gated_depthwise` computes, step by step in x's dtype."""
    value, gate = F.conv2d(x, weight, bias, padding=1, groups=x.shape[1]).chunk(2, dim=1)
    return value * F.silu(gate)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from .depthwise_kernel import start_gated_depthwise

    out = start_gated_depthwise(x, weight, bias)
    if out is None:  # the kernel does not compile for this GPU
        out = gated_depthwise_reference(x.permute(0, 3, 1, 2), weight, bias).permute(0, 2, 3, 1).contiguous()
    return out


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


# x `(B, rows, columns, 2C)` -> `(B, rows, columns, C)`, both contiguous or made so.
gated_depthwise_op = plain_operator("gated_depthwise", _convolve, _fake)


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel computes this call: no gradient is wanted, and nothing would have to be cast."""
    if x.numel() == 0 or choose_backend("auto", x.device, x.dtype, 1)[0] != "triton":
        return False
    return is_plain_call(x, weight, bias)


def gated_depthwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`conv(x)[:, :C] * SiLU(conv(x)[:, C:])` with a depthwise 3 x 3 convolution of 2C channels, zeros around.

    From SANA's feed-forward (arXiv 2410.10629, Sec. 2.2). On a CUDA device, without gradients, one kernel with sums in
    float32; otherwise torch's convolution.

    Args:
        x: `(B, 2C, rows, columns)`, best channels last in memory.
        weight: `(2C, 1, 3, 3)`. bias: `(2C,)` or None.

    Returns:
        `(B, C, rows, columns)` in x's dtype; channels last in memory where the kernel ran.
    """
    if not _takes(x, weight, bias):
        return gated_depthwise_reference(x, weight, bias)
    return gated_depthwise_op(x.permute(0, 2, 3, 1), weight, bias).permute(0, 3, 1, 2)
