"""The self-attention modules that are put into Wan: three axes, rotary positions, norms over all heads.

Stock Wan hands `rotary_emb` to each layer. With our rope module that is `WanPositions`, which says as data where the
tokens are. Under Diffusers' context parallelism each process has a run of the tokens (`Share`); the grid stays whole.

Shape names: B batch, N tokens, C channels, H heads, D channels of a head.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import nn

from .attention import (
    GATE_SHIFT,
    GridSelfAttention,
    MHLAAttnProcessor,
    MHLASelfAttention,
    NeutralDepthwiseMixin,
    OutputScale,
    SoftmaxAttnProcessor,
    SoftmaxSelfAttention,
)
from .blocks import effective_block_grid
from .mixing import handed_out
from .ops import mhla_attention
from .ops.halo import reach_of, with_neighbours
from .ops.parallel import parallel_mhla_attention
from .ops.rotation import GridRope
from .ops.share import Share

NORM_OUT_EPS = 1e-6


class WanPositions(NamedTuple):
    """Where the tokens are, as tensors only: Diffusers' context parallelism takes nothing else.

    cos, sin: `(1, N, 1, D)` each, stock Wan's table, channel pairs interleaved; `(1, 0, 1, D)` where no layer reads it.
    frequencies: float32 `(3, D / 2)`, radians per frame, row and column: the same rotation, as a `GridRope` takes it.
    places: `(0, frames, rows, columns)`, empty; its shape is the token grid.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    frequencies: torch.Tensor
    places: torch.Tensor

    @property
    def grid(self) -> tuple[int, int, int]:
        return tuple(self.places.shape[1:])


def processes_of(config) -> Share | None:
    """Which of the processes of a Diffusers `ParallelConfig` this one is; None: tokens are not spread."""
    if config is None or config.context_parallel_config is None:
        return None
    group = config.context_parallel_config._flattened_mesh.get_group()
    return Share(dist.get_rank(group), dist.get_world_size(group), group)


def share_of(config, tokens: int, grid: tuple[int, int, int]) -> Share | None:
    """`processes_of` an attention's configuration.

    Raises ValueError when this process does not hold the `tokens` that are its share of the grid.
    """
    share = processes_of(config)
    if share is None:
        return None
    start, stop = share.span(math.prod(grid))
    if tokens != stop - start:
        raise ValueError(
            f"process {share.rank} of {share.ranks} got {tokens} tokens, its share of a grid {grid} is {stop - start}: "
            "call enable_parallelism() without a cp_plan of your own, which splits the tokens in raster order"
        )
    return share


class NeutralConv3d(NeutralDepthwiseMixin, nn.Conv3d):
    """Over `(B, C, frames, rows, columns)`."""


class AcrossHeadsNorm(nn.RMSNorm):
    """Stock Wan's RMSNorm of queries or keys over all heads, which also hands out its weight.

    The operator computes the norm in its own kernels. The weight is read in this module's own `forward`, as offloading
    by leaves needs it.
    """

    @classmethod
    def of(cls, norm: nn.Module) -> "AcrossHeadsNorm":
        """The same norm as a stock RMSNorm, on the same parameter."""
        own = cls(norm.weight.shape, eps=norm.eps, device="meta")
        own.weight = norm.weight
        return own

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        """RMSNorm of x `(B, N, C)`; without x the weight `(C,)`."""
        return handed_out(self, self.weight) if x is None else super().forward(x)


class ProjectedNorm(nn.RMSNorm):
    """RMSNorm `(C,)` behind the output projection, as some of the released attention classes have it."""


class WanSelfAttentionMixin:
    """What both of our attentions in Wan share; comes first among the bases."""

    _convolution = NeutralConv3d
    _model_name = "MHLAWanTransformer3DModel"  # whose rope says where the tokens are

    def adopt(self, stock: nn.Module) -> GridSelfAttention:
        """Use the projections of a stock attention (the very modules) and its norms (the very parameters)."""
        super().adopt(stock)
        for name in ("norm_q", "norm_k"):
            norm = getattr(stock, name)
            setattr(self, name, None if norm is None else AcrossHeadsNorm.of(norm))
        return self

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: WanPositions | None = None,
    ) -> torch.Tensor:
        """Self-attention of tokens `(B, N, C)` in raster order on the grid of `rotary_emb`.

        Raises ValueError when `encoder_hidden_states` or `attention_mask` is given, or `rotary_emb` is stock Wan's.
        """
        if encoder_hidden_states is not None or attention_mask is not None:
            raise ValueError(
                f"{type(self).__name__} is a self-attention over whole blocks: it takes neither "
                "encoder_hidden_states nor attention_mask"
            )
        if rotary_emb is None or len(rotary_emb) != len(WanPositions._fields):
            raise ValueError(
                f"{type(self).__name__} needs the token grid: pass rotary_emb=model.rope(latents) of an "
                f"{self._model_name}"
            )
        # Offloading and context parallelism hand plain tuples on.
        return self.processor(self, hidden_states, WanPositions(*rotary_emb))

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values before the norms, each `(B, N, H, D)`."""
        if self.fused_projections:
            projected = self.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            projected = (self.to_q(hidden_states), self.to_k(hidden_states), self.to_v(hidden_states))
        return tuple(x.unflatten(-1, (self.heads, -1)) for x in projected)

    def finish(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        value: torch.Tensor,
        grid: tuple[int, int, int],
        share: Share | None = None,
    ) -> torch.Tensor:
        gate, local = self.gate_of(hidden_states), self.local_of(value, grid, share)
        output = output if gate is None else output * gate
        return output if local is None else output + local

    def local_of(
        self, value: torch.Tensor, grid: tuple[int, int, int], share: Share | None = None
    ) -> torch.Tensor | None:
        """What the convolution of V `(B, N, H, D)` adds; of a share of the tokens, whose neighbours are fetched."""
        if self.local_conv is None or share is None:
            return super().local_of(value, grid)
        tokens, sheet = math.prod(grid), grid[1] * grid[2]
        # Not by `kernel_size`, which an adapter around the convolution lacks.
        reach = reach_of(grid, self.local_conv.weight.shape[-1] // 2)
        wide, first = with_neighbours(value.flatten(2), share, tokens, reach)
        # Filled up to whole frames; no token of this process reaches into what is filled.
        before, behind = first % sheet, -(first + wide.shape[1]) % sheet
        image = F.pad(wide, (0, 0, before, behind)).unflatten(-1, (self.heads, -1))
        found = super().local_of(image, (image.shape[1] // sheet, *grid[1:]))
        start = share.span(tokens)[0] - first + before
        return found[:, start : start + value.shape[1]]

    def operator_norm(self, norm: AcrossHeadsNorm | None) -> tuple[torch.Tensor, float] | None:
        """A norm of queries or keys as the operator takes it: weight `(H, D)` and epsilon."""
        return None if norm is None else (norm().unflatten(0, (self.heads, -1)), norm.eps)


class MHLAWanAttnProcessor(MHLAAttnProcessor):
    """Runs `mhla_attention` on the weights of an `MHLAWanAttention`; holds nothing itself."""

    # `model.enable_parallelism(config=...)` looks for this attribute and sets it.
    _parallel_config = None

    def __call__(
        self, attn: "MHLAWanAttention", hidden_states: torch.Tensor, positions: WanPositions
    ) -> torch.Tensor:
        query, key, value = attn.project(hidden_states)
        grid = positions.grid
        share = share_of(self._parallel_config, query.shape[1], grid)
        block_grid = effective_block_grid(grid, attn.block_grid)
        gate, local = attn.gate_before_activation(hidden_states), attn.local_of(value, grid, share)
        behind = {"gate": gate, "gate_bias": None if gate is None else GATE_SHIFT, "local": local}
        inside = attn.norm_out is not None and not attn.norm_across_heads
        options = {
            "grid": grid,
            "block_grid": block_grid,
            "feature_eps": attn.feature_eps,
            "normalizer": attn.normalizer,
            "denominator_eps": attn.denominator_eps,
            "rope": GridRope(positions.frequencies),
            "query_norm": attn.operator_norm(attn.norm_q),
            "key_norm": attn.operator_norm(attn.norm_k),
            "norm_weight": attn.norm_out() if inside else None,
            "norm_eps": NORM_OUT_EPS,
            "backend": attn.backend,
            **({} if attn.norm_across_heads else behind),
        }
        mixing = attn.mixing(block_grid)
        if share is None:
            output = mhla_attention(query, key, value, mixing, **options)
        else:
            start = share.span(math.prod(grid))[0]
            output = parallel_mhla_attention(
                query, key, value, mixing, start=start, reduce=share.sum, **options
            )
        if attn.norm_across_heads:
            output = attn.normed_across_heads(output)
            output = output if gate is None else output * F.silu(gate + GATE_SHIFT)
            output = output if local is None else output + local
        return attn.project_out(output)


class MHLAWanAttention(WanSelfAttentionMixin, MHLASelfAttention):
    """MHLA (arXiv 2601.07832) in Wan's self-attention slot.

    Queries and keys are normalised over all heads, made features by ReLU, and rotated in the numerator only.

    Args (besides those of `MHLASelfAttention`):
        norm_across_heads: the output's RMSNorm goes over all heads together, with a weight `(C,)`, where `norm_out`
            alone goes over each head, with one weight `(D,)` for all of them.
        norm_projected: RMSNorm over all channels behind the output projection.
    """

    _processor_class = MHLAWanAttnProcessor
    _new_modules = (*MHLASelfAttention._new_modules, "norm_projected")

    def __init__(
        self,
        query_dim: int,
        heads: int,
        dim_head: int,
        *,
        norm_across_heads: bool = False,
        norm_projected: bool = False,
        **options,
    ):
        super().__init__(query_dim, heads, dim_head, **options)
        self.norm_across_heads = norm_across_heads
        if norm_across_heads:
            self.norm_out = OutputScale(heads * dim_head)
        self.norm_projected = ProjectedNorm(query_dim, eps=NORM_OUT_EPS) if norm_projected else None

    def normed_across_heads(self, output: torch.Tensor) -> torch.Tensor:
        """RMSNorm of `(B, N, H, D)` over heads and channels."""
        weight = self.norm_out().to(output.dtype)
        flat = F.rms_norm(output.flatten(2), weight.shape, weight, NORM_OUT_EPS)
        return flat.unflatten(-1, (self.heads, -1))

    def project_out(self, output: torch.Tensor) -> torch.Tensor:
        """Output projection and what follows it: `(B, N, H, D)` -> `(B, N, C)`."""
        hidden_states = super().project_out(output)
        return hidden_states if self.norm_projected is None else self.norm_projected(hidden_states)


class SoftmaxWanAttnProcessor(SoftmaxAttnProcessor):
    """Stock Wan's softmax attention with the gate and local convolution that MHLA can have; holds no weights."""

    _parallel_config = None  # as in `MHLAWanAttnProcessor`

    def __call__(
        self, attn: "SoftmaxWanAttention", hidden_states: torch.Tensor, positions: WanPositions
    ) -> torch.Tensor:
        query, key, value = attn.project(hidden_states)
        query, key = (
            rotated(normed_across_heads(x, norm), positions).to(value.dtype)
            for norm, x in ((attn.norm_q, query), (attn.norm_k, key))
        )
        share = share_of(self._parallel_config, query.shape[1], positions.grid)
        output = dispatch_attention_fn(
            query, key, value, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        return attn.project_out(attn.finish(output, hidden_states, value, positions.grid, share))


def normed_across_heads(x: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
    """Queries or keys `(B, N, H, D)` behind their norm over all heads, if there is one."""
    return x if norm is None else norm(x.flatten(2)).unflatten(-1, x.shape[2:])


def rotated(x: torch.Tensor, positions: WanPositions) -> torch.Tensor:
    """`(B, N, H, D)` with its channel pairs (0, 1), (2, 3), ... turned by the table of `positions`."""
    cos, sin = positions.cos[..., 0::2], positions.sin[..., 1::2]
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2)


class SoftmaxWanAttention(WanSelfAttentionMixin, SoftmaxSelfAttention):
    """Softmax attention in Wan's self-attention slot: the comparison partner of `MHLAWanAttention`."""

    _processor_class = SoftmaxWanAttnProcessor
