"""An engine in this process: messages in, steps until done, times kept. No daemon."""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from texts import Ids

from dsv4_tierd.engine import messages as m
from dsv4_tierd.engine.build import Layouts, build_engine, open_store, row_kind, store_identity
from dsv4_tierd.engine.config import EngineConfig
from dsv4_tierd.engine.gpu.runner import DeviceRunner
from dsv4_tierd.engine.gpu.warm import warm
from dsv4_tierd.engine.loop import Engine
from dsv4_tierd.engine.model.checkpoint import Preset, make_checkpoint
from dsv4_tierd.engine.model.transformer import Transformer
from dsv4_tierd.engine.report import stats
from dsv4_tierd.engine.request import State
from dsv4_tierd.tiering.manager import TierManager
from dsv4_tierd.tiering.radix import NO_PAGE

CREDIT = 1 << 30
WARM_STEPS = 2
TOY = Preset(layers="SCH", window=16, index_topk=16)


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model, and what EngineConfig calls it."""

    name: str
    transformer: Transformer
    device: torch.device

    @property
    def kv_dtype(self) -> str:
        return "fp8" if self.device.type == "cuda" else "fp32"


def load_model(spec: str, device: torch.device, folder: Path) -> Model:
    """``toy`` (made in ``folder``), a checkpoint folder, or ``preset:NAME``."""
    if spec == "toy":
        spec = str(make_checkpoint(folder / "toy", TOY, seed=0))
    if device.type == "cpu":
        return Model(spec, Transformer.load(spec, torch.float32, device), device)
    kept = Transformer.load(spec, torch.bfloat16, device, keep_quantised=True)
    return Model(spec, kept, device)


@dataclass(slots=True)
class Answer:
    """One request so far; times are of ``time.perf_counter``."""

    submitted_s: float
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[m.TokenLogprob] = field(default_factory=list)
    progress: list[tuple[float, int]] = field(default_factory=list)  # (when, tokens computed)
    ready_s: float | None = None  # pages and tail were in, to within a step
    first_s: float | None = None
    ended_s: float | None = None
    usage: m.Usage | None = None
    failed: m.Failed | None = None

    @property
    def first_ms(self) -> float:
        """From the submit to the first token."""
        assert self.first_s is not None, self.failed
        return (self.first_s - self.submitted_s) * 1e3


@dataclass(frozen=True, slots=True)
class Steps:
    """Decode steps of one batch. ``gpu_ms``: between events around each step; empty on a CPU."""

    batch: int
    wall_ms: tuple[float, ...]
    gpu_ms: tuple[float, ...]
    hits: float
    misses: float

    @property
    def median_ms(self) -> float:
        return statistics.median(self.wall_ms)

    @property
    def tokens_s(self) -> float:
        """Tokens a second of all sessions together."""
        return self.batch * len(self.wall_ms) / sum(self.wall_ms) * 1e3

    @property
    def hit_percent(self) -> float | None:
        """Of rows that were not in a tail; None: there is no hot set."""
        asked = self.hits + self.misses
        return self.hits / asked * 100 if asked else None


class OutOfTimeError(Exception):
    """The run's time is over in the middle of a case."""


class Rig:
    """One engine over a model. Every request must succeed unless ``may_fail`` says otherwise.

    ``ends_s``: on the monotonic clock; a step after it raises OutOfTimeError.
    """

    def __init__(self, model: Model, ends_s: float = float("inf"), **settings: object) -> None:
        self.model, self._ends_s = model, ends_s
        self.config = EngineConfig(
            model=model.name,
            device=model.device.type,  # type: ignore[arg-type]
            kv_dtype=model.kv_dtype,  # type: ignore[arg-type]
            **settings,  # type: ignore[arg-type]
        )
        layouts = Layouts.of(model.transformer.config, row_kind(self.config.kv_dtype))
        identity = store_identity(self.config, model.transformer.config, layouts)
        store = open_store(self.config, identity)
        self.answers: dict[str, Answer] = {}
        self.may_fail = False
        self._acks: dict[int, m.Ack] = {}
        self._numbers = itertools.count(1)
        self.engine: Engine
        self.engine, self.verbs, self.plan = build_engine(
            self.config, model.transformer, self._receive, None, store, identity.digest
        )
        if isinstance(self.engine.runner, DeviceRunner):  # as the worker does before it is ready
            size = self.engine.options.chunk_tokens
            warm(self.engine.runner, size, lambda _done, _total: None, batch_max=1)

    @property
    def tiers(self) -> TierManager:
        return self.engine.tiers

    def _receive(self, message: m.ToDaemon) -> None:
        now = time.perf_counter()
        if isinstance(message, m.Ack):
            self._acks[message.op_id] = message
        elif isinstance(message, m.Tokens | m.Progress | m.Done | m.Failed):
            answer = self.answers[message.request_id]
            if isinstance(message, m.Tokens):
                answer.first_s = answer.first_s or now
                answer.token_ids += message.token_ids
                answer.logprobs += message.logprobs
            elif isinstance(message, m.Progress):
                answer.progress.append((now, message.done))
            else:
                answer.ended_s = now
                if isinstance(message, m.Failed):
                    answer.failed = message
                    assert self.may_fail, message
                else:
                    answer.usage = message.usage

    # ------------------------------------------------------------ messages
    def name(self, stem: str) -> str:
        return f"{stem}-{next(self._numbers)}"

    def open(self, tokens: Ids, salt: str = "") -> str:
        """A session with these words, nothing of which is computed."""
        session = self.name("session")
        data = tokens.astype("<i4").tobytes()
        self.verbs.handle(m.OpenSession(session_id=session, salt=salt, token_ids=data))
        return session

    def submit(
        self,
        session: str,
        tokens: Ids | None = None,
        max_tokens: int = 0,
        logprobs: int | None = None,
        credit: int = CREDIT,
    ) -> str:
        """Append and generate greedily, ``max_tokens`` exactly; returns the request's name."""
        request = self.name("request")
        self.answers[request] = Answer(time.perf_counter())
        data = b"" if tokens is None else tokens.astype("<i4").tobytes()
        sampling = m.Sampling(ignore_eos=True, logprobs=logprobs)
        self.verbs.handle(
            m.Submit(
                request_id=request,
                session_id=session,
                append_ids=data,
                max_tokens=max_tokens,
                sampling=sampling,
                credit=credit,
            )
        )
        return request

    def start(self, session: str, tokens: Ids | None, steps: int) -> str:
        """A request for ``decode``: it draws its first token and then waits for the others."""
        return self.submit(session, tokens, 1 + WARM_STEPS + steps, credit=1)

    def op(self, kind: type[m.Message], **fields: object) -> m.Ack:
        """Send a message and step until its Ack."""
        number = next(self._numbers)
        self.verbs.handle(kind(op_id=number, **fields))  # type: ignore[arg-type, call-arg]
        while number not in self._acks:
            self.step()
        ack = self._acks.pop(number)
        assert self.may_fail or ack.code is None, ack
        return ack

    def fork(self, source: str, at: int | None = None) -> str:
        session = self.name("session")
        self.op(m.ForkSession, source_id=source, session_id=session, at=at)
        return session

    def close_sessions(self, sessions: Iterable[str]) -> None:
        for session in sessions:
            self.op(m.CloseSession, session_id=session)

    # ------------------------------------------------------------ steps
    def step(self) -> bool:
        if time.monotonic() > self._ends_s:
            raise OutOfTimeError
        self.verbs.poll()
        now, scheduler = time.perf_counter(), self.engine.scheduler
        for request in (*scheduler.queue, *scheduler.in_state(State.OPENING)):
            if request.id in self.answers:
                self.answers[request.id].ready_s = now
        return self.engine.step()

    def run(self, *requests: str) -> list[Answer]:
        """Step until these requests end."""
        answers = [self.answers[name] for name in requests]
        while any(answer.ended_s is None for answer in answers):
            self.step()
        return answers

    def generate(self, session: str, tokens: Ids | None = None, max_tokens: int = 1) -> Answer:
        return self.run(self.submit(session, tokens, max_tokens))[0]

    def until_decoding(self, requests: Sequence[str]) -> None:
        """Step until every request has its first token; none may end before."""
        while any(self.answers[name].first_s is None for name in requests):
            self.step()
        assert all(self.answers[name].ended_s is None for name in requests)

    def decode(self, requests: Sequence[str]) -> Steps:
        """Time the steps in which all of these started requests decode, to their end."""
        self.until_decoding(requests)
        answers = [self.answers[name] for name in requests]
        for name in requests:
            self.verbs.handle(m.Credit(request_id=name, tokens=CREDIT))
        for _ in range(WARM_STEPS):
            self.step()
        wall, events = [], []
        before = self.counters()
        while all(answer.ended_s is None for answer in answers):
            event = self._event()
            started = time.perf_counter()
            self.step()
            wall.append((time.perf_counter() - started) * 1e3)
            events.append((event, self._event()))
        self.run(*requests)
        self.synchronize()
        gpu = tuple(a.elapsed_time(b) for a, b in events if a is not None and b is not None)
        after = self.counters()
        hits, misses = (after[n] - before[n] for n in ("swap_in_hits", "swap_in_misses"))
        return Steps(len(requests), tuple(wall), gpu, hits, misses)

    def _event(self) -> torch.cuda.Event | None:
        if self.model.device.type != "cuda":
            return None
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def synchronize(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()

    # ------------------------------------------------------------ state
    def counters(self) -> dict[str, float]:
        return stats(self.engine).counters

    def exposed_copy_s(self) -> float | None:
        """Seconds that prefill has waited for C4 rows so far; None: the runner does not say."""
        return getattr(self.engine.runner, "exposed_copy_s", None)

    def evict_device_pages(self) -> int:
        """Take every page that no request holds off the device; the host has them."""
        nodes = [n for n in self.tiers.tree.nodes.values() if n.device != NO_PAGE and not n.refs]
        for node in sorted(nodes, key=lambda node: -node.depth):
            self.tiers.evictor.evict_device(node)
        return len(nodes)

    def drain(self) -> None:
        """Until everything is written that is to be written."""
        while self.engine.busy or self.tiers.coordinator.dirty_count:
            self.step()
            time.sleep(0.0005)

    def close(self) -> None:
        """Write what is to be written, then give back all memory, host and device."""
        self.drain()
        self.abandon()

    def abandon(self) -> None:
        """Give back all memory without asking the engine for anything."""
        self.tiers.coordinator.close()
        del self.engine, self.verbs, self.plan
        gc.collect()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
            for name in ("_accelerator_emptyHostCache", "_host_emptyCache"):  # by torch's version
                if hasattr(torch._C, name):  # noqa: SLF001  pinned memory has no public way back
                    getattr(torch._C, name)()  # noqa: SLF001

    @contextlib.contextmanager
    def chunks_of(self, chunk_tokens: int) -> Iterator[None]:
        """Prefill in other chunks, not larger than the configured ones."""
        options = self.engine.options
        assert chunk_tokens <= options.chunk_tokens
        self.engine.options = replace(
            options, chunk_tokens=chunk_tokens, chunk_tokens_beside=chunk_tokens
        )
        try:
            yield
        finally:
            self.engine.options = options


def median_ms(run: Callable[[], object], count: int) -> float:
    """Median wall time of ``count`` calls."""
    found = []
    for _ in range(count):
        started = time.perf_counter()
        run()
        found.append((time.perf_counter() - started) * 1e3)
    return statistics.median(found)


def spread(seed: int, count: int, vocab_size: int) -> Ids:
    """``count`` ids that differ from seed to seed: a question of one agent."""
    return np.random.default_rng(seed).integers(3, vocab_size, count).astype(np.int32)
