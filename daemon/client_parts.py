"""The smaller parts of the client: prefixes and operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4_tierd.daemon.client import AsyncTierd, Json


class Prefixes:
    """What ``tierd.prefixes`` is."""

    def __init__(self, client: AsyncTierd) -> None:
        self._client = client

    async def lookup(self, **words: Any) -> Json:
        """messages, text or token_ids: how much of them is cached, and where.

        ``token_ids`` may be int32 little-endian bytes: the fast way for many.
        """
        found: Json = await self._client.call("POST", "/v1/prefixes/lookup", _octets_of(words))
        return found

    async def warm(self, **words: Any) -> Json:
        """What lookup takes: bring what the store has of it to host memory."""
        body = _octets_of(words)
        found: Json = await self._client.call("POST", "/v1/prefixes/warm", body, wait="true")
        return found

    async def pin(self, pinned: bool = True, **words: Any) -> Json:
        """What lookup takes: keep its whole blocks in the shared store, or take that back."""
        verb = "pin" if pinned else "unpin"
        found: Json = await self._client.call("POST", f"/v1/prefixes/{verb}", _octets_of(words))
        return found

    async def purge(self, cache_salt: str) -> Json:
        """Forget all that is cached and stored for a tenant ("": of none) without sessions."""
        body = {"cache_salt": cache_salt}
        found: Json = await self._client.call("POST", "/v1/prefixes/purge", body, wait="true")
        return found

    async def explain(self, a: Json, b: Json) -> Json:
        """Two prompts (messages, text or token_ids each): where they first differ."""
        found: Json = await self._client.call("POST", "/v1/prefixes/explain", {"a": a, "b": b})
        return found


class Operations:
    """What ``tierd.operations`` is."""

    def __init__(self, client: AsyncTierd) -> None:
        self._client = client

    async def get(self, id: str) -> Json:
        found: Json = await self._client.call("GET", f"/v1/operations/{id}")
        return found


def _octets_of(words: Json) -> Json | bytes:
    """The body of words alone: token ids that are bytes travel as they are."""
    ids = words.get("token_ids")
    return ids if isinstance(ids, bytes) and len(words) == 1 else words
