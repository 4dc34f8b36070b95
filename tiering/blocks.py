"""Tokens to blocks: 256 tokens' content, named by a chained hash.

``hash[i] = BLAKE3(hash[i-1] || tokens of block i as int32 LE)``; the chain starts at a root
made of the store identity and the tenant's salt, so equal tokens under another model, layout
or tenant never share a name.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from blake3 import blake3

BLOCK_TOKENS = 256
_BLOCK_BYTES = BLOCK_TOKENS * 4
TokenArray = npt.NDArray[np.int32]


def chain_root(identity: bytes, salt: str) -> bytes:
    """The hash before block 0. ``identity``: 32 bytes; ``salt``: the tenant's, may be empty."""
    hasher = blake3(derive_key_context="dsv4-tierd block chain root v1")
    hasher.update(identity)
    hasher.update(salt.encode())
    return hasher.digest()


def block_hash(parent: bytes, tokens: bytes | memoryview) -> bytes:
    """Name of the block with these 256 int32 LE tokens after ``parent``; 32 bytes."""
    hasher = blake3(parent)
    hasher.update(tokens)
    return hasher.digest()


class Transcript:
    """A session's token ids, and the hashes of its whole blocks, kept in step.

    A fork shares the buffer until one side writes past the end.
    """

    __slots__ = ("_hashes", "_length", "_shared", "_tokens", "root")

    def __init__(self, root: bytes, tokens: TokenArray | None = None) -> None:
        self.root = root
        self._tokens: TokenArray = np.empty(0, np.int32) if tokens is None else tokens.astype("<i4")
        self._length = len(self._tokens)
        self._shared = False
        self._hashes: list[bytes] = []

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> TokenArray:
        """[length] int32 view; not to be written to, valid until the next change."""
        return self._tokens[: self._length]

    @property
    def hashes(self) -> list[bytes]:
        """Hash of every whole block, computed up to now."""
        hashes, octets = self._hashes, self._tokens.view(np.uint8).data
        for index in range(len(hashes), self._length // BLOCK_TOKENS):
            block = octets[index * _BLOCK_BYTES : (index + 1) * _BLOCK_BYTES]
            hashes.append(block_hash(hashes[-1] if hashes else self.root, block))
        return hashes

    def digest(self, length: int) -> bytes:
        """32 bytes that name the first ``length`` tokens, under this root."""
        hasher = blake3(derive_key_context="dsv4-tierd words v1")
        hasher.update(self.root)
        hasher.update(self._tokens[:length].tobytes())
        return hasher.digest()

    def append(self, tokens: TokenArray) -> None:
        """Add tokens at the end; amortised O(new)."""
        end = self._length + len(tokens)
        if end > len(self._tokens) or self._shared:
            grown = np.empty(max(end * 3 // 2, 1024), np.int32)
            grown[: self._length] = self.tokens
            self._tokens, self._shared = grown, False
        self._tokens[self._length : end] = tokens
        self._length = end

    def truncate(self, length: int) -> None:
        """Forget every token from ``length`` on."""
        assert 0 <= length <= self._length, (length, self._length)
        self._length = length
        del self._hashes[length // BLOCK_TOKENS :]

    def fork(self, at: int | None = None) -> Transcript:
        """A second transcript with the same tokens up to ``at``; copies no token."""
        twin = Transcript(self.root)
        twin._tokens, twin._length = self._tokens, self._length
        twin._hashes = list(self._hashes)
        twin._shared = self._shared = True
        if at is not None:
            twin.truncate(at)
        return twin
