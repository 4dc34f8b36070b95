"""What a router asks: a million tokens as octets, over HTTP, of a real engine and its store."""

from __future__ import annotations

import io
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from dsv4_tierd.engine.build import Layouts, row_kind, store_identity
from dsv4_tierd.engine.config import EngineConfig
from dsv4_tierd.engine.model.checkpoint import Preset, make_checkpoint
from dsv4_tierd.engine.model.config import load_config
from dsv4_tierd.tiering.blocks import Transcript, chain_root
from dsv4_tierd.tiering.store.disk import DiskStore
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind, StoredObject
from dsv4_tierd.tiering.store.vault import DiskConfig
from live_daemon import Live, live_daemon

TOKENS = 1_000_000
LOOKUP_S = 1.0  # on a machine that others use too
OCTETS = {"Content-Type": "application/octet-stream"}
SIZES = Preset(layers="SCH", vocab_size=512, yarn_original=65536)


def fill(folder: Path, model: Path, ids: np.ndarray[Any, np.dtype[np.int32]]) -> None:
    """A store that says it has every whole block of these tokens; a lookup reads no bytes."""
    config, shape = EngineConfig(model=str(model)), load_config(str(model))
    identity = store_identity(config, shape, Layouts.of(shape, row_kind(config.kv_dtype)))
    store = DiskStore(DiskConfig(folder, 1 << 30), identity)
    words, parent = Transcript(chain_root(identity.digest, ""), ids), None
    pages = []
    for name in words.hashes:
        pages.append(StoredObject(ObjectKey(ObjectKind.PAGE, "", name), parent, b"page"))
        parent = name
    store.put(pages)
    store.close()


async def found(live: Live, ids: np.ndarray[Any, np.dtype[np.int32]]) -> tuple[int, int, int]:
    """Tokens sent, matched, and of those in the store."""
    said = await live.ok(
        "POST", "/v1/prefixes/lookup", data=io.BytesIO(ids.tobytes()), headers=OCTETS
    )
    return said["prompt_tokens"], said["matched_tokens"], said["tiers"]["store"]


async def test_a_million_tokens_are_looked_up(tmp_path: Path) -> None:
    """All in the store, some in memory, none: right, and in less than a second each."""
    model = make_checkpoint(tmp_path / "million", SIZES, 5)
    ids = np.random.default_rng(5).integers(2, 512, TOKENS).astype("<i4")
    fill(tmp_path / "store", model, ids)
    budgets = {"device_budget": "512MiB", "host_budget": "512MiB"}
    async with live_daemon(tmp_path, model, **budgets) as live:
        whole = (TOKENS - 1) // 256 * 256
        times = []
        for _ in range(5):
            started_s = time.perf_counter()
            assert await found(live, ids) == (TOKENS, whole, whole)
            times.append(time.perf_counter() - started_s)
        assert statistics.median(times) < LOOKUP_S, times
        other = ids.copy()
        other[300_000] ^= 1
        kept = 300_000 // 256 * 256
        assert await found(live, other) == (TOKENS, kept, kept)
        other[0] ^= 1
        assert await found(live, other) == (TOKENS, 0, 0)
        await live.create("a", other[:1025].tolist())
        assert await found(live, other) == (TOKENS, 1024, 0)
        other[7] = 512
        status, said, _ = await live.call(
            "POST", "/v1/prefixes/lookup", data=io.BytesIO(other.tobytes()), headers=OCTETS
        )
        assert (status, said["error"]["code"]) == (400, "invalid_token_ids")
