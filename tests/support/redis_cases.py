"""Stores on real servers, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dsv4_tierd.tiering.store.identity import StoreIdentity
from dsv4_tierd.tiering.store.redis import RedisStore
from dsv4_tierd.tiering.store.redis_config import RedisConfig
from store_cases import IDENTITY

PATIENT_S = 10.0  # a machine may stop for seconds
DEADLINE_S = 1.0  # where a test waits for it to pass
SLACK_S = 2.0


def open_redis(
    url: str, identity: StoreIdentity | None = IDENTITY, *, bytes_max: int = 64 << 20, **how: Any
) -> RedisStore:
    """A store with small extents, so that a test crosses many, that waits long for its server."""
    settings = {"value_bytes": 64 << 10, "commit_bytes": 256 << 10, "deadline_s": PATIENT_S}
    settings |= {"connect_timeout_s": PATIENT_S}
    return RedisStore(RedisConfig(url, bytes_max, **{**settings, **how}), identity)


def open_hasty(url: str, **how: Any) -> RedisStore:
    """The same, for tests of servers that say nothing: it waits ``DEADLINE_S``."""
    return open_redis(url, deadline_s=DEADLINE_S, connect_timeout_s=DEADLINE_S, **how)


def assert_refused(url: str, password: str) -> None:
    """A store with a wrong password says that it is wrong, and does not show it."""
    store = open_redis(url)
    assert store.link.down_reason is not None
    assert "wrong user name or password" in store.link.down_reason
    assert password not in store.link.down_reason
    store.close()


def eventually(what: Callable[[], object], within_s: float = 20.0) -> float:
    """Wait until ``what`` holds; how long that took."""
    begun = time.monotonic()
    while not what():
        assert time.monotonic() - begun < within_s, "it does not come true"
        time.sleep(0.005)
    return time.monotonic() - begun
