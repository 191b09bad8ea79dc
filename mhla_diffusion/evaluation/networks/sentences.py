"""Sentence vectors by MiniLM (all-MiniLM-L6-v2), from a folder or the package that carries it; transformers runs it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .transformers_folders import load_model
from .weight_files import about_weights, find_weights


class SentenceEncoder(NamedTuple):
    """`encode(texts)` -> unit vectors `(N, width)` float32 on the CPU."""

    encode: Callable[[Sequence[str]], Tensor]
    width: int
    about: dict


def sentence_encoder(weights: str | os.PathLike | None = None) -> SentenceEncoder:
    """The mean of the last layer's states over a text's tokens, of length 1.

    Args:
        weights: a folder in transformers' layout; without it `$MHLA_WEIGHTS/minilm/` and the package are searched.

    Raises MissingWeights with every place searched.
    """
    found = find_weights("minilm", weights)
    from transformers import AutoModel, AutoTokenizer

    network = load_model(AutoModel, found.path, "bert", unused=("pooler.",))
    tokenizer = AutoTokenizer.from_pretrained(found.path, local_files_only=True)

    @torch.no_grad()
    def encode(texts: Sequence[str], batch_size: int = 256) -> Tensor:
        parts = []
        for first in range(0, len(texts), batch_size):
            batch = list(texts[first : first + batch_size])
            tokens = tokenizer(batch, padding=True, truncation=True, max_length=128, return_tensors="pt")
            states = network(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)[0]
            mask = tokens.attention_mask[..., None].to(states.dtype)
            parts.append(F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
        return torch.cat(parts)

    return SentenceEncoder(encode, network.config.hidden_size, about_weights("minilm", found))
