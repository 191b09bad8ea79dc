"""One face for every model that embeds pictures and texts in one space; it gives unit vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from .extractors import full_precision
from .preparation import as_uint8

LONG_PROMPTS = ("truncate", "error")


class Texts(NamedTuple):
    """Unit vectors `(N, width)` float32 of N captions, and how many of them were cut to fit."""

    features: Tensor
    truncated: int


class ImageTextModel:
    """Pictures and captions as unit vectors, in float32.

    Args:
        prepare: uint8 `(N, 3, H, W)` on the CPU -> what `image` reads.
        image: prepared pictures -> `(N, width)`. text: a tokenized batch -> `(N, width)`.
        tokenize: captions -> tuple of `(N, context)` tensors, cut so that the end token stays.
        length: caption -> its number of tokens with the two at its ends, uncut.
        context: tokens that fit.
        about: network, weights, preparation and activation, as result files store them.
        notes: what whoever reads the numbers must know.
    """

    def __init__(
        self,
        *,
        prepare: Callable[[Tensor], Tensor],
        image: Callable[[Tensor], Tensor],
        text: Callable[..., Tensor],
        tokenize: Callable[[list[str]], tuple[Tensor, ...]],
        length: Callable[[str], int],
        context: int,
        about: dict,
        device: torch.device,
        notes: Sequence[str] = (),
    ):
        self.prepare, self.image, self.text, self.tokenize = prepare, image, text, tokenize
        self.length, self.context, self.about, self.device = length, context, about, torch.device(device)
        self.notes = list(notes)

    def __deepcopy__(self, memo) -> ImageTextModel:
        return self  # frozen; a copy of a metric needs none of its own

    @torch.no_grad()
    def encode_images(self, pictures: Tensor) -> Tensor:
        """`(N, width)` float32 on the device. Raises ValueError as `as_uint8` does."""
        pixels = self.prepare(as_uint8(pictures).cpu()).to(self.device)
        with full_precision(self.device):
            return unit(self.image(pixels))

    @torch.no_grad()
    def encode_texts(self, captions: Sequence[str], long_prompts: str = "truncate") -> Texts:
        """Captions as unit vectors. `long_prompts`: cut what does not fit ("truncate"), or refuse it ("error").

        Raises ValueError for captions that are no text, or too long with "error".
        """
        if long_prompts not in LONG_PROMPTS:
            raise ValueError(f"long prompts are to {long_prompts!r}: give {' or '.join(LONG_PROMPTS)}")
        if isinstance(captions, str) or not all(isinstance(caption, str) for caption in captions):
            raise ValueError("captions must be a list of texts: give one text for each picture")
        long = [caption for caption in captions if self.length(caption) > self.context]
        if long and long_prompts == "error":
            raise ValueError(
                f"{len(long)} captions have more than {self.context} tokens, the first begins {long[0][:40]!r}: "
                "shorten them, or allow cutting with --long-prompts truncate"
            )
        tokens = tuple(part.to(self.device) for part in self.tokenize(list(captions)))
        with full_precision(self.device):
            return Texts(unit(self.text(*tokens)), len(long))


def unit(features: Tensor) -> Tensor:
    """Rows of length 1. Raises ValueError for a row that is 0 or not finite."""
    features = features.float()
    norm = features.norm(dim=-1)
    if not (torch.isfinite(norm).all() and (norm > 0).all()):
        raise ValueError("an embedding has length 0 or is not finite: look at the weights")
    return F.normalize(features, dim=-1)


def shortest_side_pixels(pictures: Tensor, side: int, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """CLIP's preparation: Pillow's bicubic until the shorter side is `side`, its middle square, mean and deviation.

    uint8 `(N, 3, H, W)` -> float32 `(N, 3, side, side)`.
    """
    height, width = pictures.shape[-2:]
    short = min(height, width)
    size = (
        int(side * width / short),
        int(side * height / short),
    )  # (width, height), cut off as torchvision does
    left, top = round((size[0] - side) / 2), round((size[1] - side) / 2)
    out = np.empty((len(pictures), side, side, 3), np.float32)
    for place, picture in enumerate(pictures):
        image = Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())
        if image.size != size:
            image = image.resize(size, Image.Resampling.BICUBIC)
        out[place] = image.crop((left, top, left + side, top + side))
    scaled = (torch.from_numpy(out) / 255 - torch.tensor(mean)) / torch.tensor(std)
    return scaled.permute(0, 3, 1, 2).contiguous()


def for_torchmetrics(model: ImageTextModel) -> Callable[[], tuple]:
    """`torchmetrics.multimodal.CLIPScore(model_name_or_path=for_torchmetrics(model))` computes with `model`.

    torchmetrics 1.9 reads tensors where transformers 5 returns objects, and cuts long captions behind their end token,
    which drops the score; given this, it does neither.
    """
    return lambda: (_Network(model), _Processor(model))


class _Network:
    config = object()  # without a text_config torchmetrics cuts nothing

    def __init__(self, model: ImageTextModel):
        self.model = model

    def to(self, device) -> _Network:
        return self

    @torch.no_grad()
    def get_image_features(self, pixels: Tensor) -> Tensor:
        return self.model.image(pixels.to(self.model.device))

    @torch.no_grad()
    def get_text_features(self, tokens: Tensor, mask: Tensor) -> Tensor:
        parts = (tokens, mask)[: len(self.model.tokenize(["a"]))]
        return self.model.text(*(part.to(self.model.device) for part in parts))


class _Processor:
    def __init__(self, model: ImageTextModel):
        self.model = model

    def __call__(self, text=None, images=None, **_) -> dict[str, Tensor]:
        if images is not None:
            return {"pixel_values": torch.cat([self.model.prepare(as_uint8(each[None])) for each in images])}
        tokens, *mask = self.model.tokenize(list(text))
        return {"input_ids": tokens, "attention_mask": mask[0] if mask else torch.ones_like(tokens)}
