"""SANA with MHLA self-attention: the stock model's parts, keys and machinery, with another `attn1`."""

import torch
from diffusers import CacheMixin, SanaTransformer2DModel
from diffusers.configuration_utils import register_to_config
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.sana_transformer import SanaTransformerBlock
from torch import nn

from ..attention import GridSelfAttention, MHLASanaAttention, SoftmaxSanaAttention
from ..feed_forward import GatedConvFeedForward
from .layers import known_to_caches
from .mixin import MHLAModelMixin


@known_to_caches
class MHLASanaTransformerBlock(nn.Module):
    """A SANA layer that hands the token grid to its self-attention; built around the modules of a stock one.

    Args:
        stock: the layer whose modules are taken over (the very modules, with their keys).
        attn1: the self-attention to use in place of the stock one; None keeps it.
    """

    def __init__(self, stock: SanaTransformerBlock, attn1: GridSelfAttention | None = None):
        super().__init__()
        self.norm1 = stock.norm1
        self.attn1: Attention = stock.attn1 if attn1 is None else attn1.adopt(stock.attn1)
        self.norm2 = stock.norm2
        self.attn2 = stock.attn2
        self.ff = stock.ff
        self.scale_shift_table = stock.scale_shift_table

    def speed_up_feed_forward(self) -> None:
        self.ff = GatedConvFeedForward.of(self.ff)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        timestep: torch.Tensor | None = None,
        height: int | None = None,
        width: int | None = None,
    ) -> torch.Tensor:
        """One layer on tokens `(B, N, C)`, N = height * width; arguments as in the stock layer.

        Written so that the same operations run in the same order as in the stock layer, hence bit equal
        without MHLA.
        """
        modulation = self.scale_shift_table[None] + timestep.reshape(
            hidden_states.shape[0], 6, -1
        )  # (B, 6, C)
        shift_attn, scale_attn, gate_attn, shift_ff, scale_ff, gate_ff = modulation.chunk(
            6, dim=1
        )  # (B, 1, C) each

        x = (self.norm1(hidden_states) * (1 + scale_attn) + shift_attn).to(hidden_states.dtype)
        if isinstance(self.attn1, GridSelfAttention):
            x = self.attn1(x, grid=(height, width))
        else:
            x = self.attn1(x)
        hidden_states = hidden_states + gate_attn * x

        x = self.attn2(
            hidden_states, encoder_hidden_states=encoder_hidden_states, attention_mask=encoder_attention_mask
        )
        hidden_states = x + hidden_states

        x = self.norm2(hidden_states) * (1 + scale_ff) + shift_ff
        x = self.ff(x.unflatten(1, (height, width)).permute(0, 3, 1, 2))  # (B, C, rows, columns)
        return hidden_states + gate_ff * x.flatten(2, 3).permute(0, 2, 1)


class MHLASanaTransformer2DModel(MHLAModelMixin, SanaTransformer2DModel, CacheMixin):
    """`SanaTransformer2DModel` with MHLA (arXiv 2601.07832) as the self-attention of chosen layers.

    Takes every argument of the stock model and keeps its keys; with the same seed all shared weights start
    equal to the stock model's. Latents `(B, in_channels, h, w)`, captions `(B, L, caption_channels)`.

    Args (besides the stock ones):
        mhla_layers: which layers use MHLA: None or "all"; a share such as "2/3" (all but layers 0, 3, 6, ...); or
            indices; `[]`: none (equal to stock bit for bit).
        mhla_block_grid: blocks per axis, (rows, columns): counts, so one model serves every resolution.
        mhla_feature_eps: added to relu(q), relu(k); 0 in a converted SANA.
        mhla_normalizer: "paper", "none" or "official", see `mhla_attention`.
        mhla_denominator_eps: added to the denominator; None: the operator's default. 1e-15 when converted.
        mhla_gate: multiply the output by SiLU(to_gate(x) + 1.2784645), 1 at first.
        mhla_local_conv: kernel size of a depthwise convolution on V (3: the paper's CPE), 0 at first, or
            None for no convolution.
        mhla_norm_out: per-head RMSNorm of the output, in MHLA layers.
        mhla_mixing_init, mhla_mixing_normalization, mhla_mixing_learnable: see `BlockMixing`.
        mhla_per_head_mixing: one mixing matrix for each head.
        mhla_other_layers: what the layers not listed use: "stock" (SANA's linear attention, untouched) or
            "softmax" (for comparisons, with gate and local convolution as in the MHLA layers).

    Raises ValueError on a value outside the allowed ones.

    Load a saved model with this class. The stock class would load it as well, but drop the new weights with a
    log line, and Diffusers gives no way to refuse that; `load_pipeline` refuses a pipeline whose index asks
    for it.
    """

    _no_split_modules = ["MHLASanaTransformerBlock", "PatchEmbed", "SanaModulatedNorm"]
    _repeated_blocks = ["MHLASanaTransformerBlock"]

    @register_to_config
    def __init__(
        self,
        in_channels: int = 32,
        out_channels: int | None = 32,
        num_attention_heads: int = 70,
        attention_head_dim: int = 32,
        num_layers: int = 20,
        num_cross_attention_heads: int | None = 20,
        cross_attention_head_dim: int | None = 112,
        cross_attention_dim: int | None = 2240,
        caption_channels: int = 2304,
        mlp_ratio: float = 2.5,
        dropout: float = 0.0,
        attention_bias: bool = False,
        sample_size: int = 32,
        patch_size: int = 1,
        norm_elementwise_affine: bool = False,
        norm_eps: float = 1e-6,
        interpolation_scale: int | None = None,
        guidance_embeds: bool = False,
        guidance_embeds_scale: float = 0.1,
        qk_norm: str | None = None,
        timestep_scale: float = 1.0,
        mhla_layers: list[int] | str | None = None,
        mhla_block_grid: tuple[int, int] = (4, 4),
        mhla_feature_eps: float = 1e-6,
        mhla_normalizer: str = "paper",
        mhla_denominator_eps: float | None = None,
        mhla_gate: bool = False,
        mhla_local_conv: int | None = None,
        mhla_norm_out: bool = False,
        mhla_mixing_init: str = "linear",
        mhla_mixing_normalization: str = "row",
        mhla_mixing_learnable: bool = True,
        mhla_per_head_mixing: bool = False,
        mhla_other_layers: str = "stock",
    ):
        options = self.check_mhla_options(num_layers)
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
            timestep_scale=timestep_scale,
        )
        self.register_to_config(**options)
        self.install_attention(
            MHLASanaTransformerBlock,
            MHLASanaAttention,
            SoftmaxSanaAttention,
            query_dim=num_attention_heads * attention_head_dim,
            heads=num_attention_heads,
            dim_head=attention_head_dim,
            qk_norm=qk_norm,
            dropout=dropout,
            bias=attention_bias,
            gate=mhla_gate,
            local_conv=mhla_local_conv,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        guidance: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        attention_kwargs: dict | None = None,
        controlnet_block_samples: tuple[torch.Tensor, ...] | None = None,
        return_dict: bool = True,
    ):
        """The stock forward pass: latents `(B, in_channels, h, w)` -> sample `(B, out_channels, h, w)`.

        Raises ValueError when `attention_mask` is given (the stock model accepts and ignores it) or when the
        latents do not divide into patches.
        """
        if attention_mask is not None:
            raise ValueError(
                "attention_mask: linear self-attention over blocks cannot leave tokens out; drop the "
                "argument, and mask captions with encoder_attention_mask"
            )
        height, width = hidden_states.shape[-2:]
        patch = self.config.patch_size
        if height % patch or width % patch:
            raise ValueError(f"latents of {height}x{width} do not divide into patches of {patch}x{patch}")
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
