"""Where everything lies: the pools, each session's bytes by tier, and how much of a text is cached.

    python examples/inspect_tiers.py [--text FILE]

TIERD_BASE_URL names the daemon.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from dsv4_tierd.daemon.client import AsyncTierd
from dsv4_tierd.tiering.units import format_bytes

TIERS = ("device", "host", "store")


async def pools(tierd: AsyncTierd) -> None:
    """Bytes of every pool, and what became of the pages of each tier."""
    found = await tierd.call("GET", "/v1/tiers")
    for pool in found["pools"]:
        print(f"{pool['name']:<24}{format_bytes(pool['bytes']):>12}")
    gauges = found["gauges"]
    for tier in ("device", "host"):
        states = ("free", "cached", "running", "idle_tails")
        counts = ", ".join(f"{gauges[f'{tier}_pages_{state}']:.0f} {state}" for state in states)
        print(f"{tier} pages: {counts}")


async def sessions(tierd: AsyncTierd) -> None:
    """One line a session. Shared pages count for each session that has them."""
    async for session in tierd.sessions.list():
        sizes = dict.fromkeys(TIERS, 0)
        for cell in await session.residency():
            sizes[cell["tier"]] += cell["bytes"]
        lies = ", ".join(f"{format_bytes(size)} {tier}" for tier, size in sizes.items())
        print(f"{session.id}: {session.state}, {session.tokens:,} tokens, {lies}")


async def main() -> None:
    """Read the command line and do it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path)
    args = parser.parse_args()
    async with AsyncTierd() as tierd:
        await pools(tierd)
        await sessions(tierd)
        if args.text is not None:
            text = await asyncio.to_thread(args.text.read_text)
            found = await tierd.prefixes.lookup(text=text)
            print(f"{args.text}: {found['matched_tokens']:,} of {found['prompt_tokens']:,} cached")


if __name__ == "__main__":
    asyncio.run(main())
