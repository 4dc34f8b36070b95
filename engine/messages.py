"""What the daemon and the engine worker say to one another.

Frames on a Unix socket: a 4-byte little-endian length, then one msgspec (MessagePack) message.
Token ids travel as little-endian int32 bytes. No torch here: the daemon imports this.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from dsv4_tierd.tiering.errors import TierError

FinishReason = Literal["stop", "length", "cancelled"]


class Message(msgspec.Struct, tag=True, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages; the class name is the tag."""


# ---------------------------------------------------------------- values
class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is drawn. temperature 0 is greedy; top_k 0 and top_p 1 are off.

    Noise is a function of (seed, position), so a run can be repeated.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; n: the chosen token's and the n best


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's prompt tokens came from; the four sum to ``prompt_tokens``.

    ``replayed_tokens`` were computed again without writing pages (bounded replay); they are
    part of the reused ones' price, not of the sum.
    """

    prompt_tokens: int
    completion_tokens: int
    device_tokens: int
    host_tokens: int
    store_tokens: int
    computed_tokens: int
    replayed_tokens: int = 0
    miss_reason: str | None = None


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log probability of a drawn token, and the best alternatives as (id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


# ---------------------------------------------------------------- daemon to worker
class OpenSession(Message, frozen=True):
    """Make a session known with its words so far; nothing is computed."""

    session_id: str
    salt: str = ""
    token_ids: bytes = b""
    tail_key: bytes | None = None  # of an Ack: a tail that suspend wrote to the store
    tail_borrowed: bool = False  # it is another session's, and stays when this one is deleted
    write_policy: Literal["through", "on_suspend", "never"] | None = None  # None: the store's own


class ForkSession(Message, frozen=True):
    """Copy a session at its current end, or at token ``at``. Answered by Ack."""

    op_id: int
    source_id: str
    session_id: str
    at: int | None = None


class Submit(Message, frozen=True):
    """Append tokens to a session and generate. max_tokens 0: only compute the prompt.

    An append alone leaves the last token pending, so that a later generate computes it.
    """

    request_id: str
    session_id: str
    append_ids: bytes = b""
    max_tokens: int = 0
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    expected_tokens: int | None = None  # session length before the append; else precondition_failed
    ephemeral: bool = False  # close the session when the request ends
    credit: int = 1 << 30  # tokens that may be sent before more Credit arrives


class Credit(Message, frozen=True):
    """The client has read: ``tokens`` more may be sent."""

    request_id: str
    tokens: int


class Cancel(Message, frozen=True):
    request_id: str


class SuspendSession(Message, frozen=True):
    """Write tail (and, for the store, all pages) down; Ack when durable.

    Pages that were given up before they were written are computed again from their words:
    ``stored_tokens`` says how many tokens the store has.
    """

    op_id: int
    session_id: str
    tier: Literal["host", "store"] = "store"


class ResumeSession(Message, frozen=True):
    """Bring pages and tail back before the next request. Ack when on the device."""

    op_id: int
    session_id: str


class RewindSession(Message, frozen=True):
    """Forget every token from ``to`` on."""

    op_id: int
    session_id: str
    to: int


class CloseSession(Message, frozen=True):
    """Forget a session.

    Blocks from ``drop_from`` on are no other session's: their cached and stored bytes go too,
    before the Ack. None: keep them cached.
    """

    op_id: int
    session_id: str
    drop_from: int | None = None


class PinSession(Message, frozen=True):
    """Promise that a session's pages stay in host memory (pin) or withdraw it (unpin)."""

    op_id: int
    session_id: str
    pinned: bool


class AskResidency(Message, frozen=True):
    op_id: int
    session_id: str


class AskResumePoints(Message, frozen=True):
    op_id: int
    session_id: str


class LookupPrefix(Message, frozen=True):
    """How much of these tokens is cached. Holds nothing. Ack with a Matched."""

    op_id: int
    token_ids: bytes
    salt: str = ""


class WarmPrefix(Message, frozen=True):
    """Bring what the store has of these tokens to host memory. Ack with a Warmed."""

    op_id: int
    token_ids: bytes
    salt: str = ""


class PinPrefix(Message, frozen=True):
    """Keep the stored blocks of these tokens in the store, or take that back.

    Ack with ``stored_tokens``: how many tokens those are.
    """

    op_id: int
    token_ids: bytes
    salt: str = ""
    pinned: bool = True


class TendStore(Message, frozen=True):
    """Check every stored byte, or remove what nobody can use. Ack with ``tended``."""

    op_id: int
    verb: Literal["verify", "gc"]


class PurgeSalt(Message, frozen=True):
    """Remove every cached and stored byte of one tenant. Ack with ``removed``: stored objects."""

    op_id: int
    salt: str


class AskStats(Message, frozen=True):
    op_id: int


class Audit(Message, frozen=True):
    """Run every invariant check; Ack carries the failure, if any."""

    op_id: int


class Drain(Message, frozen=True):
    """Finish nothing new; suspend every session to the store, then Ack."""

    op_id: int
    deadline_s: float


# ---------------------------------------------------------------- worker to daemon
class Ready(Message, frozen=True):
    """The worker serves. ``plan``: (name, bytes) of every pool.

    context_length: what the budgets hold of ``model_context_length``.
    """

    model_id: str
    vocab_size: int
    context_length: int
    model_context_length: int
    has_tokenizer: bool
    eos_token_ids: tuple[int, ...]
    identity: str
    plan: tuple[tuple[str, int], ...]


class LoadProgress(Message, frozen=True):
    stage: str
    done: int
    total: int


class Progress(Message, frozen=True):
    """A long prefill goes on: ``done`` of ``total`` tokens to compute."""

    request_id: str
    done: int
    total: int


class Tokens(Message, frozen=True):
    """Newly drawn tokens. ``text`` is whole UTF-8 characters, held back while undecided."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()


class Done(Message, frozen=True):
    """A request's end. ``text`` is what was still held back."""

    request_id: str
    finish_reason: FinishReason
    usage: Usage
    text: str = ""
    stop_sequence: str | None = None


class Failed(Message, frozen=True):
    """A request's end, with a code of tiering/errors.py."""

    request_id: str
    code: str
    message: str
    retry_after_s: float | None = None

    @classmethod
    def of(cls, request_id: str, error: TierError) -> Failed:
        """The end that ``error`` makes of a request."""
        return cls(
            request_id=request_id,
            code=error.code,
            message=error.message,
            retry_after_s=error.retry_after_s,
        )


class TierBytes(msgspec.Struct, frozen=True):
    """One cell of a session's residency: tokens and bytes of one group in one tier."""

    group: str
    tier: str
    tokens: int
    bytes: int


class Matched(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of a lookup: tokens whose pages are cached, and by tier."""

    matched_tokens: int
    reusable_tokens: int
    device_tokens: int
    host_tokens: int
    store_tokens: int


class Warmed(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of a warm-up: tokens in host memory now, and how many of them were read for it."""

    host_tokens: int
    loaded_tokens: int


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters, by metric name without the ``tierd_`` prefix."""

    gauges: dict[str, float]
    counters: dict[str, float]


class Ack(Message, frozen=True):
    """Answer to a message with an op_id; ``code`` names the error if it failed."""

    op_id: int
    code: str | None = None
    message: str = ""
    retry_after_s: float | None = None
    tail_key: bytes | None = None
    stored_tokens: int | None = None
    positions: tuple[int, ...] = ()
    residency: tuple[TierBytes, ...] = ()
    matched: Matched | None = None
    warmed: Warmed | None = None
    tended: dict[str, Any] | None = None
    removed: int | None = None
    stats: Stats | None = None

    @classmethod
    def refusing(cls, op_id: int, error: TierError) -> Ack:
        """The answer that ``error`` makes of an operation."""
        return cls(
            op_id=op_id,
            code=error.code,
            message=error.message,
            retry_after_s=error.retry_after_s,
        )


ToWorker = (
    OpenSession
    | ForkSession
    | Submit
    | Credit
    | Cancel
    | SuspendSession
    | ResumeSession
    | RewindSession
    | CloseSession
    | PinSession
    | AskResidency
    | AskResumePoints
    | LookupPrefix
    | WarmPrefix
    | PinPrefix
    | TendStore
    | PurgeSalt
    | AskStats
    | Audit
    | Drain
)
ToDaemon = Ready | LoadProgress | Progress | Tokens | Done | Failed | Ack

FRAME_BYTES_MAX = 64 << 20
