"""``dsv4-tierd demo``: the whole job on a tiny checkpoint, with a table and a proof at the end.

Loads the installed Python's own source code, forks four agents, streams their answers,
suspends them, kills the engine with SIGKILL, resumes, goes on; then asks each agent's questions
again on a second daemon with tiering off, which computes every prompt from its first token, and
compares every token.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsv4_tierd.daemon.cli_ask import complain
from dsv4_tierd.daemon.client import AsyncTierd, Session, StreamEvent
from dsv4_tierd.daemon.client_errors import TierdError
from dsv4_tierd.daemon.progress import Bars

QUESTIONS = (
    "Where could two threads race here? Name the function.",
    "Which function has the most branches, and how would you split it?",
    "List every exception that a caller must expect.",
    "Write a test for the least obvious behaviour in this code.",
)
SYSTEM = "You are a code reviewer. Below is a part of a repository.\n"
FOLLOW_UP = "And what would you change first?"
READY_S = 600.0
LOG_LINES = 3  # of a daemon that did not start: why
PAGE_TOKENS = 256
STOP_S = 60.0
INTERRUPTED = 130  # as shells count a Ctrl-C
TABLE_COLUMNS = 110


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """What the demo is asked to do. ``model`` None: the tiny checkpoint, made if need be."""

    tokens: int
    answer_tokens: int
    model: Path | None
    device: str
    keep: Path | None


@dataclass(slots=True)
class Step:
    """One row of the table. Bytes are the tiers' own gauges after the step."""

    name: str
    tokens: int = 0
    computed: int = 0
    device: int = 0
    host: int = 0
    store: int = 0
    seconds: float = 0.0
    bytes_by_tier: dict[str, float] = field(default_factory=dict)

    def count(self, usage: dict[str, Any]) -> None:
        tiers = usage["cached_tokens_details"]
        self.tokens += usage["prompt_tokens"] + usage["completion_tokens"]
        self.computed += usage["computed_tokens"]
        self.device += tiers["device"]
        self.host += tiers["host"]
        self.store += tiers["store"]


class DemoFailed(Exception):
    """Something that must not happen; the message says what."""


def tiny_checkpoint() -> Path:
    """The cached tiny checkpoint; made at the first call."""
    base = os.environ.get("DSV4_TIERD_CACHE") or os.environ.get("XDG_CACHE_HOME")
    cache = Path(base) if base else Path.home() / ".cache"
    folder = cache / "dsv4-tierd" / "tiny-seed0"
    if not (folder / "config.json").is_file():
        from dsv4_tierd.engine.model.checkpoint import make_checkpoint

        making = folder.with_name(f"tiny-making-{os.getpid()}")
        make_checkpoint(making, "tiny", 0)
        making.replace(folder)
    return folder


def source_code(characters: int) -> str:
    """Real text: the first ``characters`` of the standard library, modules in order of name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    pieces, size = [], 0
    for path in sorted(folder.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        pieces.append(f"# file: {path.name}\n{text}\n")
        size += len(text)
        if size >= characters:
            break
    return "".join(pieces)[:characters]


def _open_log(folder: Path) -> BinaryIO:
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / "daemon.log").open("ab")


@asynccontextmanager
async def daemon(
    plan: DemoPlan, model: Path, folder: Path, tiering: str
) -> AsyncIterator[AsyncTierd]:
    """A daemon as its own process on a free port; stopped with SIGTERM."""
    store = f"disk:{folder / 'store'}" if tiering != "off" else "none"
    arguments = {
        "--model": str(model), "--port": "0", "--device": plan.device, "--tiering": tiering,
        "--store": store, "--state-dir": str(folder / "state"), "--device-budget": "256MiB",
        "--host-budget": "2GiB", "--store-budget": "4GiB", "--drain-s": "5",
    }  # fmt: skip
    flat = [part for pair in arguments.items() for part in pair]
    log = _open_log(folder)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from dsv4_tierd.daemon.cli import main; main()", "serve", "--json",
        *flat, stdout=asyncio.subprocess.PIPE, stderr=log,
    )  # fmt: skip
    log.close()
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), READY_S)
        if not line:
            said = (folder / "daemon.log").read_text(errors="replace").splitlines()[-LOG_LINES:]
            raise DemoFailed("\n".join(["the daemon did not start:", *said]))
        async with AsyncTierd(json.loads(line)["url"], max_retries=8) as tierd:
            yield tierd
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, then patience, then SIGKILL; a second interruption ends the patience."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()
    except asyncio.CancelledError:
        process.kill()
        raise


@dataclass(frozen=True, slots=True)
class Answer:
    """What must be the same with tiering off. ``prompt_tokens`` are all that it was drawn from."""

    prompt_tokens: int
    token_ids: tuple[int, ...]


class Story:
    """The demo's steps on the tiered daemon; ``answers``: each agent's, in order."""

    def __init__(self, plan: DemoPlan, tierd: AsyncTierd, text: str, bars: Bars) -> None:
        self.plan = plan
        self.tierd = tierd
        self.text = text
        self.bars = bars
        self.steps: list[Step] = []
        self.answers: list[list[Answer]] = [[] for _ in QUESTIONS]

    @asynccontextmanager
    async def step(self, name: str) -> AsyncIterator[Step]:
        step = Step(name)
        started_s = time.monotonic()
        yield step
        step.seconds = time.monotonic() - started_s
        step.bytes_by_tier = bytes_by_tier(await self.tierd.call("GET", "/v1/tiers"))
        self.steps.append(step)

    async def load(self) -> Session:
        """The long prefix, computed once, with a bar."""
        async with self.step("load source code") as step:
            base = await self.tierd.sessions.create()
            messages = [{"role": "system", "content": SYSTEM + self.text}]
            operation = await self.tierd.call(
                "POST", f"/v1/sessions/{base.id}/append", {"messages": messages}
            )
            bar = self.bars.start("load source code")
            while operation["state"] == "running":
                await asyncio.sleep(0.2)
                operation = await self.tierd.operations.get(operation["id"])
                if done := operation["progress"]:
                    bar.to(done["done"], done["total"])
            if operation["error"]:
                raise DemoFailed(operation["error"]["message"])
            usage = operation["result"]["usage"]
            bar.to(usage["prompt_tokens"], usage["prompt_tokens"])
            step.count(usage)
            return await base.refresh()

    async def ask(self, agents: list[Session], prompts: tuple[str, ...], name: str) -> None:
        """All agents at once, streamed."""
        async with self.step(name) as step:
            bar = self.bars.start(name, len(agents) * self.plan.answer_tokens)

            def follow(event: StreamEvent) -> None:
                bar.advance(len(event.token_ids))

            answered = await asyncio.gather(
                *(
                    stream(agent, {"prompt": prompt}, self.plan.answer_tokens, follow)
                    for agent, prompt in zip(agents, prompts, strict=True)
                )
            )
            for known, (answer, usage) in zip(self.answers, answered, strict=True):
                known.append(answer)
                step.count(usage)

    async def run(self) -> None:
        base = await self.load()
        async with self.step("fork four agents"):
            agents = [await base.fork() for _ in QUESTIONS]
        await self.ask(agents, QUESTIONS, "four answers at once")
        async with self.step("suspend to the store"):
            await asyncio.gather(*(agent.suspend("store") for agent in [*agents, base]))
        await self.kill()
        async with self.step("resume") as step:
            before = await self.pages_loaded()
            await asyncio.gather(*(agent.resume() for agent in agents))
            step.store = PAGE_TOKENS * int(await self.pages_loaded() - before)
        await self.ask(agents, (FOLLOW_UP,) * len(agents), "go on")

    async def pages_loaded(self) -> float:
        """Pages that came from the store so far; agents share them, so each is loaded once."""
        counters = (await self.tierd.call("GET", "/v1/tiers"))["counters"]
        return float(counters.get("store_pages_loaded", 0.0))

    async def kill(self) -> None:
        async with self.step("kill -9 and restart"):
            pid = (await self.tierd.ready())["engine_pid"]
            os.kill(pid, signal.SIGKILL)
            await self.tierd.wait_ready(READY_S, not_pid=pid)
            found = await self.tierd.ready()
            if found["engine_restarts"] != 1:
                raise DemoFailed(f"the engine was restarted {found['engine_restarts']} times")


def bytes_by_tier(tiers: dict[str, Any]) -> dict[str, float]:
    """Bytes in use now: pages by their pool's share, the store's own count."""
    pools = {pool["name"]: pool["bytes"] for pool in tiers["pools"]}
    gauges = tiers["gauges"]

    def used(tier: str, pool: str) -> float:
        capacity = gauges[f"{tier}_pages_capacity"]
        share: float = (capacity - gauges[f"{tier}_pages_free"]) / max(1.0, capacity)
        return float(pools[pool]) * share

    return {
        "device": used("device", "device.pages"),
        "host": used("host", "host.mirror"),
        "store": float(gauges.get("store_bytes", 0.0)),
    }


async def stream(
    agent: Session, words: dict[str, Any], max_tokens: int, follow: Callable[[StreamEvent], None]
) -> tuple[Answer, dict[str, Any]]:
    """One greedy answer of exactly ``max_tokens``, and its usage."""
    ids: list[int] = []
    async for event in agent.stream(**words, max_tokens=max_tokens, ignore_eos=True):
        ids += event.token_ids
        follow(event)
        if event.result is not None:
            usage = event.result["usage"]
            return Answer(usage["prompt_tokens"], tuple(ids)), usage
    raise DemoFailed("a stream ended without its end")


async def prove(plan: DemoPlan, tierd: AsyncTierd, text: str, story: Story, bars: Bars) -> bool:
    """Whether each agent's turns, every prompt computed from its first token, come out the same.

    One computation a turn: none can be left out, as each turn's answer has its own prompt.
    """
    turns = [answer for answers in story.answers for answer in answers]
    bar = bars.start("the same without tiering", sum(turn.prompt_tokens for turn in turns))
    done = 0

    def follow(event: StreamEvent) -> None:
        bar.to(done + event.done)

    for question, answers in zip(QUESTIONS, story.answers, strict=True):
        agent = await tierd.sessions.create()
        system = {"role": "system", "content": SYSTEM + text}
        first: dict[str, Any] = {"messages": [system, {"role": "user", "content": question}]}
        for words, expected in zip((first, {"prompt": FOLLOW_UP}), answers, strict=True):
            found, usage = await stream(agent, words, plan.answer_tokens, follow)
            if usage["computed_tokens"] != usage["prompt_tokens"]:
                raise DemoFailed("the run without tiering reused something: it proves nothing")
            if found != expected:
                return False
            done += found.prompt_tokens
            bar.to(done)
    return True


def table_of(steps: list[Step]) -> Table:
    """step, tokens, computed, reused by tier, seconds, MiB by tier."""
    tiers = "device/host/store"
    table = Table("step", "tokens", "computed", f"reused\n{tiers}", "seconds", f"MiB\n{tiers}")
    for column in table.columns[1:]:
        column.justify = "right"
    for step in steps:
        reused = "/".join(f"{n:,}" for n in (step.device, step.host, step.store))
        sizes = (step.bytes_by_tier[tier] / (1 << 20) for tier in tiers.split("/"))
        table.add_row(
            step.name,
            f"{step.tokens:,}",
            f"{step.computed:,}",
            reused,
            f"{step.seconds:.2f}",
            "/".join(f"{size:,.0f}" for size in sizes),
        )
    return table


def verdict_of(equal: bool) -> Text:
    """The last line."""
    if equal:
        return Text("Every token equals the run with --tiering off.", "green")
    return Text("The answers differ from the run with --tiering off.", "red")


async def run_demo(plan: DemoPlan, *, as_json: bool, console: Console) -> int:
    """Exit code 0: every token was equal; 1: not, or the demo could not run; 130: interrupted.

    Whatever ends it, the daemons that it started end first.
    """
    said = Console(stderr=True) if as_json else console
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with ExitStack() as stack:
        if plan.keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dsv4-tierd-")))
        else:
            folder = plan.keep
        bars = Bars(said)
        try:
            with bars.shown():
                steps, equal = await _tell(plan, folder, bars)
        except (DemoFailed, TierdError, TimeoutError, OSError) as error:
            complain(said, error or "too slow: given up")
            return 1
        except asyncio.CancelledError:
            said.print("interrupted; the daemons have ended", highlight=False)
            return INTERRUPTED
    if as_json:
        found = {"equal": equal, "steps": [asdict(step) for step in steps]}
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        wide = console if console.is_terminal else Console(width=TABLE_COLUMNS)
        wide.print(table_of(steps))
        console.print(verdict_of(equal))
    return 0 if equal else 1


async def _tell(plan: DemoPlan, folder: Path, bars: Bars) -> tuple[list[Step], bool]:
    model = plan.model
    if model is None:
        model = await asyncio.to_thread(tiny_checkpoint)
    async with daemon(plan, model, folder / "tiered", "hisparse") as tierd:
        text = await _enough_text(tierd, plan.tokens)
        story = Story(plan, tierd, text, bars)
        await story.run()
    async with daemon(plan, model, folder / "off", "off") as tierd:
        equal = await prove(plan, tierd, text, story, bars)
    return story.steps, equal


async def _enough_text(tierd: AsyncTierd, tokens: int) -> str:
    """Source code of at least ``tokens`` tokens."""
    characters = tokens * 7 // 2  # fewer than code has a token, so little is loaded in vain
    while True:
        text = source_code(characters)
        found = await tierd.call("POST", "/tokenize", {"text": text})
        if found["count"] >= tokens:
            return text
        if characters > 64 * tokens:
            raise DemoFailed("this Python's standard library has too little source code")
        characters = characters * 9 // 8
