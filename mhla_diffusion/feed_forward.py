"""SANA's convolutional feed-forward on a stock one's weights, with the same keys: what a GPU computes faster.

Its tokens lie channels last in memory. There a 1 x 1 convolution is a matrix product, and the depthwise convolution
with the gate behind it one pass (`ops.depthwise`). On a CPU all of it is what the stock module computes, bit for bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers.models.transformers.sana_transformer import GLUMBConv
from diffusers.models.transformers.transformer_sana_video import GLUMBTempConv
from torch import nn

from .ops.depthwise import gated_depthwise

__all__ = ["GatedConvFeedForward", "GatedTemporalConvFeedForward"]


class PointwiseConv2d(nn.Conv2d):
    """A 1 x 1 convolution, on a GPU as the matrix product that it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            return super().forward(x)
        return F.linear(x.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


class GatedDepthwiseConv2d(nn.Conv2d):
    """A depthwise convolution that multiplies one half of its channels by SiLU of the other when asked to.

    The gate is part of this module's own `forward`: hooks that move or cast its weights act there.
    """

    def forward(self, x: torch.Tensor, gated: bool = False) -> torch.Tensor:
        return gated_depthwise(x, self.weight, self.bias) if gated else super().forward(x)


def as_kind(kind: type[nn.Conv2d], conv: nn.Conv2d) -> nn.Conv2d:
    """The same convolution, on the same parameters, of another class."""
    own = kind(
        conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding, groups=conv.groups,
        bias=conv.bias is not None, device="meta",
    )  # fmt: skip
    own.weight, own.bias = conv.weight, conv.bias
    return own.train(conv.training)


class GatedConvMixin:
    """What the feed-forwards of SANA and SANA-Video share; comes first among the bases."""

    @classmethod
    def of(cls, stock: nn.Module) -> nn.Module:
        """A stock feed-forward's modules and parameters (the very ones) in this class."""
        own = cls.__new__(cls)
        nn.Module.__init__(own)
        own.norm_type, own.residual_connection = stock.norm_type, stock.residual_connection
        for name, module in stock.named_children():
            own.add_module(name, module)
        own.norm = stock.norm
        own.conv_inverted = as_kind(PointwiseConv2d, stock.conv_inverted)
        own.conv_depth = as_kind(GatedDepthwiseConv2d, stock.conv_depth)
        own.conv_point = as_kind(PointwiseConv2d, stock.conv_point)
        return own.train(stock.training)

    @property
    def plain(self) -> bool:
        """Whether the depthwise convolution is ours: an adapter around it knows no gate."""
        return isinstance(self.conv_depth, GatedDepthwiseConv2d) and isinstance(self.nonlinearity, nn.SiLU)

    def convolved(self, x: torch.Tensor) -> torch.Tensor:
        """`(B, C, rows, columns)` -> the same size: expansion, gated depthwise convolution, projection."""
        return self.conv_point(self.conv_depth(self.nonlinearity(self.conv_inverted(x)), gated=True))


class GatedConvFeedForward(GatedConvMixin, GLUMBConv):
    """SANA's (arXiv 2410.10629, Sec. 2.2)."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(B, C, rows, columns)` -> the same size."""
        if not self.plain:
            return super().forward(hidden_states)
        x = self.convolved(hidden_states)
        if self.norm_type == "rms_norm":
            x = self.norm(x.movedim(1, -1)).movedim(-1, 1)
        return x + hidden_states if self.residual_connection else x


class GatedTemporalConvFeedForward(GatedConvMixin, GLUMBTempConv):
    """SANA-Video's (arXiv 2509.24695): the same on each frame, then a convolution over frames."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(B, frames, rows, columns, C)` -> the same size."""
        if not self.plain or self.norm_type is not None:  # SANA-Video has no norm there
            return super().forward(hidden_states)
        frames = hidden_states.shape[1]
        x = self.convolved(hidden_states.flatten(0, 1).permute(0, 3, 1, 2))
        x = x.unflatten(0, (-1, frames)).flatten(3).transpose(1, 2)  # (B, C, frames, tokens)
        x = x + self.conv_temp(x)
        x = x.permute(0, 2, 3, 1).reshape(hidden_states.shape)
        return x + hidden_states if self.residual_connection else x
