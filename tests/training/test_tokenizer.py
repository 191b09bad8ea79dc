"""The toy tokenizers, Gemma's and T5's: whole words, any text, the empty caption."""

import pytest
from transformers import AutoTokenizer, GemmaTokenizer

from mhla_diffusion.training.tokenizer import train_tokenizer, word_tokenizer

CAPTIONS = ["A flat emoji of a whale", "a 3D emoji of a red apple", "a noto style emoji of a whale"] * 4


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(CAPTIONS, vocab_size=400, max_length=16)


def test_frequent_words_are_single_tokens_that_cross_no_space(tokenizer):
    assert tokenizer.tokenize("a flat emoji of a whale") == ["a", "▁flat", "▁emoji", "▁of", "▁a", "▁whale"]


def test_any_text_survives_a_round_trip(tokenizer):
    for text in ("a whale", "zebra über 雪 🦓", "two  spaces"):
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_the_empty_caption_has_one_token_to_attend_to(tokenizer):
    encoded = tokenizer("", padding="max_length", max_length=4)
    assert encoded.attention_mask == [1, 0, 0, 0]
    assert encoded.input_ids == [tokenizer.bos_token_id, *[tokenizer.pad_token_id] * 3]


def test_saved_and_loaded_by_the_stock_class_it_is_the_same(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(loaded, GemmaTokenizer) and len(loaded) == len(tokenizer)
    for text in ("", "a red whale", "un pingüino"):
        assert loaded(text).input_ids == tokenizer(text).input_ids


@pytest.mark.parametrize(("captions", "size"), [([], 400), (CAPTIONS, 300)])
def test_too_little_to_work_with_is_refused(captions, size):
    with pytest.raises(ValueError, match="400 tokens"):
        train_tokenizer(captions, vocab_size=size, max_length=16)


def test_every_word_of_the_captions_is_one_token_of_wans_tokenizer(tmp_path):
    made = word_tokenizer(CAPTIONS, max_length=16)
    made.save_pretrained(tmp_path)
    for tokenizer in (made, AutoTokenizer.from_pretrained(tmp_path)):
        assert tokenizer.tokenize("A flat emoji of  a Whale") == [
            "▁a",
            "▁flat",
            "▁emoji",
            "▁of",
            "▁a",
            "▁whale",
        ]
        assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<pad>", "</s>", "<unk>"]
        assert tokenizer.decode(tokenizer("a red whale").input_ids, skip_special_tokens=True) == "a red whale"
        assert tokenizer.tokenize("meal")[1:] == ["m", "e", "a", "l"]
        empty = tokenizer("", padding="max_length", max_length=4)
        assert empty.input_ids == [1, 0, 0, 0] and empty.attention_mask == [1, 0, 0, 0]
        assert tokenizer("é").input_ids[-2:] == [2, 1]
    assert word_tokenizer(CAPTIONS[::-1], max_length=16).get_vocab() == made.get_vocab()
    with pytest.raises(ValueError, match="at least one caption"):
        word_tokenizer([""], max_length=16)
