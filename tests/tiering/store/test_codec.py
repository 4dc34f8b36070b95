"""The framed record: its bytes are fixed, and nothing damaged passes for whole."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dsv4_tierd.tiering.errors import InvalidRequest, TransferFailed
from dsv4_tierd.tiering.store import codec
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind, StoredObject
from store_cases import IDENTITY, page

IDENTITY_BYTES = bytes(range(32))
KEY = ObjectKey(ObjectKind.PAGE, "salt", bytes(range(100, 132)))
ITEM = StoredObject(KEY, bytes(range(200, 232)), b"payload")
# Written out once: a change here is a new format version, not a new expectation.
KNOWN = {
    "with_parent": (
        ITEM,
        (
            "4453563454494552010001000400010000010000000000000700000000000000"
            "7b8d2d5bf061fe32000102030405060708090a0b0c0d0e0f1011121314151617"
            "18191a1b1c1d1e1f6465666768696a6b6c6d6e6f707172737475767778797a7b"
            "7c7d7e7f80818283c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedf"
            "e0e1e2e3e4e5e6e7000000000000000000000000000000000000000000000000"
            "00000000000000000000000000000000000000000000000001783750704dd531"
            "73616c7400000000000000000000000000000000000000000000000000000000"
            "0000000000000000000000000000000000000000000000000000000000000000"
            "7061796c6f6164"
        ),
    ),
    "root_tail_without_tenant": (
        StoredObject(ObjectKey(ObjectKind.TAIL, "", bytes(range(100, 132))), None, b""),
        (
            "44535634544945520100030000000000c0000000000000000000000000000000"
            "c294d3380580062d000102030405060708090a0b0c0d0e0f1011121314151617"
            "18191a1b1c1d1e1f6465666768696a6b6c6d6e6f707172737475767778797a7b"
            "7c7d7e7f80818283000000000000000000000000000000000000000000000000"
            "0000000000000000000000000000000000000000000000000000000000000000"
            "000000000000000000000000000000000000000000000000bea57ddda835b0e4"
        ),
    ),
}


@pytest.mark.parametrize("case", KNOWN)
def test_known_answers(case: str) -> None:
    """The bytes of a record are these, in every version that writes format 1."""
    item, expected = KNOWN[case]
    frame = codec.encode(IDENTITY_BYTES, item)
    assert frame.hex() == expected
    assert bytes(codec.decode(IDENTITY_BYTES, item.key, frame)) == item.payload


@given(
    kind=st.sampled_from(ObjectKind),
    tenant=st.text(max_size=60),
    parent=st.none() | st.binary(min_size=32, max_size=32),
    payload=st.binary(max_size=300),
)
def test_round_trip(kind: ObjectKind, tenant: str, parent: bytes | None, payload: bytes) -> None:
    """Every object comes back as it was written, whatever its tenant's script."""
    item = StoredObject(ObjectKey(kind, tenant, bytes(32)), parent, payload)
    frame = codec.encode(IDENTITY_BYTES, item)
    header = codec.decode_header(frame)
    assert (header.key, header.parent, header.frame_bytes) == (item.key, parent, len(frame))
    assert bytes(codec.decode(IDENTITY_BYTES, item.key, frame)) == payload


def test_every_flipped_bit_is_noticed() -> None:
    """No single bit of header, padding or payload can change unseen."""
    frame = codec.encode(IDENTITY_BYTES, ITEM)
    for position in range(len(frame) * 8):
        damaged = bytearray(frame)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(TransferFailed):
            codec.decode(IDENTITY_BYTES, KEY, bytes(damaged))


def test_every_cut_is_noticed() -> None:
    """A record cut anywhere is not a record."""
    frame = codec.encode(IDENTITY_BYTES, ITEM)
    for length in range(len(frame)):
        with pytest.raises(TransferFailed):
            codec.decode(IDENTITY_BYTES, KEY, frame[:length])


def test_another_objects_record_is_refused() -> None:
    """A whole record under the wrong name, tenant or identity is not served."""
    frame = codec.encode(IDENTITY_BYTES, ITEM)
    for identity, key in [
        (bytes(32), KEY),
        (IDENTITY_BYTES, ObjectKey(KEY.kind, "other", KEY.digest)),
        (IDENTITY_BYTES, ObjectKey(ObjectKind.RESUME, KEY.tenant, KEY.digest)),
        (IDENTITY_BYTES, ObjectKey(KEY.kind, KEY.tenant, bytes(32))),
    ]:
        with pytest.raises(TransferFailed, match="another object"):
            codec.decode(identity, key, frame)


def test_names_that_do_not_fit_are_refused() -> None:
    """A tenant or a digest of the wrong size is the caller's error, not a truncated name."""
    with pytest.raises(InvalidRequest):
        codec.encode_header(
            IDENTITY_BYTES,
            StoredObject(ObjectKey(ObjectKind.PAGE, "é" * 513, bytes(32)), None, b""),
        )
    with pytest.raises(InvalidRequest):
        codec.encode_header(
            IDENTITY_BYTES, StoredObject(ObjectKey(ObjectKind.PAGE, "", bytes(31)), None, b"")
        )


def test_payloads_are_not_copied_into_headers() -> None:
    """A header is small whatever the payload, and a multiple of 64 bytes."""
    header = codec.encode_header(IDENTITY.digest, page("a", size=1 << 20))
    assert len(header) == codec.header_size("") == 192
    assert codec.header_size("x") == codec.header_size("x" * 64) == 256


@pytest.mark.parametrize("change", [{10: 9}, {192: 0xFF}])
def test_a_name_that_is_none_fails_its_check(change: dict[int, int]) -> None:
    """A kind that nobody knows, a tenant that is not text: right checksums do not help."""
    header = bytearray(codec.encode_header(IDENTITY_BYTES, ITEM))
    for at, value in change.items():
        header[at] = value
    covered = bytes(header[:184]) + bytes(header[192:])
    header[184:192] = xxhash.xxh3_64_intdigest(covered).to_bytes(8, "little")
    with pytest.raises(TransferFailed, match="a name that is none"):
        codec.decode_header(header)
