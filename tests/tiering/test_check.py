"""The audit finds what is broken: each invariant is broken by hand, one at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dsv4_tierd.tiering.check import AuditError, check, check_idle
from dsv4_tierd.tiering.manager import TierManager
from dsv4_tierd.tiering.radix import NO_PAGE, Node
from dsv4_tierd.tiering.retention import Retention
from dsv4_tierd.tiering.sequence import Sequence
from tiny_tiers import Puppet, tiny_tiers

TOKENS = np.random.default_rng(3).integers(0, 512, 2000)


class Scene:
    """One running sequence, one idle tail in a slot, one packed, a pin, points and hot rows."""

    def __init__(self) -> None:
        self.tiers: TierManager = tiny_tiers()
        self.puppet = Puppet(self.tiers)
        self.retention = Retention(self.tiers, 4)
        self.idle = self.puppet.run(TOKENS[:700])
        self.packed = self.puppet.run(np.concatenate([TOKENS[:300], TOKENS[:30]]))
        self.retention.suspend_to_host(self.packed.tail)
        self.retention.pin("p", self.idle.transcript, "")
        self.actor = self.puppet.actor(TOKENS[:900])
        self.seq: Sequence = self.puppet.open(self.actor, more=300)
        assert self.puppet.ready(self.actor)
        self.puppet.prefill(self.seq, 800)
        self.tiers.c4.lookup(0, [self.seq.place], torch.arange(32).unsqueeze(0), 1)

    @property
    def node(self) -> Node:
        """A block that is held, pinned, mirrored and on the device."""
        return self.seq.path[0]


def test_a_lively_scene_passes() -> None:
    """Nothing is reported where nothing is wrong."""
    scene = Scene()
    check(scene.tiers, scene.retention)
    with pytest.raises(AuditError, match="sequences still run"):
        check_idle(scene.tiers, scene.retention)
    scene.puppet.close(scene.actor)
    check_idle(scene.tiers, scene.retention)


def _leak(scene: Scene) -> None:
    pool = scene.tiers.mirror_pool
    pool.reserve(1)
    pool.take()


def _second_owner(scene: Scene) -> None:
    scene.seq.mirror[len(scene.seq.path)] = scene.node.mirror


def _free_in_use(scene: Scene) -> None:
    scene.tiers.device_pool.free(scene.node.device)


def _forgotten_tail_page(scene: Scene) -> None:
    assert scene.idle.tail is not None
    scene.idle.tail.mirror = NO_PAGE


def _other_owner(scene: Scene) -> None:
    hot = scene.tiers.c4
    row = int(hot.owner[0].max())  # type: ignore[attr-defined]
    hot.residency[0, row] = -1  # type: ignore[attr-defined]


def _ghost_row(scene: Scene) -> None:
    hot = scene.tiers.c4
    absent = int((hot.residency[0] < 0).nonzero()[0])  # type: ignore[attr-defined]
    hot.residency[0, absent] = 0  # type: ignore[attr-defined]


BREAKS: dict[str, tuple[Callable[[Scene], object], str]] = {
    "a reference too many": (lambda s: setattr(s.node, "refs", 5), "refs 5"),
    "a pin too many": (lambda s: setattr(s.node, "pins", 5), "pins 5"),
    "filed under another name": (lambda s: setattr(s.node, "key", b"x"), "another key"),
    "not its parent's child": (
        lambda s: s.node.parent.children.clear(),  # type: ignore[union-attr]
        "not among its parent's children",
    ),
    "a device page alone": (
        lambda s: (setattr(s.seq.path[-1], "mirror", NO_PAGE),
                   setattr(s.seq.path[-2], "mirror_children", 0)),
        "without a mirror page",
    ),
    "a hole in the mirror": (
        lambda s: (setattr(s.node, "mirror", NO_PAGE), setattr(s.node, "device", NO_PAGE)),
        "unmirrored parent",
    ),
    "a hole on the device": (lambda s: setattr(s.node, "device", NO_PAGE), "parent that is not"),
    "a wrong count of mirrored children": (
        lambda s: setattr(s.node, "mirror_children", 7),
        "mirror_children",
    ),
    "a wrong count of device children": (
        lambda s: setattr(s.node, "device_children", 7),
        "device_children",
    ),
    "a wrong count of evictable mirror pages": (
        lambda s: setattr(s.tiers.tree, "mirror_evictable", 9),
        "evictable mirror",
    ),
    "a wrong count of evictable device pages": (
        lambda s: setattr(s.tiers.tree, "device_evictable", 9),
        "evictable device",
    ),
    "a page that leaked": (_leak, "has 0 owners"),
    "a page with two owners": (_second_owner, "owners"),
    "a page that is free and in use": (_free_in_use, "has 2 owners"),
    "a tail's page that nobody knows": (_forgotten_tail_page, "has 0 owners"),
    "a mirror table that disagrees": (
        lambda s: s.seq.mirror.__setitem__(0, s.seq.path[1].mirror),
        "mirror table",
    ),
    "a device table that disagrees": (
        lambda s: s.seq.device.__setitem__(0, s.seq.path[1].device),
        "device table",
    ),
    "a free list that lacks a page": (
        lambda s: s.tiers.mirror_pool._free.pop(),
        "free list and map disagree",
    ),
    "a tail slot that leaked": (lambda s: s.tiers.tails.take(), "tail slots"),
    "a tail slot twice": (lambda s: setattr(s.idle.tail, "slot", s.seq.tail_slot), "tail slots"),
    "a tail without a reader": (lambda s: setattr(s.idle.tail, "refs", 0), "nobody refers to"),
    "a tail in two places": (lambda s: setattr(s.idle.tail, "packed", b""), "both packed and in"),
    "a packed tail with pages": (
        lambda s: (setattr(s.packed.tail, "mirror", s.idle.tail.mirror),  # type: ignore[union-attr]
                   setattr(s.packed.tail, "device", s.idle.tail.device),  # type: ignore[union-attr]
                   setattr(s.idle.tail, "mirror", NO_PAGE),
                   setattr(s.idle.tail, "device", NO_PAGE)),
        "without a slot has pages",
    ),
    "a wrong count of packed bytes": (
        lambda s: setattr(s.tiers.idle, "packed_bytes", 1),
        "packed tail bytes",
    ),
    "a resume slot that leaked": (lambda s: s.tiers.points.take(), "resume slots"),
    "a resume slot of another node": (
        lambda s: next(
            setattr(node, "resume", NO_PAGE) for node in s.tiers.points.owners().values()
        ),
        "resume slot and node",
    ),
    "a promise that nobody holds": (lambda s: s.tiers.mirror_pool.reserve(1), "reserved"),
    "a promise beyond the pool": (
        lambda s: (setattr(s.seq.reservation, "device", 99),
                   setattr(s.tiers.device_pool, "reserved", 99)),
        "more is promised",
    ),
    "a hot row that its page does not know": (_other_owner, "does not name it back"),
    "a page that claims another's hot row": (_ghost_row, "has another owner"),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_is_found_and_named(name: str) -> None:
    """Each fault raises AuditError with words about it, and not about something else."""
    scene = Scene()
    breaks, words = BREAKS[name]
    breaks(scene)
    with pytest.raises(AuditError, match=words):
        check(scene.tiers, scene.retention)


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (lambda t: t.mirror_pool.__setattr__("reserved", 1), "reserved"),
        (lambda t: t.points.take(), "resume slots"),
    ],
)
def test_rest_is_checked_too(breaks: Callable[[TierManager], object], words: str) -> None:
    """A manager at rest has no promises and no rolling slots."""
    tiers = tiny_tiers()
    check_idle(tiers)
    breaks(tiers)
    with pytest.raises(AuditError, match=words):
        check_idle(tiers)
