"""A lookup that comes while a chunk runs is answered between two of its layers; all else waits."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from dsv4_tierd.engine import messages as m
from dsv4_tierd.engine.gpu.runner import wait
from dsv4_tierd.engine.model.presets import Storage
from dsv4_tierd.engine.model.transformer import Transformer
from dsv4_tierd.engine.worker import INBOX_MAX, Channel, serve
from dsv4_tierd.tiering.check import check
from naive_store import NaiveStore
from small_models import Model, text
from world import World, ids_bytes

LAYERS = "SHCHCS"
PROMPT = text(800, 700)


@pytest.fixture(scope="module")
def model(models) -> Model:
    return models(LAYERS, 16)


class Served:
    """``serve`` over a world: messages that come at a layer, and the answers with their layers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.inbox: queue.Queue[m.ToWorker | None] = queue.Queue()
        self.coming: dict[tuple[int, int], Sequence[m.ToWorker]] = {}  # at (chunk, layer)
        self.answers: list[tuple[m.ToDaemon, tuple[int, int] | None]] = []
        self.place: tuple[int, int] | None = None
        self.chunks = -1
        runner = world.engine.runner
        receive, begin, layer, finish = (
            world.engine.send, runner.begin, runner._layer, runner.finish,
        )  # fmt: skip

        def heard(message: m.ToDaemon) -> None:
            receive(message)
            self.answers.append((message, self.place))
            if isinstance(message, m.Done | m.Failed):
                self.inbox.put(None)

        def begun(seq, stop):  # type: ignore[no-untyped-def]
            self.chunks += 1
            return begin(seq, stop)

        def passed(chunk) -> None:  # type: ignore[no-untyped-def]
            layer(chunk)
            self.place = self.chunks, chunk.layer
            check(world.tiers, world.engine.retention)
            for message in self.coming.get(self.place, ()):
                self.inbox.put(message)

        def finished(chunk, want_logits):  # type: ignore[no-untyped-def]
            self.place = None
            return finish(chunk, want_logits)

        world.engine.send = heard
        runner.begin, runner._layer, runner.finish = begun, passed, finished  # type: ignore[method-assign]

    def run(self) -> None:
        """Until a request has ended."""
        channel = SimpleNamespace(inbox=self.inbox)
        serve(cast("Channel", channel), self.world.engine, self.world.verbs)

    def acks(self) -> dict[int, tuple[m.Ack, tuple[int, int] | None]]:
        found = ((message, place) for message, place in self.answers if isinstance(message, m.Ack))
        return {ack.op_id: (ack, place) for ack, place in found}


def lookup(op_id: int, words: list[int]) -> m.LookupPrefix:
    return m.LookupPrefix(op_id=op_id, token_ids=ids_bytes(words))


def test_lookups_pass_what_changes_something(model: Model) -> None:
    """They are answered at the layer at which they came; other messages at the end, in order."""
    world = model.world()
    session = world.open()
    world.generate(session, PROMPT, 4)
    other = world.open()
    name = world.submit(other, PROMPT[:256] + text(801, 500), 4)
    served = Served(world)
    changes = [m.ForkSession(op_id=n, source_id=session, session_id=f"f{n}") for n in range(10, 14)]
    served.coming[0, 2] = [changes[0], lookup(1, PROMPT), changes[1], m.AskStats(op_id=2)]
    served.coming[0, 3] = [changes[2], lookup(3, text(802, 600)), changes[3]]
    served.coming[1, 1] = [m.RewindSession(op_id=4, session_id="f13", to=9), lookup(5, PROMPT)]
    served.run()
    acks = served.acks()
    assert [op_id for op_id in acks if op_id not in (1, 3, 5)] == [10, 11, 2, 12, 13, 4]
    assert {op_id: acks[op_id][1] for op_id in (1, 3, 5)} == {1: (0, 2), 3: (0, 3), 5: (1, 1)}
    found = [acks[op_id][0].matched for op_id in (1, 3, 5)]
    assert [match.matched_tokens if match else None for match in found] == [512, 0, 512]
    assert all(ack.code is None for ack, _ in acks.values())
    assert all(place is None for op_id, (_, place) in acks.items() if op_id not in (1, 3, 5))
    assert world.tokens("f13") == world.tokens(session)[:9]
    assert world.answers[name].done is not None
    world.settle()


def test_a_cancel_waits_for_the_chunk(model: Model) -> None:
    """What it would take away is in use."""
    world = model.world()
    name = world.submit(world.open(), PROMPT, 4)
    served = Served(world)
    served.coming[1, 2] = [m.Cancel(request_id=name), lookup(1, PROMPT)]
    served.run()
    assert served.chunks == 1
    assert world.answers[name].done is not None
    assert world.answers[name].done.finish_reason == "cancelled"
    ack, place = served.acks()[1]
    assert (ack.matched and ack.matched.matched_tokens, place) == (256, (1, 2))
    world.settle()


def test_what_is_held_is_bounded(model: Model) -> None:
    """Beyond as many as the inbox holds nothing more is taken, lookups neither."""
    world = model.world()
    name = world.submit(world.open(), PROMPT, 1)
    served = Served(world)
    served.coming[0, 1] = [m.Credit(request_id="x", tokens=1)] * INBOX_MAX + [lookup(1, PROMPT)]
    served.run()
    assert served.acks()[1][1] is None
    assert world.answers[name].done is not None


@pytest.mark.parametrize("runner", ["plain", "kernels"])
def test_blocks_that_a_lookup_makes_known_are_not_in_the_way(models, runner: str) -> None:
    """The very blocks that are being computed, found in the store meanwhile: the same answer."""
    sizes = {"head_dim": 128, "rope_dim": 64, "index_dim": 64, "q_lora": 128, "experts": 4}
    folder = models("SHC", 16, storage=Storage.FP8, **sizes).folder
    store = NaiveStore(bytes(32))

    def world() -> World:
        made = Transformer.load(folder, keep_quantised=True)
        more = {"kv_dtype": "fp8", "runner": runner, "device_budget_bytes": 24 << 20}
        return World(made, folder, store, identity=bytes(32), **more)

    late, first = world(), world()
    name = late.submit(late.open(), PROMPT, 6)
    late.step()  # a chunk of three; nothing was found
    expected = first.generate(first.open(), PROMPT, 6).token_ids
    first.settle()
    served = Served(late)
    served.coming[0, 2] = [lookup(1, PROMPT)]
    served.run()
    ack, place = served.acks()[1]
    assert place == (0, 2)
    assert ack.matched is not None
    assert (ack.matched.matched_tokens, ack.matched.store_tokens) == (512, 256)
    assert late.answers[name].token_ids == expected
    late.settle()


def test_a_chunks_end_is_waited_for_with_time_for_lookups() -> None:
    """Work that is queued on a device: the border's work is done until it is over."""
    left, done = [3], []

    def over() -> bool:
        left[0] -= 1
        return left[0] < 0

    wait(over, lambda: done.append(left[0]))
    assert done == [2, 1, 0]
