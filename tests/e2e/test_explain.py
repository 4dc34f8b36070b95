"""An agent's volatile lines on the real engine: the diagnosis names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from live_daemon import Live, live_daemon

CODE = "def f(x):\n    return x + 1\n\n" * 120


def asked(header: str, question: str, mark: int | None = None) -> list[dict[str, Any]]:
    """A chat with a header line first; ``mark``: which message has a cache_control."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": f"{header}\n{CODE}"}]},
        {"role": "user", "content": [{"type": "text", "text": question}]},
    ]
    if mark is not None:
        messages[mark]["content"][0]["cache_control"] = {"type": "ephemeral"}
    return messages


async def diagnosed(live: Live, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 1, "prompt_cache_diagnostics": True, **more}
    found: dict[str, Any] = await live.ok("POST", "/v1/chat/completions", body)
    return found["prompt_cache_diagnostics"]  # type: ignore[no-any-return]


async def test_the_diagnosis_names_the_line_that_changed(tmp_path: Path, tiny: Path) -> None:
    """First nothing is known; the same again is a hit; a new header line is what broke the next."""
    async with live_daemon(tmp_path, tiny) as live:
        first = await diagnosed(live, asked("billing: cch=aaa;", "Why?"))
        assert (first["type"], first["reason"]) == ("cache_miss", "nothing_known")
        again = await diagnosed(live, asked("billing: cch=aaa;", "What else?"))
        assert (again["type"], again["reason"]) == ("cache_hit", None)
        assert again["cached_tokens"] >= 768
        changed = await diagnosed(live, asked("billing: cch=bbb;", "What else?"))
        assert (changed["type"], changed["reason"]) == ("cache_miss", "prefix_changed")
        difference = changed["difference"]
        assert difference["message"] == 0
        assert difference["line"] == 1
        assert difference["line_a"].endswith("billing: cch=aaa;")
        assert difference["line_b"].endswith("billing: cch=bbb;")
        moved = await diagnosed(live, asked("billing: cch=bbb;", "What else?", mark=0))
        assert (moved["type"], moved["reason"]) == ("cache_hit", None)
        moved = await diagnosed(live, asked("billing: cch=bbb;", "What else?", mark=1))
        assert moved["cached_tokens"] == again["cached_tokens"]
        other = await diagnosed(live, asked("billing: cch=bbb;", "Why?"), cache_salt="other")
        assert (other["type"], other["reason"]) == ("cache_miss", "nothing_known")
        await in_a_stream(live)
        await explained(live)


async def in_a_stream(live: Live) -> None:
    """The last chunk has it, with the usage or without."""
    body = {"messages": asked("billing: cch=ccc;", "Why?"), "max_tokens": 2, "stream": True,
            "prompt_cache_diagnostics": True}  # fmt: skip
    async with live.http.post(live.url + "/v1/chat/completions", json=body) as response:
        text = await response.text()
    assert text.count('"reason":"prefix_changed"') == 1
    assert text.rstrip().endswith("data: [DONE]")
    status, found, _ = await live.call(
        "POST", "/v1/chat/completions", body | {"prompt_cache_diagnostics": "yes"}
    )
    assert (status, found["error"]["code"]) == (400, "invalid_request")


async def explained(live: Live) -> None:
    """Two prompts side by side: messages, text or ids; a moved mark is no difference."""
    a, b = asked("date: Monday", "Why?", mark=0), asked("date: Monday", "Why?", mark=1)
    path = "/v1/prefixes/explain"
    same = await live.ok("POST", path, {"a": {"messages": a}, "b": {"messages": b}})
    assert same["same"] is True
    assert same["difference"] is None
    assert same["common_tokens"] == same["tokens"]["a"] == same["tokens"]["b"]
    c = asked("date: Monday", "Who?")
    found = await live.ok("POST", path, {"a": {"messages": a}, "b": {"messages": c}})
    assert found["same"] is False
    assert found["difference"]["message"] == 1
    assert found["reusable_tokens"] == found["common_tokens"] // 256 * 256 >= 768
    found = await live.ok("POST", path, {"a": {"text": "one\ntwo"}, "b": {"text": "one\ntoo"}})
    assert found["difference"]["line"] == 2
    assert found["difference"]["byte"] == len("one\nt")
    assert found["difference"]["message"] is None
    computed = (await live.counters())["tokens_computed"]
    for body in (
        {},
        {"a": {}, "b": {}},
        {"a": {"text": "x"}},
        {"a": {"txt": 1}, "b": {"text": "x"}},
    ):
        status, error, _ = await live.call("POST", path, body)
        assert (status, error["error"]["code"]) == (400, "invalid_request")
    assert (await live.counters())["tokens_computed"] == computed


async def test_ids_alone_can_be_explained(tmp_path: Path, micro: Path) -> None:
    """A checkpoint without text: the token is named, lines are null."""
    async with live_daemon(tmp_path, micro) as live:
        body = {"a": {"token_ids": [5, 6, 7]}, "b": {"token_ids": [5, 6, 8, 9]}}
        found = await live.ok("POST", "/v1/prefixes/explain", body)
        assert found["tokens"] == {"a": 3, "b": 4}
        assert found["difference"]["common_tokens"] == 2
        assert (found["difference"]["token_a"], found["difference"]["token_b"]) == (7, 8)
        assert found["difference"]["line"] is None
