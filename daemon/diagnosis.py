"""Why a prompt was not found in the cache: where it first differs from one that came before.

Prompts are compared as token ids, which is what the cache is keyed by; text is shown for people.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import xxhash

from dsv4_tierd.daemon.tokenize import TextCodec
from dsv4_tierd.daemon.transcript import ID_BYTES, common_bytes
from dsv4_tierd.engine.messages import Usage
from dsv4_tierd.tiering.blocks import BLOCK_TOKENS

CACHE_MARKS = frozenset({"cache_control", "prompt_cache_breakpoint"})  # change no token
AFTER_TOKENS = 128  # decoded past the first difference, to show its line
LINE_CHARS_MAX = 240
PROMPTS_MAX = 16  # of one tenant
PROMPT_OVERHEAD_BYTES = 1024  # of a prompt however short, and of its tenant
PROMPTS_BYTES_MAX = 64 << 20  # of all


@dataclass(frozen=True, slots=True)
class Words:
    """A prompt: its ids (int32 LE bytes), and a digest of each message if it was a chat."""

    ids: bytes
    messages: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return len(self.ids) // ID_BYTES

    def token(self, index: int) -> int | None:
        if index >= self.count:
            return None
        return int.from_bytes(self.ids[index * ID_BYTES : (index + 1) * ID_BYTES], "little")

    def part(self, stop: int) -> list[int]:
        return memoryview(self.ids)[: stop * ID_BYTES].cast("i").tolist()


@dataclass(frozen=True, slots=True)
class Difference:
    """Where ``b`` first differs from ``a``, all counted from 0 but lines, which begin at 1.

    ``token_a`` and ``token_b``: None where the prompt has ended. ``message``: None if no message
    differs or there are none. ``byte`` (of the prompt in UTF-8) and lines: None without text.
    """

    common_tokens: int
    token_a: int | None
    token_b: int | None
    message: int | None = None
    byte: int | None = None
    line: int | None = None
    line_a: str | None = None
    line_b: str | None = None


def message_digests(messages: Sequence[Any]) -> tuple[int, ...]:
    """One number a message; where a cache mark stands is no difference."""
    return tuple(
        xxhash.xxh3_64_intdigest(msgspec.json.encode(_unmarked(m), order="sorted"))
        for m in messages
    )


def _unmarked(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _unmarked(v) for k, v in value.items() if k not in CACHE_MARKS}
    if isinstance(value, list):
        return [_unmarked(v) for v in value]
    return value


def compare(a: Words, b: Words, codec: TextCodec | None) -> Difference | None:
    """The first difference, or None if there is none. O(prompt), as text is decoded up to it."""
    if a.ids == b.ids:
        return None
    common = common_bytes(a.ids, b.ids) // ID_BYTES
    found = Difference(common, a.token(common), b.token(common), _first_message(a, b))
    if codec is None:
        return found
    text_a = codec.decode(a.part(common + AFTER_TOKENS))
    text_b = codec.decode(b.part(common + AFTER_TOKENS))
    at = _first_character(text_a, text_b)
    return Difference(
        common, found.token_a, found.token_b, found.message,
        byte=len(text_b[:at].encode()), line=text_b.count("\n", 0, at) + 1,
        line_a=_line(text_a, at), line_b=_line(text_b, at),
    )  # fmt: skip


def _first_message(a: Words, b: Words) -> int | None:
    if not a.messages or not b.messages:
        return None
    pairs = zip(a.messages, b.messages, strict=False)
    shorter = min(len(a.messages), len(b.messages))
    first = next((i for i, (x, y) in enumerate(pairs) if x != y), shorter)
    return first if first < max(len(a.messages), len(b.messages)) else None


def _first_character(a: str, b: str) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:  # a[:low] is b[:low]
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _line(text: str, at: int) -> str:
    start = text.rfind("\n", 0, at) + 1
    stop = text.find("\n", at)
    return text[start : len(text) if stop < 0 else stop][:LINE_CHARS_MAX]


class RecentPrompts:
    """Each tenant's newest prompts, bounded in number and bytes: what a miss is compared to."""

    def __init__(self, bytes_max: int = PROMPTS_BYTES_MAX) -> None:
        self.bytes_used = 0
        self._bytes_max = bytes_max
        self._by_salt: OrderedDict[str, deque[Words]] = OrderedDict()

    @staticmethod
    def _cost(words: Words) -> int:
        return len(words.ids) + PROMPT_OVERHEAD_BYTES

    def add(self, salt: str, words: Words) -> None:
        kept = self._by_salt.setdefault(salt, deque())
        self._by_salt.move_to_end(salt)
        if words in kept:
            kept.remove(words)
            self.bytes_used -= self._cost(words)
        kept.append(words)
        self.bytes_used += self._cost(words)
        if len(kept) > PROMPTS_MAX:
            self.bytes_used -= self._cost(kept.popleft())
        while self.bytes_used > self._bytes_max:
            oldest, prompts = next(iter(self._by_salt.items()))
            self.bytes_used -= self._cost(prompts.popleft())
            if not prompts:
                del self._by_salt[oldest]

    def closest(self, salt: str, words: Words) -> Words | None:
        """The tenant's prompt that begins like this one for longest; the newest of several."""
        newest_first = list(self._by_salt.get(salt, ()))[::-1]
        return max(newest_first, key=lambda w: common_bytes(w.ids, words.ids), default=None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prompt, the known one that is closest to it (None: there is none), and the difference."""

    words: Words
    known: Words | None
    difference: Difference | None

    def verdict(self, usage: Usage) -> dict[str, Any]:
        """``prompt_cache_diagnostics`` of the answer: hit or miss, and why not more was reused."""
        cached = usage.device_tokens + usage.host_tokens + usage.store_tokens
        shown = None if self.difference is None else asdict(self.difference)
        reason = self._reason(cached, usage.miss_reason)
        return {
            "type": "cache_hit" if cached else "cache_miss",
            "reason": reason,
            "cached_tokens": cached,
            "prompt_tokens": usage.prompt_tokens,
            "difference": shown if reason == "prefix_changed" else None,
        }

    def _reason(self, cached: int, engine_says: str | None) -> str | None:
        """None: nothing that was known could have been reused and was not."""
        words, known = self.words, self.known
        if words.count <= BLOCK_TOKENS:
            return None if cached else "too_short"
        if known is None:
            return None if cached else "nothing_known"
        common = words.count if self.difference is None else self.difference.common_tokens
        if cached < min(common, words.count - 1) // BLOCK_TOKENS * BLOCK_TOKENS:
            return engine_says or "no_longer_cached"
        if common // BLOCK_TOKENS < known.count // BLOCK_TOKENS:
            return "prefix_changed"
        return None


def examine(recent: RecentPrompts, salt: str, words: Words, codec: TextCodec | None) -> Comparison:
    """Compare a prompt with what came before. Blocking, O(prompt)."""
    known = recent.closest(salt, words)
    return Comparison(words, known, None if known is None else compare(known, words, codec))
