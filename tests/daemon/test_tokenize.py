"""Segments of text, joined, are what the whole text is."""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

import deepseek_recipe as recipe
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_tierd.daemon import tokenize as tokenize_module
from dsv4_tierd.daemon.encoding import encode_chat, encode_messages
from dsv4_tierd.daemon.ledger import Turn
from dsv4_tierd.daemon.routes.openai import token_name
from dsv4_tierd.daemon.tokenize import Piece, TextCodec, TextService
from dsv4_tierd.engine.vocabulary import find_tokenizer
from dsv4_tierd.tiering.errors import InvalidRequest, UnsupportedCombination


@functools.cache
def source() -> str:
    file = find_tokenizer("/nowhere", 129_280)
    assert file is not None
    return file.read_text(encoding="utf-8")


@functools.cache
def codec() -> TextCodec:
    return TextCodec(source())


@functools.cache
def whole_tokenizer() -> tokenizers.Tokenizer:
    table = json.loads(source())
    table["added_tokens"] = []
    return tokenizers.Tokenizer.from_str(json.dumps(table))


def whole(text: str) -> list[int]:
    return list(whole_tokenizer().encode(text, add_special_tokens=False).ids)


def ids(data: bytes) -> list[int]:
    return [int(i) for i in np.frombuffer(data, "<i4")]


LINES = st.lists(
    st.sampled_from(
        ["def f(x):", "    return 12345", "", "\t\t", "  ", "日本語123", "\r", " é\u2028",
        "#!?\n\n",
         "x" * 30, "... ", "\u3000", "A", "'", "\x1c", "9", "--\n", "\n ", "B\u0301"]
    ),
    min_size=1,
    max_size=60,
)  # fmt: skip


@given(
    parts=LINES,
    joins=st.lists(st.sampled_from(["\n", "", "\n\n", " \n"]), min_size=60, max_size=60),
)
@settings(max_examples=150)
def test_cut_segments_equal_the_whole(parts: list[str], joins: list[str]) -> None:
    """Cutting text at the tokenizer's safe places never changes a token id."""
    text = "".join(p + j for p, j in zip(parts, joins, strict=False))
    fresh = codec()
    assert fresh._cuttable
    fresh._cache.clear()
    old, tokenize_module.SEGMENT_CHARS = tokenize_module.SEGMENT_CHARS, 4
    try:
        assert ids(fresh.encode([Piece(text)])) == whole(text)
    finally:
        tokenize_module.SEGMENT_CHARS = old


def test_real_source_code_is_cut_and_equal() -> None:
    """A large source file is cut into many segments, and its ids are those of the whole."""
    text = Path(argparse.__file__).read_text()
    assert len(codec()._segments(text)) > 4
    assert ids(codec().encode([Piece(text)])) == whole(text)


def test_a_longer_prompt_tokenises_only_its_new_text() -> None:
    """The second turn finds every earlier segment in the cache."""
    fresh = TextCodec(source())
    text = Path(argparse.__file__).read_text()
    fresh.encode([Piece(text)])
    before = fresh.misses
    assert before >= 3
    fresh.encode([Piece(text + "\nclass More:\n    pass\n")])
    assert fresh.misses - before <= 2  # the last segment, longer now, and perhaps cut


def test_the_cache_is_bounded() -> None:
    """Many segments never hold more than the budget."""
    small = TextCodec(source(), cache_bytes_max=5_000)
    for n in range(200):
        small.encode([Piece(f"number {n} and some words")])
    assert small._cache_bytes <= 5_000
    assert 0 < len(small._cache) < 200


def test_special_spellings_in_plain_text_stay_text() -> None:
    """A role's spelling inside a message gives no special id."""
    found = ids(codec().encode([Piece("<｜User｜><think>")]))
    assert len(found) > 2
    assert not {128803, 128821} & set(found)
    assert ids(codec().encode([Piece("<｜User｜>", special=True)])) == [128803]


def test_the_bytes_of_tokens_make_the_text() -> None:
    """Also where a character is of several tokens, each of which is no text by itself."""
    text = "𓀀 e\u0301 é😀ᛃ\n\x00<｜User｜>"
    found = ids(codec().encode([Piece(text), Piece("<｜User｜>", special=True)]))
    assert "\ufffd" in codec().decode(found[:1])
    assert b"".join(map(codec().token_bytes, found)) == f"{text}<｜User｜>".encode()
    assert codec().token_bytes(1 << 30) == b""
    assert token_name(b"\xc3\xa9") == "é"
    assert token_name(b"\xc3") == r"bytes:\xc3"


CHAT = [
    {"role": "system", "content": "Be <｜Assistant｜> brief.\n"},
    {"role": "user", "content": "Hi </think>\n\nthere 12345"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "  more?"},
]


@pytest.mark.parametrize("thinking", [False, True])
def test_chat_ids_equal_the_official_encoder(thinking: bool) -> None:
    """Ids by segments equal those of the official package's own encode."""
    official = recipe.DeepseekV4Encoding().with_tokenizer(recipe.Tokenizer.from_str(source()))
    chat = encode_chat({"messages": CHAT}, thinking_default=thinking)
    assert ids(codec().encode(chat.pieces)) == official.encode(chat.request.conversation)
    assert chat.thinking is thinking


def test_messages_one_by_one_equal_the_whole_chat() -> None:
    """Appending a chat in two parts makes the prompt that one call makes."""
    first, turn = encode_messages(CHAT[:2], turn=Turn.NONE, empty=True, ends_with_eos=False)
    assert turn is Turn.ASKED
    rest, turn = encode_messages(CHAT[2:], turn=turn, empty=False, ends_with_eos=False)
    whole_chat = encode_chat({"messages": CHAT}, thinking_default=False).pieces
    joined = codec().encode(first) + codec().encode(rest)
    assert joined == codec().encode(whole_chat[:-2])


def test_an_answer_cut_short_is_closed_before_the_next_message() -> None:
    """After a cut answer the next message is preceded by EOS, after a whole one not."""
    more = [{"role": "user", "content": "go on"}]
    cut, _ = encode_messages(more, turn=Turn.ANSWERING, empty=False, ends_with_eos=False)
    done, _ = encode_messages(more, turn=Turn.ANSWERING, empty=False, ends_with_eos=True)
    assert cut[1:] == done
    assert ids(codec().encode(cut))[0] == 1


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "martian", "content": "x"}],
        [{"role": "user"}],
        ["x"],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}],
        [{"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}]}],
    ],
)
def test_bad_messages_are_refused(messages: list[object]) -> None:
    """Messages that the encoding cannot take are the caller's fault."""
    with pytest.raises(InvalidRequest):
        encode_chat({"messages": messages}, thinking_default=False)


async def test_without_a_tokenizer_text_is_refused_clearly() -> None:
    """A checkpoint with neither tokenizer nor DeepSeek's vocabulary takes ids only."""
    assert find_tokenizer("/nowhere", 1000) is None
    service = TextService(None)
    with pytest.raises(UnsupportedCombination, match="token_ids"):
        await service.encode_text("hello")
    service.close()
