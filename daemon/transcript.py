"""Token ids of sessions as persistent blocks: a fork shares them all and copies none.

::

    TokenRun 1 [0..900)  <-  TokenRun 2 [900..950)      session a: (2, 950)
                         <-  TokenRun 3 [640..700)      session b, rewound to 640: (3, 700)

A head is (run, length). A run starts where its parent is cut, so runs never change.
"""

from __future__ import annotations

from dataclasses import dataclass

ID_BYTES = 4  # int32, little-endian


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class TokenRun:
    """Tokens [start, start + len(ids) / 4) after the first ``start`` tokens of ``parent``."""

    run_id: int
    parent: TokenRun | None
    start: int
    ids: bytes

    @property
    def end(self) -> int:
        return self.start + len(self.ids) // ID_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class Transcript:
    """A session's tokens: the first ``length`` of a run's chain. Immutable."""

    run: TokenRun | None = None
    length: int = 0

    def cut(self, to: int) -> Transcript:
        """The first ``to`` tokens; shares every run. 0 <= to <= length."""
        assert 0 <= to <= self.length, f"cut to {to} of {self.length}"
        run = self.run
        while run is not None and run.start >= to:
            run = run.parent
        return Transcript(run, to)

    def grown(self, run: TokenRun) -> Transcript:
        """With ``run``, whose parent is this head's, at the end."""
        assert run.parent is self.run and run.start == self.length
        return Transcript(run, run.end)

    def read(self, start: int = 0) -> bytes:
        """int32 LE bytes of tokens [start, length). Costs the tokens read and the runs passed."""
        pieces: list[bytes] = []
        cut, run = self.length, self.run
        while run is not None and cut > start:
            first = max(start, run.start)
            pieces.append(run.ids[(first - run.start) * ID_BYTES : (cut - run.start) * ID_BYTES])
            cut, run = min(cut, run.start), run.parent
        return b"".join(reversed(pieces))

    def last_token(self) -> int | None:
        if not self.length:
            return None
        return int.from_bytes(self.read(self.length - 1), "little", signed=True)

    def runs(self) -> list[TokenRun]:
        """Oldest first."""
        found: list[TokenRun] = []
        run = self.run
        while run is not None:
            found.append(run)
            run = run.parent
        return found[::-1]


def common_prefix(a: Transcript, b: Transcript) -> int:
    """How many leading tokens are equal. Runs that both share are not read."""
    shared = _shared_tokens(a, b)
    return shared + common_bytes(a.read(shared), b.read(shared)) // ID_BYTES


def _shared_tokens(a: Transcript, b: Transcript) -> int:
    """Tokens that both take from the same runs."""
    limits: dict[int, int] = {}
    cut, run = a.length, a.run
    while run is not None:
        limits[run.run_id] = cut
        cut, run = min(cut, run.start), run.parent
    cut, run = b.length, b.run
    while run is not None:
        if run.run_id in limits:
            return min(cut, limits[run.run_id])
        cut, run = min(cut, run.start), run.parent
    return 0


def common_bytes(a: bytes, b: bytes) -> int:
    """Length of the common prefix: halves until a difference is found, so compares run in C."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high - 1:  # a[:low] equal, a[:high] not
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
