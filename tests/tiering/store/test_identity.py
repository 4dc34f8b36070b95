"""The identity: the same everywhere, different when anything that matters differs."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace

import pytest

from dsv4_tierd.tiering.store.identity import StoreIdentity, differences
from store_cases import IDENTITY


def test_known_answer() -> None:
    """The digest of these fields is this one, on every machine and in every release."""
    assert (
        IDENTITY.digest.hex() == "ec9a1e4eac2f921061ce493332b76cddbe26b7610993cda990fa13a93db5c328"
    )


@pytest.mark.parametrize("name", [field.name for field in fields(StoreIdentity)])
def test_every_field_counts(name: str) -> None:
    """Changing any one field changes the digest, and the difference is named."""
    old = getattr(IDENTITY, name)
    other = replace(IDENTITY, **{name: old + 1 if isinstance(old, int) else f"{old}x"})
    assert other.digest != IDENTITY.digest
    [difference] = differences(other.as_dict(), IDENTITY.as_dict())
    assert difference.startswith(f"{name}: ")


def test_fields_cannot_run_into_each_other() -> None:
    """Moving a character from one field to the next is another identity."""
    one = replace(IDENTITY, row_format="ab", key_format="c")
    two = replace(IDENTITY, row_format="a", key_format="bc")
    assert one.digest != two.digest


def test_a_field_of_a_later_release_is_named() -> None:
    """A folder written by a release with one more field says which."""
    there = IDENTITY.as_dict() | {"rope_scaling": "yarn"}
    assert differences(there, IDENTITY.as_dict()) == ["rope_scaling: 'yarn' there, None here"]


def test_equal_in_processes_with_different_hash_seeds() -> None:
    """Names do not depend on Python's per-process string hashing."""
    code = (
        "from store_cases import *; from dsv4_tierd.tiering.store import codec;"
        "print(IDENTITY.digest.hex(), codec.encode(IDENTITY.digest, page('a', 'b', 'salt')).hex())"
    )
    path = os.pathsep.join(sys.path)
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1
