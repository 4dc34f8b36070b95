"""A daemon with the scripted worker, for one test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from daemon_harness import Daemon, run_daemon


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    """On a free port, with a plain worker that is ready."""
    async with run_daemon(tmp_path / "state") as running:
        yield running
