"""Where rows lie, and what became of a session meanwhile, changes neither tokens nor bits.

Every world deals its pages in another random order, device and host pages apart, so that a page
number used in the wrong pool cannot be right by luck. Where chunks are cut at other places, as
by a cold run of what a warm session computed in turns, sums round apart: 1e-3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4_tierd.engine import messages as m
from dsv4_tierd.engine.build import Layouts, row_kind, store_identity
from dsv4_tierd.engine.model.dense import forward_dense
from dsv4_tierd.tiering.hot_set import HotSet
from dsv4_tierd.tiering.store.disk import DiskStore
from dsv4_tierd.tiering.store.vault import DiskConfig
from engine_probe import (
    Probe,
    largest_difference,
    make_hostile,
    miss_every_row,
    record_choices,
)
from small_models import Model, text
from world import World, ids_bytes

TOLERANCE = 1e-3
BATCH, TOPK = 4, 16
MINIMAL = {"tiering": "hisparse", "hot_rows": 2 * BATCH * TOPK}
FIRST, SECOND = text(70, 700), text(71, 75)
ANSWER_TOKENS = 24


@dataclass(slots=True)
class Turn:
    """What a request computed (not what it replayed) and drew."""

    token_ids: list[int]
    rows: dict[int, Tensor]
    usage: m.Usage


class Watched:
    """A world whose every request is remembered."""

    def __init__(self, model: Model, seed: int, **settings: object) -> None:
        self.world: World = model.world(**({"max_batch": BATCH} | settings))
        make_hostile(self.world, seed)
        self.probe = Probe(self.world)

    def turn(self, session: str, words: list[int], **sampling: object) -> Turn:
        name = self.world.submit(session, words, ANSWER_TOKENS, **sampling)
        [answer] = self.world.run(name)
        first = answer.usage.prompt_tokens - answer.usage.computed_tokens
        rows = {at: row for at, row in self.probe.rows[name].items() if at >= first}
        return Turn(answer.token_ids, rows, answer.usage)


def assert_same(a: Turn, b: Turn, bits: bool) -> None:
    """Same tokens, and the same logits wherever both computed some."""
    assert a.token_ids == b.token_ids
    both = sorted(a.rows.keys() & b.rows.keys())
    assert len(both) >= ANSWER_TOKENS
    ours = torch.stack([a.rows[position] for position in both])
    theirs = torch.stack([b.rows[position] for position in both])
    if bits:
        assert torch.equal(ours, theirs)
    else:
        assert largest_difference(ours, theirs) <= TOLERANCE


@pytest.fixture(scope="module")
def model(models) -> Model:
    return models("SHCHCS", 16)


@pytest.fixture(scope="module")
def plain(model) -> Iterator[tuple[Turn, Turn, Turn]]:
    """Tiering off: a first turn, a second one, and a second one after a rewind to token 600."""
    off = Watched(model, 1, tiering="off")
    session = off.world.open()
    turns = [off.turn(session, FIRST), off.turn(session, SECOND)]
    turns.append(off.turn(off.world.open(FIRST[:600]), SECOND))
    yield tuple(turns)
    off.world.settle()


@pytest.fixture(scope="module")
def warm(model) -> tuple[Turn, Turn]:
    """The same two turns with everything resident, the second one from the tail of the first."""
    resident = Watched(model, 2, tiering="resident")
    session = resident.world.open()
    return resident.turn(session, FIRST), resident.turn(session, SECOND)


@pytest.mark.parametrize("tiering", ["resident", "roomy", "minimal", "missing"])
def test_where_rows_lie(model, plain, warm, tiering) -> None:
    """Off, resident, a roomy and a minimal hot set, and one that misses every row: the same."""
    settings = {"resident": {"tiering": "resident"}, "roomy": {}}.get(tiering, MINIMAL)
    watched = Watched(model, 3, **settings)
    world = watched.world
    if tiering == "missing":
        miss_every_row(world)
    session = world.open()
    first, second = watched.turn(session, FIRST), watched.turn(session, SECOND)
    assert_same(first, plain[0], bits=True)
    assert_same(second, plain[1], bits=False)
    assert_same(second, warm[1], bits=True)
    counters = world.tiers.c4.counters
    if tiering == "missing":
        assert counters.hits == 0 and counters.misses > 1000
    elif tiering == "minimal":
        assert isinstance(world.tiers.c4, HotSet)
        capacity = world.tiers.c4.hot_rows * len(world.tiers.c4.rows)
        assert counters.misses > capacity, "rows were evicted for others"
    world.settle()


def test_same_rows_are_chosen(model) -> None:
    """The indexer names the same entries, layer by layer and step by step, tiered or not."""
    chosen = []
    for seed, settings in enumerate(({"tiering": "off"}, {"tiering": "resident"}, MINIMAL)):
        watched = Watched(model, seed, **settings)
        choices = record_choices(watched.world)
        watched.turn(watched.world.open(), FIRST)
        chosen.append(choices)
    for off, resident, tiered in zip(*chosen, strict=True):
        assert torch.equal(off, resident) and torch.equal(off, tiered)
    assert any(int((choice >= 0).sum()) == choice.numel() for choice in chosen[0])


@pytest.mark.parametrize("tiering", ["resident", "minimal"])
@pytest.mark.parametrize(
    "fate", ["forked", "suspended", "resumed", "suspended, resumed", "forked, suspended, resumed"]
)
def test_what_becomes_of_a_session(model, warm, tiering, fate) -> None:
    """Forked, suspended to the host, resumed: the second turn has the bits it would have had."""
    settings = {"tiering": "resident"} if tiering == "resident" else MINIMAL
    watched = Watched(model, 4, **settings)
    world, session = watched.world, watched.world.open()
    assert_same(watched.turn(session, FIRST), warm[0], bits=True)
    going_on = world.fork(session) if "forked" in fate else session
    if "suspended" in fate:
        assert world.op(m.SuspendSession, session_id=going_on, tier="host").code is None
        assert world.tiers.idle.packed_bytes > 0
    if "resumed" in fate:
        assert world.op(m.ResumeSession, session_id=going_on).code is None
        assert world.engine.sessions[going_on].tail.slot is not None
    second = watched.turn(going_on, SECOND)
    assert second.usage.computed_tokens == len(SECOND) + 1, "it started from the tail"
    assert_same(second, warm[1], bits=True)
    world.settle()


def test_forks_of_a_running_session(model, warm) -> None:
    """A fork taken in the middle of an answer goes on as its source does."""
    watched = Watched(model, 5, **MINIMAL)
    world, session = watched.world, watched.world.open()
    name = world.submit(session, FIRST, ANSWER_TOKENS)
    world.run_until(lambda: len(world.answers[name].token_ids) == 9)
    twin = world.fork(session)
    assert world.tokens(twin) == FIRST + warm[0].token_ids[:9]
    world.run(name)
    left = ANSWER_TOKENS - 9
    rest = world.generate(twin, [], left)
    assert world.answers[name].token_ids[9:] == rest.token_ids == warm[0].token_ids[9:]
    assert rest.usage.computed_tokens == 1
    world.settle()


def test_rewound(model, plain) -> None:
    """A session rewound to token 600 and told something else knows nothing of what it forgot."""
    watched = Watched(model, 6, **MINIMAL)
    world, session = watched.world, watched.world.open()
    watched.turn(session, FIRST)
    assert world.op(m.RewindSession, session_id=session, to=600).code is None
    rewound = watched.turn(session, SECOND)
    assert_same(rewound, plain[2], bits=False)
    again = Watched(model, 7)
    fresh = again.world.open(FIRST[:600])
    assert_same(again.turn(fresh, SECOND), plain[2], bits=True)
    world.settle()


def test_replayed(model, plain) -> None:
    """Without its resume points a session replays a window, and answers as before."""
    watched = Watched(model, 8, **MINIMAL)
    world = watched.world
    watched.turn(world.open(), FIRST)
    for node in list(world.tiers.points.owners().values()):
        world.tiers.points.drop(node)
    replayed = watched.turn(world.open(), FIRST)
    assert replayed.usage.replayed_tokens == 256
    assert_same(replayed, plain[0], bits=False)
    world.settle()


def test_device_pages_come_back(model, warm) -> None:
    """A session that has lost every device page is restored from the host, bit for bit."""
    watched = Watched(model, 9, **MINIMAL)
    world, tiers = watched.world, watched.world.tiers
    session = world.open()
    watched.turn(session, FIRST)
    world.op(m.SuspendSession, session_id=session, tier="host")
    for node in sorted(tiers.tree.nodes.values(), key=lambda node: -node.depth):
        tiers.evictor.evict_device(node)
    tiers.memory.device.fill_(0xFF)  # NaN in every row
    assert tiers.device_pool.free_count == tiers.device_pool.capacity
    assert_same(watched.turn(session, SECOND), warm[1], bits=True)
    world.settle()


@pytest.mark.parametrize("tiering", ["resident", "minimal"])
def test_decode_across_pages(models, tiering) -> None:
    """An answer that runs over three page borders, two of its pages in the tail, stays exact."""
    small = models("CS", 16)
    settings = {"tiering": "resident"} if tiering == "resident" else MINIMAL
    watched = Watched(small, 13, **settings, audit=False)
    world, words = watched.world, text(72, 200)
    name = world.submit(world.open(), words, 620)
    [answer] = world.run(name)
    expected = forward_dense(small.transformer, torch.tensor(words + answer.token_ids))[:-1]
    assert largest_difference(watched.probe.table(name, 0, 819), expected) <= TOLERANCE
    world.settle()


@pytest.mark.parametrize("kv_dtype", ["fp32", "fp8"])
def test_through_the_store(model, warm, tmp_path: Path, kv_dtype) -> None:
    """Suspended to disk and resumed by another engine on the same folder: the same bits."""
    here = Watched(model, 10, **MINIMAL, kv_dtype=kv_dtype)
    session = here.world.open()
    turns = here.turn(session, FIRST), here.turn(session, SECOND)
    for turn, other in zip(turns, warm, strict=True):
        assert (turn.token_ids == other.token_ids) == (kv_dtype == "fp32")

    first = _stored_world(model, tmp_path, kv_dtype, seed=11)
    session = first.world.open(name="session")
    assert_same(first.turn(session, FIRST), turns[0], bits=True)
    tail_key = first.world.op(m.SuspendSession, session_id=session, tier="store").tail_key
    first.world.settle()
    first.world.tiers.coordinator.close()

    second = _stored_world(model, tmp_path, kv_dtype, seed=12)
    words = ids_bytes(FIRST + turns[0].token_ids)
    second.world.verbs.handle(
        m.OpenSession(session_id="session", token_ids=words, tail_key=tail_key)
    )
    there = second.turn("session", SECOND)
    assert_same(there, turns[1], bits=True)
    known = len(FIRST) + ANSWER_TOKENS - 1  # pages and tail: the last drawn word was pending
    assert there.usage.store_tokens == known
    assert there.usage.computed_tokens == len(SECOND) + 1
    second.world.settle()
    second.world.tiers.coordinator.close()


def _stored_world(model: Model, folder: Path, kv_dtype: str, seed: int) -> Watched:
    settings = dict(MINIMAL, kv_dtype=kv_dtype)
    config = model.world(**settings).config
    shape = model.transformer.config
    identity = store_identity(config, shape, Layouts.of(shape, row_kind(kv_dtype)))
    store = DiskStore(DiskConfig(folder, 1 << 26), identity)
    return Watched(model, seed, store=store, **settings)
