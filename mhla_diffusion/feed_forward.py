"""The models' feed-forwards on a stock one's weights, with the same keys: what a GPU computes faster.

In SANA's the tokens lie channels last in memory. There a 1 x 1 convolution in half precision is a matrix product, and
without gradients the depthwise convolution with the gate behind it is one pass (`ops.depthwise`). In DiT's and Wan's
GELU is, without gradients, part of the product before it: the hidden channels, four times as many as the model's and
more, are written once. On a CPU all of it is what the stock module computes, bit for bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.transformers.sana_transformer import GLUMBConv
from diffusers.models.transformers.transformer_sana_video import GLUMBTempConv
from torch import nn

from .ops.backends import is_plain_call
from .ops.depthwise import gated_depthwise, gated_depthwise_reference

__all__ = ["GatedConvFeedForward", "GatedTemporalConvFeedForward", "with_gelu_in_the_product"]


class GELULinear(nn.Linear):
    """A linear layer that may apply GELU (tanh) to its output in the same kernel.

    That is part of this module's own `forward`: hooks that move or cast its weights act there.
    """

    @classmethod
    def of(cls, linear: nn.Linear) -> GELULinear:
        """The same layer, on the same parameters."""
        own = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        own.weight, own.bias = linear.weight, linear.bias
        return own.train(linear.training)

    def forward(self, x: torch.Tensor, gelu: bool = False) -> torch.Tensor:
        if not gelu:
            return super().forward(x)
        if not self.fuses(x):
            return F.gelu(super().forward(x), approximate="tanh")
        # cuBLASLt's GELU is the tanh one; torch's CPU kernel behind the same name takes the other.
        out = torch._addmm_activation(self.bias, x.flatten(0, -2), self.weight.t(), use_gelu=True)
        return out.unflatten(0, x.shape[:-1])

    def fuses(self, x: torch.Tensor) -> bool:
        """Whether one kernel computes it: on CUDA, with plain weights that need no cast, without gradients."""
        if not x.is_cuda or x.numel() == 0 or self.bias is None:
            return False
        return is_plain_call(x, self.weight, self.bias)


class GELUInTheProduct(GELU):
    """Diffusers' linear layer and GELU (tanh), as one kernel where that can be."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.proj, GELULinear):  # an adapter or a quantised layer in its place
            return super().forward(hidden_states)
        return self.proj(hidden_states, gelu=True)


def with_gelu_in_the_product(stock: FeedForward) -> FeedForward:
    """A stock feed-forward's modules and parameters (the very ones) with `GELUInTheProduct` in front, or stock itself
    where it does not begin with GELU by tanh."""
    first = stock.net[0]
    if type(first) is not GELU or first.approximate != "tanh" or type(first.proj) is not nn.Linear:
        return stock
    own, gelu = FeedForward.__new__(FeedForward), GELUInTheProduct.__new__(GELUInTheProduct)
    for module in (own, gelu):
        nn.Module.__init__(module)
    gelu.proj, gelu.approximate = GELULinear.of(first.proj), first.approximate
    own.net = nn.ModuleList([gelu, *stock.net[1:]])
    return own.train(stock.training)


class PointwiseConv2d(nn.Conv2d):
    """A 1 x 1 convolution, on a GPU as the matrix product that it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_product(x):
            return super().forward(x)
        return F.linear(x.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)

    def is_product(self, x: torch.Tensor) -> bool:
        """Whether the product takes the convolution's place: on CUDA, with plain weights, in half precision.

        In float32 torch has two settings: it lets convolutions, but not products, round to TF32. There the stock
        module's numbers and speed are those of the convolution.
        """
        if not x.is_cuda or type(self.weight) not in (torch.Tensor, nn.Parameter):
            return False
        return x.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled("cuda")


class GatedDepthwiseConv2d(nn.Conv2d):
    """A depthwise convolution that multiplies one half of its channels by SiLU of the other when asked to.

    The gate is part of this module's own `forward`: hooks that move or cast its weights act there.
    """

    backend = "auto"  # as an MHLA attention's: "eager" and "reference" leave the kernel out

    def forward(self, x: torch.Tensor, gated: bool = False) -> torch.Tensor:
        if not gated:
            return super().forward(x)
        if self.backend in ("eager", "reference"):
            return gated_depthwise_reference(x, self.weight, self.bias)
        return gated_depthwise(x, self.weight, self.bias)


def as_kind(kind: type[nn.Conv2d], conv: nn.Conv2d) -> nn.Conv2d:
    """The same convolution, on the same parameters, of another class."""
    own = kind(
        conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding, groups=conv.groups,
        bias=conv.bias is not None, padding_mode=conv.padding_mode, device="meta",
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
        """Whether the depthwise convolution is ours, with zeros around: an adapter around it knows no gate."""
        return (
            isinstance(self.conv_depth, GatedDepthwiseConv2d)
            and self.conv_depth.padding_mode == "zeros"
            and isinstance(self.nonlinearity, nn.SiLU)
        )

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
