"""The published SANA-Video models by name: arguments of the stock transformer, which ours takes as well.

Sizes are those of SANA-Video (arXiv 2509.24695): 20 layers of 20 heads with 112 channels, and captions of Gemma-2-2B.
The two differ in their autoencoder alone.
"""

from collections.abc import Mapping
from typing import Any

from .options import check_choice

# Heads x channels of the linear attention and of the cross-attention.
SANA_VIDEO_WIDTH = {
    "num_attention_heads": 20,
    "attention_head_dim": 112,
    "num_cross_attention_heads": 20,
    "cross_attention_head_dim": 112,
    "cross_attention_dim": 2240,
}
SANA_VIDEO_MODELS: Mapping[str, Mapping[str, Any]] = {
    # Latents of Wan 2.1's autoencoder, 8 times smaller, in patches of 2 x 2.
    "2B-480p": {"in_channels": 16, "out_channels": 16, "patch_size": (1, 2, 2), "sample_size": 30},
    # Latents of LTX-2's autoencoder, 32 times smaller and 8 times fewer, one token each.
    "2B-720p": {"in_channels": 128, "out_channels": 128, "patch_size": (1, 1, 1), "sample_size": 22},
}


def sana_video_config(name: str) -> dict[str, Any]:
    """Arguments for `SanaVideoTransformer3DModel` and `MHLASanaVideoTransformer3DModel`.

    Args:
        name: "2B-480p" or "2B-720p"; the same model makes videos of a text or of a picture.

    `MHLASanaVideoTransformer3DModel(**sana_video_config("2B-480p"), mhla_block_grid=(3, 5, 10))` is the whole model.
    Raises ValueError on another name.
    """
    check_choice("name", name, tuple(SANA_VIDEO_MODELS))
    return {
        **SANA_VIDEO_WIDTH,
        "num_layers": 20,
        "caption_channels": 2304,
        "mlp_ratio": 3.0,
        "qk_norm": "rms_norm_across_heads",
        **SANA_VIDEO_MODELS[name],
    }
