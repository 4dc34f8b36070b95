"""The order of eviction: the naive rule, walked in full, and the quick one agree."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4_tierd.tiering.store.catalogue import Catalogue, Entry, Extent
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind
from store_cases import digest

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["page", "resume", "touch", "evict", "remove"]), st.integers(0, 99)),
    max_size=80,
)


class NaiveOrder:
    """Using an object uses every page above it; the oldest object without children goes."""

    def __init__(self) -> None:
        self.parents: dict[int, int | None] = {}
        self.used: dict[int, int] = {}
        self.clock = 0

    def use(self, row: int | None) -> None:
        self.clock += 1
        while row is not None:
            self.used[row] = self.clock
            row = self.parents[row]

    def evict(self) -> int | None:
        leaves = set(self.parents) - set(self.parents.values())
        # An object and the page it hangs on may share their last use: the leaf is the object.
        victim = min(leaves, key=lambda row: self.used[row], default=None)
        if victim is not None:
            del self.parents[victim]
        return victim


@given(ACTIONS)
# A page whose last child was removed keeps that child's last use: root 2 is older than it.
@example([("page", 0), ("page", 1), ("page", 0), ("touch", 1), ("remove", 1), ("evict", 0)])
@settings(max_examples=300)
def test_eviction_order(actions: list[tuple[str, int]]) -> None:
    """Whatever is added, used, evicted and removed, both rules choose the same victims."""
    catalogue, naive = Catalogue(), NaiveOrder()
    entries: dict[int, Entry] = {}
    for step, (action, choice) in enumerate(actions):
        rows = sorted(naive.parents)
        pages = [r for r in rows if entries[r].key.kind is ObjectKind.PAGE]
        target = rows[choice % len(rows)] if rows else None
        if action in ("page", "resume"):
            over = pages[choice % len(pages)] if pages and choice % 5 else None
            if action == "resume" and (over is None or _has_resume(catalogue, entries[over])):
                continue
            entries[step] = _entry(step, action, None if over is None else entries[over])
            naive.parents[step] = over
            naive.use(step)
            entries[step].used = catalogue.tick()
            catalogue.add(entries[step])
        elif action == "touch" and target is not None:
            naive.use(target)
            catalogue.touch(entries[target])
        elif action == "evict":
            victim = catalogue.pop_victim(frozenset())
            assert (None if victim is None else victim.row) == naive.evict()
        elif action == "remove" and target is not None:
            for entry in catalogue.subtree([entries[target]]):
                catalogue.remove(entry)
                del naive.parents[entry.row]
        assert sorted(entry.row for entry in catalogue) == sorted(naive.parents)
        assert catalogue.count == len(naive.parents)


@given(st.integers(1, 30), st.sets(st.integers(0, 29)), st.sets(st.integers(0, 29)))
def test_what_is_read_or_protected_stays(count: int, read: set[int], protected: set[int]) -> None:
    """Eviction ends at a page that is being read or protected, and so at all above it."""
    catalogue, entries = Catalogue(), []
    for row in range(count):
        entry = _entry(row, "page", entries[-1] if entries else None)
        entry.used = catalogue.tick()
        entry.readers = int(row in read)
        catalogue.add(entry)
        entries.append(entry)
    guarded = frozenset(entries[row].key.digest for row in protected if row < count)
    evicted = []
    while (victim := catalogue.pop_victim(guarded)) is not None:
        evicted.append(victim.row)
    held = max([row for row in read | protected if row < count], default=-1)
    assert evicted == list(range(count - 1, held, -1))
    for entry in entries:
        entry.readers = 0
    while (victim := catalogue.pop_victim(frozenset())) is not None:
        evicted.append(victim.row)
    assert evicted == list(range(count - 1, -1, -1))
    assert catalogue.count == 0


def test_a_page_written_anew_takes_its_children_back() -> None:
    """A forgotten page that returns is not evicted before what already hangs on it."""
    catalogue = Catalogue()
    root = _entry(1, "page", None)
    child = _entry(2, "page", root)
    for entry in (root, child):
        entry.used = catalogue.tick()
        catalogue.add(entry)
    catalogue.remove(root)
    again = _entry(1, "page", None)
    again.row, again.used = 3, 0
    catalogue.add(again)
    assert [catalogue.pop_victim(frozenset()) for _ in range(3)] == [child, again, None]


def _entry(row: int, kind: str, over: Entry | None) -> Entry:
    parent = None if over is None else over.key.digest
    if kind == "resume":
        assert parent is not None
        key = ObjectKey(ObjectKind.RESUME, "", parent)
    else:
        key = ObjectKey(ObjectKind.PAGE, "", digest(str(row)))
    return Entry(row, bytes(32), key, parent, Extent(1, row * 4096, 4096), 100, used=0)


def _has_resume(catalogue: Catalogue, page: Entry) -> bool:
    key = ObjectKey(ObjectKind.RESUME, "", page.key.digest)
    return catalogue.find(page.identity, key) is not None
