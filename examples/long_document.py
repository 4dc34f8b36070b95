"""A document too long to read twice: watch it being read, suspend it, ask about it another day.

    python examples/long_document.py read book.txt --id book
    python examples/long_document.py ask "Who is the narrator?" --id book

The second command may run after the daemon was restarted: the document comes from the store.
TIERD_BASE_URL names the daemon.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from dsv4_tierd.daemon.client import AsyncTierd
from dsv4_tierd.daemon.client_errors import TierdError


async def read(tierd: AsyncTierd, id: str, file: Path) -> None:
    """Append the file, show how far it is, and write the session to the store."""
    session = await tierd.sessions.create(id)
    body = {"text": await asyncio.to_thread(file.read_text)}
    operation = await tierd.call("POST", f"/v1/sessions/{id}/append", body)
    said = None
    while operation["state"] == "running":
        await asyncio.sleep(0.2)
        operation = await tierd.operations.get(operation["id"])
        if (progress := operation["progress"]) and progress != said:
            print(f"read {progress['done']:,} of {progress['total']:,} tokens")
            said = progress
    if operation["error"] is not None:
        raise SystemExit(operation["error"]["message"])
    if said and said["done"] < said["total"]:
        print(f"read {said['total']:,} of {said['total']:,} tokens")
    await session.suspend()
    print(f"{session.id}: {session.tokens:,} tokens, {session.state}")


async def ask(tierd: AsyncTierd, id: str, question: str, max_tokens: int) -> None:
    """Answer in a fork, so that the next question finds the document as it was."""
    document = await tierd.sessions.get(id)
    async with tierd.fork(document) as reader:
        async for event in reader.stream(question, max_tokens=max_tokens):
            print(event.text, end="", flush=True)
            if event.result is not None:
                usage = event.result["usage"]
    tiers = usage["cached_tokens_details"]
    found = ", ".join(f"{count:,} {tier}" for tier, count in tiers.items())
    print(f"\n{usage['prompt_tokens']:,} tokens: {found}, {usage['computed_tokens']:,} computed")


async def main() -> None:
    """Read the command line and do it."""
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    reading = verbs.add_parser("read")
    reading.add_argument("file", type=Path)
    asking = verbs.add_parser("ask")
    asking.add_argument("question")
    asking.add_argument("--max-tokens", type=int, default=64)
    for verb in (reading, asking):
        verb.add_argument("--id", default="document")
    args = parser.parse_args()
    async with AsyncTierd() as tierd:
        if args.verb == "read":
            await read(tierd, args.id, args.file)
        else:
            await ask(tierd, args.id, args.question, args.max_tokens)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except (TierdError, OSError) as error:
        raise SystemExit(str(error)) from None
