"""When a call is worth repeating, and after how long. Values, no behaviour of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass

RETRIED_STATUSES = frozenset({429, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Repeat what the server refused unchanged, or what is safe to do twice.

    A refusal (429, 502 to 504 without ``x-should-retry: false``) has changed nothing, so any
    call may be repeated. After a broken connection nobody knows: only calls that are idempotent
    (GET, PUT, DELETE, or a POST with an Idempotency-Key) are.
    """

    max_retries: int = 2
    first_s: float = 0.25
    max_s: float = 8.0

    def allows(
        self, attempt: int, *, status: int | None, forbidden: bool, repeatable: bool
    ) -> bool:
        """``attempt`` 0 is the first. ``status`` None: the connection broke."""
        if attempt >= self.max_retries or forbidden:
            return False
        return repeatable if status is None else status in RETRIED_STATUSES

    def pause_s(self, attempt: int, retry_after_s: float | None) -> float:
        """What the server asked for, or a growing, jittered pause."""
        if retry_after_s is not None:
            return min(retry_after_s, 60.0)
        return min(self.max_s, self.first_s * float(2**attempt)) * random.uniform(0.5, 1.0)
