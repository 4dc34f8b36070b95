"""A stock ``lmcache server`` process with our folder behind it, and a worker that talks to it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4_tierd.tiering.store.lmcache_kit import quiet_lmcache
from dsv4_tierd.tiering.store.maintain import opened_for_care
from lmcache_cases import needs_lmcache, plugin_spec
from redis_cases import eventually
from redis_servers import free_port

# Their packages warn of one another.
pytestmark = [needs_lmcache, pytest.mark.filterwarnings("ignore")]
TOKENS, CHUNK_TOKENS, CHUNK_BYTES = 1024, 256, 256 * 4096
START_S = 60.0


@contextlib.contextmanager
def lmcache_server(folder: Path, log: Path) -> Iterator[str]:
    """The address of a server whose only L2 is our plugin; killed in the end."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("lmcache")), "server"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--http-host", "127.0.0.1", "--http-port", str(free_port())]
    command += ["--l1-size-gb", "0.1", "--no-l1-use-lazy", "--eviction-policy", "LRU"]
    command += ["--chunk-size", str(CHUNK_TOKENS)]
    command += ["--supported-transfer-mode", "engine_driven", "--disable-observability"]
    command += ["--l2-adapter", json.dumps(plugin_spec(folder))]
    quiet_lmcache()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def worker(address: str, log: Path) -> Iterator[Any]:
    """LMCache's own client, registered with a layout of opaque bytes."""
    from lmcache.v1.multiprocess.custom_types import RegisterEngineDrivenContextPayload
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    client = RequestClientFactory.create(address)
    end = time.monotonic() + START_S
    while True:
        try:
            assert client.ping(1).result(timeout=60)
            break
        except TimeoutError:
            assert time.monotonic() < end, log.read_text()
    layout = {"block_size": 256, "num_layers": 1, "hidden_dim_size": 4096, "dtype_str": "uint8"}
    payload = RegisterEngineDrivenContextPayload(
        instance_id=1, model_name="m", world_size=1, use_mla=True, **layout
    )
    client.register_kv_cache_engine_driven_context(payload).result(timeout=60)
    yield client
    client.close()


def key(request: str, rank: int | None, tokens: int = TOKENS) -> Any:
    from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

    ids = tuple(range(tokens))
    return IPCCacheServerKey("m", 1, rank, ids, 0, tokens, request_id=request, num_kv_readers=1)


def stored_bytes(folder: Path) -> list[int]:
    """What the folder holds, asked without LMCache, once nobody has it."""
    with opened_for_care(f"disk:{folder}") as [store]:
        assert store.verify().bad == ()
        return [info.payload_bytes for info in store.list_objects()]


def test_a_server_killed_and_started_again_serves_what_it_stored(tmp_path: Path) -> None:
    """Chunks that a worker stored are in our folder; after kill -9 a later server has them all.

    A longer prompt hits as far as that, and a flipped bit in the folder is a miss, not an answer.
    """
    import torch

    folder, log = tmp_path / "store", tmp_path / "log"
    chunks = [torch.full((1, 256, 4096), i + 1, dtype=torch.uint8) for i in range(4)]
    with lmcache_server(folder, log) as address, worker(address, log) as client:
        client.prepare_store(key("a", 0), 1).result(timeout=60)
        assert client.commit_store(key("a", 0), 1, pickle.dumps(chunks)).result(timeout=60)
        segments = folder / "segments"
        eventually(lambda: sum(p.stat().st_size for p in segments.iterdir()) > 4 * CHUNK_BYTES)
        time.sleep(1.0)  # the last commit's row
    assert stored_bytes(folder) == [CHUNK_BYTES] * 4
    with lmcache_server(folder, log) as address, worker(address, log) as client:
        assert hits(client, "b", TOKENS) == 4
        answer = client.prepare_retrieve(key("b", 0), 1).result(timeout=60)
        assert answer.success
        got = pickle.loads(answer.data)  # noqa: S301 our own bytes, from a server of this test's
        assert all(torch.equal(a, b) for a, b in zip(got, chunks, strict=True))
        client.commit_retrieve(key("b", 0), 1).result(timeout=60)
    [segment] = segments.iterdir()
    data = bytearray(segment.read_bytes())
    at = data.find(bytes([3]) * CHUNK_BYTES)
    data[at + 1000] ^= 1
    segment.write_bytes(data)
    with lmcache_server(folder, log) as address, worker(address, log) as client:
        assert hits(client, "c", 2 * TOKENS) == 2


def hits(client: Any, request: str, tokens: int) -> int:
    """How many chunks of a prompt the server has brought into its memory."""
    client.lookup(key(request, None, tokens), 1).result(timeout=60)
    found = client.wait_prefetch_status(request, 10.0).result(timeout=15)
    assert isinstance(found, int)
    return found
