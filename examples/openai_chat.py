"""OpenAI's own client, two turns: the second finds the first one's words in the cache.

    python examples/openai_chat.py "Explain HiSparse." "Shorter, please."

TIERD_BASE_URL names the daemon. Needs the ``openai`` package.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

import openai

SYSTEM = "You are a patient teacher. " * 60


async def turn(client: openai.AsyncOpenAI, model: str, messages: list[Any], limit: int) -> str:
    """Stream one answer, then say what was cached."""
    stream = await client.chat.completions.create(
        model=model, messages=messages, max_tokens=limit, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    text = ""
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            cached = chunk.usage.prompt_tokens_details.cached_tokens
            print(f"\n-- {cached} of {chunk.usage.prompt_tokens} prompt tokens were cached")
    return text


async def main() -> None:
    """Read the command line and do it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    url = os.environ.get("TIERD_BASE_URL", "http://127.0.0.1:8100")
    key = os.environ.get("TIERD_API_KEY", "none")
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
        model = (await client.models.list()).data[0].id
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        for question in args.questions:
            messages.append({"role": "user", "content": question})
            answer = await turn(client, model, messages, args.max_tokens)
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    asyncio.run(main())
