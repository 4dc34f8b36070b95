"""DeepSeek's tokenizer, whose first 512 ids (a small model's whole vocabulary) are mostly bytes."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer

from dsv4_tierd.engine.vocabulary import DEEPSEEK_VOCAB_SIZE, find_tokenizer


@cache
def byte_tokenizer() -> Tokenizer:
    """Loaded once."""
    path = find_tokenizer("nowhere", DEEPSEEK_VOCAB_SIZE)
    assert path is not None
    return Tokenizer.from_file(str(path))
