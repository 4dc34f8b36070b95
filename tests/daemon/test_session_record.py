"""What is written down of a session for other daemons: its bytes, and that bad ones are refused."""

from __future__ import annotations

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from dsv4_tierd.daemon.session_record import (
    HEAD_BYTES,
    SessionRecord,
    decode,
    encode,
    version_of,
)
from dsv4_tierd.tiering.errors import TransferFailed

RECORD = SessionRecord(
    identity="ab" * 32,
    id="agent-7",
    salt="me",
    holder="a-0123",
    written_s=3.5,
    created_s=1.5,
    used_s=2.5,
    token_ids=bytes(range(8)),
    ttl_s=60.0,
    metadata={"who": ["x", 1, None]},
    encoding="dsv4-1",
    turn="asked",
    tail_key=bytes(40),
    write_policy="on_suspend",
)
KNOWN = encode(RECORD, 7)


def test_the_bytes_are_known() -> None:
    """A daemon of another release writes the same record as the same bytes."""
    assert len(KNOWN) == HEAD_BYTES + 319
    assert KNOWN[:24].hex() == "44535634545352310700000000000000" + "3f01000000000000"
    assert blake3(KNOWN).hexdigest(length=8) == "1e5763968240af5d"
    assert version_of(KNOWN[:HEAD_BYTES]) == 7
    assert decode(KNOWN) == (RECORD, 7)


@given(st.integers(0, len(KNOWN) - 1), st.integers(1, 255))
def test_any_changed_byte_is_found(at: int, flip: int) -> None:
    """No byte of a record can change without being noticed."""
    bad = bytearray(KNOWN)
    bad[at] ^= flip
    if 20 <= at < 24:  # the four bytes that mean nothing yet
        return
    with pytest.raises(TransferFailed):
        decode(bytes(bad))


@given(st.integers(0, len(KNOWN) - 1))
def test_a_torn_record_is_refused(length: int) -> None:
    """A record that is not whole is none."""
    with pytest.raises(TransferFailed):
        decode(KNOWN[:length])


def test_what_is_no_record_has_no_version() -> None:
    """Nothing, too little and other bytes are version 0: as if there were none."""
    assert [version_of(data) for data in (None, b"", KNOWN[:31], b"x" * 32)] == [0, 0, 0, 0]
