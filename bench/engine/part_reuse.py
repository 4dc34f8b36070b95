"""5. Fork, suspend and resume, the same text again, and again after a restart."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from disk import drop_cached, read_rate_gbs
from harness import LINK_GBS
from rig import Answer, Rig, median_ms
from sizes import Kind
from stage import STEM, Stage, named
from texts import has_tokenizer, tokenised

from dsv4_tierd.engine import messages as m
from dsv4_tierd.tiering.plan import TAIL_C4_ROWS

GOAL_FORK_MS, GOAL_FORK_MB = 1.0, 30.0
GOAL_RESUME_MS, GOAL_AGAIN_MS = 30.0, 250.0
GOAL_DISK_PERCENT = 70.0
FORKS = 5
CASE_S = 10.0
KIND = Kind.HISPARSE


def run(stage: Stage) -> None:
    """All on one engine, and one more for the restart."""
    long = named(stage.sizes.long)
    cases = {
        ("fork", f"{long} session"): _fork,
        ("resume", f"{long} session, from host memory"): _resume,
        ("reuse", f"{long} in a new session, pages on the device"): _again_on_device,
        ("reuse", f"{long} in a new session, pages in host memory"): _again_in_host,
        ("reuse", f"{long} in a new session, after a restart"): _after_restart,
    }
    for (bench, case), measure in cases.items():
        if stage.sheet.wants(bench, case, CASE_S + stage.stem_s()):
            measure(stage, stage.with_stem(KIND), case)
    _tokenisation(stage)


@dataclass(frozen=True, slots=True)
class _DeviceUse:
    """Device bytes that sessions take from the pools, and what torch has allocated in all."""

    pools: int
    allocated: int

    @classmethod
    def of(cls, stage: Stage, rig: Rig) -> _DeviceUse:
        tiers, layouts = rig.tiers, stage.layouts
        layers = len(stage.model.transformer.config.c4_layers)
        slot = layouts.tail.slot_bytes
        slot += TAIL_C4_ROWS * layers * layouts.pages.latent.row_bytes
        slots = len(tiers.tails.slots) - tiers.tails.free_count
        pages = tiers.device_pool.capacity - tiers.device_pool.free_count
        on_gpu = stage.model.device.type == "cuda"
        return cls(
            slots * slot + pages * tiers.memory.device.shape[1],
            torch.cuda.memory_allocated() if on_gpu else 0,
        )


def _fork(stage: Stage, rig: Rig, case: str) -> None:
    """Time of the verb; bytes once the fork has taken a step of its own."""
    twins: list[str] = []
    spent_ms = median_ms(lambda: twins.append(rig.fork(STEM)), FORKS)
    stage.sheet.record("fork", case, "time", spent_ms, "ms", goal=GOAL_FORK_MS)
    before = _DeviceUse.of(stage, rig)
    requests = [rig.submit(twins[0], None, 2, credit=1)]
    rig.until_decoding(requests)
    after = _DeviceUse.of(stage, rig)
    rig.verbs.handle(m.Cancel(request_id=requests[0]))
    rig.close_sessions(twins)
    taken = after.pools - before.pools + after.allocated - before.allocated
    stage.sheet.record("fork", case, "GPU memory", taken / 1e6, "MB", goal=GOAL_FORK_MB)


def _resume(stage: Stage, rig: Rig, case: str) -> None:
    """Suspended to the host, every device page evicted; until the next step may begin."""
    rig.op(m.SuspendSession, session_id=STEM, tier="host")
    pages = rig.evict_device_pages()
    rig.synchronize()
    started = time.perf_counter()
    rig.op(m.ResumeSession, session_id=STEM)
    rig.synchronize()
    spent_ms = (time.perf_counter() - started) * 1e3
    floor_ms = pages * rig.tiers.memory.device.shape[1] / LINK_GBS / 1e6
    stage.sheet.record(
        "resume", case, "before the first step", spent_ms, "ms", goal=GOAL_RESUME_MS, floor=floor_ms
    )
    twin = rig.fork(STEM)
    answer = rig.generate(twin)
    rig.close_sessions([twin])
    stage.sheet.record("resume", case, "first token after that", answer.first_ms, "ms")


def _again(stage: Stage, rig: Rig, case: str) -> Answer:
    session = rig.open(stage.tokens[:0])
    rig.synchronize()
    answer = rig.generate(session, stage.stem)
    rig.close_sessions([session])
    stage.sheet.record(
        "reuse", case, "time to first token", answer.first_ms, "ms", goal=GOAL_AGAIN_MS
    )
    usage = answer.usage
    assert usage is not None
    stage.sheet.say(
        f"{case}: device {usage.device_tokens}, host {usage.host_tokens}, store "
        f"{usage.store_tokens}, computed {usage.computed_tokens}, again {usage.replayed_tokens}"
    )
    return answer


def _again_on_device(stage: Stage, rig: Rig, case: str) -> None:
    twin = rig.fork(STEM)
    rig.generate(twin)  # every page is on the device after it
    rig.close_sessions([twin])
    _again(stage, rig, case)


def _again_in_host(stage: Stage, rig: Rig, case: str) -> None:
    rig.evict_device_pages()
    _again(stage, rig, case)


def _after_restart(stage: Stage, rig: Rig, case: str) -> None:
    """Another engine on the same store, with nothing of its files in memory."""
    rig.drain()
    stage.close()
    folder = stage.folder / "store"
    disk_gbs = read_rate_gbs(folder)
    drop_cached(folder)
    rig = stage.rig(KIND)
    before = rig.counters()
    answer = _again(stage, rig, case)
    loaded = rig.counters()["store_bytes_read"] - before["store_bytes_read"]
    assert answer.ready_s is not None
    rate_gbs = loaded / (answer.ready_s - answer.submitted_s) / 1e9
    stage.sheet.record("reuse", case, "disk, sequential reads", disk_gbs, "GB/s", "higher")
    stage.sheet.record("reuse", case, "pages from the store", rate_gbs, "GB/s", "higher")
    stage.sheet.record(
        "reuse",
        case,
        "share of the disk's rate",
        rate_gbs / disk_gbs * 100,
        "%",
        "higher",
        GOAL_DISK_PERCENT,
    )


def _tokenisation(stage: Stage) -> None:
    """What the daemon does before the engine sees the text."""
    case = f"{named(stage.sizes.long)} of source text"
    if not has_tokenizer():
        stage.sheet.say("no tokenizer here: tokenisation is not timed")
    elif stage.sheet.wants("reuse", case, CASE_S):
        _, spent_s = tokenised(stage.sizes.long)
        stage.sheet.record("reuse", case, "tokenisation", spent_s * 1e3, "ms")
