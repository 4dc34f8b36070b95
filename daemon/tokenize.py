"""Text to token ids and back, off the event loop, cached by segment.

A segment is text between special tokens, cut further only where no token can cross. So ids of
segments, joined, equal what tokenising the whole gives, and turn k tokenises only new text.
Plain text is encoded without the added vocabulary: ``<｜User｜>`` in a prompt is six letters
and some bars, never a role.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from tokenizers import Tokenizer as HFTokenizer

from dsv4_tierd.tiering.errors import UnsupportedCombination

SEGMENT_CHARS = 8_192
# No pre-token of DeepSeek's patterns crosses from a line's end into an ASCII letter: newlines
# only end a pre-token, and the one look-ahead, \s+(?!\S), never sees a run with a newline in it.
_CUT = re.compile(r"\n(?=[A-Za-z])")
_CUTTABLE_PATTERNS = 3
_DEEPSEEK_PATTERN = "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"


@dataclass(frozen=True, slots=True)
class Piece:
    """One stretch of a prompt: plain text, or the spelling of one special token."""

    text: str
    special: bool = False


class TextCodec:
    """A tokenizer.json, read twice: with its added vocabulary, and without. Blocking."""

    def __init__(self, text: str, cache_bytes_max: int = 64 << 20) -> None:
        table: dict[str, Any] = json.loads(text)
        self.source = text
        self._full = HFTokenizer.from_str(text)
        self._cuttable = _is_deepseek(table)
        self._added = {int(token["id"]) for token in table.get("added_tokens") or ()}
        by_letters = (table.get("decoder") or {}).get("type") == "ByteLevel"
        self._letters = _byte_letters() if by_letters else {}
        table["added_tokens"] = []
        self._plain = HFTokenizer.from_str(json.dumps(table))
        self._cache: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._cache_bytes = 0
        self._cache_bytes_max = cache_bytes_max
        self.hits = 0
        self.misses = 0

    def encode(self, pieces: Sequence[Piece]) -> bytes:
        """int32 LE ids of all pieces. Raises KeyError for a special that does not exist."""
        texts: list[str] = []
        slots: list[int | bytes] = []
        for piece in pieces:
            if piece.special:
                token_id = self._full.token_to_id(piece.text)
                if token_id is None:
                    raise KeyError(piece.text)
                slots.append(int(token_id).to_bytes(4, "little"))
                continue
            for segment in self._segments(piece.text):
                slots.append(len(texts))
                texts.append(segment)
        encoded = self._encode_segments(texts)
        return b"".join(s if isinstance(s, bytes) else encoded[s] for s in slots)

    def _segments(self, text: str) -> list[str]:
        if not self._cuttable or len(text) <= SEGMENT_CHARS:
            return [text] if text else []
        found: list[str] = []
        start = 0
        while len(text) - start > SEGMENT_CHARS:
            cut = _CUT.search(text, start + SEGMENT_CHARS - 1)
            if cut is None:
                break
            found.append(text[start : cut.end()])
            start = cut.end()
        return [*found, text[start:]] if start < len(text) else found

    def _encode_segments(self, texts: Sequence[str]) -> list[bytes]:
        keys = [
            (xxhash.xxh3_128_intdigest(t.encode("utf-8", "surrogatepass")), len(t)) for t in texts
        ]
        found: dict[tuple[int, int], bytes] = {}
        todo: dict[tuple[int, int], str] = {}
        for key, text in zip(keys, texts, strict=True):
            cached = self._cache.get(key)
            if cached is None:
                todo[key] = text
            else:
                self._cache.move_to_end(key)
                found[key] = cached
        self.hits += len(texts) - len(todo)
        self.misses += len(todo)
        batch = self._plain.encode_batch_fast(list(todo.values()), add_special_tokens=False)
        for key, encoding in zip(todo, batch, strict=True):
            found[key] = np.asarray(encoding.ids, dtype="<i4").tobytes()
            self._remember(key, found[key])
        return [found[key] for key in keys]

    def _remember(self, key: tuple[int, int], ids: bytes) -> None:
        self._cache[key] = ids
        self._cache_bytes += len(ids) + 64
        while self._cache_bytes > self._cache_bytes_max and self._cache:
            _, gone = self._cache.popitem(last=False)
            self._cache_bytes -= len(gone) + 64

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens spelt out."""
        return str(self._full.decode(list(ids), skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the text; it may be a part of a character."""
        letters = self._full.id_to_token(token_id) or ""
        known = [self._letters.get(letter) for letter in letters]
        if token_id in self._added or None in known:
            return self.decode([token_id]).encode()
        return bytes(byte for byte in known if byte is not None)


def _byte_letters() -> dict[str, int]:
    """Byte-level BPE's letter for each byte: itself if printable, else one from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = (byte for byte in range(256) if byte not in printable)
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + i): byte for i, byte in enumerate(rest)}


def _is_deepseek(table: dict[str, Any]) -> bool:
    """Whether segments may be cut at line ends: only for the pre-tokenizer that was reasoned on."""
    pre = table.get("pre_tokenizer") or {}
    parts = pre.get("pretokenizers") or []
    splits = [p["pattern"].get("Regex", "") for p in parts if p.get("type") == "Split"]
    normal = table.get("normalizer")
    return (
        pre.get("type") == "Sequence"
        and len(splits) == _CUTTABLE_PATTERNS
        and splits[2].endswith(_DEEPSEEK_PATTERN)
        and (normal is None or normal == {"type": "Sequence", "normalizers": []})
    )


class TextService:
    """The codec behind two threads. ``codec`` None: this checkpoint is served by ids alone."""

    def __init__(self, codec: TextCodec | None) -> None:
        self.codec = codec
        # one thread encodes (the cache has one owner; encoding is parallel inside), one decodes
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self._decoder = ThreadPoolExecutor(1, thread_name_prefix="decode")

    def require(self) -> TextCodec:
        """Raises UnsupportedCombination."""
        if self.codec is None:
            raise UnsupportedCombination(
                "this checkpoint has no tokenizer: send token_ids instead of text or messages",
                param="text",
            )
        return self.codec

    async def encode(self, pieces: Sequence[Piece]) -> bytes:
        codec = self.require()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._encoder, codec.encode, pieces)

    async def encode_text(self, text: str) -> bytes:
        return await self.encode([Piece(text)])

    async def decode(self, ids: Sequence[int]) -> str:
        codec = self.require()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._decoder, codec.decode, ids)

    def close(self) -> None:
        self._encoder.shutdown(wait=False, cancel_futures=True)
        self._decoder.shutdown(wait=False, cancel_futures=True)
