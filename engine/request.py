"""One request on its way through the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from dsv4_tierd.engine.detokenize import TextStream
from dsv4_tierd.engine.messages import Sampling, Usage
from dsv4_tierd.engine.session import Session
from dsv4_tierd.tiering.sequence import Sequence


class State(Enum):
    """A request moves down this list; a cancel ends it from any of them."""

    QUEUED = "queued"
    OPENING = "opening"  # stored pages and the tail are coming in
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


class Purpose(Enum):
    """What is wanted of a request."""

    GENERATE = "generate"
    APPEND = "append"  # compute the prompt but its last token
    RESUME = "resume"  # bring pages and tail in, compute nothing


@dataclass(slots=True)
class Request:
    """``limit``: tokens that must be computed before the first draw (or the end).

    ``base``: tokens that the session had before this request.
    """

    id: str
    session: Session
    purpose: Purpose
    base: int
    limit: int
    max_tokens: int
    sampling: Sampling
    text: TextStream
    credit: int = 1 << 30
    ephemeral: bool = False
    op_id: int | None = None
    state: State = State.QUEUED
    seq: Sequence | None = None
    drawn: int = 0
    computed: int = 0
    replayed: int = 0
    queued_at: float = field(default_factory=time.monotonic)

    def usage(self) -> Usage:
        """Where the prompt's tokens came from."""
        reused = self.seq.reused if self.seq is not None else None
        found = reused.total if reused is not None else 0
        return Usage(
            prompt_tokens=found + self.computed,
            completion_tokens=self.drawn,
            device_tokens=reused.device if reused else 0,
            host_tokens=reused.host if reused else 0,
            store_tokens=reused.store if reused else 0,
            computed_tokens=self.computed,
            replayed_tokens=self.replayed,
            miss_reason=self._miss_reason(found),
        )

    def _miss_reason(self, found: int) -> str | None:
        if self.seq is None or self.seq.start.replayed:
            return None if self.seq is None else "no_resume_point"
        return "nothing_cached" if not found else None
