"""CLIP score: how well pictures fit their captions by the cosine of CLIP's embeddings.

Two scales are in use for one number: SANA and torchmetrics print 100 x the mean cosine, other papers the cosine. Both
are given. Nothing is clamped at 0, as Hessel et al. (arXiv 2104.08718) and torchmetrics do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..faults import InsufficientSamples, ReferenceMismatch
from ..networks.image_text import ImageTextModel

SCALE = 100.0


class ClipEstimate(NamedTuple):
    """`score` = 100 x `cosine`, `std` the deviation of the pictures' scores (not of the mean), all float64, 0-dim."""

    score: Tensor
    cosine: Tensor
    std: Tensor
    count: int
    truncated: int


def cosines(images: Tensor, texts: Tensor) -> Tensor:
    """Cosine of each row with its row, `(N,)` float64, of `(N, width)` each; rows need not have length 1.

    Raises ReferenceMismatch for two numbers of rows or two widths.
    """
    if images.shape != texts.shape or images.ndim != 2:
        raise ReferenceMismatch(
            f"embeddings of shape {tuple(images.shape)} and {tuple(texts.shape)}: give one caption for each picture"
        )
    images, texts = images.double(), texts.double()
    return (images * texts).sum(1) / (images.norm(dim=1) * texts.norm(dim=1))


def estimate(values: Tensor, truncated: int = 0) -> ClipEstimate:
    """The score of cosines `(N,)`. Raises InsufficientSamples when there are none."""
    if not len(values):
        raise InsufficientSamples("no picture with a caption: give at least one")
    values = values.double()
    return ClipEstimate(
        SCALE * values.mean(), values.mean(), SCALE * values.std(unbiased=False), len(values), truncated
    )


def clip_score(
    pictures: Tensor,
    captions: Sequence[str],
    model: ImageTextModel,
    *,
    batch_size: int = 50,
    long_prompts: str = "truncate",
) -> ClipEstimate:
    """CLIP score of `(N, 3, H, W)` pictures (uint8, or floats in [0, 1]) and their N captions.

    Args:
        long_prompts: captions with more tokens than fit are cut, the end token kept, and counted ("truncate"), or
            refused ("error").

    Raises ReferenceMismatch for two numbers; ValueError as `ImageTextModel` does.
    """
    if len(pictures) != len(captions):
        raise ReferenceMismatch(f"{len(pictures)} pictures and {len(captions)} captions: give one for each")
    found, cut = [torch.zeros(0, dtype=torch.float64)], 0
    for first in range(0, len(captions), batch_size):
        texts = model.encode_texts(captions[first : first + batch_size], long_prompts)
        images = model.encode_images(pictures[first : first + batch_size])
        found.append(cosines(images, texts.features).cpu())
        cut += texts.truncated
    return estimate(torch.cat(found), cut)
