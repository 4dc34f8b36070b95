"""Who runs: a bounded queue, admission in order, one prefill chunk at a time between decodes."""

from __future__ import annotations

import time
from collections import deque

from dsv4_tierd.engine.request import Request, State
from dsv4_tierd.tiering.blocks import BLOCK_TOKENS
from dsv4_tierd.tiering.errors import HostPoolExhausted, QueueFull, Refused

QUEUE_TIMEOUT_S = 300.0


class Scheduler:
    """Requests by state. It decides; the engine acts."""

    def __init__(
        self,
        running_max: int,
        queue_max: int,
        reuse: bool = True,
        queue_timeout_s: float = QUEUE_TIMEOUT_S,
    ) -> None:
        self.queue: deque[Request] = deque()
        self.running: list[Request] = []
        self.queue_timeout_s = queue_timeout_s
        self._running_max = running_max
        self._queue_max = queue_max
        self._reuse = reuse

    def enqueue(self, request: Request) -> None:
        """Raises QueueFull."""
        if len(self.queue) >= self._queue_max:
            raise QueueFull(f"{len(self.queue)} requests are waiting already")
        self.queue.append(request)

    def admissible(self) -> list[Request]:
        """Queued requests to try now, in order.

        One that would compute what a running prefill is computing, or one before it here, waits for
        that, and lets later ones pass.
        """
        room = self._running_max - len(self.running)
        leaders = [
            request for request in self.running if request.state in (State.OPENING, State.PREFILL)
        ]
        chosen: list[Request] = []
        for request in self.queue:
            if len(chosen) >= room:
                break
            if self._reuse and any(_follows(request, leader) for leader in leaders):
                request.queued_at = time.monotonic()  # waiting for pages is not waiting for room
            elif not self._reuse or not any(_follows(request, before) for before in chosen):
                chosen.append(request)
        return chosen

    def expired(self) -> list[Request]:
        """Queued requests that waited too long."""
        oldest = time.monotonic() - self.queue_timeout_s
        return [request for request in self.queue if request.queued_at < oldest]

    def refusal(self) -> Refused:
        """What a request is told whose time in the queue is over: what it waited for."""
        waited, retry_after_s = f"{self.queue_timeout_s:.0f} s", self.queue_timeout_s / 4
        if len(self.running) >= self._running_max:
            return QueueFull(
                f"all {self._running_max} places were taken for {waited}",
                retry_after_s=retry_after_s,
            )
        return HostPoolExhausted(
            f"no room for the request within {waited}", retry_after_s=retry_after_s
        )

    def start(self, request: Request) -> None:
        self.queue.remove(request)
        self.running.append(request)

    def requeue(self, request: Request) -> None:
        """Back to the head of the queue."""
        self.running.remove(request)
        request.state = State.QUEUED
        self.queue.appendleft(request)

    def end(self, request: Request) -> None:
        request.state = State.ENDED
        if request in self.running:
            self.running.remove(request)
        elif request in self.queue:
            self.queue.remove(request)

    def in_state(self, state: State) -> list[Request]:
        return [request for request in self.running if request.state is state]

    def next_prefill(self) -> Request | None:
        """The request whose chunk comes next: they take turns."""
        waiting = self.in_state(State.PREFILL)
        if not waiting:
            return None
        self.running.remove(waiting[0])
        self.running.append(waiting[0])
        return waiting[0]


def _follows(request: Request, leader: Request) -> bool:
    """Whether the leader is about to compute blocks that the request could reuse."""
    ours, theirs = request.session.transcript, leader.session.transcript
    if ours is theirs or ours.root != theirs.root:
        return False
    blocks = min((request.limit - 1) // BLOCK_TOKENS, leader.limit // BLOCK_TOKENS)
    computed = leader.seq.position // BLOCK_TOKENS if leader.seq is not None else 0
    mine, other = ours.hashes, theirs.hashes
    # Hashes chain, so sharing block i means sharing every block before it.
    return computed < blocks and mine[computed] == other[computed]
