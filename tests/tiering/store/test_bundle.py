"""A prefix as a file: whole, in order, for its own identity, or refused."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from dsv4_tierd.tiering.blocks import Transcript, chain_root
from dsv4_tierd.tiering.errors import NotFound, TransferFailed, UnsupportedCombination
from dsv4_tierd.tiering.store.bundle import (
    export_prefix,
    import_prefix,
    read_manifest,
    stored_leaf,
)
from dsv4_tierd.tiering.store.disk import DiskStore
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind, StoredObject
from naive_store import NaiveStore
from store_cases import (
    IDENTITY,
    chain,
    content,
    digest,
    open_disk,
    page,
    present,
    read,
    resume,
    tail,
)

ITEMS = [*chain("a", 7, "me", 3000), resume("a2", "me", 500), resume("a6", "me", 700)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    """A store with a prefix, its two points, a branch and a tail."""
    store = open_disk(tmp_path / "from")
    store.put([*ITEMS, page("branch", "a3", "me"), tail("s", "a6", "me")])
    yield store
    store.close()


def exported(store: DiskStore, leaf: str = "a6") -> bytes:
    file = io.BytesIO()
    export_prefix(store, IDENTITY, "me", digest(leaf), file)
    return file.getvalue()


def test_a_prefix_travels(store: DiskStore, tmp_path: Path) -> None:
    """Pages and points of the chain arrive byte for byte, and nothing else does."""
    seen: list[tuple[int, int]] = []
    file = io.BytesIO()
    report = export_prefix(
        store, IDENTITY, "me", digest("a6"), file, lambda done, total: seen.append((done, total))
    )
    assert (report.objects, report.file_bytes) == (9, len(file.getvalue()))
    assert seen[-1] == (report.manifest.payload_bytes, report.manifest.payload_bytes)
    other = open_disk(tmp_path / "to")
    file.seek(0)
    assert import_prefix(file, other, IDENTITY) == report
    assert [read(other, item) for item in ITEMS] == [item.payload for item in ITEMS]
    assert [other.find(item.key) for item in ITEMS] == [store.find(item.key) for item in ITEMS]
    assert other.usage().objects == len(ITEMS)
    written = other.usage().bytes_written
    file.seek(0)
    import_prefix(file, other, IDENTITY)
    assert other.usage().bytes_written == written, "what is there is left alone"
    other.close()


def test_a_shorter_leaf_gives_a_shorter_prefix(store: DiskStore) -> None:
    """Up to the block that is named, with its points; the manifest says how much that is."""
    manifest = read_manifest(io.BytesIO(exported(store, "a2")))
    assert (manifest.pages, manifest.points, manifest.tenant) == (3, 1, "me")
    assert (manifest.leaf, manifest.identity) == (digest("a2"), IDENTITY)


def test_through_a_pipe(store: DiskStore) -> None:
    """Neither side seeks, and short reads are no end."""

    class Trickle(io.RawIOBase):
        def __init__(self, data: bytes) -> None:
            self._parts = iter([data[i : i + 777] for i in range(0, len(data), 777)])
            self._rest = b""

        def read(self, size: int = -1) -> bytes:
            self._rest = self._rest or next(self._parts, b"")
            part, self._rest = self._rest[:size], self._rest[size:]
            return part

    naive = NaiveStore(IDENTITY.digest)
    import_prefix(Trickle(exported(store)), naive, IDENTITY)  # type: ignore[arg-type]
    assert all(naive.has([item.key for item in ITEMS]))


def test_another_identity_is_refused_by_name(store: DiskStore) -> None:
    """Nothing is stored, and the field that differs is named with both its values."""
    other = replace(IDENTITY, weights_digest="00" * 32)
    naive = NaiveStore(other.digest)
    with pytest.raises(UnsupportedCombination, match=r"weights_digest: 'ab.* there, '00.* here"):
        import_prefix(io.BytesIO(exported(store)), naive, other)
    assert not naive.objects


def test_every_cut_is_noticed_and_what_came_before_is_whole(store: DiskStore) -> None:
    """A file that ends anywhere raises; what was stored by then is a prefix, byte for byte."""
    data = exported(store)
    for end in (*range(0, 400, 7), *range(400, len(data), 499), len(data) - 1):
        naive = NaiveStore(IDENTITY.digest)
        with pytest.raises(TransferFailed):
            import_prefix(io.BytesIO(data[:end]), naive, IDENTITY)
        assert not naive.objects, "this file is one batch"


def test_every_flipped_bit_is_noticed(store: DiskStore) -> None:
    """No damage gets through, wherever it is."""
    data = exported(store)
    for at in itertools.chain(range(0, 1200, 5), range(1200, len(data), 331), [len(data) - 1]):
        spoiled = bytearray(data)
        spoiled[at] ^= 1 << (at % 8)
        with pytest.raises((TransferFailed, UnsupportedCombination)):
            import_prefix(io.BytesIO(spoiled), NaiveStore(IDENTITY.digest), IDENTITY)


def test_records_out_of_place_are_refused(store: DiskStore) -> None:
    """A file put together from parts of another, each of them whole, is not taken."""
    data = exported(store)
    parts = data.split(b"DSV4TIER")
    assert len(parts) == 10
    swapped = b"DSV4TIER".join([*parts[:2], parts[3], parts[2], *parts[4:]])
    left_out = b"DSV4TIER".join([*parts[:4], *parts[5:]])
    for wrong in (swapped, left_out):
        with pytest.raises(TransferFailed):
            import_prefix(io.BytesIO(wrong), NaiveStore(IDENTITY.digest), IDENTITY)
    with pytest.raises(TransferFailed, match="not an exported prefix"):
        read_manifest(io.BytesIO(b"x" * 100))


def test_a_prefix_without_its_beginning_is_not_exported(store: DiskStore) -> None:
    """What is not stored, or hangs in the air, is NotFound."""
    with pytest.raises(NotFound):
        exported(store, "none")
    naive = NaiveStore(IDENTITY.digest)
    naive.put(ITEMS)
    naive.forget(ITEMS[3].key)
    with pytest.raises(NotFound):
        export_prefix(naive, IDENTITY, "me", digest("a6"), io.BytesIO())


def test_a_page_that_goes_bad_leaves_no_whole_file() -> None:
    """An export that cannot be finished says so, and its file is refused."""
    naive = NaiveStore(IDENTITY.digest)
    naive.put(ITEMS)
    naive.spoil(ITEMS[4].key)
    file = io.BytesIO()
    with pytest.raises(TransferFailed):
        export_prefix(naive, IDENTITY, "me", digest("a6"), file)
    with pytest.raises(TransferFailed):
        import_prefix(io.BytesIO(file.getvalue()), NaiveStore(IDENTITY.digest), IDENTITY)


def test_the_leaf_of_token_ids(tmp_path: Path) -> None:
    """Tokens name the deepest block up to which all is stored, within their tenant."""
    tokens = np.arange(256 * 5 + 17, dtype=np.int32)
    hashes = Transcript(chain_root(IDENTITY.digest, "me"), tokens).hashes
    store = open_disk(tmp_path)
    keys = [ObjectKey(ObjectKind.PAGE, "me", key) for key in hashes]
    parents = [None, *hashes]
    store.put(
        [
            StoredObject(key, parent, content(key))
            for key, parent in zip(keys[:3], parents, strict=False)
        ]
    )
    assert stored_leaf(store, IDENTITY, "me", tokens) == hashes[2]
    assert stored_leaf(store, IDENTITY, "me", tokens[:600]) == hashes[1]
    for tenant, ids in (("me", tokens[:255]), ("you", tokens), ("me", tokens[::-1])):
        with pytest.raises(NotFound):
            stored_leaf(store, IDENTITY, tenant, ids)
    store.close()


def test_large_prefixes_go_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded by a batch; a file that is cut off leaves what came before it."""
    monkeypatch.setattr("dsv4_tierd.tiering.store.bundle._BATCH_BYTES", 10_000)
    items = chain("b", 20, size=4000)
    store = open_disk(tmp_path)
    store.put(items)
    file = io.BytesIO()
    export_prefix(store, IDENTITY, "", digest("b19"), file)
    store.close()
    naive = NaiveStore(IDENTITY.digest)
    seen: list[int] = []
    import_prefix(
        io.BytesIO(file.getvalue()), naive, IDENTITY, lambda done, total: seen.append(done)
    )
    assert len(seen) == 7
    assert all(present(naive, items))
    cut = NaiveStore(IDENTITY.digest)
    with pytest.raises(TransferFailed):
        import_prefix(io.BytesIO(file.getvalue()[:60_000]), cut, IDENTITY)
    assert present(cut, items) == [True] * 12 + [False] * 8


def test_a_manifest_of_brackets_is_refused() -> None:
    """JSON that is nested too deeply is a damaged file, whatever its checksum says."""
    packed = b"[" * 100_000
    head = b"DSV4PFX1" + len(packed).to_bytes(4, "little") + xxhash.xxh3_64_digest(packed)[::-1]
    with pytest.raises(TransferFailed, match="manifest cannot be read"):
        read_manifest(io.BytesIO(head + packed))
