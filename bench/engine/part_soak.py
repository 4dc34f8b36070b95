"""8. A life at random: open, append, fork, generate, suspend, resume, cancel, over-commit.

The audit runs after every verb; refusals must be those that a caller can cause. Memory, host
and device, must not grow between the end of the first quarter and the end.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
import torch
from rig import Answer, Rig
from sizes import Kind
from stage import Stage

from dsv4_tierd.engine import messages as m
from dsv4_tierd.tiering.check import check, check_idle

BENCH = "soak"
SESSIONS_MAX = 12
SEED = 4
QUEUE_TIMEOUT_S = 2.0
REFUSALS = {"host_pool_exhausted", "exceeds_capacity", "queue_full", "context_length_exceeded"}
GROWTH_RATIO_MAX = 1.02
WARM = 0.25
CASE_S = 30.0


@dataclass(slots=True)
class Memory:
    """Host bytes of the process and device bytes that torch holds, over the run.

    ``pools``: host bytes that the engine took when it was built, and keeps; pinned ones are there
    from the start, and would hide growth.
    """

    on_gpu: bool
    pools: int
    host: list[int] = field(default_factory=list)
    gpu: list[int] = field(default_factory=list)

    def sample(self) -> None:
        self.host.append(resident_bytes() - self.pools)
        if self.on_gpu:
            self.gpu.append(torch.cuda.memory_allocated())

    @staticmethod
    def growth(samples: list[int]) -> float:
        """The last tenth's largest sample to the largest of the warm quarter."""
        warm = samples[: max(1, int(len(samples) * WARM))]
        last = samples[-max(1, len(samples) // 10) :]
        return max(last) / max(warm)


def resident_bytes() -> int:
    """This process's share of the host's memory."""
    found: int = psutil.Process().memory_info().rss
    return found


class Life:
    """One engine, its sessions, and what is under way."""

    def __init__(self, stage: Stage, rig: Rig, seed: int) -> None:
        self.stage, self.rig, self.draw = stage, rig, random.Random(seed)
        self.sessions: list[str] = []
        self.under_way: dict[str, str] = {}
        self.counts: dict[str, int] = {}

    # ------------------------------------------------------------ helpers
    def _idle(self) -> str | None:
        self._collect()
        engine = self.rig.engine
        idle = [name for name in self.sessions if engine.sessions[name].request is None]
        return self.draw.choice(idle) if idle else None

    def _collect(self) -> None:
        for request in [r for r in self.under_way if self.rig.answers[r].ended_s is not None]:
            del self.under_way[request]
            self._check(self.rig.answers.pop(request))

    def _op(self, kind: type[m.Message], **fields: object) -> None:
        code = self.rig.op(kind, **fields).code
        assert code is None or code in REFUSALS | {"store_unavailable"}, code

    def _check(self, answer: Answer) -> None:
        if answer.failed is not None:
            assert answer.failed.code in REFUSALS, answer.failed
            return
        usage = answer.usage
        assert usage is not None
        found = usage.device_tokens + usage.host_tokens + usage.store_tokens + usage.computed_tokens
        assert found == usage.prompt_tokens and usage.completion_tokens == len(answer.token_ids)

    def _words(self) -> tuple[int, int]:
        """A piece of the text; often the same beginning that others have."""
        length = self.draw.choice(self.stage.sizes.soak_words)
        spare = len(self.stage.tokens) - length
        first = 0 if self.draw.random() < 0.6 else self.draw.randrange(max(1, spare))
        return first, first + length

    def _submit(self, session: str, count: int) -> None:
        first, last = self._words()
        length = len(self.rig.engine.sessions[session].transcript)
        room = self.rig.plan.context_tokens - length - count - 1
        words = self.stage.tokens[first : first + max(1, min(last - first, room))]
        self.under_way[self.rig.submit(session, words, count)] = session

    # ------------------------------------------------------------ verbs
    def open(self) -> None:
        if len(self.sessions) < SESSIONS_MAX:
            self.sessions.append(self.rig.open(self.stage.tokens[:0], self.draw.choice(["", "b"])))

    def append(self) -> None:
        session = self._idle()
        if session is not None:
            self._submit(session, 0)

    def generate(self) -> None:
        session = self._idle()
        if session is not None:
            self._submit(session, self.draw.choice([1, 3, 40]))

    def over_commit(self) -> None:
        """More than there can be, or than there is now; taken back after some steps."""
        session = self._idle()
        if session is not None:
            length = len(self.rig.engine.sessions[session].transcript)
            context = self.rig.plan.context_tokens
            count = self.draw.choice([context, max(1, context - length - 600)])
            request = self.rig.submit(session, self.stage.tokens[:7], count)
            self.under_way[request] = session
            self.steps(6)
            self.rig.verbs.handle(m.Cancel(request_id=request))

    def fork(self) -> None:
        if self.sessions and len(self.sessions) < SESSIONS_MAX:
            source = self.draw.choice(self.sessions)
            length = len(self.rig.engine.sessions[source].transcript)
            at = self.draw.choice([None, self.draw.randint(0, length)])
            self.sessions.append(self.rig.fork(source, at))

    def suspend(self) -> None:
        session = self._idle()
        if session is not None:
            tier = self.draw.choice(["host", "host", "store"])
            self._op(m.SuspendSession, session_id=session, tier=tier)
            if self.draw.random() < 0.5:
                self.rig.evict_device_pages()

    def resume(self) -> None:
        session = self._idle()
        if session is not None:
            self._op(m.ResumeSession, session_id=session)

    def rewind(self) -> None:
        session = self._idle()
        if session is not None:
            length = len(self.rig.engine.sessions[session].transcript)
            self._op(m.RewindSession, session_id=session, to=self.draw.randint(0, length))

    def cancel(self) -> None:
        if self.under_way:
            request = self.draw.choice(list(self.under_way))
            self.rig.verbs.handle(m.Cancel(request_id=request))

    def close(self) -> None:
        session = self._idle()
        if session is not None:
            self.sessions.remove(session)
            self.rig.close_sessions([session])

    # ------------------------------------------------------------ running
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()

    def act(self) -> None:
        """One verb, the audit, some steps."""
        [(_, verb)] = self.draw.choices(VERBS, [weight for weight, _ in VERBS])
        verb(self)
        self.counts[verb.__name__] = self.counts.get(verb.__name__, 0) + 1
        check(self.rig.tiers, self.rig.engine.retention)
        self.steps(self.draw.choice([0, 1, 4, 16, 64]))

    def end(self) -> None:
        """Everything ends, and nothing is held."""
        while self.under_way:
            self.rig.step()
            self._collect()
        self.rig.close_sessions(self.sessions)
        self.rig.drain()
        while self.rig.tiers.coordinator.load_targets:
            self.rig.step()
        check_idle(self.rig.tiers, self.rig.engine.retention)


VERBS: list[tuple[int, Callable[[Life], None]]] = [
    (3, Life.open),
    (4, Life.append),
    (8, Life.generate),
    (1, Life.over_commit),
    (3, Life.fork),
    (2, Life.suspend),
    (2, Life.resume),
    (2, Life.rewind),
    (2, Life.cancel),
    (2, Life.close),
]


def _rig(stage: Stage) -> Rig:
    """An engine under pressure, on a store of its own, that refuses late comers soon."""
    rig = stage.rig(
        Kind.HISPARSE,
        store=f"disk:{stage.folder / 'soak'}",
        host_budget_bytes=stage.sizes.soak_host_bytes,
        device_budget_bytes=stage.sizes.soak_device_bytes,
    )
    rig.may_fail = True
    rig.engine.scheduler.queue_timeout_s = QUEUE_TIMEOUT_S
    return rig


def run(stage: Stage) -> None:
    """As long as the sizes say, or as time is left."""
    sheet, case = stage.sheet, "random life"
    spent_s = min(stage.sizes.soak_s, sheet.left_s - CASE_S)
    if not sheet.wants(BENCH, case, CASE_S) or spent_s <= 0:
        return
    stage.close()
    before = resident_bytes()
    rig = _rig(stage)
    on_gpu = stage.model.device.type == "cuda"
    pools = resident_bytes() - before if on_gpu else 0
    life, memory = Life(stage, rig, SEED), Memory(on_gpu, pools)
    started = time.monotonic()
    acts = 0
    try:
        while time.monotonic() - started < spent_s:
            life.act()
            acts += 1
            memory.sample()
        life.end()
    except Exception as error:
        error.add_note(f"soak: seed {SEED}, act {acts}, {life.counts}")
        raise
    memory.sample()
    stage.close()
    sheet.say(", ".join(f"{name} {count}" for name, count in sorted(life.counts.items())))
    sheet.record(BENCH, case, "verbs, audited each", acts, "verbs", "higher")
    sheet.record(BENCH, case, "time", time.monotonic() - started, "s", "higher")
    for name, samples in (("host", memory.host), ("GPU", memory.gpu)):
        if samples:
            ratio = memory.growth(samples)
            sheet.record(
                BENCH, case, f"{name} memory, end to warm", ratio, "x", goal=GROWTH_RATIO_MAX
            )
