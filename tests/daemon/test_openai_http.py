"""OpenAI's routes, by OpenAI's own client, stream or not, in sessions or without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from daemon_harness import Daemon, expected, read_events, run_daemon
from fake_worker import text_of

USER: list[Any] = [{"role": "user", "content": "Find the race in the scheduler."}]


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=daemon.url + "/v1", api_key="none", max_retries=0
    ) as made:
        yield made


async def chat_ids(daemon: Daemon, messages: list[Any]) -> list[int]:
    found = await daemon.ok("POST", "/tokenize", {"messages": messages})
    ids: list[int] = found["token_ids"]
    return ids


async def test_a_streamed_chat_and_its_cached_tokens(
    daemon: Daemon, client: openai.AsyncOpenAI
) -> None:
    """AsyncOpenAI streams a chat twice in one session and reads cached_tokens the second time."""
    ids = await chat_ids(daemon, USER)
    texts, usages = [], []
    for _ in range(2):
        stream = await client.chat.completions.create(
            model="fake",
            messages=USER,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"session_id": "agent-1"},
        )
        text, reasons = "", []
        async for chunk in stream:
            if chunk.usage is not None:
                usages.append(chunk.usage)
            for choice in chunk.choices:
                text += choice.delta.content or ""
                if choice.finish_reason:
                    reasons.append(choice.finish_reason)
        texts.append(text)
        assert reasons == ["length"]
    assert texts[0] == texts[1] == "".join(map(text_of, expected(ids, 8)))
    assert [u.prompt_tokens for u in usages] == [len(ids)] * 2
    details = usages[1].prompt_tokens_details
    assert details is not None
    assert details.cached_tokens == len(ids)
    assert usages[0].completion_tokens == 8


async def test_a_chat_in_one_answer_with_logprobs(
    daemon: Daemon, client: openai.AsyncOpenAI
) -> None:
    """A whole answer has text, usage by tier, DeepSeek's counts and logprobs."""
    ids = await chat_ids(daemon, USER)
    answer = await client.chat.completions.create(
        model="fake", messages=USER, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert choice.message.content == "".join(map(text_of, expected(ids, 3)))
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [len(p.top_logprobs) for p in choice.logprobs.content] == [2, 2, 2]
    assert answer.usage is not None
    found = answer.usage.model_dump()
    assert found["prompt_cache_miss_tokens"] == found["prompt_tokens"] == len(ids)
    assert found["cached_tokens_details"] == {"device": 0, "host": 0, "store": 0}
    assert len(daemon.service.sessions) == 0  # stateless: nothing is left


async def test_a_growing_chat_appends_only_the_difference(
    daemon: Daemon, client: openai.AsyncOpenAI
) -> None:
    """In a session the next turn keeps the common prefix; an edited history is rewound."""
    headers = {"X-Session-Id": "agent-2"}
    ids = await chat_ids(daemon, USER)
    await client.chat.completions.create(
        model="fake", messages=USER, max_tokens=4, temperature=0, extra_headers=headers
    )
    more = [*USER, {"role": "assistant", "content": "no"}, {"role": "user", "content": "Go on."}]
    answer = await client.chat.completions.create(
        model="fake", messages=more, max_tokens=4, temperature=0, extra_headers=headers
    )
    whole = await chat_ids(daemon, more)
    assert answer.choices[0].message.content == "".join(map(text_of, expected(whole, 4)))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == len(ids)
    session = await daemon.ok("GET", "/v1/sessions/agent-2")
    assert session["tokens"] == len(whole) + 4


@pytest.mark.parametrize("session", [None, "s"])
async def test_several_choices_by_forking(
    daemon: Daemon, client: openai.AsyncOpenAI, session: str | None
) -> None:
    """n choices share the prompt, differ by seed, and leave no session but the named one."""
    answer = await client.chat.completions.create(
        model="fake",
        messages=USER,
        max_tokens=5,
        n=3,
        seed=7,
        temperature=1.0,
        extra_body={} if session is None else {"session_id": session},
    )
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert len({c.message.content for c in answer.choices}) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 15
    await daemon.service.worker.refresh_stats(2)
    kept = 0 if session is None else 1
    assert daemon.service.worker.gauges()["sessions_open"] == kept
    stream = await client.chat.completions.create(
        model="fake", messages=USER, max_tokens=5, n=3, seed=7, temperature=1.0, stream=True
    )
    texts = ["", "", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in answer.choices]


async def test_thinking_is_parsed_apart(tmp_path: Path) -> None:
    """With thinking on, text before the end of thought is reasoning_content."""
    async with run_daemon(tmp_path) as daemon:
        body = {"messages": USER, "max_tokens": 3, "thinking": {"type": "enabled"}}
        answer = await daemon.ok("POST", "/v1/chat/completions", body)
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"]
        assert not message["content"]


async def test_plain_completions(daemon: Daemon, client: openai.AsyncOpenAI) -> None:
    """Text and ids, whole and streamed, give the same tokens."""
    ids = (await daemon.ok("POST", "/tokenize", {"prompt": "def main():"}))["tokens"]
    want = "".join(map(text_of, expected(ids, 6)))
    for prompt in ("def main():", ids):
        whole = await client.completions.create(
            model="fake", prompt=prompt, max_tokens=6, temperature=0, logprobs=1
        )
        assert whole.choices[0].text == want
        assert whole.choices[0].logprobs is not None
        assert len(whole.choices[0].logprobs.token_logprobs or []) == 6
        stream = await client.completions.create(
            model="fake", prompt=prompt, max_tokens=6, temperature=0, stream=True
        )
        assert "".join([c.choices[0].text async for c in stream]) == want


async def test_eos_ends_an_answer(tmp_path: Path) -> None:
    """EOS gives finish_reason stop, no text, and stands in the session."""
    async with run_daemon(tmp_path, "eos_at=3") as daemon:
        body = {"messages": USER, "max_tokens": 9, "session_id": "s", "temperature": 0}
        answer = await daemon.ok("POST", "/v1/chat/completions", body)
        assert answer["choices"][0]["finish_reason"] == "stop"
        ids = await chat_ids(daemon, USER)
        assert (await daemon.ok("GET", "/v1/sessions/s"))["tokens"] == len(ids) + 3
        events = await read_events(daemon, "/v1/chat/completions", body | {"stream": True})
        assert events[-1] == ("", "[DONE]")


async def test_models_tiers_lookup_metrics_version(daemon: Daemon) -> None:
    """The routes that only tell."""
    assert (await daemon.ok("GET", "/v1/models"))["data"][0]["id"] == "fake"
    tiers = await daemon.ok("GET", "/v1/tiers")
    assert {"name": "mirror", "bytes": 1 << 20} in tiers["pools"]
    found = await daemon.ok("POST", "/v1/prefixes/lookup", {"token_ids": [5] * 600})
    assert (found["prompt_tokens"], found["matched_tokens"]) == (600, 512)
    assert found["tiers"] == {"device": 0, "host": 512, "store": 0}
    assert (await daemon.ok("GET", "/version"))["encoding"].startswith("deepseek-recipe")
    assert (await daemon.ok("GET", "/ready"))["ready"]
    text = (await daemon.ok("POST", "/detokenize", {"token_ids": [128803, 33310]}))["text"]
    assert text == "<｜User｜>hello"
    await daemon.ok("POST", "/v1/completions", {"prompt": [5, 6], "max_tokens": 2})
    page = await (await daemon.http.get(daemon.url + "/metrics")).text()
    for line in (
        'tierd_sessions{state="idle"} 0.0',
        'tierd_pages{group="c4",tier="host"} 3.0',
        'tierd_prompt_tokens_total{source="computed"} 2.0',
        'tierd_requests_total{outcome="length"} 1.0',
        "tierd_steps_total 2.0",
        "tierd_engine_up 1.0",
    ):
        assert line in page, line
    names = [family.name for family in text_string_to_metric_families(page)]
    assert len(names) == len(set(names))  # a second one of a name makes a page unreadable


async def test_counters_never_go_down_over_an_engine_restart(daemon: Daemon) -> None:
    """A new engine counts from zero; what the daemon shows goes on."""
    await daemon.ok("POST", "/v1/completions", {"prompt": [5], "max_tokens": 4})
    await daemon.ok("GET", "/v1/tiers")
    worker = daemon.service.worker
    before = worker.counters()["steps"]
    assert before == 4
    import os
    import signal

    os.kill(worker.pid or 0, signal.SIGKILL)
    await daemon.until(lambda: worker.restarts == 1 and worker.state == "ready")
    assert worker.counters()["steps"] >= before
    await daemon.ok("POST", "/v1/completions", {"prompt": [5], "max_tokens": 1})
    await daemon.ok("GET", "/v1/tiers")
    assert worker.counters()["steps"] == before + 1


async def test_several_choices_need_no_more_room_than_one(daemon: Daemon) -> None:
    """A session is set to the request's words: what it held before is not counted beside them."""
    worker = daemon.service.worker
    assert worker.model is not None
    worker.model = msgspec.structs.replace(
        worker.model, context_length=100, model_context_length=100
    )
    body = {"prompt": [5] * 60, "max_tokens": 2, "session_id": "s"}
    for choices in (1, 1, 2):
        await daemon.ok("POST", "/v1/completions", body | {"n": choices})
    status, found, _ = await daemon.call("POST", "/v1/completions", body | {"max_tokens": 41})
    assert (status, found["error"]["code"]) == (400, "context_length_exceeded")


async def test_first_requests_at_once_meet_a_busy_session(daemon: Daemon) -> None:
    """One makes it; to the others it is no session that there is not."""
    body = {"prompt": [5, 6], "max_tokens": 2, "session_id": "s"}
    found = await asyncio.gather(*(daemon.call("POST", "/v1/completions", body) for _ in range(4)))
    assert {status for status, _, _ in found} == {200, 409}
    assert {answer["error"]["code"] for status, answer, _ in found if status == 409} == {
        "session_busy"
    }
