"""The doctor names each setting that will hurt, and nothing else."""

from __future__ import annotations

import time

import pytest

import redis_servers
from dsv4_tierd.tiering.errors import StoreUnavailable
from dsv4_tierd.tiering.store.redis_config import RedisConfig
from dsv4_tierd.tiering.store.redis_doctor import check_server
from redis_cases import SLACK_S, open_redis
from redis_servers import Server
from store_cases import page, read

GOOD = {"maxmemory": "256mb", "maxmemory_policy": "noeviction"}


def warnings(server: Server, **how: object) -> list[str]:
    return check_server(RedisConfig(server.url, 128 << 20, **how))


def test_a_good_server_has_no_warnings() -> None:
    """As docs/STORE.md says to configure it."""
    with Server(**GOOD) as server:
        assert warnings(server) == []


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"appendonly": "yes"}, "appendonly is on"),
        ({"save": "60 1"}, "snapshots"),
        ({"maxmemory": "0"}, "maxmemory is not set"),
        ({"maxmemory": "64mb"}, "before the store evicts by itself"),
        ({"maxmemory_policy": "allkeys-lru"}, "may evict the catalogue"),
        ({"maxmemory_policy": "volatile-lru"}, "without ttl_s"),
        ({"timeout": "30"}, "idle connections"),
        ({"protected_mode": "no"}, "anyone who reaches"),
        ({"proto_max_bulk_len": "1mb"}, "proto-max-bulk-len"),
    ],
)
def test_each_bad_setting_is_named(settings: dict[str, str], word: str) -> None:
    """One warning for one setting."""
    with Server(**GOOD | settings) as server:
        found = warnings(server)
        assert len(found) == 1, found
        assert word in found[0]


def test_a_store_without_a_budget() -> None:
    """Under noeviction nobody would evict then; a time to live in the URL is counted."""
    with Server(**GOOD) as server:
        [warning] = check_server(RedisConfig(server.url, 0))
        assert "noeviction" in warning
    with Server(**GOOD | {"maxmemory_policy": "volatile-lru"}) as server:
        assert check_server(RedisConfig(f"{server.url}?ttl_s=60", 0)) == []


def test_a_user_without_config() -> None:
    """A user who may not ask for settings is told what was not looked at; the store works."""
    with Server(**GOOD) as server, server.client as client:
        client.execute_command("ACL SETUSER app on >x ~tierd:1:* +@all -config -acl")
        url = f"redis://app:x@127.0.0.1:{server.port}"
        [warning] = check_server(RedisConfig(url, 128 << 20))
        assert "CONFIG is not allowed" in warning
        store = open_redis(url)
        store.put([page("a")])
        assert read(store, page("a")) == page("a").payload
        store.gc()
        store.close()


@pytest.mark.parametrize(
    "url", ["redis://{}", "redis+cluster://{}", "redis+sentinel://{},{}/main?sentinel_password=x"]
)
def test_a_server_that_is_away_is_an_error(url: str) -> None:
    """And not a clean bill of health; nobody is asked over and over."""
    dead = f"127.0.0.1:{redis_servers.free_port()}"
    begun = time.monotonic()
    with pytest.raises(StoreUnavailable, match=f"(?si){dead}.*connection"):
        check_server(RedisConfig(url.format(dead, dead), 1 << 20))
    assert time.monotonic() - begun < 1 + SLACK_S
