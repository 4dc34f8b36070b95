"""The name of a checkpoint's weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsv4_tierd.engine.model.digest import CACHE_FILE, weights_digest
from dsv4_tierd.engine.model.folder import WeightsError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "weights"
    found.mkdir()
    (found / "a.safetensors").write_bytes(b"one" * 1000)
    (found / "b.safetensors").write_bytes(b"two" * 1000)
    return found


def test_names_content_not_place(folder: Path, tmp_path: Path) -> None:
    """The same files elsewhere have the same name; any byte, file name or split changes it."""
    first = weights_digest(folder)
    assert len(first) == 32
    moved = folder.rename(tmp_path / "elsewhere")
    assert weights_digest(moved) == first
    seen = {first}
    (moved / "b.safetensors").write_bytes(b"two" * 999 + b"twO")
    seen.add(weights_digest(moved))
    (moved / "a.safetensors").rename(moved / "c.safetensors")
    seen.add(weights_digest(moved))
    (moved / "c.safetensors").write_bytes(b"one" * 1000 + b"t")
    (moved / "b.safetensors").write_bytes(b"wo" + b"two" * 998 + b"twO")
    seen.add(weights_digest(moved))
    assert len(seen) == 4


def test_is_remembered_until_a_file_changes(folder: Path, tmp_path: Path) -> None:
    """Unchanged size, time and inode are trusted, so a large model is read once."""
    cache, file = tmp_path / "cache", folder / "a.safetensors"
    first = weights_digest(folder, cache)
    stat = file.stat()
    file.write_bytes(b"ONE" * 1000)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert weights_digest(folder, cache) == first  # not read again
    assert weights_digest(folder) != first
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert weights_digest(folder, cache) == weights_digest(folder) != first


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"x": 3}', b'{"x": "zz"}', b"\xff\xfe"])
def test_a_broken_cache_is_no_cache(folder: Path, tmp_path: Path, content: bytes) -> None:
    """Garbage in the cache file costs a read, never a wrong name or an error."""
    (tmp_path / CACHE_FILE).write_bytes(content)
    assert weights_digest(folder, tmp_path) == weights_digest(folder)
    assert list(tmp_path.glob(CACHE_FILE + "*")) == [tmp_path / CACHE_FILE]


def test_nothing_to_name(tmp_path: Path) -> None:
    """A folder without weights has no digest."""
    with pytest.raises(WeightsError, match="holds no"):
        weights_digest(tmp_path)
