"""Page numbers and promises."""

from __future__ import annotations

import random

import pytest

from dsv4_tierd.tiering.pages import PagePool


def test_pages_come_lowest_first() -> None:
    """So that pages taken together lie in runs; a freed low one is next."""
    pool = PagePool("p", 6)
    assert pool.reserve(6)
    assert [pool.take() for _ in range(4)] == [0, 1, 2, 3]
    pool.free(1)
    pool.free(0)
    pool.reserve(1)
    assert [pool.take() for _ in range(3)] == [0, 1, 4]


def test_a_promise_is_kept_or_not_made() -> None:
    """A reservation beyond what is there changes nothing; within it, every take succeeds."""
    pool = PagePool("p", 4)
    assert pool.reserve(3)
    assert not pool.reserve(2)
    assert (pool.reserved, pool.available) == (3, 1)
    for _ in range(3):
        pool.take()
    assert (pool.reserved, pool.available, pool.free_count) == (0, 1, 1)


def test_a_page_is_taken_only_on_a_promise() -> None:
    """Take without a reservation is a bug, and found."""
    with pytest.raises(AssertionError, match="without a reservation"):
        PagePool("p", 4).take()


def test_a_page_is_freed_once() -> None:
    """Freeing a free page is a bug, and found."""
    pool = PagePool("p", 2)
    pool.reserve(1)
    page = pool.take()
    pool.free(page)
    with pytest.raises(AssertionError, match="free already"):
        pool.free(page)


def test_no_more_promises_are_returned_than_were_made() -> None:
    """Unreserving more than is reserved is a bug, and found."""
    pool = PagePool("p", 2)
    pool.reserve(1)
    with pytest.raises(AssertionError):
        pool.unreserve(2)


def test_what_can_be_reclaimed_may_be_promised() -> None:
    """A pool with nothing free promises what eviction would give, and evicts one at a time."""
    pool, cached, asked = PagePool("p", 3), [], []
    pool.reserve(3)
    cached += [pool.take() for _ in range(3)]
    pool.reclaimable = lambda: len(cached)

    def reclaim(count: int) -> int:
        asked.append(count)
        pool.free(cached.pop(0))
        return 1

    pool.reclaim = reclaim
    assert pool.available == 3 and pool.reserve(3) and not pool.reserve(1)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    assert asked == [1, 1, 1]


def test_any_history_keeps_the_sums() -> None:
    """Free, taken and promised pages always add up; no page is in two hands."""
    draw = random.Random(4)
    pool, taken = PagePool("p", 20), set()
    for _ in range(3000):
        action = draw.randrange(4)
        if action == 0:
            pool.reserve(draw.randrange(5))
        elif action == 1 and pool.reserved:
            page = pool.take()
            assert page not in taken
            taken.add(page)
        elif action == 2 and taken:
            page = draw.choice(sorted(taken))
            taken.remove(page)
            pool.free(page)
        elif action == 3:
            pool.unreserve(draw.randint(0, pool.reserved))
        assert pool.free_count + len(taken) == 20
        assert 0 <= pool.available == pool.free_count - pool.reserved
        assert [pool.is_free(page) for page in range(20)] == [p not in taken for p in range(20)]
