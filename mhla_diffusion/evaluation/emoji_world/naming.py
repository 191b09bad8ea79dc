"""Names pictures of emoji: EfficientNet-Lite0 behind the heads, and which concept a prompt asks for."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..features import efficientnet_lite0, image_features
from ..networks.extractors import full_precision, usable
from ..networks.sentences import SentenceEncoder, sentence_encoder
from ..networks.weight_files import about_weights, find_weights
from .heads import load_heads
from .reading import PALETTE, Background, Box, background_of, box_of, crop_of, foreground

NEAREST = 5  # among so many nearest concepts an object counts as what was asked for
_BACKGROUND = re.compile(rf" on an? (?:{'|'.join(PALETTE)}) background")


class Namer:
    """The network, the heads, and the concepts that pictures are compared with.

    Args:
        weights: paths for the roles emoji-heads, efficientnet-lite0 and minilm. MiniLM is read only for a prompt of no
            known concept.

    Raises MissingWeights, ValueError as `load_heads` and `efficientnet_lite0`.
    """

    def __init__(
        self, weights: dict[str, str | os.PathLike] | None = None, device: str | torch.device = "auto"
    ):
        self.weights = weights or {}
        self.heads, about = load_heads(self.weights.get("emoji-heads"))
        found = find_weights("efficientnet-lite0", self.weights.get("efficientnet-lite0"))
        self.network = efficientnet_lite0(usable(device), found.path)
        self.about = {
            "network": f"efficientnet-lite0, emoji heads {about['sha256'][:12]}",
            "protocol": "cropped to the drawing, on white, 128 px",
            "weights": [about_weights("efficientnet-lite0", found), about],
            "heads_accuracy": self.heads.about.get("accuracy"),
        }
        self.device = usable(device)
        self.names = list(self.heads.concepts)
        self._known = {name.lower(): name for name in self.names}
        self._added = torch.zeros(0, self.heads.vectors.shape[1])
        self._encoder: SentenceEncoder | None = None

    def concept_of(self, prompt: str) -> str:
        """The concept that a prompt of one object asks for; a new one is added to the candidates by MiniLM.

        Raises MissingWeights for a new one when MiniLM is nowhere.
        """
        text = _BACKGROUND.sub("", prompt.strip().lower())
        text = text.partition(" emoji of ")[2] or text
        shorter = [text, text.rpartition(", ")[0], text.partition(", ")[0]]  # without keywords
        for each in filter(None, shorter):
            for name in (each, re.sub(r"^(?:an?|the|one) ", "", each)):
                if name in self._known:
                    return self._known[name]
        if self._encoder is None:
            self._encoder = sentence_encoder(self.weights.get("minilm"))
            self.about["weights"].append(self._encoder.about)
        with torch.no_grad():
            vector = self.heads.texts(self._encoder.encode([text]))
        self._added = torch.cat([self._added, vector])
        self.names.append(text)
        self._known[text] = text
        return text

    def features(self, crops: Tensor) -> Tensor:
        """`(N, 1280)` of uint8 `(N, 3, 128, 128)`."""
        if not len(crops):
            return torch.zeros(0, 1280)
        with full_precision(self.device):
            return image_features(self.network, crops)

    def similarities(self, crops: Tensor) -> Tensor:
        """Cosines `(N, len(self.names))` of crops with every candidate."""
        return self.heads.similarities(self.features(crops), self._added)

    def nearest(self, crops: Tensor, number: int = NEAREST) -> list[list[str]]:
        """Names of the nearest concepts of each crop, the nearest first."""
        order = self.similarities(crops).topk(min(number, len(self.names)), dim=1).indices
        return [[self.names[i] for i in row] for row in order.tolist()]


def whole_crop(picture: Tensor) -> Tensor:
    """All that stands in a picture, on white: uint8 `(3, 128, 128)`. A picture of background only is kept whole."""
    background = background_of(picture)
    mask = foreground(picture, background)
    if not mask.any():
        return F.interpolate(picture[None].float(), (128, 128))[0].to(torch.uint8)
    return crop_of(picture, box_of(mask), background)


def object_crops(picture: Tensor, boxes: Sequence[Box], background: Background) -> Tensor:
    """uint8 `(len(boxes), 3, 128, 128)`."""
    crops = [crop_of(picture, box, background) for box in boxes]
    return torch.stack(crops) if crops else torch.zeros(0, 3, 128, 128, dtype=torch.uint8)
