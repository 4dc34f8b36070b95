"""Where tests that open a store hundreds of times put it, and a Redis whose network fails."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import redis_servers
from dsv4_tierd.tiering.store import redis_keeper
from proxy import Proxy

_IN_MEMORY = Path("/dev/shm")  # noqa: S108 a random name below it is used
_NEEDED_BYTES = 256 << 20


@pytest.fixture
def quick_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: what is tested is the order of calls, not the disk."""
    if not os.access(_IN_MEMORY, os.W_OK) or shutil.disk_usage(_IN_MEMORY).free < _NEEDED_BYTES:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=_IN_MEMORY) as folder:
        yield Path(folder)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A proxy before an empty server; nothing but calls sends commands that count."""
    proxy = Proxy(redis_servers.emptied().port)
    yield proxy
    proxy.close()


@pytest.fixture
def quick_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reconnecting is tried often, and uses are told only when asked for."""
    monkeypatch.setattr(redis_keeper, "BACK_OFF_S", (0.02, 0.2))
    monkeypatch.setattr(redis_keeper, "TELL_S", 1e9)
