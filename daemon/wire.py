"""Bodies of our own routes, and what all routes check alike. Unknown fields are errors."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from dsv4_tierd.engine.messages import Done, Sampling, TokenLogprob, Usage
from dsv4_tierd.tiering.errors import InvalidRequest, InvalidTokenIds, TierError

STOPS_MAX = 16
STOP_CHARS_MAX = 256
LOGPROBS_MAX = 20
METADATA_BYTES_MAX = 16 << 10
METADATA_DEPTH_MAX = 32
TTL_S_MAX = 10 * 365 * 86_400.0


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of our own request bodies."""


class Input(Body):
    """New words for a session: at most one of the three."""

    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    token_ids: list[int] | None = None

    def given(self) -> list[str]:
        names = ("messages", "text", "token_ids")
        return [name for name in names if getattr(self, name) is not None]


class CreateSession(Input):
    id: str | None = None
    ttl: float | None = None
    cache_salt: str = ""
    pin: bool = False
    write_policy: Literal["through", "on_suspend", "never"] | None = None
    metadata: dict[str, Any] = {}


class PatchSession(Body):
    ttl: float | msgspec.UnsetType | None = msgspec.UNSET
    metadata: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class Append(Input):
    cache_salt: str | None = None
    expected_tokens: int | None = None


class Generate(Input):
    cache_salt: str | None = None
    expected_tokens: int | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | bool | None = None
    stream: bool = False
    thinking: bool = False


class Fork(Body):
    id: str | None = None
    at: int | None = None
    cache_salt: str | None = None


class Suspend(Body):
    """``tier`` None: the store, or host memory where nothing of the session is to be stored."""

    tier: Literal["host", "store"] | None = None
    cache_salt: str | None = None


class Resume(Body):
    cache_salt: str | None = None


class Rewind(Body):
    to: int
    cache_salt: str | None = None


class Pin(Body):
    tier: Literal["host"] = "host"
    ttl: float | None = None
    cache_salt: str | None = None


class Lookup(Input):
    cache_salt: str | None = None


class Purge(Body):
    cache_salt: str


class Explain(Body):
    a: Input
    b: Input


class Tokenize(Body):
    text: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None


class Detokenize(Body):
    token_ids: list[int] | None = None
    tokens: list[int] | None = None
    model: str | None = None


B = TypeVar("B")


def decode(data: bytes, kind: type[B]) -> B:
    """Parse a JSON body; an empty one is ``{}``. Raises InvalidRequest."""
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(error, kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error


def from_query(query: Mapping[str, str], kind: type[B]) -> B:
    """The same fields from a query string, for bodies that are bytes. Raises InvalidRequest."""
    try:
        return msgspec.convert(dict(query), kind, strict=False)
    except msgspec.ValidationError as error:
        raise _refusal(error, kind) from error


def _refusal(error: msgspec.ValidationError, kind: Any) -> InvalidRequest:
    """What is wrong with which field, and where it is one of some words, which they are."""
    message, param = str(error), _param(str(error))
    if message.startswith("Invalid enum value") and param in (hints := get_type_hints(kind)):
        message += f": it is one of {', '.join(_words_of(hints[param]))}"
    return InvalidRequest(message, param=param)


def _words_of(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [word for option in get_args(hint) for word in _words_of(option)]


def _param(message: str) -> str | None:
    start = message.find("`$.")
    return message[start + 3 :].split("`", maxsplit=1)[0] if start >= 0 else None


def pack_ids(ids: Sequence[int], vocab_size: int) -> bytes:
    """int32 LE bytes. Raises InvalidTokenIds."""
    try:
        array = np.asarray(ids, dtype=np.int64)
    except (OverflowError, ValueError, TypeError) as error:
        raise InvalidTokenIds("token ids are whole numbers", param="token_ids") from error
    return check_ids(array, vocab_size)


def bytes_ids(data: bytes, vocab_size: int) -> bytes:
    """Ids that came as int32 LE bytes. Raises InvalidTokenIds."""
    if len(data) % 4:
        raise InvalidTokenIds("the body is not whole int32 numbers", param="token_ids")
    return check_ids(np.frombuffer(data, dtype="<i4"), vocab_size)


def check_ids(array: np.ndarray[Any, np.dtype[Any]], vocab_size: int) -> bytes:
    """int32 LE bytes of ids that are all in the vocabulary. Raises InvalidTokenIds."""
    if array.size and (array.min() < 0 or array.max() >= vocab_size):
        first = int(np.flatnonzero((array < 0) | (array >= vocab_size))[0])
        raise InvalidTokenIds(
            f"token_ids[{first}] is {int(array[first])}: ids are 0 to {vocab_size - 1}",
            param=f"token_ids[{first}]",
        )
    return array.astype("<i4", copy=False).tobytes()


def check_max_tokens(value: int | None, name: str = "max_tokens") -> int | None:
    """Raises InvalidRequest unless None or positive."""
    if value is not None and not 1 <= value <= 1 << 30:
        raise InvalidRequest(f"{name} is at least 1", param=name)
    return value


def check_ttl(value: float | None) -> float | None:
    """Raises InvalidRequest unless None or a positive number of seconds."""
    if value is not None and not (math.isfinite(value) and 0 < value <= TTL_S_MAX):
        raise InvalidRequest("ttl is a positive number of seconds", param="ttl")
    return value


def check_metadata(value: dict[str, Any]) -> dict[str, Any]:
    """Raises InvalidRequest when it is too large or too deep, or the journal cannot hold it."""
    if _depth(value) > METADATA_DEPTH_MAX:
        raise InvalidRequest(
            f"metadata is nested at most {METADATA_DEPTH_MAX} deep", param="metadata"
        )
    if len(msgspec.json.encode(value)) > METADATA_BYTES_MAX:
        raise InvalidRequest(f"metadata is at most {METADATA_BYTES_MAX} bytes", param="metadata")
    try:
        msgspec.msgpack.encode(value)
    except OverflowError as error:
        raise InvalidRequest(
            "a whole number in metadata is of at most 64 bits", param="metadata"
        ) from error
    return value


def _depth(value: Any) -> int:
    """Levels of objects and lists; 0 for a plain value."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [
            inner for item in level for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return depth


def sampling(
    *,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    logprobs: int | bool | None = None,
) -> Sampling:
    """Checked sampling settings; an unsaid seed is drawn. Raises InvalidRequest."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    best = int(logprobs) if logprobs is not None and logprobs is not False else None
    checks = (
        ("temperature", math.isfinite(temperature) and 0 <= temperature <= 100, "0 to 100"),
        ("top_p", math.isfinite(top_p) and 0 < top_p <= 1, "more than 0, at most 1"),
        ("top_k", 0 <= top_k <= 1 << 20, "0 (off) or more"),
        ("seed", seed is None or -(1 << 63) <= seed < 1 << 63, "a 64-bit number"),
        ("stop", len(stops) <= STOPS_MAX, f"at most {STOPS_MAX} strings"),
        ("stop", all(0 < len(s) <= STOP_CHARS_MAX for s in stops), "non-empty and short strings"),
        ("stop_token_ids", all(0 <= i < 1 << 31 for i in stop_token_ids), "token ids"),
        ("logprobs", best is None or 0 <= best <= LOGPROBS_MAX, f"0 to {LOGPROBS_MAX}"),
    )
    for name, passed, rule in checks:
        if not passed:
            raise InvalidRequest(f"{name} must be {rule}", param=name)
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=(seed if seed is not None else random.getrandbits(31)) & ((1 << 63) - 1),
        stop=stops,
        stop_token_ids=tuple(stop_token_ids),
        ignore_eos=ignore_eos,
        logprobs=best,
    )


def usage_json(usage: Usage) -> dict[str, Any]:
    """OpenAI's, DeepSeek's and our names for the same counts."""
    cached = usage.device_tokens + usage.host_tokens + usage.store_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": cached,
            "cache_write_tokens": usage.computed_tokens,
        },
        "prompt_cache_hit_tokens": cached,
        "prompt_cache_miss_tokens": usage.prompt_tokens - cached,
        "cached_tokens_details": {
            "device": usage.device_tokens,
            "host": usage.host_tokens,
            "store": usage.store_tokens,
        },
        "computed_tokens": usage.computed_tokens,
        "replayed_tokens": usage.replayed_tokens,
    }


def logprob_json(value: TokenLogprob) -> dict[str, Any]:
    """A drawn token's log probability in our own form."""
    return {
        "token_id": value.token_id,
        "logprob": value.logprob,
        "top": [{"token_id": i, "logprob": p} for i, p in value.top],
    }


def done_json(done: Done, session_id: str, tokens: int) -> dict[str, Any]:
    """What both the streamed and the whole answer of ``generate`` end with."""
    return {
        "finish_reason": done.finish_reason,
        "stop_sequence": done.stop_sequence,
        "session_id": session_id,
        "tokens": tokens,
        "usage": usage_json(done.usage),
    }


def error_json(error: TierError) -> dict[str, Any]:
    """OpenAI's error envelope."""
    kind = "invalid_request_error" if error.status < 429 else "server_error"
    return {
        "error": {
            "message": error.message,
            "type": "rate_limit_error" if error.status == 429 else kind,
            "param": error.param,
            "code": error.code,
        }
    }
