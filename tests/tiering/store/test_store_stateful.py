"""Any history of calls, restarts and ends: the embedded store and a dict cannot be told apart."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dsv4_tierd.tiering.errors import PreconditionFailed, TransferFailed
from dsv4_tierd.tiering.store.disk import DiskStore
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind, PrefixStore, StoredObject
from naive_store import NaiveStore
from store_cases import IDENTITY, FaultyFiles, content, digest, open_disk

NAMES = st.integers(0, 15)
TENANTS = st.sampled_from(["", "one"])


class Twins(RuleBasedStateMachine):
    """A tree of sixteen pages (page n hangs on page n // 2), their resume points, some tails."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.life = 0
        self.naive = NaiveStore(IDENTITY.digest)

    @initialize(holes=st.booleans())
    def begin(self, holes: bool) -> None:
        self.files = FaultyFiles(holes=holes)
        self.real = self._opened()

    def teardown(self) -> None:
        self.real.close()
        shutil.rmtree(self.root)

    @rule(first=NAMES, tenant=TENANTS, count=st.integers(1, 4))
    def put_pages(self, first: int, tenant: str, count: int) -> None:
        items = []
        for name in range(first, min(first + count, 16)):
            key = ObjectKey(ObjectKind.PAGE, tenant, digest(f"{name}"))
            parent = digest(f"{name // 2}") if name > 1 else None
            items.append(StoredObject(key, parent, content(key, 100 + 3000 * (name % 3))))
        self._both(lambda store: store.put(items))

    @rule(name=NAMES, tenant=TENANTS, kind=st.sampled_from([ObjectKind.RESUME, ObjectKind.TAIL]))
    def put_other(self, name: int, tenant: str, kind: ObjectKind) -> None:
        key = ObjectKey(kind, tenant, digest(f"{name}"))
        item = StoredObject(key, digest(f"{name}"), content(key, 5000))
        self._both(lambda store: store.put([item]))

    @rule(name=NAMES, tenant=TENANTS, kind=st.sampled_from(ObjectKind))
    def delete(self, name: int, tenant: str, kind: ObjectKind) -> None:
        self._both(lambda store: store.delete([ObjectKey(kind, tenant, digest(f"{name}"))]))

    @rule(tenant=TENANTS)
    def delete_tenant(self, tenant: str) -> None:
        self._both(lambda store: store.delete_tenant(tenant))

    @rule(name=NAMES, tenant=TENANTS, kind=st.sampled_from(ObjectKind))
    def get(self, name: int, tenant: str, kind: ObjectKind) -> None:
        self._get(ObjectKey(kind, tenant, digest(f"{name}")))

    @precondition(lambda self: self.naive.objects)
    @rule(choice=st.integers(0, 1000), place=st.integers(0, 1000))
    def spoil(self, choice: int, place: int) -> None:
        """One byte of a record rots on the disk."""
        keys = list(self.naive.objects)
        key = keys[choice % len(keys)]
        if key in self.naive.bad:
            return
        payload = self.naive.objects[key][1]
        for path in (self._folder / "segments").iterdir():
            data = bytearray(path.read_bytes())
            start = data.find(payload)
            if start >= 0:
                data[start + place % len(payload)] ^= 0xFF
                path.write_bytes(data)
                self.naive.spoil(key)
                return
        raise AssertionError("a stored object's bytes are in no segment")

    @rule()
    def restart(self) -> None:
        self.real.close()
        self.real = self._opened()

    @rule()
    def end_without_warning(self) -> None:
        """The folder as a kill would leave it, opened by the next process."""
        old, before = self.real, self._folder
        self.life += 1
        shutil.copytree(before, self._folder)
        self.real = self._opened()
        old.close()

    @rule()
    def lose_index(self) -> None:
        """The index is gone; bad records are found out while it is rebuilt."""
        self.real.close()
        (self._folder / "index.sqlite").unlink()
        for key in list(self.naive.bad):
            self.naive.forget(key)
        self.real = self._opened()

    @rule()
    def tidy(self) -> None:
        self.real.gc()
        self._meet_bad_ones_that_were_moved()

    @rule()
    def verify(self) -> None:
        report = self.real.verify()
        assert len(report.bad) == len(self.naive.bad)
        assert report.objects == len(self.naive.objects)
        for key in list(self.naive.bad):
            self.naive.forget(key)

    @invariant()
    def same_catalogue(self) -> None:
        keys = [
            ObjectKey(kind, tenant, digest(f"{name}"))
            for kind in ObjectKind
            for tenant in ("", "one")
            for name in range(16)
        ]
        assert self.real.has(keys) == self.naive.has(keys)
        assert self.real.usage().objects == len(self.naive.objects)

    @property
    def _folder(self) -> Path:
        return self.root / str(self.life)

    def _opened(self) -> DiskStore:
        return open_disk(self._folder, files=self.files, segment_bytes=40 << 10)

    def _get(self, key: ObjectKey) -> None:
        size = len(self.naive.objects[key][1]) if key in self.naive.objects else 1
        buffers = [bytearray(size), bytearray(size)]
        pending = iter(buffers)
        self._both(lambda store: store.get(key, memoryview(next(pending))))
        assert buffers[0] == buffers[1] or key not in self.naive.objects

    def _meet_bad_ones_that_were_moved(self) -> None:
        """Compaction reads what it moves, and so finds bad records; which, is its affair."""
        for key in list(self.naive.bad):
            if not self.real.has([key])[0]:
                self.naive.forget(key)

    def _both(self, call) -> None:
        outcomes = []
        stores: tuple[PrefixStore, ...] = (self.naive, self.real)
        for store in stores:
            try:
                outcomes.append(call(store))
            except (PreconditionFailed, TransferFailed) as error:
                outcomes.append(type(error))
        if not self.files._holes:
            self._meet_bad_ones_that_were_moved()
        assert outcomes[0] == outcomes[1]


def test_any_history(quick_folder: Path) -> None:
    """No history of calls, rot, restarts and ends tells the embedded store from a dict."""
    run_state_machine_as_test(
        lambda: Twins(Path(tempfile.mkdtemp(dir=quick_folder))),
        settings=settings(max_examples=60, stateful_step_count=40),
    )
