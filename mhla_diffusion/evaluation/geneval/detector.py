"""Objects in pictures by Mask2Former through transformers, their colours by CLIP; weights from this machine.

Not GenEval's own detector, which is Mask2Former of mmdetection 2 with other preparation: numbers are near, not equal.
"""

from __future__ import annotations

import os
from collections.abc import Container, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..networks.clip import clip_model
from ..networks.extractors import full_precision, usable
from ..networks.image_text import ImageTextModel, unit
from ..networks.transformers_folders import load_model
from ..networks.weight_files import about_weights, find_weights
from .judge import THRESHOLD, Detection

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
TEMPLATES = ("a photo of a {c} {n}", "a photo of a {c}-colored {n}", "a photo of a {c} object")
BEHIND = (0x99, 0x99, 0x99)  # what lies behind an object whose colour is asked
# COCO's names, and older ones of the same classes, as GenEval's prompts say them.
NAMES = {
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
    "aeroplane": "airplane",
    "motorbike": "motorcycle",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
}


class Detector:
    """Detections of pictures above `threshold`, the most confident first.

    Args:
        weights: paths for the roles mask2former (a folder in transformers' layout) and clip.
        colours: whether CLIP names the colour of each object.

    Raises MissingWeights with every place searched; ValueError for another kind of model.
    """

    def __init__(
        self,
        weights: dict[str, str | os.PathLike] | None = None,
        *,
        colours: bool = True,
        threshold: float = THRESHOLD,
        device: str | torch.device = "auto",
        clip: ImageTextModel | None = None,
    ):
        weights = weights or {}
        found = find_weights("mask2former", weights.get("mask2former"))
        self.clip = clip
        if colours and clip is None:
            self.clip = clip_model(weights.get("clip"), pretrained=None, device=device)
        from transformers import AutoImageProcessor, Mask2FormerForUniversalSegmentation

        self.device, self.threshold = usable(device), threshold
        self.network = load_model(Mask2FormerForUniversalSegmentation, found.path, "mask2former")
        self.network = self.network.to(self.device)
        self.processor = AutoImageProcessor.from_pretrained(found.path, local_files_only=True)
        self.labels = {n: NAMES.get(name, name) for n, name in self.network.config.id2label.items()}
        self.about = {
            "detector": "Mask2Former through transformers",
            "official": False,
            "weights": [about_weights("mask2former", found)],
            "colours": self.clip.about if self.clip else None,
            "threshold": threshold,
        }
        self._words: dict[str, Tensor] = {}

    def check_classes(self, names: Sequence[str]) -> None:
        """Raises ValueError for a class that the model does not know."""
        unknown = sorted(set(names) - set(self.labels.values()))
        if unknown:
            raise ValueError(
                f"the detector has no class {unknown[0]!r}: give one trained on COCO, such as "
                "facebook/mask2former-swin-small-coco-instance"
            )

    @torch.no_grad()
    def __call__(self, picture: Tensor, coloured: Container[str] | None = None) -> list[Detection]:
        """Detections in a uint8 picture `(3, H, W)`; `coloured`: classes whose colour is wanted, None: all."""
        image = Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())
        inputs = self.processor(images=image, return_tensors="pt").to(self.device)
        with full_precision(self.device):
            output = self.network(**inputs)
        size = [(image.height, image.width)]
        # Masks may overlap here, as in GenEval, whose own suppression is switched off.
        found = self.processor.post_process_instance_segmentation(
            output, threshold=self.threshold, target_sizes=size, return_binary_maps=True
        )[0]
        detections = []
        if not found["segments_info"]:  # then the segmentation is one empty map
            return detections
        for mask, segment in zip(found["segmentation"], found["segments_info"], strict=True):
            mask = np.asarray(mask.cpu()) > 0.5
            if not mask.any():
                continue
            name = self.labels[int(segment["label_id"])]
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            box = (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)
            wanted = self.clip and (coloured is None or name in coloured)
            color = self.colour_of(image, mask, box, name) if wanted else None
            detections.append(Detection(name, float(segment["score"]), tuple(map(float, box)), color))
        return sorted(detections, key=lambda each: -each.score)

    def colour_of(self, image: Image.Image, mask: np.ndarray, box: tuple[int, ...], name: str) -> str:
        """The colour whose sentences are nearest to the object alone, on grey."""
        alone = Image.composite(image, Image.new("RGB", image.size, BEHIND), Image.fromarray(mask))
        pixels = torch.from_numpy(np.asarray(alone.crop(box)).copy()).permute(2, 0, 1)[None]
        if name not in self._words:
            self._words[name] = colour_words(self.clip, name)
        return COLOURS[int((self.clip.encode_images(pixels) @ self._words[name].T).argmax())]


def colour_words(clip: ImageTextModel, name: str) -> Tensor:
    """One unit vector `(10, width)` for each colour: the mean of its sentences."""
    rows = [
        clip.encode_texts([text.format(c=colour, n=name) for text in TEMPLATES]).features.mean(0)
        for colour in COLOURS
    ]
    return unit(torch.stack(rows))
