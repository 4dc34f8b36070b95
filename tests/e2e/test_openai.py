"""OpenAI's own client against the real engine, on a checkpoint that has text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from live_daemon import Live, live_daemon

SYSTEM = "You review code. " * 160
QUESTION = "Where could two threads race here?"


async def streamed(client: openai.AsyncOpenAI, messages: list[Any], **more: Any) -> tuple[str, Any]:
    """A streamed chat: its text, and the usage that came last."""
    stream = await client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, temperature=0, stream=True,
        stream_options={"include_usage": True}, **more,
    )  # fmt: skip
    text, usage, finish = "", None, None
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
        usage = chunk.usage or usage
    assert finish in ("length", "stop")
    assert usage is not None
    return text, usage


async def chat_twice(client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
    ]
    text, first = await streamed(client, messages)
    assert first.prompt_tokens_details.cached_tokens == 0
    assert 1 <= first.completion_tokens <= 12
    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And what first?"},
    ]
    again, second = await streamed(client, messages)
    cached = second.prompt_tokens_details.cached_tokens
    assert cached >= first.prompt_tokens // 256 * 256 > 0
    details = second.model_extra["cached_tokens_details"]
    assert sum(details.values()) == cached
    assert cached + second.model_extra["computed_tokens"] == second.prompt_tokens
    whole = await client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, temperature=0
    )
    assert whole.choices[0].message.content == again  # streamed or not, cached or not
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == second.prompt_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="tiny", messages=[])
    assert caught.value.code == "invalid_request"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="other", messages=messages)


async def test_a_chat_streams_and_its_second_turn_is_cached(tmp_path: Path, tiny: Path) -> None:
    """AsyncOpenAI reads a stream to its end, and cached_tokens on the second turn; so do errors."""
    async with live_daemon(tmp_path, tiny) as live:
        async with openai.AsyncOpenAI(
            base_url=f"{live.url}/v1", api_key="none", max_retries=0
        ) as client:
            assert [model.id for model in (await client.models.list()).data] == ["tiny"]
            await chat_twice(client)
        await in_a_session(live)


async def in_a_session(live: Live) -> None:
    """A client that names its session goes on in it: the words in common are not computed again."""
    async with openai.AsyncOpenAI(
        base_url=f"{live.url}/v1", api_key="none", default_headers={"X-Session-Id": "mine"}
    ) as client:
        messages: list[Any] = [{"role": "user", "content": SYSTEM + "Begin."}]
        text, first = await streamed(client, messages)
        session = await live.ok("GET", "/v1/sessions/mine")
        assert session["tokens"] == first.prompt_tokens + first.completion_tokens
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
        _, second = await streamed(client, messages)
        assert second.prompt_tokens_details.cached_tokens >= first.prompt_tokens // 256 * 256 > 0
