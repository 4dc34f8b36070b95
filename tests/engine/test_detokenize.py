"""Text as it streams: whole characters, and never a part of a stop string."""

from __future__ import annotations

import random
from functools import cache

import pytest

from byte_tokenizer import byte_tokenizer as tokenizer
from dsv4_tierd.engine.detokenize import TextStream

ALPHABETS = (
    "abc XYZ.,!?\n\t0123456789",
    "éüßøñçŁžαβγδжЩъ",
    "漢字かなカナ한국어中文，。！",
    "😀🚀👩‍👩‍👧‍👦🏳️‍🌈🇩🇪👍🏽",
    "𝒜𝔘𐍈𒀀\u200d\u0301\u202e\ufeff",
)


def random_text(draw: random.Random, length: int) -> str:
    return "".join(draw.choice(draw.choice(ALPHABETS)) for _ in range(length))


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def byte_ids(data: bytes) -> list[int]:
    """One token a byte, as a model may choose to write any character."""
    single = {v: k for k, v in _byte_letters().items()}
    return [tokenizer().token_to_id(single[byte]) for byte in data]


@cache
def _byte_letters() -> dict[str, int]:
    """Byte-level BPE's letter for each byte: itself if printable, else from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in printable]
    return letters | {chr(256 + i): byte for i, byte in enumerate(rest)}


def stream(ids: list[int], *stop: str) -> tuple[list[str], TextStream]:
    """Every piece, the last one from ``finish``."""
    text = TextStream(tokenizer(), stop)
    pieces = []
    for token in ids:
        pieces.append(text.push(token))
        if text.stopped_by is not None:
            break
    return [*pieces, text.finish()], text


@pytest.mark.parametrize("seed", range(40))
def test_token_by_token_is_the_whole(seed: int) -> None:
    """Any text, token by token or byte by byte: the pieces join to it, each of whole characters."""
    draw = random.Random(seed)
    text = random_text(draw, draw.randint(1, 120))
    for ids in (ids_of(text), byte_ids(text.encode())):
        pieces, _ = stream(ids)
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_with_its_last_byte() -> None:
    """Nothing is said of a character until it is whole; then it is said at once."""
    pieces, _ = stream(byte_ids("é😀x".encode()))
    assert pieces == ["", "é", "", "", "", "😀", "x", ""]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_an_unfinished_character_ends_as_replacement(cut: int) -> None:
    """An answer that ends inside a character ends with U+FFFD, as decoding it all would."""
    ids = ids_of("so ") + byte_ids("😀".encode()[:cut])
    pieces, _ = stream(ids)
    assert "".join(pieces) == tokenizer().decode(ids) == "so \ufffd"


def test_bytes_that_are_no_text() -> None:
    """Random tokens and bytes, as a random model draws them, give what decoding them gives."""
    draw = random.Random(1)
    for ids in (
        [draw.randrange(128_000) for _ in range(2000)],
        byte_ids(draw.randbytes(2000)),
        byte_ids(b"\xff\xfe\x80abc\xc3\xa9\xc3"),
    ):
        pieces, _ = stream(ids)
        assert "".join(pieces) == tokenizer().decode(ids, skip_special_tokens=False)


def test_special_tokens_are_spelled_out() -> None:
    """A chat parser looks for special tokens in the text, so they stand where they were drawn."""
    eos = tokenizer().token_to_id("<｜end▁of▁sentence｜>")
    bos = tokenizer().token_to_id("<｜begin▁of▁sentence｜>")
    ids = [bos, *ids_of("ab"), eos, *byte_ids("é".encode()), *ids_of("z")]
    pieces, _ = stream(ids)
    assert "".join(pieces) == "<｜begin▁of▁sentence｜>ab<｜end▁of▁sentence｜>éz"


@pytest.mark.parametrize("seed", range(30))
def test_stop_strings_across_tokens(seed: int) -> None:
    """Wherever tokens are cut, text ends before the stop string, and no part of it is ever sent."""
    draw = random.Random(seed)
    text = random_text(draw, 60)
    begin = draw.randrange(40)
    stop = text[begin : begin + draw.randint(1, 12)]
    expected = text[: text.index(stop)]
    for ids in (ids_of(text), byte_ids(text.encode())):
        pieces, found = stream(ids, "never there", stop)
        assert found.stopped_by == stop
        assert "".join(pieces) == expected
        assert found.push(ids[0]) == found.finish() == ""


def test_what_might_be_a_stop_string_is_held() -> None:
    """An end that could still become a stop string waits; as soon as it cannot, it is sent."""
    text = TextStream(tokenizer(), ("END.", "Ü"))
    pushed = [text.push(token) for token in byte_ids(b"aENENDEND!")]
    assert pushed == ["a", "", "", "EN", "", "", "END", "", "", "END!"]
    assert text.stopped_by is None
    assert [text.push(token) for token in byte_ids(b"xEND")] == ["x", "", "", ""]
    assert text.finish() == "END"


def test_the_first_stop_string_wins() -> None:
    """Of several stop strings the one that begins first counts, and of those the shortest."""
    pieces, found = stream(byte_ids(b"one two three"), "three", "two", "two three", "tw")
    assert "".join(pieces) == "one " and found.stopped_by == "tw"


def test_empty_stop_strings_stop_nothing() -> None:
    """An empty stop string is none."""
    pieces, found = stream(ids_of("all of it"), "")
    assert "".join(pieces) == "all of it" and found.stopped_by is None


def test_without_a_tokenizer_there_is_no_text() -> None:
    """Token ids alone: nothing is decoded, and nothing stops."""
    text = TextStream(None, ("a",))
    assert [text.push(token) for token in range(300)] == [""] * 300
    assert text.finish() == "" and text.stopped_by is None
