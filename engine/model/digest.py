"""The name of a checkpoint's weights: BLAKE3 over its files, remembered while they stay."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from blake3 import blake3

from dsv4_tierd.engine.model.folder import safetensor_files
from dsv4_tierd.engine.model.presets import parse_preset
from dsv4_tierd.engine.model.seeded import seeded_digest

CACHE_FILE = "weights-digests.json"
_REMEMBERED = 64


def weights_digest(model: str | Path, cache_folder: str | Path | None = None) -> bytes:
    """32 bytes that name the content of a folder's safetensors files, or a preset's recipe.

    cache_folder: where digests are remembered by the files' sizes, times and inodes; None reads
    the files every time. Raises WeightsError. Cost: one read of the weights, then a few stats.
    """
    if (seeded := parse_preset(model)) is not None:
        return seeded_digest(seeded)
    files = safetensor_files(Path(model))
    key = json.dumps([_identity(file) for file in files])
    cache = None if cache_folder is None else Path(cache_folder) / CACHE_FILE
    remembered = {} if cache is None else _read(cache)
    if key in remembered:
        return bytes.fromhex(remembered[key])
    digest = blake3()
    for file in files:
        # Each file's own hash, so that bytes moved between files change the name.
        digest.update(blake3(file.name.encode()).digest())
        digest.update(blake3(max_threads=blake3.AUTO).update_mmap(file).digest())
    value = digest.digest()
    if cache is not None:
        remembered[key] = value.hex()
        _write(cache, dict(list(remembered.items())[-_REMEMBERED:]))
    return value


def _identity(file: Path) -> list[str | int]:
    stat = file.stat()
    return [str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _read(cache: Path) -> dict[str, str]:
    """What is remembered; a cache that cannot be read is an empty one."""
    try:
        found = json.loads(cache.read_bytes())
    except (OSError, ValueError):
        return {}
    well_formed = isinstance(found, dict) and all(_is_digest(value) for value in found.values())
    return found if well_formed else {}


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _write(cache: Path, remembered: dict[str, str]) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=cache.parent, prefix=CACHE_FILE)
    with os.fdopen(handle, "w") as file:
        json.dump(remembered, file)
    Path(temporary).replace(cache)
