"""Where tests that open a store hundreds of times put it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

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
