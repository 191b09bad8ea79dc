"""Wan with MHLA self-attention: the stock model's parts, keys, forward pass and machinery, with another `attn1`."""

import math
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.configuration_utils import register_to_config
from diffusers.loaders import WanLoraLoaderMixin
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed, WanTransformerBlock
from torch import nn

from ..attention import GridSelfAttention
from ..feed_forward import with_gelu_in_the_product
from ..mixing import handed_out
from ..wan_attention import MHLAWanAttention, SoftmaxWanAttention, WanPositions
from .layers import known_to_caches
from .mixin import MHLAModelMixin

__all__ = [
    "AXES",
    "MHLAWanRotaryPosEmbed",
    "MHLAWanTransformer3DModel",
    "check_turning_heads",
    "check_video_latents",
]

AXES = ("frames", "rows", "columns")
THETA = 10000.0  # stock Wan's, which no config holds


def check_video_latents(latents: torch.Tensor, channels: int) -> None:
    """Raise ValueError unless these are latents `(B, channels, frames, height, width)`."""
    if latents.ndim != 5 or latents.shape[1] != channels or 0 in latents.shape:
        raise ValueError(
            f"latents have shape {tuple(latents.shape)}: this model takes (batch, {channels}, frames, height, width), "
            "at least one of each"
        )


def check_turning_heads(channels: int) -> None:
    """Raise ValueError unless a head of so many channels can be turned in pairs; stock stops with a bare assertion."""
    if channels < 2 or channels % 2:
        raise ValueError(
            f"attention_head_dim={channels}: give an even number, for rotary positions turn pairs"
        )


class MHLAWanRotaryPosEmbed(WanRotaryPosEmbed):
    """Stock Wan's rotary table, together with what it is made of: frequencies per axis, and the token grid.

    Args:
        tabulated: whether a layer reads the table; where none does, it is not made, and has no tokens.
    """

    def __init__(
        self,
        attention_head_dim: int,
        patch_size: tuple[int, int, int],
        max_seq_len: int,
        tabulated: bool = True,
    ):
        super().__init__(attention_head_dim, patch_size, max_seq_len, THETA)
        self.tabulated = tabulated
        self.register_buffer("frequencies", self.axial_frequencies(), persistent=False)

    def axial_frequencies(self) -> torch.Tensor:
        """float32 `(3, D / 2)`: radians per frame, row and column. Each pair of channels follows one axis."""
        sizes = (self.t_dim, self.h_dim, self.w_dim)
        rows = []
        for axis, size in enumerate(sizes):
            own = [THETA ** (-2 * pair / size) for pair in range(size // 2)]
            rows.append([0.0] * (sum(sizes[:axis]) // 2) + own + [0.0] * (sum(sizes[axis + 1 :]) // 2))
        return torch.tensor(rows, dtype=torch.float32)

    def _apply(self, fn, recurse: bool = True):
        # `model.to(torch.bfloat16)` casts stock's table, as it does in stock; angles per token must not be rounded, for
        # the places multiply the error.
        exact = self.frequencies
        super()._apply(fn, recurse)
        if self.frequencies.dtype != exact.dtype:
            self.frequencies = exact.to(self.frequencies.device)
        return self

    def forward(self, hidden_states: torch.Tensor) -> WanPositions:
        """Positions of the tokens that latents `(B, channels, frames, height, width)` become.

        Raises ValueError when the latents do not divide into patches, or hold more tokens on an axis than the table.
        """
        sizes = hidden_states.shape[2:]
        if any(size % patch for size, patch in zip(sizes, self.patch_size, strict=True)):
            raise ValueError(
                f"latents of {'x'.join(map(str, sizes))} do not divide into patches of "
                f"{'x'.join(map(str, self.patch_size))}: give multiples of these on each axis"
            )
        grid = [size // patch for size, patch in zip(sizes, self.patch_size, strict=True)]
        for axis, tokens in zip(AXES, grid, strict=True):
            if tokens > self.max_seq_len:
                raise ValueError(
                    f"{tokens} {axis} of tokens, but the rotary table holds {self.max_seq_len} positions on each axis: "
                    f"build or load the model with rope_max_seq_len={tokens}, or give smaller videos"
                )
        if self.tabulated:
            cos, sin = super().forward(hidden_states)
        else:
            cos, sin = (
                table.new_empty(1, 0, 1, table.shape[-1]) for table in (self.freqs_cos, self.freqs_sin)
            )
        return WanPositions(cos, sin, handed_out(self, self.frequencies), hidden_states.new_empty(0, *grid))


@known_to_caches
class MHLAWanTransformerBlock(WanTransformerBlock):
    """A Wan layer whose self-attention may be one of ours; built around the modules of a stock one.

    Args:
        stock: the layer whose modules are taken over (the very modules, with their keys).
        attn1: the self-attention to use in place of the stock one; None keeps it.
    """

    def __init__(self, stock: WanTransformerBlock, attn1: GridSelfAttention | None = None):
        nn.Module.__init__(self)
        self.norm1 = stock.norm1
        self.attn1 = stock.attn1 if attn1 is None else attn1.adopt(stock.attn1)
        self.attn2 = stock.attn2
        self.norm2 = stock.norm2
        self.ffn = stock.ffn
        self.norm3 = stock.norm3
        self.scale_shift_table = stock.scale_shift_table

    def speed_up_feed_forward(self) -> None:
        self.ffn = with_gelu_in_the_product(self.ffn)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        rotary_emb: WanPositions,
    ) -> torch.Tensor:
        """The stock layer on tokens `(B, N, C)`, in raster order on the grid of `rotary_emb`."""
        if not isinstance(self.attn1, GridSelfAttention):
            rotary_emb = tuple(rotary_emb[:2])  # all that the stock attention knows
        return super().forward(hidden_states, encoder_hidden_states, temb, rotary_emb)


class MHLAWanTransformer3DModel(MHLAModelMixin, WanTransformer3DModel):
    """`WanTransformer3DModel` with MHLA (arXiv 2601.07832) as the self-attention of chosen layers.

    For Wan 2.1 (text to video, image to video, first and last frame) and Wan 2.2 (each of the two experts, and TI2V
    with a timestep for each token). Takes every argument of the stock model and keeps its keys and its forward pass;
    with the same seed all shared weights start equal to the stock model's. Latents `(B, in_channels, frames, height,
    width)`; every token grid works: ragged ones, one frame, portrait.

    Args (besides the stock ones):
        mhla_layers: which layers use MHLA: None or "all"; a share such as "2/3" (all but layers 0, 3, 6, ...); or
            indices; `[]`: none (equal to stock bit for bit).
        mhla_block_grid: blocks per axis, (frames, rows, columns): counts, so one model serves every resolution. An axis
            with fewer tokens than blocks has one block per token there, with the mixing matrix interpolated.
        mhla_feature_eps: added to relu(q), relu(k).
        mhla_normalizer: "none" (as the released Wan weights), "paper" or "official", see `mhla_attention`.
        mhla_denominator_eps: added to the denominator; None: the operator's default.
        mhla_gate: multiply the output by SiLU(to_gate(x) + 1.2784645), 1 at first.
        mhla_local_conv: kernel size of a depthwise convolution on V over frames, rows and columns (3: the paper's CPE),
            0 at first, or None for no convolution.
        mhla_norm_out: RMSNorm of each head's output, in MHLA layers; None: where mhla_normalizer is "none".
        mhla_norm_across_heads: that norm goes over all heads together instead.
        mhla_norm_projected: RMSNorm behind the output projection, in MHLA layers; some released classes have one.
        mhla_mixing_init, mhla_mixing_normalization, mhla_mixing_learnable: see `BlockMixing`.
        mhla_per_head_mixing: one mixing matrix for each head.
        mhla_other_layers: what the layers not listed use: "stock" (Wan's softmax attention, untouched) or
            "softmax" (for comparisons, with gate and local convolution as in the MHLA layers).

    Raises ValueError on a value outside the allowed ones.

    Load a saved model with this class. The stock class would load it as well, but drop the new weights with a
    log line; `load_pipeline` refuses a pipeline whose index asks for it.
    """

    _no_split_modules = ["MHLAWanTransformerBlock"]
    _repeated_blocks = ["MHLAWanTransformerBlock"]
    _keep_in_fp32_modules = [*WanTransformer3DModel._keep_in_fp32_modules, "mixing"]
    # Without stock's entry for timesteps of tokens, which would refuse an output that is not a tuple.
    _cp_plan = {module: plan for module, plan in WanTransformer3DModel._cp_plan.items() if module}
    _layers_in = "blocks"
    _lora_loader = WanLoraLoaderMixin
    default_block_grid = (3, 5, 10)

    @register_to_config
    def __init__(
        self,
        patch_size: tuple[int, ...] = (1, 2, 2),
        num_attention_heads: int = 40,
        attention_head_dim: int = 128,
        in_channels: int = 16,
        out_channels: int = 16,
        text_dim: int = 4096,
        freq_dim: int = 256,
        ffn_dim: int = 13824,
        num_layers: int = 40,
        cross_attn_norm: bool = True,
        qk_norm: str | None = "rms_norm_across_heads",
        eps: float = 1e-6,
        image_dim: int | None = None,
        added_kv_proj_dim: int | None = None,
        rope_max_seq_len: int = 1024,
        pos_embed_seq_len: int | None = None,
        mhla_layers: list[int] | str | None = None,
        mhla_block_grid: tuple[int, int, int] = (3, 5, 10),
        mhla_feature_eps: float = 1e-6,
        mhla_normalizer: str = "none",
        mhla_denominator_eps: float | None = None,
        mhla_gate: bool = False,
        mhla_local_conv: int | None = None,
        mhla_norm_out: bool | None = None,
        mhla_norm_across_heads: bool = False,
        mhla_norm_projected: bool = False,
        mhla_mixing_init: str = "linear",
        mhla_mixing_normalization: str = "row",
        mhla_mixing_learnable: bool = True,
        mhla_per_head_mixing: bool = False,
        mhla_other_layers: str = "stock",
    ):
        options = self.check_mhla_options(num_layers)
        norm_out = mhla_normalizer == "none" if mhla_norm_out is None else mhla_norm_out
        check_turning_heads(attention_head_dim)
        if mhla_norm_across_heads and not norm_out:
            raise ValueError(
                "mhla_norm_across_heads=True without mhla_norm_out: give mhla_norm_out=True, or leave both out"
            )
        super().__init__(
            patch_size=patch_size,
            num_attention_heads=num_attention_heads,
            attention_head_dim=attention_head_dim,
            in_channels=in_channels,
            out_channels=out_channels,
            text_dim=text_dim,
            freq_dim=freq_dim,
            ffn_dim=ffn_dim,
            num_layers=num_layers,
            cross_attn_norm=cross_attn_norm,
            qk_norm=qk_norm,
            eps=eps,
            image_dim=image_dim,
            added_kv_proj_dim=added_kv_proj_dim,
            rope_max_seq_len=rope_max_seq_len,
            pos_embed_seq_len=pos_embed_seq_len,
        )
        self.register_to_config(**options, mhla_norm_out=norm_out)
        self.install_attention(
            MHLAWanTransformerBlock,
            MHLAWanAttention,
            SoftmaxWanAttention,
            mhla_only={
                "norm_across_heads": mhla_norm_across_heads,
                "norm_projected": mhla_norm_projected,
            },
            query_dim=num_attention_heads * attention_head_dim,
            heads=num_attention_heads,
            dim_head=attention_head_dim,
            qk_norm="rms_norm_across_heads",
            bias=True,
            gate=mhla_gate,
            local_conv=mhla_local_conv,
        )
        tabulated = not all(isinstance(block.attn1, MHLAWanAttention) for block in self.blocks)
        self.rope = MHLAWanRotaryPosEmbed(attention_head_dim, patch_size, rope_max_seq_len, tabulated)
        if not tabulated:  # nothing to split
            self._cp_plan = {module: plan for module, plan in self._cp_plan.items() if module != "rope"}

    def check_shapes(self, latents: torch.Tensor, timestep: torch.Tensor) -> None:
        """Raise ValueError unless these are latents of this model, and timesteps of samples or of tokens."""
        check_video_latents(latents, self.config.in_channels)
        tokens = math.prod(latents.shape[2:]) // math.prod(self.config.patch_size)
        if timestep.ndim not in (1, 2) or timestep.ndim == 2 and timestep.shape[1] != tokens:
            raise ValueError(
                f"timestep has shape {tuple(timestep.shape)}: give one for each sample, (batch,), or one for each "
                f"token, (batch, {tokens})"
            )

    def image_of_each(self, image: torch.Tensor, samples: int) -> torch.Tensor:
        """Embedded images `(B, tokens, image_dim)`, of first and last frame two in a row, for as many samples.

        Diffusers' pipelines give one for each prompt, also where they make several videos of it: those share it.

        Raises ValueError on numbers that do not fit, and where the model takes no images.
        """
        if self.config.image_dim is None:
            raise ValueError(
                "this model takes no images (image_dim=None): leave encoder_hidden_states_image out"
            )
        each = 1 if self.config.pos_embed_seq_len is None else 2
        groups = image.shape[0] // each  # compilers know no divmod of symbolic sizes
        if image.shape[0] % each or not groups or samples % groups:
            raise ValueError(
                f"encoder_hidden_states_image holds {image.shape[0]} images for {samples} samples: give {each} for each"
            )
        if groups == samples:
            return image
        return image.unflatten(0, (groups, each)).repeat_interleave(samples // groups, dim=0).flatten(0, 1)

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_image: torch.Tensor | None = None,
        return_dict: bool = True,
        attention_kwargs: dict[str, Any] | None = None,
    ):
        """The stock forward pass: latents `(B, in_channels, frames, height, width)` -> a sample of that size.

        Args:
            hidden_states: height and width are multiples of the patch size, otherwise free.
            timestep: `(B,)`, or `(B, N)` with one for each token (Wan 2.2 TI2V).
            encoder_hidden_states: captions `(B, L, text_dim)`.
            encoder_hidden_states_image: `(B, tokens, image_dim)`, in image-to-video models of Wan 2.1; twice as many of
                first and last frame. Fewer serve equal shares of the samples, in order.
            attention_kwargs: `{"scale": s}` scales a LoRA.

        Raises ValueError on latents or timesteps of another shape, on images that do not fit, when the latents do not
        divide into patches, or hold more tokens on an axis than the rotary table has positions.
        """
        self.check_shapes(hidden_states, timestep)
        if encoder_hidden_states_image is not None:
            encoder_hidden_states_image = self.image_of_each(
                encoder_hidden_states_image, hidden_states.shape[0]
            )
        return super().forward(
            hidden_states,
            self.local_timestep(hidden_states, timestep),
            encoder_hidden_states,
            encoder_hidden_states_image,
            return_dict=return_dict,
            attention_kwargs=attention_kwargs,
        )
