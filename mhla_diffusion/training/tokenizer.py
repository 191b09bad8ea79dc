"""Train a small Gemma tokenizer on captions, for toy text encoders that are trained from scratch.

GemmaTokenizer is a byte-fallback BPE over text whose spaces became "▁". Training splits at those marks, so that no
token crosses a word; at inference Gemma's own pre-tokenizer sees one long word, which gives the same tokens, because
every learnt merge has "▁" in front at most.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import GemmaTokenizer

SPECIAL_TOKENS = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<mask>",
)  # the ids 0..4 that Gemma configurations expect
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))  # any text can be encoded


def train_tokenizer(captions: Iterable[str], vocab_size: int, max_length: int) -> GemmaTokenizer:
    """A GemmaTokenizer with ``vocab_size`` tokens, trained on lower-cased ``captions``.

    Args:
        vocab_size: special tokens, 256 byte tokens, characters and merges together; at least 400.
        max_length: stored as ``model_max_length``.

    Raises:
        ValueError: if there is no caption or the vocabulary is too small.
    """
    captions = [caption.lower().strip() for caption in captions]  # as the SANA pipelines do before encoding
    if not captions or vocab_size < 400:
        raise ValueError(
            f"got {len(captions)} captions and vocab_size {vocab_size}: give at least one caption and 400 tokens"
        )
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *BYTE_TOKENS],
        min_frequency=2,
        show_progress=False,
    )
    trained.train_from_iterator(captions, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = GemmaTokenizer(
        vocab=model["vocab"], merges=merges, model_max_length=max_length, padding_side="right"
    )
    # "<bos>" opens every caption: the empty one, used for guidance, then has a token to attend to
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", SPECIAL_TOKENS.index("<bos>"))]
    )
    return tokenizer
