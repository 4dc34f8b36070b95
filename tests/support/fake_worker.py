"""A worker that speaks the real protocol and computes nothing: tokens are a fixed function.

The token after a session's tokens is ``next_token`` of all of them, so any slip in what the
daemon journals, forks, rewinds or reopens shows as a wrong token. ``model`` holds switches,
comma-separated: ``delay=0.01`` per token, ``load_s=1``, ``prefill_s=1``, ``eos_at=N``, ``flood``,
``double``, ``dead``, ``stall``, ``refuse=code``, ``nopins``, ``vocab=N``, ``context=N``.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import msgspec

from dsv4_tierd.engine.config import EngineConfig
from dsv4_tierd.engine.messages import (
    Ack,
    AskResidency,
    AskResumePoints,
    AskStats,
    Audit,
    Cancel,
    CloseSession,
    Credit,
    Done,
    Drain,
    Failed,
    ForkSession,
    LoadProgress,
    LookupPrefix,
    Matched,
    OpenSession,
    PinPrefix,
    PinSession,
    Progress,
    PurgeSalt,
    Ready,
    ResumeSession,
    RewindSession,
    Stats,
    Submit,
    SuspendSession,
    TendStore,
    TierBytes,
    TokenLogprob,
    Tokens,
    ToWorker,
    Usage,
    Warmed,
    WarmPrefix,
)

VOCAB = 129_280
EOS = 1
CONTEXT = 1 << 20


def next_token(ids: list[int], seed: int = 0) -> int:
    """Depends on the length and the last 64 tokens, which depend on those before them."""
    near = ids[-64:]
    data = struct.pack(f"<{len(near) + 1}i", len(ids), *near) + bytes([seed % 251])
    return 300 + int.from_bytes(hashlib.blake2b(data).digest()[:4], "little") % 10_000


def text_of(token: int) -> str:
    return f"[{token}]"


class Session:
    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.computed = 0
        self.pinned = False


class FakeWorker:
    def __init__(self, sock: socket.socket, config: EngineConfig) -> None:
        self.sock = sock
        self.config = config
        self.switches: dict[str, str] = dict(
            [*part.split("="), "1"][:2] for part in Path(config.model).name.split(",") if part
        )
        self.sessions: dict[str, Session] = {}
        self.running: dict[str, asyncio.Task[None]] = {}
        self.cancelled: set[str] = set()
        self.credit: dict[str, int] = {}
        self.credited = asyncio.Event()
        self.cached: set[bytes] = set()
        self.tails: dict[bytes, str] = {}
        self.counters: dict[str, float] = {"steps": 0.0, "audits": 0.0, "requests": 0.0}

    async def send(self, message: Any) -> None:
        payload = msgspec.msgpack.encode(message)
        self.writer.write(struct.pack("<I", len(payload)) + payload)
        await self.writer.drain()

    async def run(self) -> None:
        self.reader, self.writer = await asyncio.open_unix_connection(sock=self.sock)
        if "dead" in self.switches:
            sys.exit(3)
        load_s = float(self.switches.get("load_s", 0))
        for done in range(4):
            await self.send(LoadProgress(stage="weights", done=done, total=4))
            await asyncio.sleep(load_s / 4)
        await self.send(
            Ready(
                model_id="fake",
                vocab_size=int(self.switches.get("vocab", VOCAB)),
                context_length=int(self.switches.get("context", CONTEXT)),
                model_context_length=int(self.switches.get("model_context", CONTEXT)),
                has_tokenizer=False,
                eos_token_ids=(EOS,),
                identity="fake",
                plan=(("mirror", 1 << 20), ("hot_set", 1 << 16)),
            )
        )
        decoder = msgspec.msgpack.Decoder(ToWorker)
        while True:
            try:
                (length,) = struct.unpack("<I", await self.reader.readexactly(4))
                message = decoder.decode(await self.reader.readexactly(length))
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            await self.handle(message)

    async def handle(self, m: Any) -> None:
        match m:
            case OpenSession():
                assert m.session_id not in self.sessions, "opened twice"
                self.sessions[m.session_id] = Session(unpack(m.token_ids))
            case Submit():
                task = asyncio.create_task(self.guarded(m))
                self.running[m.request_id] = task
            case Credit():
                if m.request_id in self.credit:
                    self.credit[m.request_id] += m.tokens
                    self.credited.set()
            case Cancel():
                self.cancelled.add(m.request_id)
                self.credited.set()
            case AskStats():
                if "stall" not in self.switches or self.counters["steps"] < 1:
                    await self.send(
                        Ack(
                            op_id=m.op_id,
                            stats=Stats(
                                gauges={
                                    "sessions_open": float(len(self.sessions)),
                                    "requests_running": float(len(self.running)),
                                    'pages{group="c4",tier="host"}': 3.0,
                                },
                                counters=dict(self.counters),
                            ),
                        )
                    )
            case _:
                await self.send(self.answer(m))

    def answer(self, m: Any) -> Ack:
        session = self.sessions.get(getattr(m, "session_id", ""))
        match m:
            case ForkSession():
                source = self.sessions[m.source_id]
                at = len(source.ids) if m.at is None else m.at
                assert at <= len(source.ids), "fork past the end"
                copy = Session(source.ids[:at])
                copy.computed = min(at, source.computed)
                self.sessions[m.session_id] = copy
            case RewindSession():
                assert session is not None
                del session.ids[m.to :]
                session.computed = min(session.computed, m.to)
            case CloseSession():
                assert session is not None
                del self.sessions[m.session_id]
                self.counters["closed"] = self.counters.get("closed", 0) + 1
                if m.drop_from is not None:
                    self.counters["drop_from_last"] = float(m.drop_from)
            case SuspendSession():
                if m.tier == "store" and self.config.store == "none":
                    return Ack(op_id=m.op_id, code="unsupported_combination", message="no store")
                stored = len(session.ids) if session is not None and m.tier == "store" else None
                key = hashlib.sha256(m.session_id.encode()).digest()
                return Ack(op_id=m.op_id, tail_key=key, stored_tokens=stored)
            case PinSession():
                assert session is not None
                if "nopins" in self.switches and m.pinned:
                    return Ack(op_id=m.op_id, code="pin_budget_exhausted", message="no pins left")
                session.pinned = m.pinned
            case AskResumePoints():
                assert session is not None
                return Ack(op_id=m.op_id, positions=tuple(range(256, len(session.ids) + 1, 256)))
            case AskResidency():
                assert session is not None
                return Ack(
                    op_id=m.op_id,
                    residency=(
                        TierBytes(group="c4", tier="host", tokens=len(session.ids), bytes=4096),
                    ),
                )
            case Audit():
                self.counters["audits"] += 1
            case ResumeSession() | Drain():
                pass
            case _:
                return self.answer_of_tiers(m)
        return Ack(op_id=m.op_id)

    def answer_of_tiers(self, m: Any) -> Ack:
        """Of words and stores, without a session."""
        match m:
            case LookupPrefix():
                n = len(m.token_ids) // 4
                return Ack(
                    op_id=m.op_id,
                    matched=Matched(
                        matched_tokens=n // 256 * 256,
                        reusable_tokens=n // 256 * 256,
                        device_tokens=0,
                        host_tokens=n // 256 * 256,
                        store_tokens=0,
                    ),
                )
            case WarmPrefix():
                n = len(m.token_ids) // 4 // 256 * 256
                return Ack(op_id=m.op_id, warmed=Warmed(host_tokens=n, loaded_tokens=n // 2))
            case PinPrefix():
                n = len(m.token_ids) // 4 // 256 * 256
                return Ack(op_id=m.op_id, stored_tokens=n)
            case PurgeSalt():
                return Ack(op_id=m.op_id, removed=7)
            case TendStore(verb="verify"):
                bad = ["page 00ff: checksum"] if self.config.model == "rotten" else []
                return Ack(op_id=m.op_id, tended={"objects": 9, "bytes_read": 4096, "bad": bad})
            case TendStore():
                sizes = {"bytes_before": 4096, "bytes_after": 1024, "segments_compacted": 1}
                return Ack(op_id=m.op_id, tended=sizes)
        raise AssertionError(f"no answer to {m}")

    async def guarded(self, m: Submit) -> None:
        try:
            await self.generate(m)
        except AssertionError as error:
            await self.send(
                Failed(request_id=m.request_id, code="internal_error", message=str(error))
            )
        finally:
            self.running.pop(m.request_id, None)
            self.credit.pop(m.request_id, None)

    async def generate(self, m: Submit) -> None:
        session = self.sessions[m.session_id]
        if code := self.switches.get("refuse"):
            await self.send(
                Failed(request_id=m.request_id, code=code, message="refused", retry_after_s=2.0)
            )
            return
        if m.expected_tokens is not None:
            assert m.expected_tokens == len(session.ids), (
                f"the daemon thinks {m.expected_tokens}, the worker has {len(session.ids)}"
            )
        session.ids += unpack(m.append_ids)
        prompt = len(session.ids)
        self.credit[m.request_id] = m.credit
        await self.prefill(m.request_id)
        reused, session.computed = session.computed, prompt
        reason = await self.decode(m, session) if m.max_tokens else "stop"
        if m.request_id in self.cancelled:
            reason = "cancelled"
            self.counters["cancelled"] = self.counters.get("cancelled", 0) + 1
        if m.ephemeral:
            self.sessions.pop(m.session_id, None)
        done = Done(
            request_id=m.request_id,
            finish_reason=reason,  # type: ignore[arg-type]
            usage=Usage(
                prompt_tokens=prompt,
                completion_tokens=len(session.ids) - prompt,
                device_tokens=0,
                host_tokens=reused,
                store_tokens=0,
                computed_tokens=prompt - reused,
            ),
        )
        await self.send(done)
        if "double" in self.switches:
            await self.send(Tokens(request_id=m.request_id, token_ids=(5,), text="late"))
            await self.send(done)

    async def prefill(self, request_id: str) -> None:
        prefill_s = float(self.switches.get("prefill_s", 0))
        for part in range(4 if prefill_s else 0):
            await self.send(Progress(request_id=request_id, done=part, total=4))
            await asyncio.sleep(prefill_s / 4)
            if request_id in self.cancelled:
                return

    async def decode(self, m: Submit, session: Session) -> str:
        delay = float(self.switches.get("delay", 0))
        for drawn in range(1, m.max_tokens + 1):
            self.counters["steps"] += 1
            await asyncio.sleep(delay)
            await self.wait_for_credit(m.request_id)
            if m.request_id in self.cancelled:
                break
            token = next_token(session.ids, m.sampling.seed if m.sampling.temperature else 0)
            if self.switches.get("eos_at") == str(drawn):
                token = EOS
            session.ids.append(token)
            session.computed = len(session.ids) - 1
            self.credit[m.request_id] -= 1
            await self.send_token(m, token)
            if token == EOS and not m.sampling.ignore_eos:
                return "stop"
        return "length"

    async def wait_for_credit(self, request_id: str) -> None:
        while self.credit[request_id] <= 0 and "flood" not in self.switches:
            if request_id in self.cancelled:
                return
            self.counters["parked"] = self.counters.get("parked", 0) + 1
            self.credited.clear()
            await self.credited.wait()

    async def send_token(self, m: Submit, token: int) -> None:
        logprobs: tuple[TokenLogprob, ...] = ()
        if m.sampling.logprobs is not None:
            best = ((token, -0.5), (400, -1.5))
            logprobs = (TokenLogprob(token_id=token, logprob=-0.5, top=best),)
        text = "" if token == EOS else text_of(token)
        await self.send(
            Tokens(request_id=m.request_id, token_ids=(token,), text=text, logprobs=logprobs)
        )


def unpack(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket-fd", type=int, required=True)
    args = parser.parse_args()
    sock = socket.socket(fileno=args.socket_fd)
    try:
        config = read_config(sock)
    except EOFError:
        sys.exit(0)
    asyncio.run(FakeWorker(sock, config).run())


def read_config(sock: socket.socket) -> EngineConfig:
    """The first frame, as in ``engine.worker``, which loads torch."""
    header = sock.recv(4, socket.MSG_WAITALL)
    if len(header) < 4:
        raise EOFError
    return EngineConfig.from_json(sock.recv(struct.unpack("<I", header)[0], socket.MSG_WAITALL))


if __name__ == "__main__":
    main()
