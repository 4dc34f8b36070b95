"""Which store: what ``--store`` names.

::

    none                              no store
    disk:PATH                         a folder of this machine
    redis://…  rediss://…  unix://…   a Redis, a Valkey, a cluster (see redis_config)
    lmcache:{"type": "fs_native", …}  any L2 adapter of LMCache (see lmcache)
    disk:PATH,REMOTE                  a folder in front of one of the other two
    disk:PATH,POLICY:REMOTE           POLICY: what the remote is sent: through (everything),
                                      on_suspend (what a suspended session needs), never

The store's byte budget holds for each tier.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4_tierd.tiering.errors import InvalidRequest
from dsv4_tierd.tiering.store.identity import FIELD_NAMES, StoreIdentity
from dsv4_tierd.tiering.store.protocol import PrefixStore, WritePolicy
from dsv4_tierd.tiering.store.redis_config import SCHEMES, RedisConfig, parse
from dsv4_tierd.tiering.store.tiered import TieredConfig, TieredStore

log = logging.getLogger(__name__)

HELP = (
    "none, disk:PATH, redis://…, lmcache:{…}, or two of them: disk:PATH,[through:|on_suspend:|"
    "never:]redis://…"
)
_POLICIES = {policy.value: policy for policy in WritePolicy}
_REMOTE = "|".join([*(re.escape(f"{scheme}://") for scheme in SCHEMES), "lmcache:"])
_NAMES = set(FIELD_NAMES)
_BORDER = re.compile(rf",(?=(?:(?:{'|'.join(_POLICIES)}):)?(?:{_REMOTE}|disk:))")


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier of a specification: exactly one of the three is set."""

    folder: Path | None = None
    redis_url: str | None = None
    lmcache: Mapping[str, Any] | None = None
    policy: WritePolicy | None = None


def parse_spec(spec: str) -> tuple[TierSpec, ...]:
    """The tiers that ``spec`` names, nearest first; none for ``none``. Opens nothing.

    Raises InvalidRequest, saying what is wrong; never repeats a password.
    """
    if spec == "none":
        return ()
    tiers = [_tier(part) for part in _split(spec)]
    if tiers[0].policy is not None:
        raise InvalidRequest("--store: a policy stands before a second tier", param="store")
    if len(tiers) > 2 or (len(tiers) == 2 and (tiers[0].folder is None or tiers[1].folder)):
        raise InvalidRequest("--store: two tiers are a disk: and then a remote one", param="store")
    return tuple(tiers)


def open_store(spec: str, identity: StoreIdentity | None, bytes_max: int) -> PrefixStore | None:
    """Open what ``spec`` names; None for ``none``.

    Raises InvalidRequest (the specification), UnsupportedCombination (a package is missing),
    StoreUnavailable (a folder that cannot be used).
    """
    tiers = parse_spec(spec)
    opened = [_open(tier, identity, bytes_max) for tier in tiers[:1]]
    if len(tiers) == 2:
        try:
            opened.append(_open(tiers[1], identity, bytes_max))
        except BaseException:
            opened[0].close()
            raise
        config = TieredConfig(policy=tiers[1].policy or WritePolicy.THROUGH)
        return TieredStore(opened[0], opened[1], config)
    return opened[0] if opened else None


def _split(spec: str) -> list[str]:
    """At the commas between tiers: those inside JSON and between cluster nodes are not."""
    parts = []
    while spec:
        json_at = re.match(rf"(?:(?:{'|'.join(_POLICIES)}):)?lmcache:", spec)
        if json_at:
            end = _json_end(spec, json_at.end())
            if end < len(spec) and not _BORDER.match(spec, end):
                raise InvalidRequest("--store lmcache:{…}: text after the JSON", param="store")
        else:
            border = _BORDER.search(spec)
            end = border.start() if border else len(spec)
        parts.append(spec[:end])
        spec = spec[end + 1 :]
    return parts or [""]


def _json_end(spec: str, start: int) -> int:
    try:
        return json.JSONDecoder().raw_decode(spec, start)[1]
    except ValueError as error:
        raise InvalidRequest(f"--store lmcache:{{…}}: {error}", param="store") from error


def _tier(text: str) -> TierSpec:
    name, _, rest = text.partition(":")
    policy = _POLICIES.get(name)
    if policy is not None:
        text = rest
        name, _, rest = text.partition(":")
    if name == "disk" and rest:
        return TierSpec(folder=Path(rest), policy=policy)
    if name in SCHEMES:
        parse(RedisConfig(text, 0))
        return TierSpec(redis_url=text, policy=policy)
    if name == "lmcache":
        found = json.loads(rest)
        if not isinstance(found, dict) or not isinstance(found.get("type"), str):
            raise InvalidRequest('--store lmcache: needs {"type": …}', param="store")
        return TierSpec(lmcache=found, policy=policy)
    raise InvalidRequest(f"--store is not one of: {HELP}", param="store")


def _open(tier: TierSpec, identity: StoreIdentity | None, bytes_max: int) -> PrefixStore:
    if tier.folder is not None:
        from dsv4_tierd.tiering.store.disk import DiskStore
        from dsv4_tierd.tiering.store.vault import DiskConfig

        return DiskStore(DiskConfig(tier.folder, bytes_max), identity)
    if tier.redis_url is not None:
        from dsv4_tierd.tiering.store.redis import RedisStore

        return RedisStore(RedisConfig(tier.redis_url, bytes_max), identity)
    from dsv4_tierd.tiering.store.lmcache import open_lmcache

    assert tier.lmcache is not None
    return open_lmcache(tier.lmcache, identity, bytes_max)


def known_identities(spec: str) -> list[StoreIdentity]:
    """The identities that wrote to the (one) store that ``spec`` names.

    Raises InvalidRequest, UnsupportedCombination, StoreUnavailable.
    """
    tiers = parse_spec(spec)
    if len(tiers) != 1:
        raise InvalidRequest("one store is looked at at a time", param="store")
    return identities_of(tiers[0])


def identities_of(tier: TierSpec) -> list[StoreIdentity]:
    """The identities that wrote to a tier; those of another release are named and left out."""
    found = []
    for fields in _fields(tier):
        if set(fields) == _NAMES:
            found.append(StoreIdentity(**fields))
        else:
            strange = ", ".join(sorted(_NAMES ^ set(fields)))
            log.warning("store: an identity of another release is left out: %s", strange)
    return found


def _fields(tier: TierSpec) -> list[dict[str, Any]]:
    if tier.folder is not None:
        from dsv4_tierd.tiering.store.folder import stored_identities

        return stored_identities(tier.folder)
    if tier.redis_url is not None:
        from dsv4_tierd.tiering.store.redis import RedisStore
        from dsv4_tierd.tiering.store.redis_replies import as_object
        from dsv4_tierd.tiering.store.redis_rows import IDENTITIES
        from dsv4_tierd.tiering.store.redis_shelf import scan_hash

        store = RedisStore(RedisConfig(tier.redis_url, 0), None)
        try:
            return [fields for _, fields in scan_hash(store.link, IDENTITIES, as_object)]
        finally:
            store.close()
    from dsv4_tierd.tiering.store.lmcache import lmcache_identities

    assert tier.lmcache is not None
    return lmcache_identities(tier.lmcache)
