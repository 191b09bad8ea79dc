"""The published DiT models by name: arguments of the stock transformer, which ours takes as well.

Sizes are those of DiT (arXiv 2212.09748, Table 1). All draw from 1000 classes, work on the latents of a 8-fold
autoencoder with 4 channels, and predict a mean and a variance (twice as many output channels).
"""

import re
from collections.abc import Mapping
from typing import Any

DIT_WIDTHS: Mapping[str, Mapping[str, int]] = {
    "S": {"num_layers": 12, "num_attention_heads": 6, "attention_head_dim": 64},
    "B": {"num_layers": 12, "num_attention_heads": 12, "attention_head_dim": 64},
    "L": {"num_layers": 24, "num_attention_heads": 16, "attention_head_dim": 64},
    "XL": {"num_layers": 28, "num_attention_heads": 16, "attention_head_dim": 72},
}
DIT_PATCHES = (2, 4, 8)
DIT_SIZES = (256, 512)
DIT_MODELS = tuple(f"{width}/{patch}" for width in DIT_WIDTHS for patch in DIT_PATCHES)
AUTOENCODER_FACTOR = 8


def dit_config(name: str, size: int = 256) -> dict[str, Any]:
    """Arguments for `DiTTransformer2DModel` and `MHLADiTTransformer2DModel`.

    Args:
        name: width and patch size, such as "S/2", "B/4", "L/8" or "XL/2" ("DiT-XL/2" means the same).
        size: pixels per side that the model is made for: 256 or 512.

    `MHLADiTTransformer2DModel(**dit_config("XL/2", 512), mhla_block_grid=(4, 4))` is the whole model. Raises
    ValueError on another name or size.
    """
    plain = re.sub(r"^DiT-", "", name) if isinstance(name, str) else name
    if plain not in DIT_MODELS:
        raise ValueError(f"name={name!r}: choose one of {', '.join(DIT_MODELS)}")
    if size not in DIT_SIZES:
        raise ValueError(f"size={size!r}: choose one of {', '.join(map(str, DIT_SIZES))} pixels")
    width, patch = plain.split("/")
    return {
        **DIT_WIDTHS[width],
        "in_channels": 4,
        "out_channels": 8,
        "patch_size": int(patch),
        "sample_size": size // AUTOENCODER_FACTOR,
        "num_embeds_ada_norm": 1000,
        # That of the released weights' code, where Diffusers' default is 1e-5.
        "norm_eps": 1e-6,
    }
