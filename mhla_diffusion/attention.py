"""The self-attention modules that are put into the models, and their stateless processors.

A module keeps the names of the stock attention (`to_q, to_k, to_v, to_out.0, norm_q, norm_k`), so
checkpoints, LoRA and quantisation go on working, and holds every new weight: `mixing`, and by option
`to_gate`, `local_conv`, `norm_out`. A processor holds none. The token grid is an argument of `forward`: no
hook, context or state carries it.

Shape names: B batch, N tokens, C channels, H heads, D channels of a head, M blocks.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import (
    Attention,
    PAGCFGIdentitySelfAttnProcessor2_0,
    PAGCFGSanaLinearAttnProcessor2_0,
    PAGIdentitySanaLinearAttnProcessor2_0,
    PAGIdentitySelfAttnProcessor2_0,
)
from torch import nn

from .blocks import effective_block_grid, integer
from .mixing import BlockMixing, handed_out
from .ops import mhla_attention
from .ops.local_convolution import local_convolution

# SiLU(GATE_SHIFT) = 1: a gate whose projection is zero changes nothing, and weight decay pulls it there.
GATE_SHIFT = 1.2784645

# What perturbed-attention guidance puts into a layer while it draws (at first, and by default after another choice
# of layers), and of how many parts of the batch the last one is perturbed.
PERTURBED_PARTS = {
    PAGCFGSanaLinearAttnProcessor2_0: 3,
    PAGCFGIdentitySelfAttnProcessor2_0: 3,
    PAGIdentitySanaLinearAttnProcessor2_0: 2,
    PAGIdentitySelfAttnProcessor2_0: 2,
}


class OutputScale(nn.Module):
    """Weight `(D,)` of the per-head RMSNorm behind the read-out; `forward()` returns it for the operator."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_dim))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.fill_(1.0)

    def forward(self) -> torch.Tensor:
        return handed_out(self, self.weight)


class NeutralLinear(nn.Linear):
    """A linear layer that starts at zero."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.zero_()
        self.bias.zero_()


class NeutralDepthwiseMixin:
    """A depthwise convolution over the token grid that starts at zero; comes first among the bases."""

    backend = "auto"  # as an MHLA attention's: "eager" and "reference" leave the kernels out

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.zero_()
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # An adapter makes other convolutions of this class, and programs for pictures without seams change the padding.
        depthwise = self.in_channels == self.out_channels == self.groups and self.padding_mode == "zeros"
        if self.backend in ("eager", "reference") or not depthwise:
            return super().forward(x)
        return local_convolution(x, self.weight, self.bias)


class NeutralConv2d(NeutralDepthwiseMixin, nn.Conv2d):
    """Over `(B, C, rows, columns)`."""


def odd_size(local_conv) -> int:
    """The kernel size of a local convolution; ValueError unless it is an odd positive integer."""
    size = integer(local_conv)
    if size is None or size < 1 or size % 2 == 0:
        raise ValueError(
            f"local_conv={local_conv!r}: give an odd kernel size such as 3, or None for no convolution"
        )
    return size


class GridSelfAttention(Attention):
    """Projections, gate and local convolution of a self-attention over a token grid; the subclasses add the core.

    Args:
        query_dim: channels C of the tokens.
        heads, dim_head: H and D.
        qk_norm, dropout, bias: as in the stock `Attention`.
        norm_in: LayerNorm with weight and bias of the tokens before the projections, as in the released DiT code.
        gate: multiply the core's output by `SiLU(to_gate(x) + 1.2784645)`; 1 at first.
        local_conv: odd kernel size of a depthwise convolution on V, added behind the gate (0 at first), or
            None for no convolution.
    """

    _processor_class: type
    _convolution: type = NeutralConv2d  # of `local_conv`
    # New modules by name; each has `reset_parameters`, which writes its documented start.
    _new_modules = ("norm_in", "to_gate", "local_conv")

    def __init__(
        self,
        query_dim: int,
        heads: int,
        dim_head: int,
        *,
        qk_norm: str | None = None,
        dropout: float = 0.0,
        bias: bool = False,
        norm_in: bool = False,
        gate: bool = False,
        local_conv: int | None = None,
    ):
        super().__init__(
            query_dim=query_dim,
            heads=heads,
            dim_head=dim_head,
            kv_heads=heads if qk_norm is not None else None,
            qk_norm=qk_norm,
            dropout=dropout,
            bias=bias,
            processor=self._processor_class(),
        )
        if local_conv is not None:
            local_conv = odd_size(local_conv)
        inner_dim = heads * dim_head
        self.norm_in = nn.LayerNorm(query_dim) if norm_in else None
        self.to_gate = NeutralLinear(query_dim, inner_dim) if gate else None
        self.local_conv = (
            self._convolution(inner_dim, inner_dim, local_conv, padding=local_conv // 2, groups=inner_dim)
            if local_conv
            else None
        )

    def adopt(self, stock: Attention) -> "GridSelfAttention":
        """Use the projections and norms of a stock attention (the very modules) in place of the own ones."""
        for name in ("to_q", "to_k", "to_v", "to_out", "norm_q", "norm_k"):
            setattr(self, name, getattr(stock, name))
        return self

    def new_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Name and module of everything that a stock attention lacks."""
        for name in self._new_modules:
            module = getattr(self, name)
            if module is not None:
                yield name, module

    def set_processor(self, processor) -> None:
        """Set the processor; raises ValueError on a foreign one, which would silently replace MHLA."""
        if not isinstance(processor, self._processor_class):
            raise ValueError(
                f"{type(self).__name__} takes a {self._processor_class.__name__} only, got a "
                f"{type(processor).__name__}: use restore(model) to go back to the stock attention, or "
                "set_attn_processor with a dict that leaves attn1 as it is"
            )
        super().set_processor(processor)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        grid: tuple[int, int],
    ) -> torch.Tensor:
        """Self-attention of tokens `(B, N, C)`, in raster order on `grid` = (rows, columns).

        Raises ValueError when `encoder_hidden_states` or `attention_mask` is given: neither has a meaning.
        """
        if encoder_hidden_states is not None or attention_mask is not None:
            raise ValueError(
                f"{type(self).__name__} is a self-attention over whole blocks: it takes neither "
                "encoder_hidden_states nor attention_mask"
            )
        if self.norm_in is not None:
            hidden_states = self.norm_in(hidden_states)
        parts = PERTURBED_PARTS.get(type(self.processor))
        if parts is None:
            return self.processor(self, hidden_states, grid=grid)
        perturbed = hidden_states.shape[0] // parts
        attended = self._processor_class()(self, hidden_states[:-perturbed], grid=grid)
        return torch.cat((attended, self.identity(hidden_states[-perturbed:], grid)))

    def identity(self, hidden_states: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """The output if every token attended to itself alone: what perturbed-attention guidance leads away from."""
        value = self.to_v(hidden_states).unflatten(-1, (self.heads, -1))
        return self.project_out(self.finish(self.normed(value), hidden_states, value, grid))

    def normed(self, output: torch.Tensor) -> torch.Tensor:
        """The core's output `(B, N, H, D)` behind the output norm, if there is one."""
        return output

    def finish(
        self, output: torch.Tensor, hidden_states: torch.Tensor, value: torch.Tensor, grid: tuple[int, int]
    ) -> torch.Tensor:
        """The core's output `(B, N, H, D)` times the gate, plus the local convolution of V."""
        gate, local = self.gate_of(hidden_states), self.local_of(value, grid)
        output = output if gate is None else output * gate
        return output if local is None else output + local

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, each `(B, N, H, D)`."""
        if self.fused_projections:
            query, key, value = self.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            query, key, value = self.to_q(hidden_states), self.to_k(hidden_states), self.to_v(hidden_states)
        if self.norm_q is not None:
            query = self.norm_q(query)
        if self.norm_k is not None:
            key = self.norm_k(key)
        # Under autocast the norms return float32; the core wants one dtype.
        heads = (*value.shape[:-1], self.heads, -1)
        return query.to(value.dtype).view(heads), key.to(value.dtype).view(heads), value.view(heads)

    def gate_before_activation(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """`to_gate(x)`, `(B, N, H, D)`; None without a gate."""
        return None if self.to_gate is None else self.to_gate(hidden_states).unflatten(-1, (self.heads, -1))

    def gate_of(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """What the core's output is multiplied by, `(B, N, H, D)`; None without a gate."""
        gate = self.gate_before_activation(hidden_states)
        return None if gate is None else F.silu(gate + GATE_SHIFT)

    def local_of(self, value: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor | None:
        """What the local convolution of V `(B, N, H, D)` adds, in the same shape; None without one."""
        if self.local_conv is None:
            return None
        image = value.flatten(2).transpose(1, 2).unflatten(-1, grid)  # (B, H*D, rows, columns)
        return self.local_conv(image).flatten(2).transpose(1, 2).unflatten(-1, (self.heads, -1))

    def project_out(self, output: torch.Tensor) -> torch.Tensor:
        """Output projection and dropout: `(B, N, H, D)` -> `(B, N, C)`."""
        hidden_states = output.flatten(2)
        for step in self.to_out:
            hidden_states = step(hidden_states)
        if hidden_states.dtype == torch.float16:  # an overflow here would be an infinity in every later layer
            hidden_states = hidden_states.clamp(-65504, 65504)
        return hidden_states


class MHLAAttnProcessor:
    """Runs `mhla_attention` on the weights of an `MHLASelfAttention`; holds nothing itself."""

    def __call__(
        self, attn: "MHLASelfAttention", hidden_states: torch.Tensor, grid: tuple[int, int]
    ) -> torch.Tensor:
        query, key, value = attn.project(hidden_states)
        block_grid = effective_block_grid(grid, attn.block_grid)
        gate = attn.gate_before_activation(hidden_states)
        output = mhla_attention(
            query,
            key,
            value,
            attn.mixing(block_grid),
            grid=grid,
            block_grid=block_grid,
            feature_eps=attn.feature_eps,
            normalizer=attn.normalizer,
            denominator_eps=attn.denominator_eps,
            norm_weight=attn.norm_out() if attn.norm_out is not None else None,
            gate=gate,
            gate_bias=None if gate is None else GATE_SHIFT,
            local=attn.local_of(value, grid),
            backend=attn.backend,
        )
        return attn.project_out(output)


class SoftmaxAttnProcessor:
    """Softmax attention with the same gate and local convolution, for comparisons; holds no weights."""

    # `model.set_attention_backend("flash")` looks for this attribute and sets it.
    _attention_backend = None

    def __call__(
        self, attn: "SoftmaxSelfAttention", hidden_states: torch.Tensor, grid: tuple[int, int]
    ) -> torch.Tensor:
        query, key, value = attn.project(hidden_states)
        output = dispatch_attention_fn(query, key, value, backend=self._attention_backend)
        return attn.project_out(attn.finish(output, hidden_states, value, grid))


class MHLASelfAttention(GridSelfAttention):
    """Multi-head linear attention over token blocks (MHLA, arXiv 2601.07832, Sec. 3).

    Args (besides those of `GridSelfAttention`):
        block_grid: blocks per axis, (rows, columns). M is their product. A grid with fewer tokens than blocks
            on an axis uses one block per token there, with the mixing matrix interpolated.
        feature_eps, normalizer, denominator_eps: see `mhla_attention`.
        norm_out: RMSNorm of each head's output, with one weight `(D,)` for all heads.
        mixing_init, mixing_normalization, mixing_learnable: see `BlockMixing`.
        per_head_mixing: one matrix for each head, `(H, M, M)`, instead of one `(M, M)`.
    """

    _processor_class = MHLAAttnProcessor
    _new_modules = ("mixing", "norm_in", "to_gate", "local_conv", "norm_out")

    def __init__(
        self,
        query_dim: int,
        heads: int,
        dim_head: int,
        *,
        block_grid: tuple[int, int],
        feature_eps: float = 1e-6,
        normalizer: str = "paper",
        denominator_eps: float | None = None,
        norm_out: bool = False,
        mixing_init: str = "linear",
        mixing_normalization: str = "row",
        mixing_learnable: bool = True,
        per_head_mixing: bool = False,
        **common,
    ):
        super().__init__(query_dim, heads, dim_head, **common)
        self.block_grid = tuple(block_grid)
        self.feature_eps = feature_eps
        self.normalizer = normalizer
        self.denominator_eps = denominator_eps
        self.backend = "auto"
        self.mixing = BlockMixing(
            self.block_grid,
            num_heads=heads if per_head_mixing else None,
            init=mixing_init,
            normalization=mixing_normalization,
            learnable=mixing_learnable,
        )
        self.norm_out = OutputScale(dim_head) if norm_out else None

    def normed(self, output: torch.Tensor) -> torch.Tensor:
        if self.norm_out is None:
            return output
        return F.rms_norm(output, output.shape[-1:], self.norm_out().to(output.dtype), 1e-6)


class SoftmaxSelfAttention(GridSelfAttention):
    """Softmax attention with the same projections and options: the comparison partner of `MHLASelfAttention`."""

    _processor_class = SoftmaxAttnProcessor


class MHLASanaAttention(MHLASelfAttention):
    """MHLA in SANA's self-attention slot."""


class SoftmaxSanaAttention(SoftmaxSelfAttention):
    """Softmax attention in SANA's self-attention slot."""


class MHLADiTAttention(MHLASelfAttention):
    """MHLA in DiT's self-attention slot; `bias` is usually on there."""


class SoftmaxDiTAttention(SoftmaxSelfAttention):
    """Softmax attention in DiT's self-attention slot, with the gate and local convolution that MHLA can have."""
