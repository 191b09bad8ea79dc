"""The published Wan models by name: arguments of the stock transformer, which ours takes as well.

Sizes are those of Wan (arXiv 2503.20314) and its release 2.2. All have heads of 128 channels, patches of 1x2x2 latents,
and captions of UMT5-XXL.
"""

from collections.abc import Mapping
from typing import Any

from .options import check_choice

# Heads, layers and width of the feed-forward part.
SIZES = {
    "1.3B": {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960},
    "5B": {"num_attention_heads": 24, "num_layers": 30, "ffn_dim": 14336},
    "14B": {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824},
}
VAE_2_1 = {"in_channels": 16, "out_channels": 16}
VAE_2_2 = {"in_channels": 48, "out_channels": 48}
# Latents of the noise and of the given frames, and a mask of four channels.
GIVEN_FRAMES = {"in_channels": 36, "out_channels": 16}
IMAGE = {"image_dim": 1280, "added_kv_proj_dim": 5120}

WAN_MODELS: Mapping[str, Mapping[str, Any]] = {
    "2.1-t2v-1.3B": {**SIZES["1.3B"], **VAE_2_1},
    "2.1-t2v-14B": {**SIZES["14B"], **VAE_2_1},
    "2.1-i2v-14B": {**SIZES["14B"], **GIVEN_FRAMES, **IMAGE},
    "2.1-flf2v-14B": {**SIZES["14B"], **GIVEN_FRAMES, **IMAGE, "pos_embed_seq_len": 514},
    # Of each of the two experts, which are models of their own.
    "2.2-t2v-A14B": {**SIZES["14B"], **VAE_2_1},
    "2.2-i2v-A14B": {**SIZES["14B"], **GIVEN_FRAMES},
    "2.2-ti2v-5B": {**SIZES["5B"], **VAE_2_2},
}


def wan_config(name: str) -> dict[str, Any]:
    """Arguments for `WanTransformer3DModel` and `MHLAWanTransformer3DModel`.

    Args:
        name: "2.1-t2v-1.3B", "2.1-t2v-14B", "2.1-i2v-14B", "2.1-flf2v-14B", "2.2-t2v-A14B", "2.2-i2v-A14B" or
            "2.2-ti2v-5B"; the same model serves 480p and 720p.

    `MHLAWanTransformer3DModel(**wan_config("2.1-t2v-1.3B"), mhla_layers="2/3")` is the hybrid of the paper. Raises
    ValueError on another name.
    """
    check_choice("name", name, tuple(WAN_MODELS))
    return {
        "patch_size": (1, 2, 2),
        "attention_head_dim": 128,
        "text_dim": 4096,
        "freq_dim": 256,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "pos_embed_seq_len": None,
        **WAN_MODELS[name],
    }
