"""Every example does what it says, against a live daemon."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

from live_daemon import ENVIRON, Live, live_daemon

EXAMPLES = Path(__file__).parents[2] / "examples"


async def run(live: Live, name: str, *arguments: str, code: int = 0) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLES / name), *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env=ENVIRON | {"TIERD_BASE_URL": live.url},
    )  # fmt: skip
    try:
        out, _ = await asyncio.wait_for(process.communicate(), 90)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = out.decode(errors="replace")
    assert process.returncode == code, text
    return text


async def test_the_examples_work(tmp_path: Path, tiny: Path) -> None:
    """Agents fork, a document is read once and asked after a restart, chats find their words."""
    book = tmp_path / "book.txt"
    book.write_text("".join(f"Chapter {n}. It was a day like {n - 1}.\n" for n in range(150)))
    async with live_daemon(tmp_path, tiny) as live:
        limit = ("--max-tokens", "4")
        told = await run(live, "agent_fork.py", str(EXAMPLES), "What?", "Why?", *limit)
        read = int(re.search(r": ([\d,]+) tokens read", told)[1].replace(",", ""))
        assert read > 1000
        cached = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) of [\d,]+ cached", told)]
        assert len(cached) == 2
        assert min(cached) >= read - 1
        told = await run(live, "long_document.py", "read", str(book), "--id", "book")
        assert re.search(r"read [\d,]+ of [\d,]+ tokens", told)
        assert "suspended" in told
        lines = re.findall(r"read .* tokens", told)
        assert len(lines) == len(set(lines))
        told = await run(live, "long_document.py", "read", str(book), "--id", "book", code=1)
        assert (told.count("\n"), "book" in told) == (1, True)
        told = await run(live, "long_document.py", "ask", "Who?", "--id", "nobody", code=1)
        assert (told.count("\n"), "nobody" in told) == (1, True)
        told = await run(live, "openai_chat.py", "One?", "Two?", *limit)
        first, second = (int(n) for n in re.findall(r"-- (\d+) of \d+ prompt tokens", told))
        assert first == 0
        assert second >= 256
        told = await run(live, "inspect_tiers.py", "--text", str(book))
        assert re.search(r"host\.mirror +[\d.]+ MiB", told)
        assert re.search(r"book: suspended, [\d,]+ tokens, .* store", told)
        matched, total = re.search(r"book\.txt: ([\d,]+) of ([\d,]+) cached", told).groups()
        assert int(matched.replace(",", "")) >= int(total.replace(",", "")) - 256
        code, _ = await live.stop()
        assert code == 0
        await live.start()
        told = await run(live, "long_document.py", "ask", "Who?", "--id", "book", *limit)
        tokens, stored = re.search(r"([\d,]+) tokens: .* ([\d,]+) store", told).groups()
        assert int(stored.replace(",", "")) >= 0.9 * int(tokens.replace(",", ""))
