"""Small tokenizers made of captions, for toy text encoders trained from scratch: Gemma's for SANA, T5's for Wan.

GemmaTokenizer is a byte-fallback BPE over text whose spaces became "▁". Training splits at those marks, so that no
token crosses a word; at inference Gemma's own pre-tokenizer sees one long word, which gives the same tokens, because
every learnt merge has "▁" in front at most.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import GemmaTokenizer, PreTrainedTokenizerFast

SPECIAL_TOKENS = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<mask>",
)  # the ids 0..4 that Gemma configurations expect
T5_TOKENS = ("<pad>", "</s>", "<unk>")  # the ids 0..2 that T5 configurations expect
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


def word_tokenizer(captions: Iterable[str], max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer that works as Wan's (T5's) does, with every word of ``captions`` as one token.

    Other words fall apart into the letters that captions have, and letters that none has become ``<unk>``. Text is
    lower-cased, which Wan's pipelines leave to the tokenizer. Every caption ends in ``</s>``: the empty one, used for
    guidance, then has a token to attend to.

    Raises:
        ValueError: if there is no caption.
    """
    counts = Counter(word for caption in captions for word in caption.lower().split())
    if not counts:
        raise ValueError("there are no words to make a tokenizer of: give at least one caption")
    total = counts.total()
    letters = sorted({letter for word in counts for letter in word})
    words = sorted(counts, key=lambda word: (-counts[word], word))
    scores = {f"▁{word}": math.log(counts[word] / total) for word in words}
    spelled = min(scores.values()) - 10.0  # a word as a whole is always likelier than its letters
    scores |= {piece: spelled for piece in ["▁", *letters] if piece not in scores}
    vocabulary = [(token, 0.0) for token in T5_TOKENS] + list(scores.items())
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=T5_TOKENS.index("<unk>"), byte_fallback=False))
    backend.normalizer = normalizers.Lowercase()
    mark = {"replacement": "▁", "prepend_scheme": "always"}
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**mark)]
    )
    backend.decoder = decoders.Metaspace(**mark)
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", T5_TOKENS.index("</s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        model_max_length=max_length, padding_side="right",
    )  # fmt: skip
