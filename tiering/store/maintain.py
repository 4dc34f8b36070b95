"""Looking after stores: every tier that a specification names, opened to be listed and checked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

from dsv4_tierd.tiering.errors import InvalidRequest, UnsupportedCombination
from dsv4_tierd.tiering.store.disk import BYTES_MIN, DiskStore, GcReport, ObjectInfo, VerifyReport
from dsv4_tierd.tiering.store.open import TierSpec, identities_of, parse_spec
from dsv4_tierd.tiering.store.protocol import PrefixStore, parts_of
from dsv4_tierd.tiering.store.redis_config import RedisConfig
from dsv4_tierd.tiering.store.vault import DiskConfig

NO_BOUND = 1 << 60
PATIENT_S = 10.0  # a call's deadline, where the specification has none: nobody's answer waits
Advance = Callable[[int, int], None]  # objects done, of so many


@runtime_checkable
class Maintained(Protocol):
    """A store as those see it who look after it."""

    def list_objects(self) -> Iterator[ObjectInfo]:
        """Every object. Raises StoreUnavailable."""

    def verify(self, advance: Advance | None = None) -> VerifyReport:
        """Read and check every object; bad ones are forgotten. Raises StoreUnavailable."""

    def gc(self) -> GcReport:
        """Remove what nobody can use, and shrink to the budget. Raises StoreUnavailable."""

    def close(self) -> None:
        """Let the store go."""


@contextlib.contextmanager
def opened_for_care(spec: str, bytes_max: int | None = None) -> Iterator[list[Maintained]]:
    """What ``spec`` names, nearest first: a store a tier, or (LMCache) one an identity.

    ``bytes_max``: what ``gc`` shrinks a folder to, or each identity on a remote store; None:
    nothing is given up. Raises InvalidRequest, UnsupportedCombination, StoreUnavailable.
    """
    if bytes_max is not None and bytes_max < BYTES_MIN:
        raise InvalidRequest(f"a store needs at least {BYTES_MIN} bytes", param="store")
    with contextlib.ExitStack() as opened:
        found = []
        for tier in parse_spec(spec):
            for store in _open(tier, bytes_max):
                opened.callback(store.close)
                found.append(store)
        yield found


def tiers_of(store: PrefixStore) -> list[Maintained]:
    """What is looked after of an open store, nearest first.

    Raises UnsupportedCombination (one has no such care), StoreUnavailable (it is not open yet).
    """
    parts = parts_of(store)
    cared: list[Maintained] = [part for part in parts if isinstance(part, Maintained)]
    if len(cared) < len(parts):
        raise UnsupportedCombination("this kind of store cannot be looked after")
    return cared


def verified(tiers: Sequence[Maintained], advance: Advance | None = None) -> dict[str, Any]:
    """What checking all of them found: objects, bytes_read, bad. Raises StoreUnavailable."""
    reports = [tier.verify(advance) for tier in tiers]
    return {
        "objects": sum(report.objects for report in reports),
        "bytes_read": sum(report.bytes_read for report in reports),
        "bad": [line for report in reports for line in report.bad],
    }


def tidied(tiers: Sequence[Maintained]) -> dict[str, int]:
    """What tidying all of them changed, summed. Raises StoreUnavailable."""
    reports = [asdict(tier.gc()) for tier in tiers]
    return {name: sum(report[name] for report in reports) for name in reports[0]}


def _open(tier: TierSpec, bytes_max: int | None) -> Iterator[Maintained]:
    if tier.folder is not None:
        yield DiskStore(DiskConfig(tier.folder, NO_BOUND if bytes_max is None else bytes_max), None)
    elif tier.redis_url is not None:
        from dsv4_tierd.tiering.store.redis import RedisStore

        yield RedisStore(RedisConfig(tier.redis_url, bytes_max or 0, deadline_s=PATIENT_S), None)
    else:
        from dsv4_tierd.tiering.store.lmcache import open_lmcache

        assert tier.lmcache is not None
        for identity in identities_of(tier):
            yield open_lmcache({"deadline_s": PATIENT_S, **tier.lmcache}, identity, bytes_max or 0)
