"""Random lives of an engine: every verb in any order, tiny budgets, every token checked.

A life follows from its seed; a failure prints it. ``live(model, seed, count)`` replays one.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from dsv4_tierd.engine import messages as m
from hostile_store import HostileStore
from small_models import Model, text
from truth import assert_true, assert_usage_adds_up, at_rest, make_world

PAGE = 58_000
TOKENS_MAX = 1300
REFUSALS = {"host_pool_exhausted", "exceeds_capacity", "queue_full"}
STEM = text(1000, 700)


class Life:
    """A world, its sessions, and what is under way."""

    def __init__(self, model: Model, seed: int) -> None:
        self.model, self.draw = model, random.Random(seed)
        self.store = HostileStore() if seed % 3 else None
        self.settings: dict[str, object] = {
            "host_budget_bytes": 16 * PAGE + 700_000,
            "device_budget_bytes": self.draw.choice([2_600_000, 6_000_000]),
            "hot_rows": self.draw.choice([None, 128]),
            "pin_budget_bytes": 4 * PAGE,
            "max_batch": 3,
            "idle_tails": self.draw.choice([1, 4]),
            "chunk_tokens": self.draw.choice([100, 256]),
            "tiering": "resident" if seed % 5 == 0 else "hisparse",
        }
        self.sessions: list[str] = []
        self.under_way: dict[str, tuple[str, int]] = {}
        self.checked = self.serial = 0
        self._start()

    def _start(self) -> None:
        self.world = make_world(self.model, self.store, **self.settings)
        self.world.engine.scheduler.queue_timeout_s = 0.5

    # ------------------------------------------------------------ helpers
    def _idle(self) -> str | None:
        self._check_ended()  # before their sessions get other words
        engine = self.world.engine
        idle = [name for name in self.sessions if engine.sessions[name].request is None]
        return self.draw.choice(idle) if idle else None

    def _words(self) -> list[int]:
        """Often what other sessions say too."""
        if self.draw.random() < 0.4:
            return STEM[: self.draw.choice([255, 256, 257, 512, 600, 700])]
        return text(self.draw.randrange(6), self.draw.randint(1, 400))

    def step(self, count: int) -> None:
        """Steps of the engine; whatever ends is checked at once."""
        for _ in range(count):
            self.world.step()
            self._check_ended()

    def _check_ended(self) -> None:
        for name in [name for name in self.under_way if self.world.answers[name].ended]:
            self._check(name)

    def _check(self, name: str) -> None:
        session, prompt = self.under_way.pop(name)
        answer = self.world.answers[name]
        if answer.failed is not None:
            assert answer.failed.code in REFUSALS, answer.failed
            return
        assert answer.done is not None
        try:
            assert_true(self.model, self.world, session, answer)
        except AssertionError as error:
            error.add_note(f"{name} of {session}, prompt {prompt}: {answer.done}")
            error.add_note(f"words: {self.world.tokens(session)}")
            error.add_note(f"settings: {self.settings}")
            raise
        if answer.done.finish_reason != "cancelled":
            assert_usage_adds_up(answer, prompt)
        self.checked += len(answer.token_ids)

    # ------------------------------------------------------------ verbs
    def open(self) -> None:
        if len(self.sessions) < 6:
            self.serial += 1
            words = self._words() if self.draw.random() < 0.5 else []
            self.sessions.append(self.world.open(words, f"n{self.serial}"))

    def generate(self) -> None:
        session = self._idle()
        if session is None:
            return
        tokens = self._words()
        room = TOKENS_MAX - len(self.world.tokens(session))
        tokens = tokens[: max(room, 0)] or [7]
        count = self.draw.choice([0, 1, 3, 12])
        self._submit(session, tokens, count)

    def _submit(self, session: str, tokens: list[int], count: int) -> str:
        prompt = len(self.world.tokens(session)) + len(tokens) - (count == 0)
        name = self.world.submit(session, tokens, count)
        self.under_way[name] = (session, prompt)
        return name

    def over_commit(self) -> None:
        """More than there can be, or more than there is now."""
        session = self._idle()
        if session is not None:
            context = self.world.plan.context_tokens
            count = self.draw.choice([context, context - len(self.world.tokens(session)) - 300])
            name = self._submit(session, [3] * 10, max(count, 1))
            self.step(self.draw.choice([1, 4, 12]))
            self._cancel(name)

    def fork(self) -> None:
        if self.sessions and len(self.sessions) < 6:
            source = self.draw.choice(self.sessions)
            length = len(self.world.tokens(source))
            at = self.draw.choice([None, self.draw.randint(0, length)])
            self.serial += 1
            self.sessions.append(self.world.fork(source, at, f"n{self.serial}"))

    def suspend(self) -> None:
        session = self._idle()
        if session is not None:
            tier = self.draw.choice(["host", "store"])
            ack = self.world.op(m.SuspendSession, session_id=session, tier=tier)
            assert ack.code in (None, "store_unavailable")

    def resume(self) -> None:
        session = self._idle()
        if session is not None:
            ack = self.world.op(m.ResumeSession, session_id=session)
            assert ack.code is None or ack.code in REFUSALS, ack

    def rewind(self) -> None:
        session = self._idle()
        if session is not None:
            to = self.draw.randint(0, len(self.world.tokens(session)))
            assert self.world.op(m.RewindSession, session_id=session, to=to).code is None

    def pin(self) -> None:
        if self.sessions:
            session, pinned = self.draw.choice(self.sessions), self.draw.random() < 0.6
            ack = self.world.op(m.PinSession, session_id=session, pinned=pinned)
            assert ack.code in (None, "pin_budget_exhausted", "host_pool_exhausted", "not_pinned")

    def cancel(self) -> None:
        self._check_ended()
        if self.under_way:
            self._cancel(self.draw.choice(list(self.under_way)))

    def _cancel(self, name: str) -> None:
        self.world.verbs.handle(m.Cancel(request_id=name))
        if name in self.under_way:
            self._check(name)

    def close(self) -> None:
        session = self._idle()
        if session is not None:
            drop = self.draw.choice([None, None, len(self.world.tokens(session)) // 512])
            ack = self.world.op(m.CloseSession, session_id=session, drop_from=drop)
            assert ack.code is None
            self.sessions.remove(session)

    def trouble(self) -> None:
        """The store fails a read, loses an object, or the worker is started anew."""
        if self.store is None:
            return
        kind = self.draw.choice(["broken", "lost", "restart"])
        if kind == "broken":
            self.store.broken = 1
        elif kind == "lost":
            with self.store._lock:
                keys = list(self.store.naive.objects)
                if keys:
                    self.store.naive.delete([self.draw.choice(keys)])
        else:
            self.step(3)
            words = {name: self.world.tokens(name) for name in self.sessions}
            self.world.tiers.coordinator.close()
            self.under_way.clear()
            self._start()
            for name, tokens in words.items():
                self.world.open(tokens, name)

    # ------------------------------------------------------------ the end
    def end(self) -> None:
        """Everything ends, and every page comes back."""
        while self.under_way:
            self.step(1)
        for session in self.sessions:
            self.world.op(m.CloseSession, session_id=session)
        self.world.settle()
        assert at_rest(self.world) and not len(self.world.tiers.idle)
        self.world.tiers.coordinator.close()


VERBS: list[tuple[int, Callable[[Life], None]]] = [
    (3, Life.open),
    (8, Life.generate),
    (1, Life.over_commit),
    (3, Life.fork),
    (2, Life.suspend),
    (1, Life.resume),
    (2, Life.rewind),
    (1, Life.pin),
    (1, Life.cancel),
    (1, Life.close),
    (1, Life.trouble),
]


def live(model: Model, seed: int, count: int) -> Life:
    """``count`` verbs with steps between them."""
    life = Life(model, seed)
    for _ in range(count):
        [(_, verb)] = life.draw.choices(VERBS, [weight for weight, _ in VERBS])
        verb(life)
        life.step(life.draw.choice([0, 1, 3, 10]))
    life.end()
    return life


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_every_token_of_a_random_life_is_the_models_own(micro: Model, seed: int) -> None:
    """Whatever verbs come in whatever order, answers are right, and at the end nothing is held."""
    life = live(micro, seed, 80)
    assert life.checked > 30
