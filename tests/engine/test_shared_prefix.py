"""One prefix, two machines: what one engine computed, another continues, through every store."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import redis_servers
from dsv4_tierd.engine.request import State
from dsv4_tierd.tiering.coordinator import StoreLimits
from dsv4_tierd.tiering.store.bundle import export_prefix, import_prefix, stored_leaf
from dsv4_tierd.tiering.store.protocol import ObjectKind, PrefixStore
from dsv4_tierd.tiering.store.tiered import TieredStore
from fake_l2 import Bucket, open_fake
from hostile_store import HostileStore, ManualExecutor
from lmcache_cases import open_adapter
from redis_cases import open_redis
from small_models import Model, text
from store_cases import IDENTITY, open_disk
from tiered_cases import PATIENT_S, hostile, tiered_config
from world import MIB, World

WORDS = text(31, 8192 + 37)
PAGES = 8192 // 256
ANSWER_TOKENS = 4
BUDGET = 256 * MIB


def engine(model: Model, store: PrefixStore | None) -> World:
    """A machine of its own: nothing is shared but what the store shares."""
    return model.world(store=store, identity=IDENTITY.digest)


def ask(world: World, words: list[int]) -> tuple[list[int], float]:
    """The answer's tokens, and the share of the prompt's whole blocks that the store gave."""
    answer = world.generate(world.open(), words, ANSWER_TOKENS)
    usage = answer.usage
    assert usage.host_tokens == usage.device_tokens == 0
    return answer.token_ids, usage.store_tokens / (len(words) // 256 * 256)


def ask_anew(world: World, words: list[int]) -> tuple[list[int], float]:
    """As ``ask``, and what was read before, and is found again in memory, counts too."""
    usage = (answer := world.generate(world.open(), words, ANSWER_TOKENS)).usage
    reused = usage.store_tokens + usage.host_tokens + usage.device_tokens
    return answer.token_ids, reused / (len(words) // 256 * 256)


def stop(world: World) -> None:
    """Everything is written, and the store is closed."""
    world.settle()
    world.tiers.coordinator.close()


@pytest.fixture(scope="module")
def model(models: Callable[..., Model]) -> Model:
    return models("SCH", yarn_original=1024)


@pytest.fixture(scope="module")
def alone(model: Model) -> list[int]:
    """What an engine without a store answers."""
    world = engine(model, None)
    answer = world.generate(world.open(), WORDS, ANSWER_TOKENS)
    return answer.token_ids


Opener = Callable[[str], PrefixStore]


KINDS = ["disk", "redis", "lmcache", "disk_and_redis", "disk_and_lmcache"]
if find_spec("lmcache"):  # its own adapter, then, and not only our stand-in for one
    KINDS += ["fs_native", "disk_and_fs_native"]


@pytest.fixture(params=KINDS)
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """Call with a machine's name: its store, which shares with the others of this test."""
    if request.param == "disk":
        return lambda _: open_disk(tmp_path, bytes_max=BUDGET)
    bucket = Bucket()
    if "redis" in request.param:
        url = redis_servers.emptied().url

    def remote() -> PrefixStore:
        if "redis" in request.param:
            return open_redis(url, bytes_max=BUDGET)
        if "fs_native" in request.param:
            spec = {"type": "fs_native", "base_path": str(tmp_path / "far")}
            return open_adapter(spec, bytes_max=BUDGET)
        return open_fake(bucket, bytes_max=BUDGET)

    if not request.param.startswith("disk"):
        return lambda _: remote()
    patient = tiered_config(deadline_s=PATIENT_S)
    return lambda machine: TieredStore(_local(tmp_path / machine), remote(), patient)


def test_one_computes_and_another_continues(model: Model, alone: list[int], shared: Opener) -> None:
    """99 % and more of the prefix comes from the store, and the answer is the same."""
    first = engine(model, shared("first"))
    assert ask(first, WORDS) == (alone, 0.0)
    stop(first)
    second = engine(model, shared("second"))
    answer, share = ask(second, WORDS)
    assert share >= 0.99
    assert answer == alone
    stop(second)


def test_a_restore_copies_what_came_while_the_rest_is_read(model: Model) -> None:
    """Read, check and copy to the device overlap: a page is on the device a step after its read."""
    store, words = HostileStore(), WORDS[:2085]
    first = engine(model, store)
    answer = first.generate(first.open(), words, ANSWER_TOKENS).token_ids
    stop(first)
    second = engine(model, store)
    readers = ManualExecutor()
    second.tiers.coordinator._readers = readers  # type: ignore[assignment]
    name = second.submit(second.open(), words, ANSWER_TOKENS)
    on_device = []
    while second.engine.requests[name].state in (State.QUEUED, State.OPENING):
        second.step()
        seq = second.engine.requests[name].seq
        assert seq is not None
        if seq.began:
            break
        on_device.append(seq.restored)
        assert readers.run_one()
    assert [count for count in range(8) if count in on_device] == list(range(8))
    second.run(name)
    assert second.answers[name].token_ids == answer
    stop(second)


@pytest.mark.parametrize("kind", ["redis", "lmcache"])
def test_while_the_first_still_runs(
    model: Model, alone: list[int], kind: str, tmp_path: Path
) -> None:
    """The second has been up all the time, sees the prefix within a second, and continues it."""
    bucket, url = Bucket(), redis_servers.emptied().url

    def open_one(machine: str) -> PrefixStore:
        far = open_fake(bucket) if kind == "lmcache" else open_redis(url, bytes_max=BUDGET)
        patient = tiered_config(deadline_s=PATIENT_S)
        return TieredStore(_local(tmp_path / machine), far, patient)

    second = engine(model, open_one("second"))
    assert ask(second, text(5, 300))[1] == 0.0
    first = engine(model, open_one("first"))
    ask(first, WORDS)
    first.settle()
    assert first.tiers.coordinator._store.flush(30.0)
    time.sleep(1.0)
    answer, share = ask(second, WORDS)
    assert share >= 0.99
    assert answer == alone
    stop(first)
    stop(second)


def test_from_a_file(model: Model, alone: list[int], tmp_path: Path) -> None:
    """An exported prefix, imported where nothing else is shared, is continued as well."""
    first = engine(model, open_disk(tmp_path / "first", bytes_max=BUDGET))
    ask(first, WORDS)
    stop(first)
    file = io.BytesIO()
    source = open_disk(tmp_path / "first", bytes_max=BUDGET)
    leaf = stored_leaf(source, IDENTITY, "", np.array(WORDS, np.int32))
    report = export_prefix(source, IDENTITY, "", leaf, file)
    source.close()
    assert report.manifest.pages == PAGES
    assert report.manifest.points >= 1
    target = open_disk(tmp_path / "second", bytes_max=BUDGET)
    file.seek(0)
    import_prefix(file, target, IDENTITY)
    second = engine(model, target)
    answer, share = ask(second, WORDS)
    assert share >= 0.99
    assert answer == alone
    stop(second)


@pytest.fixture
def filled(model: Model, alone: list[int], tmp_path: Path) -> HostileStore:
    """A remote that holds the prefix, and misbehaves on demand."""
    remote = hostile()
    first = engine(model, TieredStore(_local(tmp_path / "first"), remote, tiered_config()))
    assert ask(first, WORDS)[0] == alone
    stop(first)
    return remote


def _local(folder: Path) -> PrefixStore:
    return open_disk(folder, bytes_max=BUDGET)


def test_a_dead_remote_costs_a_recomputation(
    model: Model, alone: list[int], filled: HostileStore, tmp_path: Path
) -> None:
    """Without the remote the answer is computed; with it back the next one is read."""
    filled.down = True
    store = TieredStore(_local(tmp_path / "second"), filled, tiered_config())
    second = engine(model, store)
    begun = time.monotonic()
    assert ask(second, WORDS[:600]) == (ask(engine(model, None), WORDS[:600])[0], 0.0)
    assert time.monotonic() - begun < 20
    assert second.tiers.coordinator.up, "the local tier is not left alone for it"
    filled.down = False
    time.sleep(0.4)
    answer, share = ask_anew(second, WORDS)
    assert answer == alone
    assert share >= 0.99
    stop(second)


def test_a_remote_that_stalls_half_way_gives_half(
    model: Model, alone: list[int], filled: HostileStore, tmp_path: Path
) -> None:
    """What came before the deadline is used, the rest is computed, and the answer is the same."""
    plain, reads = filled.get, 0

    def get(key, into):
        nonlocal reads
        if key.kind is ObjectKind.PAGE:
            reads += 1
            if reads == 7:
                filled.gate.clear()
        return plain(key, into)

    filled.get = get
    store = TieredStore(_local(tmp_path / "second"), filled, tiered_config())
    second = engine(model, store)
    answer, share = ask_anew(second, WORDS)
    filled.gate.set()
    assert answer == alone
    assert 0.0 < share < 0.6
    assert store.tier_usage()["local"].up
    stop(second)


def test_a_local_store_that_stalls_gives_a_part_at_the_deadline(
    model: Model, alone: list[int], filled: HostileStore
) -> None:
    """The coordinator's own deadline does the same for a store without one."""
    plain, reads = filled.get, 0

    def get(key, into):
        nonlocal reads
        reads += 1
        if reads == 9:
            filled.gate.clear()
        return plain(key, into)

    filled.get = get
    second = engine(model, filled)
    second.tiers.coordinator._limits = StoreLimits(deadline_s=0.3)
    answer, share = ask_anew(second, WORDS)
    assert answer == alone
    assert 0.0 < share < 0.8
    filled.gate.set()
    second.tiers.coordinator.close()


def test_a_remote_with_wrong_bytes_costs_a_recomputation(
    model: Model, alone: list[int], filled: HostileStore, tmp_path: Path
) -> None:
    """Objects that fail their check are computed again; the answer is the same."""
    filled.broken = 3
    store = TieredStore(_local(tmp_path / "second"), filled, tiered_config())
    second = engine(model, store)
    answer, _ = ask(second, WORDS)
    assert answer == alone
    assert not filled.broken
    stop(second)
