"""Any life of sessions over the tiers: tree, pages, points, hot set, mirror and store hold true."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

from tier_lives import Lives

TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=25,
    stateful_step_count=60,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

Draw = random.Random


def create(machine: Lives, draw: Draw) -> None:
    """One more session, if there may be."""
    if len(machine.actors) < 4:
        length = draw.choice([255, 256, 257, 512, 1024, draw.randint(1, 1500)])
        machine.create(stem=draw.randint(0, 1), length=length, tenant=draw.choice(["", "", "b"]))


def open_one(machine: Lives, draw: Draw, pick: int) -> None:
    """A sequence that is left opening, if there may be one more."""
    if sum(actor.seq is not None for actor in machine.actors) < 2:
        machine.open(pick=pick, more=draw.randint(0, 300))


def fork(machine: Lives, draw: Draw, pick: int) -> None:
    """A copy of a session, whole or cut, if there may be one more."""
    if 0 < len(machine.actors) < 6:
        machine.fork(pick=pick, share=draw.random(), whole=draw.random() < 0.5)


TROUBLE = ["down", "up", "up", "broken", "wait 1", "wait 6", "wait 11"]
# How often, and what: a denser life than a search for small examples leads.
ACTIONS: list[tuple[int, Callable[[Lives, Draw, int], object]]] = [
    (6, lambda m, d, pick: m.first_turn(pick=pick)),
    (6, lambda m, d, pick: m.short_turn(pick=pick, count=d.randint(1, 20), decoded=9)),
    (
        6,
        lambda m, d, pick: m.long_turn(
            pick=pick, count=d.randint(100, 700), decoded=d.choice([30, 400])
        ),
    ),
    (3, lambda m, d, pick: m.turn_without_end(pick=pick, count=d.randint(0, 300), decoded=9)),
    (3, lambda m, d, pick: m.decode(pick=pick, count=d.choice([1, 5, 140, 600]))),
    (3, lambda m, d, pick: m.prefill(pick=pick, count=d.randint(1, 600), commit=d.random() < 0.7)),
    (2, open_one),
    (2, lambda m, d, pick: m.ready(pick=pick)),
    (4, lambda m, d, pick: m.close(pick=pick, keep=d.random() < 0.8)),
    (3, lambda m, d, pick: create(m, d)),
    (2, fork),
    (1, lambda m, d, pick: m.rewind(pick=pick, share=d.random())),
    (1, lambda m, d, pick: m.forget(pick=pick)),
    (1, lambda m, d, pick: m.publish(pick=pick)),
    (1, lambda m, d, pick: m.pin(pick=pick)),
    (1, lambda m, d, pick: m.unpin(name=d.choice("012"))),
    (1, lambda m, d, pick: m.suspend_to_host(pick=pick)),
    (1, lambda m, d, pick: m.drop(pick=pick, block=d.randint(0, 5))),
    (1, lambda m, d, pick: m.purge()),
    (1, lambda m, d, pick: m.look_up(pick=pick)),
]
STORE_ACTIONS: list[tuple[int, Callable[[Lives, Draw, int], object]]] = [
    (6, lambda m, d, pick: m.write_all()),
    (3, lambda m, d, pick: m.read_one(index=d.randint(0, 3), poll=d.random() < 0.7)),
    (2, lambda m, d, pick: m.suspend_to_store(pick=pick)),
    (2, lambda m, d, pick: m.trouble(what=d.choice(TROUBLE))),
    (1, lambda m, d, pick: m.store_evicts(choice=d.randint(0, 100)) if stored(m) else None),
    (1, lambda m, d, pick: m.restart()),
]


def stored(machine: Lives) -> bool:
    return machine.store is not None and bool(machine.store.naive.objects)


def live(seed: int, steps: int) -> Lives:
    """A life that follows from its seed, checked after every step."""
    draw, machine = random.Random(seed), Lives()
    lengths = [(draw.randint(0, 1), draw.randint(1, 1500)) for _ in range(3)]
    has_store = seed % 3 != 0
    machine.begin(tiered=seed % 5 != 0, has_store=has_store, lengths=lengths)
    table = ACTIONS + (STORE_ACTIONS if has_store else [])
    weights = [weight for weight, _ in table]
    try:
        for _ in range(steps):
            [(_, act)] = draw.choices(table, weights)
            if sum(actor.seq is not None for actor in machine.actors) == 2 and draw.random() < 0.5:
                machine.close(pick=draw.randint(0, 5), keep=draw.random() < 0.8)
            act(machine, draw, draw.randint(0, 5))
            machine.all_is_well()
            machine.the_store_holds_what_its_names_say()
            machine.what_is_acknowledged_as_stored_is()
    finally:
        machine.teardown()
    return machine


@pytest.mark.parametrize("seed", range(1, 6))
def test_a_long_life_is_true_at_every_step(seed: int) -> None:
    """Two hundred steps of turns, forks, faults and restarts; then everything is given back."""
    live(seed, 200)
