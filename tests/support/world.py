"""An engine in this process: messages in, answers collected, with the audit after every step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dsv4_tierd.engine import messages as m
from dsv4_tierd.engine.build import Layouts, build_engine, row_kind, store_identity
from dsv4_tierd.engine.config import EngineConfig
from dsv4_tierd.engine.model.transformer import Transformer
from dsv4_tierd.tiering.check import check, check_idle
from dsv4_tierd.tiering.store.protocol import PrefixStore

MIB = 1 << 20
STEPS_MAX = 200_000


def ids_bytes(tokens: Iterable[int]) -> bytes:
    """Token ids as they travel."""
    return np.array(list(tokens), "<i4").tobytes()


@dataclass(slots=True)
class Answer:
    """One request's outcome so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[m.TokenLogprob] = field(default_factory=list)
    text: str = ""
    done: m.Done | None = None
    failed: m.Failed | None = None

    @property
    def ended(self) -> bool:
        return self.done is not None or self.failed is not None

    @property
    def usage(self) -> m.Usage:
        assert self.done is not None, self.failed
        return self.done.usage


class World:
    """A model, its tiers and an engine. ``audit`` runs the check after every step."""

    def __init__(
        self,
        model: Transformer,
        folder: Path,
        store: PrefixStore | None = None,
        audit: bool = True,
        identity: bytes | None = None,
        **settings: object,
    ) -> None:
        defaults: dict[str, object] = {
            "device_budget_bytes": 64 * MIB,
            "host_budget_bytes": 64 * MIB,
            "pin_budget_bytes": 8 * MIB,
            "resume_budget_bytes": 4 * MIB,
            "chunk_tokens": 256,
            "max_batch": 4,
        }
        self.config = EngineConfig(model=str(folder), **(defaults | settings))  # type: ignore[arg-type]
        self.answers: dict[str, Answer] = {}
        self.acks: dict[int, m.Ack] = {}
        self.audit = audit
        self._names = itertools.count()
        self._ops = itertools.count(1)
        if identity is None:
            layouts = Layouts.of(model.config, row_kind(self.config.kv_dtype))
            identity = store_identity(self.config, model.config, layouts).digest
        self.engine, self.verbs, self.plan = build_engine(
            self.config, model, self._receive, None, store, identity
        )
        self.tiers = self.engine.tiers

    def _receive(self, message: m.ToDaemon) -> None:
        if isinstance(message, m.Ack):
            self.acks[message.op_id] = message
        elif isinstance(message, m.Tokens):
            answer = self.answers[message.request_id]
            answer.token_ids += message.token_ids
            answer.logprobs += message.logprobs
            answer.text += message.text
        elif isinstance(message, m.Done):
            self.answers[message.request_id].done = message
            self.answers[message.request_id].text += message.text
        elif isinstance(message, m.Failed):
            self.answers[message.request_id].failed = message

    # ------------------------------------------------------------ acting
    def open(self, tokens: Sequence[int] = (), name: str | None = None, salt: str = "") -> str:
        name = name or f"s{next(self._names)}"
        self.verbs.handle(m.OpenSession(session_id=name, salt=salt, token_ids=ids_bytes(tokens)))
        return name

    def submit(
        self, session: str, tokens: Sequence[int] = (), max_tokens: int = 0, **sampling: object
    ) -> str:
        name = f"r{next(self._names)}"
        self.answers[name] = Answer()
        settings = m.Sampling(**({"ignore_eos": True} | sampling))  # type: ignore[arg-type]
        self.verbs.handle(
            m.Submit(
                request_id=name,
                session_id=session,
                append_ids=ids_bytes(tokens),
                max_tokens=max_tokens,
                sampling=settings,
            )
        )
        return name

    def op(self, kind: type[m.Message], **fields: object) -> m.Ack:
        """Send a message with an op_id and step until its Ack comes."""
        op_id = next(self._ops)
        self.verbs.handle(kind(op_id=op_id, **fields))  # type: ignore[arg-type, call-arg]
        self.run_until(lambda: op_id in self.acks)
        return self.acks[op_id]

    def step(self) -> bool:
        self.verbs.poll()
        worked = self.engine.step()
        if self.audit:
            check(self.tiers, self.engine.retention)
        return worked

    def run_until(self, condition) -> None:  # type: ignore[no-untyped-def]
        for _ in range(STEPS_MAX):
            if condition():
                return
            self.step()
        raise AssertionError("the engine did not get there")

    def run(self, *requests: str) -> list[Answer]:
        """Step until these requests end (all, if none is named)."""
        names = requests or tuple(self.answers)
        self.run_until(lambda: all(self.answers[name].ended for name in names))
        return [self.answers[name] for name in names]

    def generate(
        self, session: str, tokens: Sequence[int] = (), max_tokens: int = 8, **sampling: object
    ) -> Answer:
        return self.run(self.submit(session, tokens, max_tokens, **sampling))[0]

    def fork(self, source: str, at: int | None = None, name: str | None = None) -> str:
        name = name or f"s{next(self._names)}"
        ack = self.op(m.ForkSession, source_id=source, session_id=name, at=at)
        assert ack.code is None, ack
        return name

    def tokens(self, session: str) -> list[int]:
        return self.engine.sessions[session].transcript.tokens.tolist()

    def settle(self) -> None:
        """Run until nothing is left to do, then check that everything is at rest."""
        self.run_until(lambda: not self.engine.busy and not self.tiers.coordinator.dirty_count)
        self.run_until(lambda: not self.tiers.coordinator.load_targets)
        check_idle(self.tiers, self.engine.retention)
