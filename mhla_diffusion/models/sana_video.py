"""SANA-Video with MHLA self-attention: the stock model's parts, keys and machinery, with another `attn1`."""

import math
from typing import Any

import torch
from diffusers import CacheMixin, SanaVideoTransformer3DModel
from diffusers.configuration_utils import register_to_config
from diffusers.models.transformers.transformer_sana_video import SanaVideoTransformerBlock
from torch import nn

from ..attention import GridSelfAttention
from ..feed_forward import GatedTemporalConvFeedForward
from ..sana_video_attention import QK_NORMS, MHLASanaVideoAttention, SoftmaxSanaVideoAttention
from ..wan_attention import WanPositions
from .layers import known_to_caches
from .mixin import MHLAModelMixin
from .options import check_choice
from .wan import MHLAWanRotaryPosEmbed, check_turning_heads, check_video_latents


@known_to_caches
class MHLASanaVideoTransformerBlock(SanaVideoTransformerBlock):
    """A SANA-Video layer whose self-attention may be one of ours; built around the modules of a stock one.

    Args:
        stock: the layer whose modules are taken over (the very modules, with their keys).
        attn1: the self-attention to use in place of the stock one; None keeps it.
    """

    def __init__(self, stock: SanaVideoTransformerBlock, attn1: GridSelfAttention | None = None):
        nn.Module.__init__(self)
        self.norm1 = stock.norm1
        self.attn1 = stock.attn1 if attn1 is None else attn1.adopt(stock.attn1)
        self.norm2 = stock.norm2
        self.attn2 = stock.attn2
        self.ff = stock.ff
        self.scale_shift_table = stock.scale_shift_table

    def speed_up_feed_forward(self) -> None:
        self.ff = GatedTemporalConvFeedForward.of(self.ff)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        timestep: torch.Tensor | None = None,
        frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        rotary_emb: WanPositions | None = None,
    ) -> torch.Tensor:
        """The stock layer on tokens `(B, N, C)`, in raster order on the grid of `rotary_emb`."""
        if not isinstance(self.attn1, GridSelfAttention):
            rotary_emb = tuple(rotary_emb[:2])  # all that the stock attention knows
        return super().forward(
            hidden_states,
            attention_mask,
            encoder_hidden_states,
            encoder_attention_mask,
            timestep,
            frames,
            height,
            width,
            rotary_emb,
        )


class MHLASanaVideoTransformer3DModel(MHLAModelMixin, SanaVideoTransformer3DModel, CacheMixin):
    """`SanaVideoTransformer3DModel` with MHLA (arXiv 2601.07832) as the self-attention of chosen layers.

    For SANA-Video (arXiv 2509.24695), text to video and image to video. Takes every argument of the stock model and
    keeps its keys and its forward pass; with the same seed all shared weights start equal to the stock model's. Latents
    `(B, in_channels, frames, height, width)`; every token grid works: ragged ones, one frame, portrait. What the stock
    model lacks: caches and regional compilation.

    Args (besides the stock ones):
        mhla_layers: which layers use MHLA: None or "all"; a share such as "2/3" (all but layers 0, 3, 6, ...); or
            indices; `[]`: none (equal to stock bit for bit).
        mhla_block_grid: blocks per axis, (frames, rows, columns): counts, so one model serves every resolution. An axis
            with fewer tokens than blocks has one block per token there, with the mixing matrix interpolated.
        mhla_feature_eps: added to relu(q), relu(k); 0 in a converted SANA-Video.
        mhla_normalizer: "paper", "none" or "official", see `mhla_attention`.
        mhla_denominator_eps: added to the denominator; None: the operator's default. 1e-15 when converted.
        mhla_gate: multiply the output by SiLU(to_gate(x) + 1.2784645), 1 at first.
        mhla_local_conv: kernel size of a depthwise convolution on V over frames, rows and columns (3: the paper's CPE),
            0 at first, or None for no convolution.
        mhla_norm_out: RMSNorm of each head's output, in MHLA layers; None: where mhla_normalizer is "none".
        mhla_mixing_init, mhla_mixing_normalization, mhla_mixing_learnable: see `BlockMixing`.
        mhla_per_head_mixing: one mixing matrix for each head.
        mhla_other_layers: what the layers not listed use: "stock" (SANA-Video's linear attention, untouched) or
            "softmax" (for comparisons, with gate and local convolution as in the MHLA layers).

    Raises ValueError on a value outside the allowed ones.

    Load a saved model with this class. The stock class would load it as well, but drop the new weights with a
    log line; `load_pipeline` refuses a pipeline whose index asks for it.
    """

    _no_split_modules = ["MHLASanaVideoTransformerBlock", "SanaModulatedNorm"]
    _repeated_blocks = ["MHLASanaVideoTransformerBlock"]
    _why_no_context_parallelism = "its feed-forward convolves over the token grid; Wan can be spread"
    default_block_grid = (3, 5, 10)

    @register_to_config
    def __init__(
        self,
        in_channels: int = 16,
        out_channels: int | None = 16,
        num_attention_heads: int = 20,
        attention_head_dim: int = 112,
        num_layers: int = 20,
        num_cross_attention_heads: int | None = 20,
        cross_attention_head_dim: int | None = 112,
        cross_attention_dim: int | None = 2240,
        caption_channels: int = 2304,
        mlp_ratio: float = 2.5,
        dropout: float = 0.0,
        attention_bias: bool = False,
        sample_size: int = 30,
        patch_size: tuple[int, int, int] = (1, 2, 2),
        norm_elementwise_affine: bool = False,
        norm_eps: float = 1e-6,
        interpolation_scale: int | None = None,
        guidance_embeds: bool = False,
        guidance_embeds_scale: float = 0.1,
        qk_norm: str | None = "rms_norm_across_heads",
        rope_max_seq_len: int = 1024,
        mhla_layers: list[int] | str | None = None,
        mhla_block_grid: tuple[int, int, int] = (3, 5, 10),
        mhla_feature_eps: float = 1e-6,
        mhla_normalizer: str = "paper",
        mhla_denominator_eps: float | None = None,
        mhla_gate: bool = False,
        mhla_local_conv: int | None = None,
        mhla_norm_out: bool | None = None,
        mhla_mixing_init: str = "linear",
        mhla_mixing_normalization: str = "row",
        mhla_mixing_learnable: bool = True,
        mhla_per_head_mixing: bool = False,
        mhla_other_layers: str = "stock",
    ):
        options = self.check_mhla_options(num_layers)
        norm_out = mhla_normalizer == "none" if mhla_norm_out is None else mhla_norm_out
        check_turning_heads(attention_head_dim)
        check_choice("qk_norm", qk_norm, QK_NORMS)
        super().__init__(
            in_channels=in_channels,
            out_channels=out_channels,
            num_attention_heads=num_attention_heads,
            attention_head_dim=attention_head_dim,
            num_layers=num_layers,
            num_cross_attention_heads=num_cross_attention_heads,
            cross_attention_head_dim=cross_attention_head_dim,
            cross_attention_dim=cross_attention_dim,
            caption_channels=caption_channels,
            mlp_ratio=mlp_ratio,
            dropout=dropout,
            attention_bias=attention_bias,
            sample_size=sample_size,
            patch_size=patch_size,
            norm_elementwise_affine=norm_elementwise_affine,
            norm_eps=norm_eps,
            interpolation_scale=interpolation_scale,
            guidance_embeds=guidance_embeds,
            guidance_embeds_scale=guidance_embeds_scale,
            qk_norm=qk_norm,
            rope_max_seq_len=rope_max_seq_len,
        )
        self.register_to_config(**options, mhla_norm_out=norm_out)
        self.install_attention(
            MHLASanaVideoTransformerBlock,
            MHLASanaVideoAttention,
            SoftmaxSanaVideoAttention,
            query_dim=num_attention_heads * attention_head_dim,
            heads=num_attention_heads,
            dim_head=attention_head_dim,
            qk_norm=qk_norm,
            dropout=dropout,
            bias=attention_bias,
            gate=mhla_gate,
            local_conv=mhla_local_conv,
        )
        tabulated = not all(
            isinstance(block.attn1, MHLASanaVideoAttention) for block in self.transformer_blocks
        )
        # The same table as Wan's.
        self.rope = MHLAWanRotaryPosEmbed(attention_head_dim, patch_size, rope_max_seq_len, tabulated)

    def check_shapes(self, latents: torch.Tensor, timestep: torch.Tensor) -> None:
        """Raise ValueError unless these are latents of this model, and timesteps of samples or of tokens."""
        check_video_latents(latents, self.config.in_channels)
        batch, patches = latents.shape[0], zip(latents.shape[2:], self.config.patch_size, strict=True)
        grid = [size // patch for size, patch in patches]
        if timestep.shape[:1] != (batch,) or timestep.numel() not in (batch, batch * math.prod(grid)):
            raise ValueError(
                f"timestep has shape {tuple(timestep.shape)}: give one for each sample, ({batch},), or one for each "
                f"token, {(batch, 1, *grid)}"
            )

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        guidance: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        controlnet_block_samples: tuple[torch.Tensor, ...] | None = None,
        return_dict: bool = True,
    ):
        """The stock forward pass: latents `(B, in_channels, frames, height, width)` -> a sample of that size.

        Args:
            hidden_states: frames, height and width are multiples of the patch size, otherwise free.
            encoder_hidden_states: captions `(B, L, caption_channels)`; encoder_attention_mask `(B, L)`, 1 = keep.
            timestep: `(B,)`, or one for each token, `(B, 1, frames, rows, columns)` (image to video).
            guidance: `(B,)`, in models with guidance_embeds.
            attention_kwargs: `{"scale": s}` scales a LoRA.

        Raises ValueError when `attention_mask` is given (the stock model accepts and ignores it), on latents or
        timesteps of another shape, when the latents do not divide into patches, or when they hold more tokens on an
        axis than the rotary table has positions.
        """
        if attention_mask is not None:
            raise ValueError(
                "attention_mask: linear self-attention over blocks cannot leave tokens out; drop the "
                "argument, and mask captions with encoder_attention_mask"
            )
        self.check_shapes(hidden_states, timestep)
        with self.own_cache_context():
            return super().forward(
                hidden_states,
                encoder_hidden_states,
                timestep,
                guidance=guidance,
                encoder_attention_mask=encoder_attention_mask,
                attention_kwargs=attention_kwargs,
                controlnet_block_samples=controlnet_block_samples,
                return_dict=return_dict,
            )
