"""One long prefix, read once; several agents fork off it, ask at the same time, and are suspended.

    python examples/agent_fork.py FOLDER "What does it do?" "What would you test?"

Reads the Python files of FOLDER. TIERD_BASE_URL names the daemon.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from dsv4_tierd.daemon.client import AsyncTierd, Session


def repository(folder: Path, characters: int) -> str:
    """The folder's Python files, one after the other, cut at ``characters``."""
    files = sorted(folder.rglob("*.py"))
    text = "\n".join(f"# file: {f.relative_to(folder)}\n{f.read_text()}" for f in files)
    return text[:characters]


async def ask(tierd: AsyncTierd, base: Session, question: str, max_tokens: int) -> str:
    """Fork, stream one answer, and leave the fork suspended. Returns what to print."""
    async with tierd.fork(base) as agent:
        answer, usage = "", {}
        async for event in agent.stream(question, max_tokens=max_tokens):
            answer += event.text
            if event.result is not None:
                usage = event.result["usage"]
    cached = sum(usage["cached_tokens_details"].values())
    return (
        f"{agent.id}: {question}\n  {answer!r}\n  {cached:,} of {usage['prompt_tokens']:,} cached"
    )


async def main() -> None:
    """Read the command line and do it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--characters", type=int, default=400_000)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    async with AsyncTierd() as tierd:
        text = await asyncio.to_thread(repository, args.folder, args.characters)
        base = await tierd.sessions.create(messages=[{"role": "system", "content": text}])
        print(f"{base.id}: {base.tokens:,} tokens read")
        asked = (ask(tierd, base, question, args.max_tokens) for question in args.questions)
        for told in await asyncio.gather(*asked):
            print(told)


if __name__ == "__main__":
    asyncio.run(main())
