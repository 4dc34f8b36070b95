"""The engine's stream begins after the one on which its weights were made."""

from __future__ import annotations

import pytest
import torch

from dsv4_tierd.engine.build import _take_own_stream


class Stream:
    """Notes whom it waits for."""

    def __init__(self, _device: torch.device | None = None) -> None:
        self.before: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.before.append(other)


def test_the_engines_stream_waits_for_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made by kernels that the host does not wait for."""
    making, taken = Stream(), []
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: making)
    monkeypatch.setattr(torch.cuda, "set_stream", taken.append)
    _take_own_stream(torch.device("cuda"))
    (stream,) = taken
    assert stream.before == [making]
