"""Token ids to text as they come: whole characters only, stop strings cut off."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """Text of one request. Without a tokenizer there is no text, and no stop string.

    Special tokens are spelled out: what a chat parser looks for is among them. What could still
    become a stop string, and bytes that are not yet a character, are held back.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = ()) -> None:
        self.stopped_by: str | None = None
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._decoder = DecodeStream(skip_special_tokens=False)
        self._undecided: list[int] = []  # ids whose bytes are not yet a whole character
        self._held = ""

    def push(self, token_id: int) -> str:
        """Add one token; returns text that is certain. Sets ``stopped_by`` at a stop string."""
        if self._tokenizer is None or self.stopped_by is not None:
            return ""
        piece = self._decoder.step(self._tokenizer, token_id)
        if piece is None:
            self._undecided.append(token_id)
            return ""
        self._undecided.clear()
        return self._release(piece)

    def finish(self) -> str:
        """What was still held back: all of it, an unfinished character as U+FFFD."""
        if self._tokenizer is None or self.stopped_by is not None:
            return ""
        rest = (
            self._tokenizer.decode(self._undecided, skip_special_tokens=False)
            if self._undecided
            else ""
        )
        self._undecided.clear()
        text, self._held = self._release(rest) + self._held, ""
        return text

    def _release(self, piece: str) -> str:
        text = self._held + piece
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
