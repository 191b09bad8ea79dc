"""The published DiT models by name: arguments of the stock transformer and ours, and the start of their training.

Sizes are those of DiT (arXiv 2212.09748, Table 1). All draw from 1000 classes, work on the latents of a 8-fold
autoencoder with 4 channels, and predict a mean and a variance (twice as many output channels).
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import DiTTransformer2DModel
from torch import nn

from ..attention import GridSelfAttention

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


@torch.no_grad()
def start_as_published(model: DiTTransformer2DModel, generator: torch.Generator | None = None) -> None:
    """Write the values into a new DiT from which the published ones were trained (adaLN-Zero, Sec. 3.2).

    Diffusers leaves PyTorch's own start, with which training is worse: here every layer begins as the identity and the
    output as zero. All copies of the embedders get the same values. What MHLA adds keeps its own start.

    Args:
        model: a `DiTTransformer2DModel` or ours.
        generator: on the model's device; None: PyTorch's global one.
    """
    new = {
        id(part)
        for attention in model.modules()
        if isinstance(attention, GridSelfAttention)
        for _, module in attention.new_modules()
        for part in module.modules()
    }
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)) and id(module) not in new:
            xavier(module, generator)
    for layer in model.transformer_blocks:
        for projection in (layer.attn1.to_q, layer.attn1.to_k, layer.attn1.to_v):
            xavier(projection, generator, outputs=3 * projection.out_features)  # one matrix in the original
    embedders = [layer.norm1.emb for layer in model.transformer_blocks]
    first = embedders[0]
    time = (first.timestep_embedder.linear_1, first.timestep_embedder.linear_2)
    for module in (first.class_embedder.embedding_table, *time):
        module.weight.normal_(0.0, 0.02, generator=generator)
    for embedder in embedders[1:]:
        embedder.load_state_dict(first.state_dict())
    zero = [layer.norm1.linear for layer in model.transformer_blocks] + [model.proj_out_1, model.proj_out_2]
    for module in zero:
        module.weight.zero_()
        module.bias.zero_()


def xavier(
    module: nn.Linear | nn.Conv2d, generator: torch.Generator | None, outputs: int | None = None
) -> None:
    """Xavier-uniform weights of a linear map, a patch projection as one of flat patches; no bias.

    `outputs`: of the larger map that this one is a part of.
    """
    weight = module.weight.flatten(1)
    bound = math.sqrt(6 / (weight.shape[1] + (outputs or weight.shape[0])))
    module.weight.uniform_(-bound, bound, generator=generator)
    if module.bias is not None:
        module.bias.zero_()
