"""The engine: one thread, one loop. ``step`` is its table of contents.

Only this thread writes tier state. Nothing in a step blocks on the store or on a client.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from dsv4_tierd.engine.messages import Ack, Done, Failed, FinishReason, Progress, ToDaemon, Tokens
from dsv4_tierd.engine.request import Purpose, Request, State
from dsv4_tierd.engine.runner import Chunk, Runner, next_cut
from dsv4_tierd.engine.sampler import draw
from dsv4_tierd.engine.scheduler import Scheduler
from dsv4_tierd.engine.session import Session
from dsv4_tierd.tiering.begin import StaleStart
from dsv4_tierd.tiering.blocks import BLOCK_TOKENS
from dsv4_tierd.tiering.errors import DeviceOutOfMemory, HostPoolExhausted, TierError
from dsv4_tierd.tiering.idle import IdleTails
from dsv4_tierd.tiering.manager import TierManager
from dsv4_tierd.tiering.retention import Retention

log = logging.getLogger("dsv4_tierd.engine")

STORED_TAIL_DEADLINE_S = 10.0
REFUSED_PAUSE = 10.0  # before the next try, of the time that one without room took
OUT_OF_MEMORY = (
    "the device has no room for a chunk of the prompt: a smaller --chunk-tokens needs less"
)
OUT_OF_MEMORY_S = 10.0


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the loop itself is told."""

    chunk_tokens: int
    chunk_tokens_beside: int  # while others decode
    max_batch: int
    queue_max: int
    eos_token_ids: tuple[int, ...]


@dataclass(slots=True)
class EngineCounters:
    """Counters never go down. Token counts are of prompts, by where they were found."""

    requests: int = 0
    requests_failed: int = 0
    requests_cancelled: int = 0
    tokens_device: int = 0
    tokens_host: int = 0
    tokens_store: int = 0
    tokens_computed: int = 0
    tokens_replayed: int = 0
    tokens_generated: int = 0
    steps: int = 0
    reopened: int = 0


@dataclass(slots=True)
class _Pace:
    """Measured seconds of a decode step, and of a prefill layer."""

    decode_s: float = 0.0
    layer_s: float = 0.0

    def layers(self, layer_count: int) -> int:
        """Layers of prefill that take about as long as a decode step."""
        if not self.decode_s or not self.layer_s:
            return 1
        return max(1, min(layer_count, int(self.decode_s / self.layer_s)))


class Engine:
    """Sessions and requests over one model and its tiers. ``send`` must not block."""

    def __init__(
        self,
        runner: Runner,
        retention: Retention,
        options: EngineOptions,
        send: Callable[[ToDaemon], None],
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.runner = runner
        self.tiers: TierManager = runner.tiers
        self.retention = retention
        self.options = options
        self.tokenizer = tokenizer
        self.send = send
        self.sessions: dict[str, Session] = {}
        self.requests: dict[str, Request] = {}
        self.counters = EngineCounters()
        self.scheduler = Scheduler(options.max_batch, options.queue_max, self.tiers.config.reuse)
        self._chunk: Chunk | None = None
        self._chunk_request: Request | None = None
        self._pace = _Pace()
        self._admit_from = 0.0  # monotonic

    # ------------------------------------------------------------ the step
    def step(self) -> bool:
        """One turn of the loop; False if there was nothing to do."""
        self.tiers.coordinator.poll()
        self._admit()
        self._open_ready()
        worked = self._prefill()
        worked = self._decode() or worked
        self.counters.steps += worked
        return worked or self.tiers.restoring

    @property
    def busy(self) -> bool:
        """Whether a request is queued or running."""
        return bool(self.scheduler.queue or self.scheduler.running)

    # ------------------------------------------------------------ admission
    def _admit(self) -> None:
        if time.monotonic() >= self._admit_from:
            self._open_what_fits()
        for request in self.scheduler.expired():
            self.fail(request, self.scheduler.refusal())

    def _open_what_fits(self) -> None:
        for request in self.scheduler.admissible():
            began = time.monotonic()
            try:
                self._open(request)
            except HostPoolExhausted:
                now = time.monotonic()  # to match a long text again costs as much as a step
                self._admit_from = now + REFUSED_PAUSE * (now - began)
                break  # in order: it is the next to fit
            except TierError as error:
                self.fail(request, error)

    def _open(self, request: Request) -> None:
        session = request.session
        if not self._stored_tail_ready(session):
            return
        reserve = len(session.transcript) + request.max_tokens
        request.seq = self.tiers.open(session.transcript, session.salt, session.tail, reserve)
        request.seq.write_policy = session.write_policy
        if request.state is State.QUEUED:
            self.scheduler.start(request)
        request.state = State.OPENING

    def _stored_tail_ready(self, session: Session) -> bool:
        """Fetch a tail that suspend wrote. False: it is on its way."""
        stored = session.stored_tail
        if session.tail is not None and IdleTails.lost(session.tail):
            self._drop_tail(session)  # the store may still have what it was
        if stored is None or not stored.usable or session.tail is not None:
            return True
        if stored.fetch is None:
            stored.fetch = self.tiers.fetch_tail(session.salt, stored.digest, stored.size)
            stored.since = time.monotonic()
        if stored.fetch is not None and not stored.fetch.done():
            if time.monotonic() - stored.since < STORED_TAIL_DEADLINE_S:
                return False
            stored.fetch = None  # late: computed from the words instead
        session.tail = self.tiers.accept_tail(stored.fetch, session.transcript)
        stored.usable, stored.fetch = False, None
        return True

    def _open_ready(self) -> None:
        for request in self.scheduler.in_state(State.OPENING):
            seq = request.seq
            assert seq is not None
            uses_tail = seq.tail is not None
            try:
                if not self.tiers.ready(seq):
                    continue
            except StaleStart:
                self._reopen(request)
                continue
            if not uses_tail:
                self._drop_tail(request.session)  # the tree had more than it
            request.session.tail = None
            request.state = State.PREFILL

    def _reopen(self, request: Request) -> None:
        """What the start relied on is gone: start from what is there now."""
        assert request.seq is not None
        self.counters.reopened += 1
        self.tiers.close(request.seq)
        request.seq = None
        try:
            self._open(request)
        except HostPoolExhausted:
            self.scheduler.requeue(request)
        except TierError as error:
            self.fail(request, error)
        else:
            if request.seq is None:  # a stored tail is on its way
                self.scheduler.requeue(request)

    # ------------------------------------------------------------ prefill
    def _prefill(self) -> bool:
        """A slice of a chunk: all its layers, or about one decode step's time of them."""
        if self._chunk is None and not self._begin_chunk():
            return False
        chunk, request = self._chunk, self._chunk_request
        assert chunk is not None and request is not None
        layer_count = self.runner.model.config.num_hidden_layers
        decoding = bool(self.scheduler.in_state(State.DECODE))
        layers = self._pace.layers(layer_count) if decoding else layer_count
        started, first = time.perf_counter(), chunk.layer
        try:
            done = self.runner.advance(chunk, layers)
        except torch.OutOfMemoryError as error:
            self._out_of_memory(request, error)
            return True
        if decoding:
            self.runner.settle()
        self._pace.layer_s = (time.perf_counter() - started) / max(chunk.layer - first, 1)
        if done:
            self._finish_chunk(chunk, request)
        return True

    def _begin_chunk(self) -> bool:
        while (request := self.scheduler.next_prefill()) is not None:
            seq = request.seq
            assert seq is not None
            if request.purpose is not Purpose.RESUME and seq.position < request.limit:
                self._chunk_request = request
                beside = bool(self.scheduler.in_state(State.DECODE))
                options = self.options
                size = options.chunk_tokens_beside if beside else options.chunk_tokens
                try:
                    self._chunk = self.runner.begin(seq, next_cut(seq, request.limit, size))
                except torch.OutOfMemoryError as error:
                    self._out_of_memory(request, error)
                    continue
                return True
            self.end(request, "length")  # nothing to compute
        return False

    def _out_of_memory(self, request: Request, error: torch.OutOfMemoryError) -> None:
        """Its chunk does not fit: nothing that its sequence holds was written."""
        log.error("a prefill chunk does not fit the device: %s", error)
        self.fail(request, DeviceOutOfMemory(OUT_OF_MEMORY, retry_after_s=OUT_OF_MEMORY_S))

    def _finish_chunk(self, chunk: Chunk, request: Request) -> None:
        self._chunk = self._chunk_request = None
        seq = chunk.seq
        first = seq.position
        wants_logits = chunk.stop == request.limit and request.purpose is Purpose.GENERATE
        logits = self.runner.finish(chunk, wants_logits)
        request.replayed += max(0, min(chunk.stop, seq.emit_from) - first)
        request.computed += max(0, chunk.stop - max(first, seq.emit_from))
        if chunk.stop < request.limit:
            if request.limit % BLOCK_TOKENS == 0 and chunk.stop == request.limit - BLOCK_TOKENS:
                self.tiers.publish(seq)  # where these very words, sent again, would start
            total = request.limit - seq.start.begin
            self.send(
                Progress(request_id=request.id, done=seq.position - seq.start.begin, total=total)
            )
            return
        self.tiers.publish(seq)
        if logits is None:
            self.end(request, "length")
        else:
            request.state = State.DECODE
            self._draw(request, logits, int(logits.argmax()))

    # ------------------------------------------------------------ decode
    def _decode(self) -> bool:
        """One token for every decoding request whose client keeps up."""
        batch = [request for request in self.scheduler.in_state(State.DECODE) if request.credit > 0]
        if not batch:
            return False
        started = time.perf_counter()
        logits = self.runner.decode([request.seq for request in batch if request.seq is not None])
        best: list[int] = logits.argmax(1).tolist()  # one wait for all
        self._pace.decode_s = time.perf_counter() - started
        for request, row, token in zip(batch, logits, best, strict=True):
            self._draw(request, row, token)
        return True

    def _draw(self, request: Request, logits: Tensor, best: int) -> None:
        """Draw the next token, add it to the words, send it; end the request if it is the last."""
        session, sampling = request.session, request.sampling
        drawn = draw(logits, sampling, len(session.transcript), best)
        self._append(request, drawn.token_id)
        request.drawn += 1
        request.credit -= 1
        self.counters.tokens_generated += 1
        is_eos = drawn.token_id in self.options.eos_token_ids and not sampling.ignore_eos
        stopped = is_eos or drawn.token_id in sampling.stop_token_ids
        text = "" if stopped else request.text.push(drawn.token_id)
        logprobs = (drawn.logprob,) if drawn.logprob is not None else ()
        self.send(
            Tokens(request_id=request.id, token_ids=(drawn.token_id,), text=text, logprobs=logprobs)
        )
        if stopped or request.text.stopped_by is not None:
            self.end(request, "stop")
        elif request.drawn >= request.max_tokens:
            self.end(request, "length")

    def _append(self, request: Request, token_id: int) -> None:
        word = np.array([token_id], np.int32)
        request.session.transcript.append(word)
        if request.seq is not None and request.seq.transcript is not request.session.transcript:
            request.seq.transcript.append(word)

    # ------------------------------------------------------------ ends
    def end(self, request: Request, reason: FinishReason) -> None:
        """Finish a request in any state: release everything, keep the tail, say so."""
        self._release(request)
        usage = request.usage()
        self.counters.requests += 1
        self.counters.requests_cancelled += reason == "cancelled"
        self.counters.tokens_device += usage.device_tokens
        self.counters.tokens_host += usage.host_tokens
        self.counters.tokens_store += usage.store_tokens
        self.counters.tokens_computed += usage.computed_tokens
        self.counters.tokens_replayed += usage.replayed_tokens
        if request.op_id is not None:
            self.send(Ack(op_id=request.op_id))
            return
        self.send(
            Done(
                request_id=request.id,
                finish_reason=reason,
                usage=usage,
                text=request.text.finish(),
                stop_sequence=request.text.stopped_by,
            )
        )

    def fail(self, request: Request, error: TierError) -> None:
        """End a request with an error: its words are taken back, unless some were drawn on them."""
        self._release(request)
        if not request.drawn:
            self._take_back(request.session, request.base)
        self.counters.requests_failed += 1
        if request.op_id is not None:
            self.send(Ack.refusing(request.op_id, error))
        else:
            self.send(Failed.of(request.id, error))

    def _release(self, request: Request) -> None:
        if self._chunk_request is request:
            self._chunk = self._chunk_request = None
            self.runner.settle()  # its copies are over before its pages are another's
        if request.seq is not None:
            began = request.seq.began
            tail = self.tiers.close(request.seq, keep_tail=not request.ephemeral)
            if began:
                request.session.tail = tail
            session = request.session
            self.retention.follow(session.id, session.transcript, session.salt)
        self.scheduler.end(request)
        self.requests.pop(request.id, None)
        request.session.request = None
        if request.ephemeral:
            self.forget(request.session)

    def forget(self, session: Session) -> None:
        """The worker knows the session no more; its pages stay cached."""
        self._drop_tail(session)
        self.sessions.pop(session.id, None)

    def truncate(self, session: Session, length: int) -> None:
        """Forget an idle session's words from ``length`` on, and tails that may have seen them."""
        if length < len(session.transcript):
            self._take_back(session, length)
            if session.stored_tail is not None:
                session.stored_tail.usable = False

    def _take_back(self, session: Session, length: int) -> None:
        """Forget a request's words: no stored tail saw them, suspensions are of idle sessions."""
        session.transcript.truncate(length)
        if session.tail is not None and session.tail.position >= length:
            self._drop_tail(session)

    def _drop_tail(self, session: Session) -> None:
        if session.tail is not None:
            self.tiers.idle.release(session.tail)
            session.tail = None
