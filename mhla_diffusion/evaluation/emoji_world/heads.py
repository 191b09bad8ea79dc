"""Two small heads that put EfficientNet-Lite0's features and MiniLM's sentence vectors into one space.

They are trained on the emoji set by `train/emoji_heads.py`; their file also holds the vectors of all concepts, so that
naming a picture needs no text encoder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ...pipelines.pictures import write_atomically
from ..networks.weight_files import about_weights, find_weights

IMAGE_WIDTH, TEXT_WIDTH, HIDDEN, WIDTH = 1280, 384, 384, 192
FORMAT = "emoji-heads 1"


def head(inputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


class EmojiHeads(nn.Module):
    """Features of pictures `(N, 1280)` and of texts `(N, 384)` -> unit vectors `(N, 192)`.

    `concepts`: names, `vectors`: their unit vectors `(K, 192)`; `about`: how it was trained, and its accuracy.
    """

    def __init__(self, concepts: Sequence[str] = (), about: dict | None = None):
        super().__init__()
        self.image, self.text = head(IMAGE_WIDTH), head(TEXT_WIDTH)
        self.register_buffer("mean", torch.zeros(IMAGE_WIDTH))
        self.register_buffer("std", torch.ones(IMAGE_WIDTH))
        self.register_buffer("vectors", torch.zeros(len(concepts), WIDTH))
        self.concepts, self.about = list(concepts), about or {}

    def images(self, features: Tensor) -> Tensor:
        return F.normalize(self.image((features - self.mean) / self.std), dim=-1)

    def texts(self, features: Tensor) -> Tensor:
        return F.normalize(self.text(features), dim=-1)

    @torch.no_grad()
    def similarities(self, features: Tensor, others: Tensor | None = None) -> Tensor:
        """Cosines `(N, K)` of pictures' features with every concept, and with the unit vectors `others` behind them."""
        vectors = self.vectors if others is None else torch.cat([self.vectors, others])
        return self.images(features) @ vectors.T

    def save(self, path: Path) -> None:
        """float16, with concepts and `about` in the file's header."""
        tensors = {name: value.half().contiguous() for name, value in self.state_dict().items()}
        # One entry: safetensors writes several in an order that changes from run to run, and with it the file's hash.
        content = save(tensors, {FORMAT: json.dumps({"concepts": self.concepts, "about": self.about})})
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(content))


def load_heads(given: str | os.PathLike | None = None) -> tuple[EmojiHeads, dict]:
    """The heads, in float32 on the CPU, and what results store about their file.

    Args:
        given: a file; without it `$MHLA_WEIGHTS/emoji-heads/` and the checkout are searched.

    Raises MissingWeights with every place searched; ValueError for a file of another kind.
    """
    found = find_weights("emoji-heads", given)
    try:
        with safe_open(found.path, "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}
        if FORMAT not in header:
            raise ValueError(f"its header has no {FORMAT!r}")
        heads = EmojiHeads(**json.loads(header[FORMAT]))
        heads.load_state_dict(tensors)
    except Exception as error:  # safetensors and torch each raise their own
        raise ValueError(f"{found.path} holds no heads for emoji ({' '.join(str(error).split())})") from error
    return heads.eval(), about_weights("emoji-heads", found)
