"""A sentence encoder of MiniLM's width with random weights, which tells texts apart by their letters."""

import string
from pathlib import Path

import torch
from transformers import BertConfig, BertModel, BertTokenizer


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    letters = [*string.ascii_lowercase, *string.digits, ",", "."]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + each for each in letters)]
    (path / "vocab.txt").write_text("\n".join(words) + "\n")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=384,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=256,
    )
    BertModel(config).eval().save_pretrained(path)
    BertTokenizer(str(path / "vocab.txt")).save_pretrained(path)
    return path
