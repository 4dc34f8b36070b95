"""Two tiers for tests: a folder in front of a store that misbehaves on demand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dsv4_tierd.tiering.store.protocol import StoredObject, WritePolicy
from dsv4_tierd.tiering.store.tiered import TieredConfig, TieredStore
from hostile_store import HostileStore
from store_cases import IDENTITY, open_disk

DEADLINE_S = 1.0
PATIENT_S = 10.0
RETRY_S = 0.3


def tiered_config(
    policy: WritePolicy = WritePolicy.THROUGH, deadline_s: float = DEADLINE_S
) -> TieredConfig:
    """Short times; ``deadline_s`` for tests that a busy machine must not fail."""
    return TieredConfig(policy, deadline_s, retry_after_s=RETRY_S, close_s=1.0)


def open_tiered(
    folder: Path, remote: HostileStore, policy: WritePolicy = WritePolicy.THROUGH
) -> TieredStore:
    """A small disk store in front of ``remote``."""
    return TieredStore(open_disk(folder), remote, tiered_config(policy))


class SettledTiered(TieredStore):
    """Returns when both tiers have what they shall have."""

    def put(self, objects: Sequence[StoredObject]) -> None:
        super().put(objects)
        assert self.flush(30.0)


def open_settled(folder: Path) -> TieredStore:
    """Two folders, always in step."""
    local, remote = open_disk(folder / "local"), open_disk(folder / "remote")
    return SettledTiered(local, remote, tiered_config(deadline_s=PATIENT_S))


def hostile() -> HostileStore:
    """A remote with the tests' identity."""
    return HostileStore(IDENTITY.digest)
