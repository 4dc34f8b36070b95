"""Releases and identities: what older ones wrote is read, what others wrote is refused by name.

``data/v1`` was written by the first release: two pages and their last, a resume point and a tail,
in each kind of store. It is never written anew; a format that can no longer be read gets a test
that it is refused instead.
"""

from __future__ import annotations

import base64
import json
import logging
import shutil
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest

import redis_servers
from dsv4_tierd.tiering.errors import StoreUnavailable, TransferFailed, UnsupportedCombination
from dsv4_tierd.tiering.store import bundle, codec, index, lmcache_log, redis_rows
from dsv4_tierd.tiering.store.identity import StoreIdentity
from dsv4_tierd.tiering.store.lmcache_shelf import Name
from dsv4_tierd.tiering.store.protocol import PrefixStore
from fake_l2 import Bucket, open_fake
from redis_cases import eventually, open_redis
from store_cases import IDENTITY, chain, open_disk, page, present, read, resume, tail

V1 = Path(__file__).parent / "data" / "v1"
PAGES = chain("old", 3, tenant="you", size=300)
POINT = resume("old2", tenant="you", size=50)
ITEMS = [*PAGES, POINT, tail("old", "old2", tenant="you", size=7)]
# Each a class of formats with a version of its own.
VERSIONS = (
    (codec, "FORMAT_VERSION"),
    (index, "SCHEMA_VERSION"),
    (redis_rows, "_ROW_VERSION"),
    (lmcache_log, "_VERSION"),
    (bundle, "FORMAT_VERSION"),
)
_buckets: dict[Path, Bucket] = {}


def bucket(folder: Path) -> Bucket:
    """The object store of a test."""
    return _buckets.setdefault(folder, Bucket())


OPENERS: dict[str, Callable[[Path, StoreIdentity], PrefixStore]] = {
    "disk": lambda folder, identity: open_disk(folder / "disk", identity),
    "redis": lambda folder, identity: open_redis(redis_servers.current().url, identity),
    "lmcache": lambda folder, identity: open_fake(bucket(folder), identity),
}


@pytest.fixture(params=OPENERS)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Each kind of store, empty."""
    redis_servers.emptied()
    yield request.param
    _buckets.pop(tmp_path, None)


def bring_v1(kind: str, folder: Path) -> None:
    """Put what the first release left where a store of this kind finds it."""
    if kind == "disk":
        shutil.copytree(V1 / "disk", folder / "disk")
    elif kind == "redis":
        with redis_servers.current().client as client:
            for key, value in json.loads((V1 / "redis.json").read_text()).items():
                if isinstance(value, str):
                    client.set(key, bytes.fromhex(value))
                else:
                    pairs = {bytes.fromhex(k): bytes.fromhex(v) for k, v in value.items()}
                    client.hset(key, mapping=pairs)
    else:
        for space, digest, group, rank, salt, data in json.loads((V1 / "lmcache.json").read_text()):
            name = Name(space, bytes.fromhex(digest), group, rank, salt)
            bucket(folder).objects[name] = zlib.decompress(base64.b64decode(data))


@pytest.mark.parametrize("release", ["this", "a later one"])
def test_what_the_first_release_wrote_is_read(
    kind: str, release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte; and one whose formats have gone on reads it still, and adds to it."""
    bring_v1(kind, tmp_path)
    if release != "this":
        for module, name in VERSIONS:
            monkeypatch.setattr(module, name, 2)
    store = OPENERS[kind](tmp_path, IDENTITY)
    assert [read(store, item) for item in ITEMS] == [item.payload for item in ITEMS]
    assert store.usage().objects == len(ITEMS)
    assert store.usage().checksum_failures == 0
    more = page("old3", "old2", tenant="you", size=300)
    store.put([more])
    store.close()
    store = OPENERS[kind](tmp_path, IDENTITY)
    assert [read(store, item) for item in [*ITEMS, more]] == [i.payload for i in [*ITEMS, more]]
    store.close()


@pytest.mark.parametrize("release", ["this", "a later one"])
def test_a_file_of_the_first_release_is_imported(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages and its point are stored as they were exported."""
    if release != "this":
        for module, name in VERSIONS:
            monkeypatch.setattr(module, name, 2)
    store = open_disk(tmp_path)
    with (V1 / "prefix.bin").open("rb") as source:
        bundle.import_prefix(source, store, IDENTITY)
    items = [*PAGES, POINT]
    assert [read(store, item) for item in items] == [item.payload for item in items]
    store.close()


def test_a_folder_of_a_later_release_is_refused_and_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name; rebuilding it from records that this release may not read would lose them."""
    monkeypatch.setattr(index, "SCHEMA_VERSION", 2)
    store = open_disk(tmp_path)
    store.put(ITEMS)
    store.close()
    monkeypatch.undo()
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="later release: index version 2"):
            open_disk(tmp_path)
    db = sqlite3.connect(tmp_path / "index.sqlite")
    assert db.execute("PRAGMA user_version").fetchone() == (2,)
    db.close()
    monkeypatch.setattr(index, "SCHEMA_VERSION", 2)
    store = open_disk(tmp_path)
    assert all(present(store, ITEMS))
    store.close()


def test_rows_of_a_later_release_are_passed_over_and_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two releases on one server: the older says so, once, uses its own, and harms nothing."""
    url = redis_servers.emptied().url
    monkeypatch.setattr(redis_rows, "_ROW_VERSION", 2)
    later = open_redis(url)
    later.put(ITEMS)
    later.close()
    monkeypatch.undo()
    with caplog.at_level(logging.INFO):
        store = open_redis(url)
    [line] = [r.getMessage() for r in caplog.records if "another version" in r.getMessage()]
    assert "5 catalogue rows" in line
    assert not any(present(store, ITEMS))
    assert [read(store, item) for item in ITEMS] == [None] * 5
    own = chain("new", 3)
    store.put(own)
    caplog.clear()
    time.sleep(1.5)  # it looks once a second whether it is in step
    assert not [r for r in caplog.records if "anew" in r.getMessage()]
    store.gc(grace_s=0)
    store.close()
    monkeypatch.setattr(redis_rows, "_ROW_VERSION", 2)
    later = open_redis(url)
    assert [read(later, item) for item in [*ITEMS, *own]] == [i.payload for i in [*ITEMS, *own]]
    later.close()


def test_a_log_of_a_later_release_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """What it names is not used, and this release goes on beside it."""
    monkeypatch.setattr(lmcache_log, "_VERSION", 2)
    later = open_fake(bucket(tmp_path))
    later.put(ITEMS)
    later.close()
    monkeypatch.undo()
    with caplog.at_level(logging.WARNING):
        store = open_fake(bucket(tmp_path))
    assert any("version 2, of another release" in r.getMessage() for r in caplog.records)
    assert not any(present(store, ITEMS))
    store.put(chain("new", 3))
    assert all(present(store, chain("new", 3)))
    store.close()


def test_records_and_files_of_a_later_release_are_named() -> None:
    """A record says which formats can be read, a file too."""
    record = bytearray(codec.encode(IDENTITY.digest, POINT))
    record[8:10] = (2).to_bytes(2, "little")
    with pytest.raises(TransferFailed, match="record format 2, this reads 1"):
        codec.decode(IDENTITY.digest, POINT.key, bytes(record))
    manifest = bundle.Manifest(IDENTITY, "", bytes(32), 1, 0, 0).pack()
    later = manifest.replace(b'"format": 1', b'"format": 2')
    assert later != manifest
    with pytest.raises(UnsupportedCombination, match="format 2, this reads 1"):
        bundle.Manifest.unpack(later)


@pytest.mark.parametrize("name", [field.name for field in fields(StoreIdentity)])
def test_every_other_identity_is_refused_by_name(
    kind: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other weights, formats, layouts: nothing is served, the log names the field and both values.

    The first identity's objects stay, and are served to it again.
    """
    old = getattr(IDENTITY, name)
    other = replace(IDENTITY, **{name: old + 1 if isinstance(old, int) else f"{old}x"})
    store = OPENERS[kind](tmp_path, IDENTITY)
    store.put(ITEMS)
    store.close()
    with caplog.at_level(logging.INFO):
        stranger = OPENERS[kind](tmp_path, other)
    said = [r.getMessage() for r in caplog.records if f"{name}: " in r.getMessage()]
    assert len(said) == 1
    assert str(old) in said[0] and str(getattr(other, name)) in said[0]
    assert not any(present(stranger, ITEMS))
    assert [read(stranger, item) for item in ITEMS] == [None] * 5
    stranger.put(chain("theirs", 2))
    stranger.close()
    store = OPENERS[kind](tmp_path, IDENTITY)
    eventually(lambda: all(present(store, ITEMS)))
    assert [read(store, item) for item in ITEMS] == [item.payload for item in ITEMS]
    assert not any(present(store, chain("theirs", 2)))
    store.close()
