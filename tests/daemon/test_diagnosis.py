"""Prompts compared: the first token, byte, line and message that differ; what is remembered."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_tierd.daemon.diagnosis import (
    PROMPT_OVERHEAD_BYTES,
    Comparison,
    RecentPrompts,
    Words,
    compare,
    message_digests,
)
from dsv4_tierd.daemon.encoding import encode_chat
from dsv4_tierd.daemon.tokenize import TextCodec
from dsv4_tierd.engine.messages import Usage
from dsv4_tierd.engine.vocabulary import DEEPSEEK_VOCAB_SIZE, find_tokenizer


@functools.cache
def codec() -> TextCodec:
    file = find_tokenizer("nowhere", DEEPSEEK_VOCAB_SIZE)
    assert file is not None
    return TextCodec(file.read_text(encoding="utf-8"))


def ids(*numbers: int) -> Words:
    return Words(np.array(numbers, "<i4").tobytes())


def chat(messages: list[dict[str, object]]) -> Words:
    pieces = encode_chat({"messages": messages}, thinking_default=False).pieces
    return Words(codec().encode(pieces), message_digests(messages))


def test_the_first_differing_line_is_named() -> None:
    """Byte, line, both lines and the message: what a person needs to find it."""
    code = "def f():\n    return 1\n" * 40
    a = chat([{"role": "system", "content": f"Review.\nToday is Monday — 9:01.\n{code}"}])
    b = chat([{"role": "system", "content": f"Review.\nToday is Monday — 9:02.\n{code}"}])
    found = compare(a, b, codec())
    assert found is not None
    assert found.message == 0
    assert found.line == 2
    assert found.line_a == "Today is Monday — 9:01."
    assert found.line_b == "Today is Monday — 9:02."
    prompt = codec().decode(b.part(b.count)).encode()
    assert found.byte is not None
    assert prompt[: found.byte].decode().endswith("Monday — 9:0")
    assert found.token_a is not None and found.token_b is not None
    assert codec().decode([found.token_a]) != codec().decode([found.token_b])


def test_a_longer_prompt_differs_where_the_shorter_ends() -> None:
    """One more message: its number, and None for the token of the one that has ended."""
    first: list[dict[str, object]] = [{"role": "user", "content": "Hello."}]
    more = [*first, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Go on."}]
    found = compare(chat(first), chat(more), codec())
    assert found is not None
    assert found.message == 1
    assert found.token_a is None
    assert compare(chat(first), chat(first), codec()) is None


def test_a_cache_mark_is_no_difference() -> None:
    """cache_control may stand anywhere, or move: same digests, same ids."""
    part = {"type": "text", "text": "Hello."}
    marked = {**part, "cache_control": {"type": "ephemeral"}}
    plain: list[dict[str, object]] = [
        {"role": "system", "content": [part]},
        {"role": "user", "content": [part]},
    ]
    one: list[dict[str, object]] = [{"role": "system", "content": [marked]}, plain[1]]
    two: list[dict[str, object]] = [plain[0], {"role": "user", "content": [marked]}]
    assert message_digests(plain) == message_digests(one) == message_digests(two)
    assert compare(chat(one), chat(two), codec()) is None
    assert compare(chat(plain), chat(two), codec()) is None


token_lists = st.lists(st.integers(0, 3), max_size=12)


@given(token_lists, token_lists)
def test_without_text_the_token_is_named(a: list[int], b: list[int]) -> None:
    """The common prefix and the two tokens after it, as a plain loop finds them."""
    common = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    found = compare(ids(*a), ids(*b), None)
    if a == b:
        assert found is None
        return
    assert found is not None
    assert found.common_tokens == common
    assert found.token_a == (a[common] if common < len(a) else None)
    assert found.token_b == (b[common] if common < len(b) else None)
    assert (found.byte, found.line, found.message) == (None, None, None)


def test_the_closest_prompt_of_the_tenant_is_remembered() -> None:
    """The longest common beginning wins, of equals the newest; tenants never see one another."""
    recent = RecentPrompts()
    recent.add("x", ids(1, 2, 3, 9))
    recent.add("x", ids(1, 2, 8))
    recent.add("x", ids(1, 2, 7))
    recent.add("y", ids(1, 2, 3, 4))
    assert recent.closest("x", ids(1, 2, 3, 4)) == ids(1, 2, 3, 9)
    assert recent.closest("x", ids(1, 2, 6)) == ids(1, 2, 7)
    assert recent.closest("z", ids(1)) is None


def test_what_is_remembered_is_bounded() -> None:
    """Sixteen prompts a tenant, and so many bytes of all: the oldest tenant pays first."""
    own = PROMPT_OVERHEAD_BYTES
    room = 17 * own + 400
    recent = RecentPrompts(bytes_max=room)
    for n in range(20):
        recent.add("x", ids(n))
    assert recent.bytes_used == 16 * (4 + own)
    recent.add("x", ids(19))  # again: kept once
    assert recent.bytes_used == 16 * (4 + own)
    recent.add("y", ids(*range(99)))
    assert recent.bytes_used <= room
    assert recent.closest("x", ids(19)) == ids(19)
    recent.add("y", ids(*range(16 * own // 4)))
    assert recent.bytes_used == 17 * own
    assert recent.closest("x", ids(19)) is None
    recent.add("y", ids(*range(room // 4)))  # larger than all the room: not kept
    assert recent.bytes_used == 0


def test_tenants_that_come_once_are_bounded_too() -> None:
    """A prompt of one token each, of a thousand tenants: the oldest are forgotten."""
    recent = RecentPrompts(bytes_max=100 * PROMPT_OVERHEAD_BYTES)
    for n in range(1000):
        recent.add(f"tenant {n}", ids(n))
    known = [n for n in range(1000) if recent.closest(f"tenant {n}", ids(n)) is not None]
    assert known == list(range(1000 - len(known), 1000))
    assert 90 < len(known) <= 100


def usage(prompt: int, host: int, reason: str | None = None) -> Usage:
    return Usage(
        prompt_tokens=prompt, completion_tokens=1, device_tokens=0, host_tokens=host,
        store_tokens=0, computed_tokens=prompt - host, miss_reason=reason,
    )  # fmt: skip


long = list(range(1000))


@pytest.mark.parametrize(
    ("known", "host", "engine", "kind", "reason"),
    [
        (None, 0, None, "cache_miss", "nothing_known"),
        (long[:900], 768, None, "cache_hit", None),
        (long[:900], 0, None, "cache_miss", "no_longer_cached"),
        (long[:900], 512, "no_resume_point", "cache_hit", "no_resume_point"),
        ([7, *long], 0, None, "cache_miss", "prefix_changed"),
        ([*long[:600], 7, *long[600:]], 512, None, "cache_hit", "prefix_changed"),
        ([*long[:800], 7], 768, None, "cache_hit", None),  # within the last block of both
    ],
)
def test_the_reason_is_the_first_that_holds(
    known: list[int] | None, host: int, engine: str | None, kind: str, reason: str | None
) -> None:
    """Nothing to compare with, gone from the cache, or changed: said only if more was possible."""
    words = ids(*long)
    before = None if known is None else ids(*known)
    difference = None if before is None else compare(before, words, None)
    verdict = Comparison(words, before, difference).verdict(usage(1000, host, engine))
    assert (verdict["type"], verdict["reason"]) == (kind, reason)
    assert (verdict["difference"] is not None) == (reason == "prefix_changed")
    assert verdict["cached_tokens"] == host
