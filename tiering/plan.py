"""Sizes of every pool, from two budgets and the model. No torch: a laptop can plan an H200.

The planner answers one question: which sessions fit. Growing either budget never makes that
answer smaller, and whatever cannot work is refused with the numbers that say why.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_tierd.tiering.blocks import BLOCK_TOKENS
from dsv4_tierd.tiering.errors import ExceedsCapacity

C4_ROWS_PER_PAGE = BLOCK_TOKENS // 4
IDLE_SLOTS_MAX = 8  # more idle tails than this are packed when a session starts
RESIDENCY_SHARE = 16  # one part in this many of the device budget may be residency tables
TAIL_C4_ROWS = 2 * C4_ROWS_PER_PAGE  # the unfinished page and the last finished one


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What the planner needs to know of a model, in bytes and counts."""

    c4_layers: int
    index_topk: int
    row_bytes: int
    mirror_page_bytes: int
    device_page_bytes: int
    tail_slot_bytes: int
    resume_bytes: int
    context_length: int
    score_rows: int = 0  # queries whose index scores stand on the device at once


@dataclass(frozen=True, slots=True)
class Budgets:
    """What may be spent. ``hot_rows`` None: as many as the device budget allows.

    Resume points and packed idle tails come out of the host budget, at most an eighth of it each.
    """

    device_bytes: int
    host_bytes: int
    max_batch: int
    hot_rows: int | None = None
    tiered: bool = True  # False: C4 rows are read where the pages lie, no hot set
    resume_bytes: int = 512 << 20
    idle_tails: int = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """Pool sizes. Everything is allocated once, from these numbers."""

    mirror_pages: int
    device_pages: int
    tail_slots: int
    hot_rows: int
    resume_slots: int
    idle_tail_bytes: int
    staging_rows: int
    context_tokens: int
    bytes_by_pool: tuple[tuple[str, int], ...]
    score_count: int = 0  # fp32 scores of scratch


def plan(model: ModelSizes, budgets: Budgets) -> Plan:
    """Derive every size. Raises ExceedsCapacity if not even one small session fits."""
    host = _HostSplit.of(model, budgets)
    tail_slots = _tail_slots(budgets)
    tail_bytes = tail_slots * model.tail_slot_bytes
    hot_row_bytes = model.c4_layers * (model.row_bytes + 8)  # the row, its owner and its stamp
    per_page = model.device_page_bytes + _score_bytes(model)
    fixed = tail_bytes
    minimum = 0
    if budgets.tiered:
        minimum = 2 * budgets.max_batch * model.index_topk
        if budgets.hot_rows is not None:
            if budgets.hot_rows < minimum:
                raise ExceedsCapacity(
                    f"hot rows {budgets.hot_rows} < 2 x batch x top-k = {minimum}: "
                    "a step could not hold its rows"
                )
            minimum = budgets.hot_rows
        fixed += tail_slots * TAIL_C4_ROWS * model.c4_layers * model.row_bytes
        per_page += _staging_bytes(model)
    spare = max(budgets.device_bytes - fixed - minimum * hot_row_bytes, 0)
    mirror_pages = host.mirror_pages
    residency = _residency_bytes(model) if budgets.tiered else 0
    share = 0
    if residency:
        # A share of its own, used or not: so that no budget's growth takes from the other part.
        share = spare // RESIDENCY_SHARE
        mirror_pages = min(mirror_pages, share // residency)
        spare -= share
    session_pages = min(mirror_pages, spare // per_page)
    if session_pages < 2:
        raise ExceedsCapacity(
            f"device budget {budgets.device_bytes} B holds no session: tails need {fixed} B, "
            f"{minimum} hot rows {minimum * hot_row_bytes} B and two pages {2 * per_page} B"
        )
    session_pages = min(session_pages, -(-model.context_length // BLOCK_TOKENS))
    left = spare - session_pages * per_page, share - mirror_pages * residency
    return _spend(model, budgets, host, (session_pages, mirror_pages), left, minimum)


def _spend(
    model: ModelSizes,
    budgets: Budgets,
    host: _HostSplit,
    pages: tuple[int, int],
    unspent: tuple[int, int],
    hot_rows: int,
) -> Plan:
    """Share what one largest session leaves: more device pages, more hot rows.

    unspent: bytes of everything else, and of the residency tables' share, which may become hot
    rows alone: a larger mirror must not cost a session its device pages.
    """
    session_pages, mirror_pages = pages
    left, share_left = unspent
    residency = _residency_bytes(model) if budgets.tiered else 0
    hot_row_bytes = model.c4_layers * (model.row_bytes + 8)
    device_pages = session_pages
    if budgets.tiered and budgets.hot_rows is None and hot_row_bytes:
        own = left // 2
        more = min((own + share_left) // hot_row_bytes, mirror_pages * C4_ROWS_PER_PAGE)
        hot_rows, left = hot_rows + more, left - own
    more_pages = min(left // model.device_page_bytes, mirror_pages - device_pages)
    device_pages += more_pages
    tail_slots = _tail_slots(budgets)
    staging_rows = session_pages * C4_ROWS_PER_PAGE if budgets.tiered else 0
    tail_c4 = tail_slots * TAIL_C4_ROWS * model.c4_layers * model.row_bytes if budgets.tiered else 0
    pools = (
        ("host.mirror", mirror_pages * model.mirror_page_bytes),
        ("host.resume_points", host.resume_slots * model.resume_bytes),
        ("host.idle_tails", host.tail_bytes),
        ("device.pages", device_pages * model.device_page_bytes),
        ("device.tails", tail_slots * model.tail_slot_bytes + tail_c4),
        ("device.hot_rows", hot_rows * hot_row_bytes),
        ("device.residency", mirror_pages * residency),
        ("device.staging", 2 * staging_rows * model.row_bytes),
        ("device.scores", session_pages * _score_bytes(model)),
    )
    return Plan(
        mirror_pages=mirror_pages,
        device_pages=device_pages,
        tail_slots=tail_slots,
        hot_rows=hot_rows,
        resume_slots=host.resume_slots,
        idle_tail_bytes=host.tail_bytes,
        staging_rows=staging_rows,
        context_tokens=min(session_pages * BLOCK_TOKENS, model.context_length),
        bytes_by_pool=pools,
        score_count=session_pages * _score_bytes(model) // 4,
    )


@dataclass(frozen=True, slots=True)
class _HostSplit:
    mirror_pages: int
    resume_slots: int
    tail_bytes: int

    @classmethod
    def of(cls, model: ModelSizes, budgets: Budgets) -> _HostSplit:
        # One rolling point a running session and a few to keep, whatever the share says.
        floor = budgets.max_batch + 4
        resume_bytes = max(
            floor * model.resume_bytes, min(budgets.resume_bytes, budgets.host_bytes // 8)
        )
        resume_slots = resume_bytes // model.resume_bytes
        # Each part is an eighth of what is left, not of the whole, and counts in full even where
        # slots do not fill it: so no part ever grows by more than the budget does.
        left = max(budgets.host_bytes - resume_bytes, 0)
        tail_bytes = min(
            budgets.idle_tails * (model.tail_slot_bytes + model.mirror_page_bytes), left // 8
        )
        pages = (left - tail_bytes) // model.mirror_page_bytes
        if pages < 2:
            raise ExceedsCapacity(
                f"host budget {budgets.host_bytes} B holds no session: {resume_slots} resume "
                f"points need {resume_slots * model.resume_bytes} B and two pages "
                f"{2 * model.mirror_page_bytes} B"
            )
        return cls(pages, resume_slots, tail_bytes)


def _tail_slots(budgets: Budgets) -> int:
    """Running sessions, a few idle ones, and the prefill in progress."""
    return budgets.max_batch + min(budgets.max_batch, IDLE_SLOTS_MAX) + 1


def _staging_bytes(model: ModelSizes) -> int:
    """Two staging buffers' share of one page: one layer's rows each."""
    return 2 * C4_ROWS_PER_PAGE * model.row_bytes if model.c4_layers else 0


def _score_bytes(model: ModelSizes) -> int:
    """Index scores of one page: fp32."""
    return 4 * C4_ROWS_PER_PAGE * model.score_rows


def _residency_bytes(model: ModelSizes) -> int:
    """Residency entries of one mirror page."""
    return 4 * C4_ROWS_PER_PAGE * model.c4_layers
