"""Stores on real servers, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dsv4_tierd.tiering.store.identity import StoreIdentity
from dsv4_tierd.tiering.store.redis import RedisStore
from dsv4_tierd.tiering.store.redis_config import RedisConfig
from store_cases import IDENTITY

DEADLINE_S = 0.4


def open_redis(
    url: str, identity: StoreIdentity | None = IDENTITY, *, bytes_max: int = 64 << 20, **how: Any
) -> RedisStore:
    """A store with small extents, so that a test crosses many, and short deadlines."""
    settings = {"value_bytes": 64 << 10, "commit_bytes": 256 << 10, "deadline_s": DEADLINE_S}
    settings |= {"connect_timeout_s": DEADLINE_S}
    return RedisStore(RedisConfig(url, bytes_max, **{**settings, **how}), identity)


def eventually(what: Callable[[], object], within_s: float = 5.0) -> float:
    """Wait until ``what`` holds; how long that took."""
    begun = time.monotonic()
    while not what():
        assert time.monotonic() - begun < within_s, "it does not come true"
        time.sleep(0.005)
    return time.monotonic() - begun
