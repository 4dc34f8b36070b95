"""Stores on LMCache's own adapters, where LMCache is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dsv4_tierd.tiering.store.identity import StoreIdentity
from dsv4_tierd.tiering.store.lmcache import LMCacheConfig, LMCacheStore
from dsv4_tierd.tiering.store.lmcache_kit import LMCacheToolkit
from store_cases import IDENTITY

WHY_NOT = (
    "LMCache is not installed here: `make test-lmcache` runs these tests in an environment of "
    "their own"
)
needs_lmcache = pytest.mark.skipif(find_spec("lmcache") is None, reason=WHY_NOT)


def open_adapter(
    spec: dict[str, Any],
    identity: StoreIdentity = IDENTITY,
    *,
    bytes_max: int = 64 << 20,
    deadline_s: float = 2.0,
) -> LMCacheStore:
    """A store with small commits and short times. Skips without LMCache."""
    if find_spec("lmcache") is None:
        pytest.skip(WHY_NOT)
    config = LMCacheConfig(bytes_max, deadline_s, poll_s=0.05, commit_bytes=128 << 10)
    return LMCacheStore(LMCacheToolkit(spec), config, identity)


def open_fs_native(folder: Path) -> LMCacheStore:
    """On LMCache's C++ file adapter."""
    return open_adapter({"type": "fs_native", "base_path": str(folder), "num_workers": 2})


def plugin_spec(folder: Path) -> dict[str, Any]:
    """What one gives LMCache to use our disk store."""
    return {
        "type": "plugin",
        "module_path": "dsv4_tierd.tiering.store.lmcache_plugin",
        "class_name": "TierdL2Adapter",
        "adapter_params": {"path": str(folder), "bytes_max": "64MiB"},
    }


def open_plugin(folder: Path) -> LMCacheStore:
    """On our own disk store, through LMCache and back."""
    return open_adapter(plugin_spec(folder))
