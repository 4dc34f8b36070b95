"""What the engine says of itself: gauges, counters, and where a session lies."""

from __future__ import annotations

from dsv4_tierd.engine.loop import Engine
from dsv4_tierd.engine.messages import Stats, TierBytes
from dsv4_tierd.engine.request import State
from dsv4_tierd.engine.session import Session
from dsv4_tierd.tiering.blocks import BLOCK_TOKENS
from dsv4_tierd.tiering.radix import NO_PAGE


def residency(engine: Engine, session: Session) -> tuple[TierBytes, ...]:
    """Tokens and bytes of a session by group and tier. Pages shared with others count whole."""
    tiers, layout = engine.tiers, engine.tiers.config.pages
    path = tiers.match(session.transcript, session.salt, len(session.transcript))
    counts = {
        "device": sum(node.device != NO_PAGE for node in path),
        "host": sum(node.mirror != NO_PAGE for node in path),
        "store": sum(node.stored for node in path),
    }
    c128_bytes = sum(section.bytes for section in layout.c128)
    page_bytes = {
        "c4": layout.c4_bytes,
        "index": layout.device_bytes - c128_bytes,
        "c128": c128_bytes,
    }
    cells = [
        TierBytes(group, tier, pages * BLOCK_TOKENS, pages * size)
        for tier, pages in counts.items()
        for group, size in page_bytes.items()
        if not (tier == "device" and group == "c4")
    ]
    tail = session.tail
    if tail is not None and (tail.slot is not None or tail.packed is not None):
        tier = "device" if tail.slot is not None else "host"
        size = tiers.config.tail.slot_bytes if tail.packed is None else len(tail.packed)
        cells.append(TierBytes("tail", tier, tail.position % BLOCK_TOKENS, size))
    return tuple(cells)


def stats(engine: Engine) -> Stats:
    """Gauges, all at rest when idle but the cached ones, and counters, which never go down."""
    return Stats(gauges=_gauges(engine), counters=_counters(engine))


def _gauges(engine: Engine) -> dict[str, float]:
    tiers, scheduler = engine.tiers, engine.scheduler
    mirror, device = tiers.mirror_pool, tiers.device_pool
    held = [node for node in tiers.tree.nodes.values() if node.refs]
    mirror_held = sum(node.mirror != NO_PAGE for node in held)
    mirror_pinned = sum(
        n.mirror != NO_PAGE and not n.refs for n in tiers.tree.nodes.values() if n.pins
    )
    device_held = sum(node.device != NO_PAGE for node in held)
    private = sum(seq.page_count - len(seq.path) for seq in tiers.running if seq.began)
    loading = sum(1 for kind, _ in tiers.coordinator.load_targets if kind.name == "PAGE")
    idle_pages = sum(tail.mirror != NO_PAGE for tail in tiers.idle)
    gauges: dict[str, float] = {
        "requests_queued": len(scheduler.queue),
        "requests_running": len(scheduler.running),
        "requests_decoding": len(scheduler.in_state(State.DECODE)),
        "sessions_open": len(engine.sessions),
        "host_pages_capacity": mirror.capacity,
        "host_pages_free": mirror.free_count,
        "host_pages_cached": tiers.tree.mirror_evictable,
        "host_pages_pinned": mirror_pinned,
        "host_pages_running": mirror_held + private + loading,
        "host_pages_idle_tails": idle_pages,
        "device_pages_capacity": device.capacity,
        "device_pages_free": device.free_count,
        "device_pages_cached": tiers.tree.device_evictable,
        "device_pages_running": device_held + private,
        "device_pages_idle_tails": idle_pages,
        "resume_points_used": tiers.points.used_count,
        "resume_points_limit": tiers.points.capacity,
        "tail_slots_free": tiers.tails.free_count,
        "tails_packed_bytes": tiers.idle.packed_bytes,
        "pinned_pages": engine.retention.pinned_pages,
        "pinned_pages_limit": engine.retention.pin_pages_max,
        "store_writes_pending": tiers.coordinator.dirty_count,
        "store_up": 0.0,
        "blocks_known": len(tiers.tree.nodes),
    }
    usage = tiers.coordinator.store_usage()
    if usage is not None:
        gauges |= {
            # A store may know that it is away before anything is asked of it.
            "store_up": float(tiers.coordinator.up and usage.up),
            "store_objects": usage.objects,
            "store_bytes": usage.bytes_used,
            "store_bytes_limit": usage.bytes_max,
        }
    return gauges


def _counters(engine: Engine) -> dict[str, float]:
    tiers, own = engine.tiers, engine.counters
    evictions, swaps, store = tiers.evictor.counters, tiers.c4.counters, tiers.coordinator.counters
    counters: dict[str, float] = {name: getattr(own, name) for name in own.__slots__}
    counters |= {
        "swap_in_hits": swaps.hits,
        "swap_in_misses": swaps.misses,
        "swap_in_bytes": swaps.bytes_fetched,
        "device_pages_evicted": evictions.device_evicted,
        "host_pages_evicted": evictions.mirror_evicted,
        "blocks_dropped": evictions.dropped,
        "resume_points_evicted": tiers.points.evicted_total,
        "tails_packed": tiers.idle.counters.packed,
        "tails_lost": tiers.idle.counters.lost,
    }
    counters |= {f"store_{name}": getattr(store, name) for name in store.__slots__}
    usage = tiers.coordinator.store_usage()
    if usage is not None:
        counters |= {
            "store_bytes_written": usage.bytes_written,
            "store_bytes_read": usage.bytes_read,
            "store_checksum_failures": usage.checksum_failures,
            "store_evicted_objects": usage.evicted_objects,
        }
    return counters
