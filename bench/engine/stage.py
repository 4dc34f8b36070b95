"""What the parts share: the model, the text, and one engine at a time on one store.

The long prompt is computed once; every other engine on the same store reads its pages from
there, so a part can run in a process of its own, and the next one on the same machine finds it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from rig import Answer, Model, Rig
from sheet import Sheet
from sizes import Kind, Sizes, fewest_hot_rows, hot_rows_within
from texts import Ids

from dsv4_tierd.engine.build import Layouts, row_kind
from dsv4_tierd.engine.messages import OpenSession

STEM = "stem"
ENGINE_S = 15.0  # to build an engine on host memory that must be pinned, and read the store


@dataclass(slots=True)
class Stage:
    """``switches``: further settings of EngineConfig for every engine."""

    model: Model
    tokens: Ids
    sizes: Sizes
    sheet: Sheet
    folder: Path
    switches: dict[str, object] = field(default_factory=dict)
    _rig: Rig | None = None
    _key: object = None

    @property
    def vocab_size(self) -> int:
        return self.model.transformer.config.vocab_size

    @property
    def layouts(self) -> Layouts:
        return Layouts.of(self.model.transformer.config, row_kind(self.model.kv_dtype))

    @property
    def store_spec(self) -> str:
        return f"disk:{self.folder / 'store'}"

    # ------------------------------------------------------------ engines
    def rig(self, kind: Kind, **more: object) -> Rig:
        """The engine of this kind; the one before it is closed unless it is the same.

        ``more``: settings of EngineConfig that differ from the kind's.
        """
        key = (kind, tuple(sorted(more.items())))
        if self._rig is None or key != self._key:
            self.close()
            started = time.monotonic()
            settings = self.settings(kind) | {"store": self.store_spec} | more
            self._rig, self._key = Rig(self.model, self.sheet.ends_s, **settings), key
            pools = (f"{name} {size / 1e9:.2f}" for name, size in self._rig.plan.bytes_by_pool)
            spent_s = time.monotonic() - started
            self.sheet.say(f"engine: {kind.value}, {spent_s:.1f} s; GB: {', '.join(pools)}")
        return self._rig

    def settings(self, kind: Kind) -> dict[str, object]:
        """Settings of EngineConfig for one kind of engine."""
        sizes, config = self.sizes, self.model.transformer.config
        batch = 1 if kind in (Kind.MINIMAL, Kind.OFF) else sizes.agents
        found: dict[str, object] = {
            "tiering": "hisparse" if kind is Kind.MINIMAL else kind.value,
            "device_budget_bytes": sizes.device_bytes,
            "host_budget_bytes": sizes.small_host_bytes,
            "chunk_tokens": sizes.chunk_tokens,
            "max_batch": batch,
            "queue_max": 1024,
        }
        if kind is Kind.HISPARSE:
            found["host_budget_bytes"] = sizes.host_bytes
            found["hot_rows"] = hot_rows_within(sizes.c4_bytes, batch, config, self.layouts)
        elif kind is Kind.MINIMAL:
            found["hot_rows"] = fewest_hot_rows(batch, config)
        else:
            found["device_budget_bytes"] = sizes.resident_bytes
        return found | self.switches

    def close(self) -> None:
        """Close the engine in place."""
        if self._rig is not None:
            self._rig.close()
            self._rig = self._key = None

    def forget(self) -> None:
        """Give up an engine in an unknown state: nothing more is asked of it."""
        rig, self._rig, self._key = self._rig, None, None
        if rig is not None:
            rig.abandon()

    # ------------------------------------------------------------ the long prompt
    @property
    def stem(self) -> Ids:
        return self.tokens[: self.sizes.long]

    def load_stem(self, rig: Rig, length: int | None = None) -> Answer:
        """Compute the long prompt in this engine, or read it from the store. Once an engine.

        Returns once it is stored, so that no writing disturbs what is measured next.
        """
        words = self.stem if length is None else self.stem[:length]
        rig.verbs.handle(OpenSession(session_id=STEM))
        [answer] = rig.run(rig.submit(STEM, words))
        rig.drain()
        self._marker(len(words)).touch()
        return answer

    def with_stem(self, kind: Kind, length: int | None = None, **more: object) -> Rig:
        """The engine of this kind, with the session STEM on (a first part of) the long prompt."""
        rig = self.rig(kind, **more)
        if STEM not in rig.engine.sessions:
            answer = self.load_stem(rig, length)
            assert answer.usage is not None
            self.sheet.say(f"long prompt: {answer.usage.computed_tokens} tokens computed")
        return rig

    def stem_s(self, length: int | None = None) -> float:
        """Seconds that the long prompt, or its first part, may take."""
        length = length or self.sizes.long
        if any(self._marker(each).exists() for each in {length, self.sizes.long}):
            return ENGINE_S
        return ENGINE_S + length / self.sizes.prefill_tokens_s

    def _marker(self, length: int) -> Path:
        """A file that says that the store has the long prompt's first part."""
        return self.folder / f"stem-{length}"

    @property
    def prefill_case(self) -> str:
        return f"{named(self.sizes.long)} tokens, C4 in {self.sizes.c4_bytes >> 20} MiB"


def named(tokens: int) -> str:
    """A length as people say it: 64K, 900K."""
    if tokens % 1024 == 0:
        return f"{tokens // 1024}K"
    return f"{tokens // 1000}K" if tokens % 1000 == 0 else str(tokens)
