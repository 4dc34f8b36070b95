"""Tokens to block names: known answers, equal everywhere, and forks that never leak."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from dsv4_tierd.tiering.blocks import BLOCK_TOKENS, Transcript, block_hash, chain_root

ROOT = chain_root(bytes(range(32)), "tenant")
TOKENS = np.arange(600, dtype=np.int32)
KNOWN = {
    "root": "b9e3c438d3118b526aac715e1df01892779f83dd0b02810ba62a9f4122411fbf",
    "block 0": "36e92dfb4e45362f11c256962e94c7a15ec3dbcd9745ec848e49a32b080979b5",
    "block 1": "df4c3a250c5dbe991a99decaec5af66aa18cf15f422dc0d0525ded788eb4f634",
}


def test_names_are_known_answers() -> None:
    """The same identity, salt and tokens give these names, now and in later versions."""
    transcript = Transcript(ROOT, TOKENS)
    assert ROOT.hex() == KNOWN["root"]
    assert [key.hex() for key in transcript.hashes] == [KNOWN["block 0"], KNOWN["block 1"]]


def test_a_name_is_the_chained_hash_of_little_endian_tokens() -> None:
    """hash[i] = BLAKE3(hash[i-1] || 256 int32 LE), by the plainest code there is."""
    parent = ROOT
    for i, key in enumerate(Transcript(ROOT, TOKENS).hashes):
        block = TOKENS[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS].astype("<i4").tobytes()
        parent = blake3(parent + block).digest()
        assert key == parent == block_hash(parent_of(i), block)


def parent_of(block: int) -> bytes:
    """The hash before a block of TOKENS."""
    return Transcript(ROOT, TOKENS).hashes[block - 1] if block else ROOT


def test_names_do_not_depend_on_the_process() -> None:
    """Two processes with different PYTHONHASHSEED compute the same names."""
    code = (
        "import numpy as np; from dsv4_tierd.tiering.blocks import Transcript, chain_root;"
        "root = chain_root(bytes(range(32)), 'tenant');"
        "print(Transcript(root, np.arange(600, dtype=np.int32)).hashes[-1].hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "271828")
    }
    assert seen == {KNOWN["block 1"]}


@pytest.mark.parametrize(
    ("identity", "salt"),
    [(bytes(range(32)), ""), (bytes(range(32)), "tenant2"), (bytes(32), "tenant")],
)
def test_another_identity_or_salt_shares_no_name(identity: bytes, salt: str) -> None:
    """Changing the identity or the salt changes every block's name."""
    other = Transcript(chain_root(identity, salt), TOKENS).hashes
    assert not set(other) & set(Transcript(ROOT, TOKENS).hashes)


def test_one_token_changes_its_block_and_all_after() -> None:
    """Blocks before the change keep their names."""
    changed = np.tile(TOKENS[:256], 4)
    names = Transcript(ROOT, changed.copy()).hashes[:]
    changed[300] += 1
    others = Transcript(ROOT, changed).hashes
    assert others[0] == names[0]
    assert not set(others[1:]) & set(names)


def test_equal_blocks_at_other_places_have_other_names() -> None:
    """A name chains its whole prefix."""
    assert len(set(Transcript(ROOT, np.tile(TOKENS[:256], 4)).hashes)) == 4


def test_a_fork_copies_no_token_until_one_side_writes() -> None:
    """Both sides see one buffer; the first write moves the writer away from it."""
    source = Transcript(ROOT, TOKENS)
    twin = source.fork()
    assert np.shares_memory(source.tokens, twin.tokens)
    twin.append(np.array([7], np.int32))
    assert not np.shares_memory(source.tokens, twin.tokens)


def test_what_is_written_after_a_cut_never_shows_in_the_fork() -> None:
    """Truncate then append, on either side, leaves the other side's tokens and names alone."""
    for writes_source in (True, False):
        source = Transcript(ROOT, TOKENS)
        twin = source.fork()
        before = source.hashes[:]
        writer, other = (source, twin) if writes_source else (twin, source)
        writer.truncate(100)
        writer.append(np.full(500, 3, np.int32))
        assert other.tokens.tolist() == TOKENS.tolist()
        assert other.hashes == before
        assert writer.hashes == Transcript(ROOT, writer.tokens.copy()).hashes != before


ACTIONS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["append", "truncate", "fork"]),
        st.integers(0, 700),
    ),
    max_size=20,
)


@given(actions=ACTIONS)
def test_any_history_equals_lists(actions: list[tuple[int, str, int]]) -> None:
    """Transcripts and names equal those of plain lists through any appends, cuts and forks."""
    family = [(Transcript(ROOT, TOKENS[:300]), TOKENS[:300].tolist())]
    for serial, (pick, action, number) in enumerate(actions):
        at = pick % len(family)
        transcript, plain = family[at]
        if action == "append":
            new = [serial] * number
            transcript.append(np.array(new, np.int32))
            plain += new
        elif action == "truncate":
            transcript.truncate(min(number, len(plain)))
            del plain[number:]
        else:
            cut = min(number, len(plain))
            family.append((transcript.fork(cut), plain[:cut]))
        if number % 2:
            assert len(transcript.hashes) == len(plain) // BLOCK_TOKENS
    for transcript, plain in family:
        assert transcript.tokens.tolist() == plain
        assert transcript.hashes == Transcript(ROOT, np.array(plain, np.int32)).hashes
