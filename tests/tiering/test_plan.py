"""The planner: what fits grows with each budget, and what cannot work is refused with numbers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dsv4_tierd.tiering.errors import ExceedsCapacity
from dsv4_tierd.tiering.plan import Budgets, ModelSizes, Plan, plan

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
FLASH = ModelSizes(
    c4_layers=21,
    index_topk=512,
    row_bytes=584,
    mirror_page_bytes=990_000,
    device_page_bytes=205_000,
    tail_slot_bytes=15_400_000,
    resume_bytes=4_100_000,
    context_length=1 << 20,
)
SMALL = ModelSizes(
    c4_layers=2,
    index_topk=16,
    row_bytes=320,
    mirror_page_bytes=58_624,
    device_page_bytes=17_664,
    tail_slot_bytes=223_232,
    resume_bytes=45_056,
    context_length=1 << 16,
)
MODELS = st.sampled_from([FLASH, SMALL, replace(SMALL, resume_bytes=1_000_003)])
BATCHES = st.integers(1, 32)
BYTES = st.integers(1 * MIB, 64 * GIB) | st.integers(1 * MIB, 512 * MIB)
STEPS = st.integers(1, 64) | st.integers(1, 4 * GIB)


def budgets(device: int, host: int, batch: int = 4, **more: object) -> Budgets:
    return Budgets(device_bytes=device, host_bytes=host, max_batch=batch, **more)  # type: ignore[arg-type]


def planned(model: ModelSizes, given_budgets: Budgets) -> Plan | None:
    """None: refused."""
    try:
        return plan(model, given_budgets)
    except ExceedsCapacity:
        return None


def context(found: Plan | None) -> int:
    return 0 if found is None else found.context_tokens


@given(model=MODELS, device=BYTES, host=BYTES, batch=BATCHES, step=STEPS, tiered=st.booleans())
def test_more_host_memory_never_shrinks_the_answer(
    model: ModelSizes, device: int, host: int, batch: int, step: int, tiered: bool
) -> None:
    """Longest session and mirror never get smaller as the host budget grows, not by one byte."""
    less = planned(model, budgets(device, host, batch, tiered=tiered))
    more = planned(model, budgets(device, host + step, batch, tiered=tiered))
    assert context(more) >= context(less)
    if less is not None and more is not None:
        assert more.mirror_pages >= less.mirror_pages
        assert more.resume_slots >= less.resume_slots


@given(model=MODELS, device=BYTES, host=BYTES, batch=BATCHES, step=STEPS, tiered=st.booleans())
def test_more_device_memory_never_shrinks_the_answer(
    model: ModelSizes, device: int, host: int, batch: int, step: int, tiered: bool
) -> None:
    """Longest session and mirror never get smaller as the device budget grows."""
    less = planned(model, budgets(device, host, batch, tiered=tiered))
    more = planned(model, budgets(device + step, host, batch, tiered=tiered))
    assert context(more) >= context(less)
    if less is not None and more is not None:
        assert more.mirror_pages >= less.mirror_pages


@given(model=MODELS, device=BYTES, host=BYTES, batch=BATCHES, step=STEPS)
def test_a_larger_mirror_costs_no_device_pages(
    model: ModelSizes, device: int, host: int, batch: int, step: int
) -> None:
    """Where the longest session stays as it is, more host memory never means fewer sessions."""
    rows = 2 * batch * model.index_topk
    less, more = (
        planned(model, budgets(device, size, batch, hot_rows=rows)) for size in (host, host + step)
    )
    assume(less is not None and more is not None)
    assert less is not None and more is not None
    if less.context_tokens == more.context_tokens and less.staging_rows == more.staging_rows:
        assert more.device_pages >= less.device_pages


@given(share=st.integers(1, 4000))
def test_every_byte_of_a_small_host_counts_upwards(share: int) -> None:
    """Around the places where a resume slot or a page is gained, no byte more gives less."""
    host = 3 * MIB + share * SMALL.resume_bytes // 7
    sizes = [
        context(planned(SMALL, budgets(64 * MIB, host + extra, idle_tails=8))) for extra in range(9)
    ]
    assert sizes == sorted(sizes)


@given(model=MODELS, device=BYTES, host=BYTES, batch=BATCHES, tiered=st.booleans())
def test_sizes_stay_within_the_budgets(
    model: ModelSizes, device: int, host: int, batch: int, tiered: bool
) -> None:
    """The pools of each tier add up to no more than its budget, and are what the plan says."""
    found = planned(model, budgets(device, host, batch, tiered=tiered))
    assume(found is not None)
    assert found is not None
    pools = dict(found.bytes_by_pool)
    assert sum(size for name, size in pools.items() if name.startswith("device.")) <= device
    assert sum(size for name, size in pools.items() if name.startswith("host.")) <= host
    assert pools["host.mirror"] == found.mirror_pages * model.mirror_page_bytes
    assert pools["device.pages"] == found.device_pages * model.device_page_bytes
    assert found.context_tokens <= found.mirror_pages * 256
    assert found.context_tokens <= found.device_pages * 256
    assert not tiered or found.hot_rows >= 2 * batch * model.index_topk
    assert not tiered or found.context_tokens <= found.staging_rows * 4
    assert found.resume_slots >= batch + 4


def test_a_tiny_device_holds_what_a_large_host_holds() -> None:
    """The device needs a fraction of the session: index keys, C128 rows and staging alone."""
    found = plan(FLASH, budgets(4 * GIB, 24 * GIB, batch=1, idle_tails=4))
    host_room = found.mirror_pages * 256
    assert found.context_tokens >= 0.9 * min(host_room, FLASH.context_length)


@pytest.mark.parametrize(
    ("device", "host"), [(1 * MIB, 1 * GIB), (64 * MIB, 200 * KIB), (2_700_000, 300 * MIB)]
)
def test_what_cannot_work_is_refused_with_the_numbers(device: int, host: int) -> None:
    """The error names the budget and what is needed, in bytes."""
    with pytest.raises(ExceedsCapacity) as caught:
        plan(SMALL, budgets(device, host))
    assert len(re.findall(r"\d{4,}", caught.value.message)) >= 3
    assert str(device) in caught.value.message or str(host) in caught.value.message


def test_too_few_hot_rows_are_refused_with_the_rule() -> None:
    """A step must be able to hold its rows: 2 x batch x top-k."""
    with pytest.raises(ExceedsCapacity, match=r"127 < 2 x batch x top-k = 128"):
        plan(SMALL, budgets(64 * MIB, 64 * MIB, hot_rows=127))
    assert plan(SMALL, budgets(64 * MIB, 64 * MIB, hot_rows=128)).hot_rows == 128


def test_the_model_bounds_the_context() -> None:
    """No session is longer than the model was made for, however much memory there is."""
    assert plan(SMALL, budgets(64 * GIB, 64 * GIB)).context_tokens == SMALL.context_length
