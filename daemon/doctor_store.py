"""``dsv4-tierd doctor --store …``: whether what ``--store`` names is fit to be a store."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from dsv4_tierd.daemon.doctor import GIB, Check
from dsv4_tierd.tiering.errors import TierError
from dsv4_tierd.tiering.store.open import TierSpec, parse_spec
from dsv4_tierd.tiering.units import format_bytes

AWAY = "nothing is stored or found there: requests compute, until it answers"


def examine_store(spec: str, bytes_max: int) -> Iterator[Check]:
    """Checks of each tier that ``spec`` names. Changes nothing. Raises InvalidRequest."""
    for tier in parse_spec(spec):
        if tier.folder is not None:
            yield _folder(tier.folder, bytes_max)
        elif tier.redis_url is not None:
            yield from _redis(tier, bytes_max)
        else:
            yield Check(
                "LMCache",
                find_spec("lmcache") is not None,
                "installed" if find_spec("lmcache") else "not installed",
                "the store cannot be opened: pip install 'dsv4-tierd[lmcache]' (CPU torch first)",
            )


def _folder(folder: Path, bytes_max: int) -> Check:
    there = folder
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    own = sum(path.stat().st_blocks * 512 for path in folder.rglob("*")) if there == folder else 0
    return Check(
        "store disk",
        free + own >= bytes_max + GIB and os.access(there, os.W_OK),
        f"{format_bytes(free)} free in {there}, {format_bytes(own)} in use by the store",
        f"less than the budget of {format_bytes(bytes_max)}, or not writable: writes will fail",
    )


def _redis(tier: TierSpec, bytes_max: int) -> Iterator[Check]:
    from dsv4_tierd.tiering.store.redis_config import RedisConfig, parse
    from dsv4_tierd.tiering.store.redis_doctor import check_server

    assert tier.redis_url is not None
    config = RedisConfig(tier.redis_url, bytes_max)
    target = parse(config)[1]
    try:
        warnings = check_server(config)
    except TierError as error:
        yield Check("Redis", False, f"{target.shown}: {error.message}", AWAY)
        return
    for warning in warnings:
        yield Check("Redis", False, target.shown, warning)
    if not warnings:
        yield Check("Redis", True, f"{target.shown} is set up for it", AWAY)
