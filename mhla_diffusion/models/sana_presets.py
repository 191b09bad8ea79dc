"""The published SANA models by name: arguments of the stock transformer, which ours takes as well.

Sizes are those of SANA (arXiv 2410.10629), SANA-1.5 (arXiv 2501.18427) and SANA-Sprint (arXiv 2503.09641). All
use a 32-fold autoencoder with 32 channels, patches of one latent, and captions of Gemma-2-2B.
"""

from collections.abc import Mapping
from typing import Any

from .options import check_choice

# Width as heads x channels of the linear attention and of the cross-attention.
WIDTH_1152 = {
    "num_attention_heads": 36,
    "attention_head_dim": 32,
    "num_cross_attention_heads": 16,
    "cross_attention_head_dim": 72,
    "cross_attention_dim": 1152,
}
WIDTH_2240 = {
    "num_attention_heads": 70,
    "attention_head_dim": 32,
    "num_cross_attention_heads": 20,
    "cross_attention_head_dim": 112,
    "cross_attention_dim": 2240,
}
QK_NORM = {"qk_norm": "rms_norm_across_heads"}
SPRINT = {**QK_NORM, "guidance_embeds": True}

SANA_MODELS: Mapping[str, Mapping[str, Any]] = {
    "0.6B": {**WIDTH_1152, "num_layers": 28},
    "1.6B": {**WIDTH_2240, "num_layers": 20},
    "1.5-1.6B": {**WIDTH_2240, **QK_NORM, "num_layers": 20},
    "1.5-4.8B": {**WIDTH_2240, **QK_NORM, "num_layers": 60},
    "sprint-0.6B": {**WIDTH_1152, **SPRINT, "num_layers": 28},
    "sprint-1.6B": {**WIDTH_2240, **SPRINT, "num_layers": 20},
}
# Pictures from 2K on have sine-cosine positions, stretched to the grid; smaller ones have none.
INTERPOLATION_SCALE = {512: None, 1024: None, 2048: 1.0, 4096: 2.0}
AUTOENCODER_FACTOR = 32


def sana_config(name: str, size: int = 1024) -> dict[str, Any]:
    """Arguments for `SanaTransformer2DModel` and `MHLASanaTransformer2DModel`.

    Args:
        name: "0.6B", "1.6B", "1.5-1.6B", "1.5-4.8B", "sprint-0.6B" or "sprint-1.6B".
        size: pixels per side that the model is made for: 512, 1024, 2048 or 4096.

    `MHLASanaTransformer2DModel(**sana_config("1.6B"), mhla_block_grid=(4, 4))` is the whole model. Raises
    ValueError on another name or size.
    """
    check_choice("name", name, tuple(SANA_MODELS))
    if size not in INTERPOLATION_SCALE:
        raise ValueError(f"size={size!r}: choose one of {', '.join(map(str, INTERPOLATION_SCALE))} pixels")
    return {
        **SANA_MODELS[name],
        "in_channels": 32,
        "out_channels": 32,
        "caption_channels": 2304,
        "mlp_ratio": 2.5,
        "patch_size": 1,
        "sample_size": size // AUTOENCODER_FACTOR,
        "interpolation_scale": INTERPOLATION_SCALE[size],
    }
