"""DiT with MHLA self-attention: the stock model's parts, keys and machinery, with another `attn1`.

Shape names: B batch, N tokens, C channels, p patch size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers import CacheMixin, DiTTransformer2DModel
from diffusers.configuration_utils import register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.attention import AttentionMixin, BasicTransformerBlock
from diffusers.models.attention_processor import Attention
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.utils import apply_lora_scale
from torch import nn

from ..attention import GridSelfAttention, MHLADiTAttention, SoftmaxDiTAttention
from ..feed_forward import with_gelu_in_the_product
from .layers import known_to_caches
from .mixin import MHLAModelMixin
from .options import check_choice

# Share of the labels that a training step replaces by the null class (DiT, arXiv 2212.09748, Sec. 3).
LABEL_DROPOUT = 0.1


@known_to_caches
class MHLADiTTransformerBlock(nn.Module):
    """A DiT layer that hands the token grid to its self-attention; built around the modules of a stock one.

    Args:
        stock: the layer whose modules are taken over (the very modules, with their keys).
        attn1: the self-attention to use in place of the stock one; None keeps it.
    """

    def __init__(self, stock: BasicTransformerBlock, attn1: GridSelfAttention | None = None):
        super().__init__()
        self.norm1 = stock.norm1
        self.attn1: Attention = stock.attn1 if attn1 is None else attn1.adopt(stock.attn1)
        self.norm3 = stock.norm3
        self.ff = stock.ff

    def speed_up_feed_forward(self) -> None:
        self.ff = with_gelu_in_the_product(self.ff)

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        class_labels: torch.Tensor,
        grid: tuple[int, int],
        conditioning: torch.Tensor | None = None,
        attention_kwargs: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """One layer on tokens `(B, N, C)`, in raster order on `grid` = (rows, columns).

        Timesteps and labels, `(B,)` each, are embedded by the layer's own embedder, unless their embedding
        `conditioning` `(B, C)` is given. The same operations in the same order as in the stock layer, hence
        bit equal without MHLA.
        """
        norm1 = self.norm1
        if conditioning is None:
            conditioning = norm1.emb(timestep, class_labels, hidden_dtype=hidden_states.dtype)
        modulation = norm1.linear(norm1.silu(conditioning)).unsqueeze(1)  # (B, 1, 6 C)
        shift_attn, scale_attn, gate_attn, shift_ff, scale_ff, gate_ff = modulation.chunk(6, dim=2)

        x = norm1.norm(hidden_states) * (1 + scale_attn) + shift_attn
        if isinstance(self.attn1, GridSelfAttention):
            x = self.attn1(x, grid=grid)
        else:
            x = self.attn1(x, **(attention_kwargs or {}))
        # The product first: a sum of two tensors that lie differently in memory lies as its first one.
        hidden_states = gate_attn * x + hidden_states

        x = self.norm3(hidden_states) * (1 + scale_ff) + shift_ff
        return gate_ff * self.ff(x) + hidden_states


def fetches_itself(module: nn.Module) -> bool:
    """Whether each part that holds weights has a hook of Diffusers' group offloading, which fetches them."""
    holders = (part for part in module.modules() if next(part.parameters(recurse=False), None) is not None)
    registries = (getattr(part, "_diffusers_hook", None) for part in holders)
    return all(r is not None and r.get_hook("group_offloading") is not None for r in registries)


def embedded(
    layer: MHLADiTTransformerBlock, timestep: torch.Tensor, class_labels: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """What the layer's embedder makes, `(B, C)` in x's dtype, on x's device also while its weights lie elsewhere.

    Offloading by blocks fetches a layer's weights when the layer runs; its embedder runs before that. Offloading by
    leaves, and accelerate's, fetch the embedder's own.
    """
    embedder = layer.norm1.emb
    weights = dict(embedder.named_parameters())
    arguments, options = (timestep, class_labels), {"hidden_dtype": x.dtype}
    registry = getattr(layer, "_diffusers_hook", None)
    hook = None if registry is None else registry.get_hook("group_offloading")
    if hook is not None and hook.group.offload_to_disk_path is not None:
        # Of weights on the disk there is nothing to copy: memory of their shape stands in their place.
        hook.group.onload_()
        if hook.group.stream is not None:
            hook.group.stream.synchronize()
        try:
            return embedder(*arguments, **options)
        finally:
            hook.group.offload_()
    if all(p.device == x.device or p.is_meta for p in weights.values()) or fetches_itself(embedder):
        return embedder(*arguments, **options)
    near = {name: p.to(x.device, non_blocking=True) for name, p in weights.items()}
    return torch.func.functional_call(embedder, near, arguments, options)


class MHLADiTTransformer2DModel(
    MHLAModelMixin, DiTTransformer2DModel, AttentionMixin, PeftAdapterMixin, CacheMixin
):
    """`DiTTransformer2DModel` with MHLA (arXiv 2601.07832) as the self-attention of chosen layers.

    Takes every argument of the stock model and keeps its keys; with the same seed all shared weights start
    equal to the stock model's. Latents `(B, in_channels, h, w)`, timesteps and class labels `(B,)`. What the
    stock model lacks: LoRA, attention processors, caches, regional compilation, group offload, device maps,
    and pictures that are not square.

    The size of a picture is free: positions are those of the stock model, sines and cosines of
    `i * base / rows` and `j * base / columns` for row i and column j, with base = sample_size / patch_size.
    A grid of any shape thus covers the range that the model was trained on, stretched on each axis by itself.

    Args (besides the stock ones):
        mhla_layers: which layers use MHLA: None or "all"; a share such as "2/3" (all but layers 0, 3, 6, ...); or
            indices; `[]`: none (equal to stock bit for bit).
        mhla_block_grid: blocks per axis, (rows, columns): counts, so one model serves every resolution.
        mhla_feature_eps: added to relu(q), relu(k).
        mhla_normalizer: "paper", "none" or "official", see `mhla_attention`.
        mhla_denominator_eps: added to the denominator; None: the operator's default.
        mhla_gate: multiply the output by SiLU(to_gate(x) + 1.2784645), 1 at first.
        mhla_local_conv: kernel size of a depthwise convolution on V (3: the paper's CPE), 0 at first, or
            None for no convolution.
        mhla_norm_out: per-head RMSNorm of the output, in MHLA layers.
        mhla_norm_in: LayerNorm before the projections, in MHLA layers; the released MHLA code has one.
        mhla_mixing_init, mhla_mixing_normalization, mhla_mixing_learnable: see `BlockMixing`.
        mhla_per_head_mixing: one mixing matrix for each head.
        mhla_time_shift: the timestep's frequencies are 10000^(-i / (128 - shift)): 1 in Diffusers' DiT, 0 in the
            original code and in the released MHLA code.
        mhla_other_layers: what the layers not listed use: "stock" (DiT's softmax attention, untouched) or
            "softmax" (for comparisons, with gate and local convolution as in the MHLA layers).

    In training, a tenth of the labels is replaced by the null class, `num_embeds_ada_norm`, for all layers
    alike (the stock model draws anew in each layer); `label_dropout = 0` leaves that to the training loop.

    Raises ValueError on a value outside the allowed ones.

    Load a saved model with this class. The stock class would load it as well, but drop the new weights with a
    log line; `load_pipeline` refuses a pipeline whose index asks for it.
    """

    _no_split_modules = ["MHLADiTTransformerBlock"]
    _repeated_blocks = ["MHLADiTTransformerBlock"]
    _supports_group_offloading = True

    @register_to_config
    def __init__(
        self,
        num_attention_heads: int = 16,
        attention_head_dim: int = 72,
        in_channels: int = 4,
        out_channels: int | None = None,
        num_layers: int = 28,
        dropout: float = 0.0,
        norm_num_groups: int = 32,
        attention_bias: bool = True,
        sample_size: int = 32,
        patch_size: int = 2,
        activation_fn: str = "gelu-approximate",
        num_embeds_ada_norm: int | None = 1000,
        upcast_attention: bool = False,
        norm_type: str = "ada_norm_zero",
        norm_elementwise_affine: bool = False,
        norm_eps: float = 1e-5,
        mhla_layers: list[int] | str | None = None,
        mhla_block_grid: tuple[int, int] = (4, 4),
        mhla_feature_eps: float = 1e-6,
        mhla_normalizer: str = "paper",
        mhla_denominator_eps: float | None = None,
        mhla_gate: bool = False,
        mhla_local_conv: int | None = None,
        mhla_norm_out: bool = False,
        mhla_norm_in: bool = False,
        mhla_mixing_init: str = "linear",
        mhla_mixing_normalization: str = "row",
        mhla_mixing_learnable: bool = True,
        mhla_per_head_mixing: bool = False,
        mhla_time_shift: int = 1,
        mhla_other_layers: str = "stock",
    ):
        options = self.check_mhla_options(num_layers)
        check_choice("mhla_time_shift", mhla_time_shift, (0, 1))
        if sample_size % patch_size:
            raise ValueError(
                f"sample_size={sample_size} does not divide into patches of patch_size={patch_size}: "
                f"give a multiple, such as {max(sample_size // patch_size, 1) * patch_size}"
            )
        super().__init__(
            num_attention_heads=num_attention_heads,
            attention_head_dim=attention_head_dim,
            in_channels=in_channels,
            out_channels=out_channels,
            num_layers=num_layers,
            dropout=dropout,
            norm_num_groups=norm_num_groups,
            attention_bias=attention_bias,
            sample_size=sample_size,
            patch_size=patch_size,
            activation_fn=activation_fn,
            num_embeds_ada_norm=num_embeds_ada_norm,
            upcast_attention=upcast_attention,
            norm_type=norm_type,
            norm_elementwise_affine=norm_elementwise_affine,
            norm_eps=norm_eps,
        )
        self.register_to_config(**options)
        self.install_attention(
            MHLADiTTransformerBlock,
            MHLADiTAttention,
            SoftmaxDiTAttention,
            mhla_only={"norm_in": mhla_norm_in},
            query_dim=self.inner_dim,
            heads=num_attention_heads,
            dim_head=attention_head_dim,
            dropout=dropout,
            bias=attention_bias,
            gate=mhla_gate,
            local_conv=mhla_local_conv,
        )
        self.label_dropout = LABEL_DROPOUT
        for layer in self.transformer_blocks:
            layer.norm1.emb.class_embedder.dropout_prob = 0.0  # the model drops labels, once for all layers
            layer.norm1.emb.time_proj.downscale_freq_shift = mhla_time_shift

    @apply_lora_scale("cross_attention_kwargs")
    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor | None = None,
        class_labels: torch.Tensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[torch.Tensor]:
        """One pass of the network: latents `(B, in_channels, h, w)` -> sample `(B, out_channels, h, w)`.

        Args:
            hidden_states: h and w are multiples of the patch size, otherwise free.
            timestep: `(B,)`, integers or floats.
            class_labels: int64 `(B,)`, from 0 to `num_embeds_ada_norm`, which is the null class.
            cross_attention_kwargs: `{"scale": s}` scales a LoRA; other entries go to stock attentions.

        Raises ValueError when something is missing or the latents do not divide into patches.
        """
        patch = self.config.patch_size
        batch, _, height, width = hidden_states.shape
        if height % patch or width % patch:
            raise ValueError(f"latents of {height}x{width} do not divide into patches of {patch}x{patch}")
        if cross_attention_kwargs and all(
            isinstance(x.attn1, GridSelfAttention) for x in self.transformer_blocks
        ):
            raise ValueError(
                f"cross_attention_kwargs={cross_attention_kwargs}: no layer has a stock attention that could take it; "
                'give {"scale": s} for a LoRA, or None'
            )
        if timestep is None or class_labels is None:
            raise ValueError("DiT needs timestep and class_labels, one of each per item of the batch")
        grid = (height // patch, width // patch)

        if self.training and self.label_dropout > 0:
            dropped = torch.rand(batch, device=class_labels.device) < self.label_dropout
            class_labels = torch.where(dropped, self.config.num_embeds_ada_norm, class_labels)

        # The convolution of patches gives tokens with channels outermost, which every later layer would read slowly.
        x = self.pos_embed(hidden_states).contiguous()  # (B, N, C)
        conditioning = embedded(self.transformer_blocks[0], timestep, class_labels, x)  # (B, C)
        embedder = self.transformer_blocks[0].norm1.emb
        with self.own_cache_context():
            for layer in self.transformer_blocks:
                # A layer whose embedder is the first one's own module need not embed again.
                shared = conditioning if layer.norm1.emb is embedder else None
                arguments = (x, timestep, class_labels, grid, shared, cross_attention_kwargs)
                if torch.is_grad_enabled() and self.gradient_checkpointing:
                    x = self._gradient_checkpointing_func(layer, *arguments)
                else:
                    x = layer(*arguments)

        shift, scale = self.proj_out_1(F.silu(conditioning)).unsqueeze(1).chunk(2, dim=2)
        x = self.proj_out_2(self.norm_out(x) * (1 + scale) + shift)  # (B, N, p p out_channels)
        x = x.unflatten(2, (patch, patch, self.out_channels)).unflatten(
            1, grid
        )  # (B, rows, columns, p, p, c)
        sample = x.permute(0, 5, 1, 3, 2, 4).reshape(batch, self.out_channels, height, width)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def share_embedders(self) -> None:
        """Let all layers use the first one's timestep and label embedder, which the original DiT has once.

        Diffusers keeps a copy of it in every layer (75 million parameters in XL/2) and computes each. Outputs
        stay the same bit for bit. Saving writes every copy, so files keep their keys; call it again after
        loading. Raises ValueError when the copies differ: those of a new model, or trained apart.
        """
        embedders = [layer.norm1.emb for layer in self.transformer_blocks]
        first = dict(embedders[0].named_parameters())
        for index, embedder in enumerate(embedders):
            for name, parameter in embedder.named_parameters():
                if parameter is not first[name] and not torch.equal(parameter, first[name]):
                    raise ValueError(
                        f"layer {index} embeds in another way than layer 0 ({name} differs): the copies were trained "
                        "apart and cannot be shared"
                    )
        for layer in self.transformer_blocks:
            layer.norm1.emb = embedders[0]
