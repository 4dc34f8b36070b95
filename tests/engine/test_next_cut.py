"""Where a prefill is cut into chunks."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from dsv4_tierd.engine.runner import next_cut
from dsv4_tierd.tiering.blocks import BLOCK_TOKENS


@dataclass
class At:
    """As much of a sequence as a cut depends on."""

    position: int
    emit_from: int


def cuts(position: int, emit_from: int, limit: int, chunk_tokens: int) -> list[int]:
    seq, found = At(position, emit_from), []
    while seq.position < limit:
        stop = next_cut(seq, limit, chunk_tokens)  # type: ignore[arg-type]
        assert seq.position < stop <= limit
        found.append(stop)
        seq.position = stop
    return found


def test_an_example() -> None:
    """Multiples of the chunk size, where pages begin, the last boundary, the end."""
    assert cuts(0, 0, 700, 300) == [300, 512, 600, 700]
    assert cuts(100, 256, 700, 300) == [256, 300, 512, 600, 700]
    assert cuts(512, 512, 513, 300) == [513]
    assert cuts(0, 0, 512, 1000) == [256, 512]


@given(
    begin=st.integers(0, 3000),
    replayed=st.integers(0, 600),
    left=st.integers(1, 3000),
    chunk_tokens=st.integers(1, 1500),
)
def test_properties(begin: int, replayed: int, left: int, chunk_tokens: int) -> None:
    """Every chunk is within the size, and every place that something hangs on is a cut."""
    emit_from = begin + replayed
    limit = emit_from + left
    found = cuts(begin, emit_from, limit, chunk_tokens)
    edges = [begin, *found]
    assert found[-1] == limit
    assert all(b - a <= chunk_tokens for a, b in zip(edges, found, strict=False))
    assert emit_from in edges, "no chunk both replays and writes pages"
    boundaries = {(limit - less) // BLOCK_TOKENS * BLOCK_TOKENS for less in (0, 1)}
    for boundary in boundaries:
        assert boundary in edges or boundary < begin, "the window is kept there as a resume point"
    aligned = [at for at in range(0, limit, chunk_tokens) if at > begin]
    assert set(aligned) <= set(found), "two runs of one text cut alike"
    assert set(found) <= {limit, *boundaries, emit_from, *aligned}, "and nowhere else"
