"""Runs of pages: consecutive on both sides, as long as they get, in order."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_tierd.kernels.page_copy import runs


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=20))
def test_runs_cover_every_pair_in_order_and_are_maximal(pairs: list[tuple[int, int]]) -> None:
    """Expanding the runs gives the pairs back; two runs in a row could not be one."""
    found = list(runs([d for d, _ in pairs], [s for _, s in pairs]))
    assert [(d + i, s + i) for d, s, n in found for i in range(n)] == pairs
    for (d, s, n), (next_d, next_s, _) in pairwise(found):
        assert (d + n, s + n) != (next_d, next_s)


def test_uneven_lists_are_refused() -> None:
    """A page without its counterpart is an error."""
    with pytest.raises(ValueError, match="2 pages to copy to, 1 to copy from"):
        list(runs([1, 2], [1]))
