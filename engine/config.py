"""What the daemon tells the engine worker at start: one JSON object, the first frame. No torch."""

from __future__ import annotations

from typing import Literal

import msgspec

GIB = 1 << 30


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's part of the configuration. Sizes are bytes; lengths are tokens.

    ``runner``: over the ops of ``kernels``, or their plain twin; auto: the former on a GPU, if the
    ops take the model. ``side_streams``: chains of a decode step that do not need one another run
    beside each other. ``store``: see ``tiering.store.open``; ``store_may_wait``: one that cannot
    be opened is away, not an error. ``hot_rows`` None: as many as the device budget allows.
    ``chunk_tokens`` None: by the runner; it never depends on a budget, so that answers do not
    either.
    """

    model: str
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kv_dtype: Literal["auto", "fp8", "bf16", "fp32"] = "auto"
    runner: Literal["auto", "plain", "kernels"] = "auto"
    side_streams: bool = True
    tiering: Literal["hisparse", "resident", "off"] = "hisparse"
    device_budget_bytes: int = GIB
    host_budget_bytes: int = 4 * GIB
    pin_budget_bytes: int = 2 * GIB
    resume_budget_bytes: int = GIB // 2
    hot_rows: int | None = None
    idle_tails: int = 64
    store: str = "none"
    store_may_wait: bool = False
    store_bytes_max: int = 64 * GIB
    chunk_tokens: int | None = None
    max_batch: int = 8
    queue_max: int = 64

    def __repr__(self) -> str:
        """Without the store, whose URL may hold a password."""
        return f"EngineConfig(model={self.model!r}, …)"

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str | bytes) -> EngineConfig:
        """Raises msgspec.ValidationError on an unknown key or a wrong type."""
        return msgspec.json.decode(text, type=EngineConfig)
