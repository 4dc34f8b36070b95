"""What a Redis should be told before it is a prefix store: warnings, a line each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsv4_tierd.tiering.errors import StoreUnavailable
from dsv4_tierd.tiering.store.redis_config import RedisConfig
from dsv4_tierd.tiering.store.redis_link import Link
from dsv4_tierd.tiering.store.redis_replies import as_fields, as_pairs

_RELAXED = ("volatile-lru", "volatile-lfu", "volatile-random", "volatile-ttl")


def check_server(config: RedisConfig) -> list[str]:
    """Connect, look at the settings, and say what will hurt; empty: all is well.

    Changes nothing. Raises InvalidRequest (the URL), StoreUnavailable (away, too old).
    """
    link = Link(config)
    try:
        link.connect()
        link.restored()
        warnings: list[str] = []
        for pool in link.pools():
            found = list(_warnings(link, pool, link.config))  # with the URL's options
            warnings += [text for text in found if text not in warnings]
        return warnings
    finally:
        link.close()


def _warnings(link: Link, pool: Any, config: RedisConfig) -> Iterator[str]:
    persistence = link.ask(pool, "INFO", "persistence", read=as_fields)
    memory = link.ask(pool, "INFO", "memory", read=as_fields)
    settings = _settings(link, pool)
    policy = memory.get("maxmemory_policy") or settings.get("maxmemory-policy", "")
    limit = _number(memory, "maxmemory")
    if persistence.get("aof_enabled") == "1":
        yield (
            "appendonly is on: every page is also written to a log, which halves the rate of writes"
            " or worse; pages can be computed again, so: appendonly no"
        )
    if settings.get("save"):
        yield (
            f"save {settings['save']!r}: snapshots fork a process that is as large as the store;"
            ' save ""'
        )
    yield from _memory(limit, policy, memory, config)
    if settings.get("requirepass") == "" and settings.get("protected-mode") == "no":
        yield "anyone who reaches the port can read, change and delete every tenant's pages"
    timeout = _number(settings, "timeout")
    if timeout:
        yield f"timeout {timeout}: idle connections are closed, and opened again for the next call"
    bulk = _number(settings, "proto-max-bulk-len") or config.value_bytes
    if bulk < config.value_bytes:
        yield f"proto-max-bulk-len {bulk} is less than an extent of {config.value_bytes} bytes"
    if not settings:
        yield "CONFIG is not allowed: save, timeout and passwords were not looked at"


def _memory(limit: int, policy: str, memory: dict[str, str], config: RedisConfig) -> Iterator[str]:
    if policy == "noeviction" and not limit:
        yield (
            "maxmemory-policy noeviction and maxmemory is not set: the machine's memory is the"
            " limit, where the server is killed; set maxmemory above the store's budget"
        )
    if limit and policy == "noeviction" and not config.bytes_max:
        yield (
            "maxmemory-policy noeviction, and the store has no budget: once the server is full,"
            " writes fail; give the store a budget, or ttl_s and a volatile- policy"
        )
    if limit and policy == "noeviction" and limit < config.bytes_max:
        yield (
            f"maxmemory-policy noeviction with maxmemory {limit}, less than the store's"
            f" {config.bytes_max} bytes: writes will fail before the store evicts by itself;"
            " raise one or lower the other"
        )
    if limit and policy.startswith("allkeys-"):
        yield (
            f"maxmemory-policy {policy} may evict the catalogue itself, and then all is lost at"
            " once; take noeviction and let the store evict (or a volatile- policy with ttl_s)"
        )
    if limit and policy in _RELAXED and not config.ttl_s:
        yield f"maxmemory-policy {policy} evicts nothing of a store without ttl_s"
    used = _number(memory, "used_memory")
    if limit and used > 0.9 * limit:
        yield f"{used} of {limit} bytes of memory are in use"


def _settings(link: Link, pool: Any) -> dict[str, str]:
    """The settings that matter; empty where CONFIG is not allowed."""
    names = ("save", "timeout", "requirepass", "protected-mode", "maxmemory-policy")
    try:
        found = [
            pair
            for name in (*names, "proto-max-bulk-len")
            for pair in link.ask(pool, "CONFIG", "GET", name, read=as_pairs)
        ]
    except StoreUnavailable:
        link.check()  # away, rather than forbidden
        return {}
    return {name.decode(errors="replace"): text.decode(errors="replace") for name, text in found}


def _number(found: dict[str, str], name: str) -> int:
    """What it says of itself; 0 where it says nothing. Raises StoreUnavailable."""
    text = found.get(name) or "0"
    if not text.isdecimal():
        raise StoreUnavailable(f"it says that its {name} is {text!r:.60}")
    return int(text)
