"""What ``--store`` may say, and what it opens."""

from __future__ import annotations

from pathlib import Path

import pytest

import redis_servers
from dsv4_tierd.tiering.errors import BadRequest, InvalidRequest, StoreUnavailable
from dsv4_tierd.tiering.store.disk import DiskStore
from dsv4_tierd.tiering.store.open import TierSpec, open_store, parse_spec
from dsv4_tierd.tiering.store.protocol import WritePolicy
from dsv4_tierd.tiering.store.redis import RedisStore
from dsv4_tierd.tiering.store.tiered import TieredStore
from store_cases import IDENTITY, page, read

BUDGET = 64 << 20
CLUSTER = "redis+cluster://:pw@h:1,g:2"
FS = '{"type": "fs", "base_path": "/a,redis://b,disk:c}"}'


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ("none", ()),
        ("disk:/a b,c", (TierSpec(folder=Path("/a b,c")),)),
        ("redis://h", (TierSpec(redis_url="redis://h"),)),
        ("disk:/a," + CLUSTER, (TierSpec(folder=Path("/a")), TierSpec(redis_url=CLUSTER))),
        (
            "disk:x,on_suspend:unix:///s",
            (
                TierSpec(folder=Path("x")),
                TierSpec(redis_url="unix:///s", policy=WritePolicy.ON_SUSPEND),
            ),
        ),
        (
            "disk:/a,never:lmcache:" + FS,
            (
                TierSpec(folder=Path("/a")),
                TierSpec(
                    lmcache={"type": "fs", "base_path": "/a,redis://b,disk:c}"},
                    policy=WritePolicy.NEVER,
                ),
            ),
        ),
    ],
)
def test_specifications_that_are_taken(spec: str, found: tuple[TierSpec, ...]) -> None:
    """Commas inside JSON, paths and lists of nodes are no border between tiers."""
    assert parse_spec(spec) == found


@pytest.mark.parametrize(
    "spec",
    [
        *("", "disk:", "s3:x", "none,redis://h", "redis://h,disk:/a", "disk:/a,disk:/b"),
        *("disk:/a,redis://h,redis://g", "through:disk:/a", "lmcache:", "lmcache:{", "lmcache:{}"),
        *("lmcache:[1]", 'lmcache:{"type": 1}', "lmcache:" + FS + "x", "redis://h?ttl_s=soon"),
        *("redis+sentinel://:hunter2@h", "redis://:hunter2/x@h", "redis://:hunter2?x@h"),
        *("redis+cluster://:hunter2/x@h:1", "redis+cluster://:hunter2?x@h:1"),
        *("redis+cluster://:x@h:hunter2", "redis://:x@h:hunter2", "redis://:hunter2#x@h"),
    ],
)
def test_specifications_that_are_refused(spec: str) -> None:
    """A wrong one is refused before anything is opened, and a password is not repeated."""
    with pytest.raises(InvalidRequest) as refused:
        parse_spec(spec)
    assert refused.value.param == "store"
    assert "hunter2" not in str(refused.value)


def test_each_kind_is_opened(tmp_path: Path) -> None:
    """A folder, a server, and one in front of the other, which share what they hold."""
    url = redis_servers.emptied().url
    assert open_store("none", IDENTITY, BUDGET) is None
    disk = open_store(f"disk:{tmp_path / 'one'}", IDENTITY, BUDGET)
    assert isinstance(disk, DiskStore)
    disk.close()
    both = open_store(f"disk:{tmp_path / 'one'},{url}", IDENTITY, BUDGET)
    assert isinstance(both, TieredStore)
    assert both.config.policy is WritePolicy.THROUGH
    both.put([page("a")])
    both.close()
    server = open_store(url, IDENTITY, BUDGET)
    assert isinstance(server, RedisStore)
    assert read(server, page("a")) == page("a").payload
    server.close()


def test_a_tier_that_cannot_be_opened_leaves_the_other_closed(tmp_path: Path) -> None:
    """Neither a folder's lock nor a thread stays behind."""
    spec = f"disk:{tmp_path}"
    with pytest.raises(BadRequest):
        open_store(spec + ',lmcache:{"type": "no such thing"}', IDENTITY, BUDGET)
    held = open_store(spec, IDENTITY, BUDGET)
    with pytest.raises(StoreUnavailable):
        open_store(f"{spec},{redis_servers.emptied().url}", IDENTITY, BUDGET)
    assert held is not None
    held.close()
