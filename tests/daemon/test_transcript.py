"""Token runs shared between sessions."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from dsv4_tierd.daemon.transcript import TokenRun, Transcript, common_bytes, common_prefix


def pack(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


@given(st.data())
def test_forks_cuts_and_appends_read_back_what_lists_hold(data: st.DataObject) -> None:
    """Any mix of fork, cut and append reads back exactly like plain lists."""
    pairs: list[tuple[Transcript, list[int]]] = [(Transcript(), [])]
    for run_id in range(data.draw(st.integers(1, 12))):
        head, model = pairs[data.draw(st.integers(0, len(pairs) - 1))]
        if data.draw(st.booleans()):
            to = data.draw(st.integers(0, len(model)))
            head, model = head.cut(to), model[:to]
        ids = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
        pairs.append((head.grown(TokenRun(run_id, head.run, head.length, pack(ids))), model + ids))
    for head, model in pairs:
        start = data.draw(st.integers(0, len(model)))
        assert head.read(start) == pack(model[start:])
        assert head.last_token() == (model[-1] if model else None)
    (a, model_a), (b, model_b) = pairs[-1], pairs[data.draw(st.integers(0, len(pairs) - 1))]
    same = 0
    while same < min(len(model_a), len(model_b)) and model_a[same] == model_b[same]:
        same += 1
    assert common_prefix(a, b) == same


@given(st.binary(max_size=40), st.binary(max_size=10), st.binary(max_size=10))
def test_common_bytes_stops_at_the_first_difference(head: bytes, a: bytes, b: bytes) -> None:
    """The common prefix is the longest equal one."""
    found = common_bytes(head + a, head + b)
    assert (head + a)[:found] == (head + b)[:found]
    assert (head + a)[found : found + 1] != (head + b)[found : found + 1] or found == min(
        len(head + a), len(head + b)
    )
