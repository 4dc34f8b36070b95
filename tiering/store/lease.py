"""Who owns a session when several daemons could: a lease that its holder renews, and a fence.

A lease is held until its time runs out or it is released. Each acquisition draws a larger
token; what an owner writes about the session goes through ``write``, which compares token and
holder in the same step. So a holder that was paused past its lease (a stopped process, a
suspended machine, a long pause of the network) is refused afterwards, whatever it believes.

Nobody's wall clock decides anything: the server counts a lease's time down, and a holder counts
its own on a clock that only goes forward, from before it asked.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from blake3 import blake3

from dsv4_tierd.tiering.errors import PreconditionFailed, SessionBusy, StoreUnavailable
from dsv4_tierd.tiering.store.redis_link import Link
from dsv4_tierd.tiering.store.redis_replies import (
    as_bytes,
    as_flag,
    as_int,
    as_list,
    as_number,
    as_text,
    as_value,
    bad,
)
from dsv4_tierd.tiering.store.redis_rows import PREFIX
from dsv4_tierd.tiering.store.resp import Argument, Reply

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_DRIFT = 0.02  # how much slower than the server's a holder's clock may run
_SEQUENCE_S = 86_400
RECORD_BYTES_MAX = 64 << 20  # what a read allows time for


class LeaseLost(PreconditionFailed):
    """Another holds it, or nobody: what was to be done was not done."""


class HeldByAnother(SessionBusy):
    """``owner`` holds it; unless renewed, for ``retry_after_s`` more."""

    def __init__(self, name: str, owner: str, left_s: float) -> None:
        super().__init__(f"{name} is held by {owner}", retry_after_s=left_s)
        self.owner = owner


@dataclass(frozen=True, slots=True)
class Lease:
    """A claim on a name. ``token``: larger than any before. ``until``: on ``clock()``, seconds."""

    name: str
    holder: str
    token: int
    ttl_s: float
    until: float

    @property
    def valid(self) -> bool:
        """Whether nobody else can hold it yet. True proves nothing a moment later: see write."""
        return clock() < self.until


class SessionLeases(Protocol):
    """Exclusive, renewable, fenced. Calls are thread-safe and block for a deadline at most.

    All raise StoreUnavailable: it is not known whether anything was done; doing it again is safe.
    """

    def acquire(self, name: str, holder: str, ttl_s: float) -> Lease:
        """Claim a name; one's own claim is renewed.

        ``holder`` names one process at a time: a later life may only use the name of one that is
        known to be dead. Raises HeldByAnother.
        """

    def renew(self, lease: Lease) -> Lease:
        """The same claim, for its whole time from now. Raises LeaseLost."""

    def release(self, lease: Lease) -> bool:
        """Give it up; False: it was not held any more, and nothing changed."""

    def write(self, lease: Lease, record: bytes, ttl_s: float | None = None) -> None:
        """Replace what is recorded under the name, for ``ttl_s`` seconds or for ever.

        Raises LeaseLost: nothing was written.
        """

    def read(self, name: str, bytes_max: int | None = None) -> bytes | None:
        """What is recorded under the name, or its first bytes; anyone may ask."""

    def forget(self, lease: Lease) -> None:
        """Remove the record and the lease. Raises LeaseLost."""

    def holder_of(self, name: str) -> str | None:
        """Who holds it now."""


def clock() -> float:
    """Seconds that only go forward, through a suspended machine too."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


# KEYS: lease sequence record. ARGV: claim of the asker ("token holder"), then what is said.

# ARGV: holder, ms, seconds. Returns token, or 0, the holder and the ms that are left.
_ACQUIRE = """#!lua
local held = redis.call('GET', KEYS[1])
if held then
  local token, owner = string.match(held, '^(%d+) (.*)$')
  if owner ~= ARGV[1] then return {'0', owner, redis.call('PTTL', KEYS[1])} end
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return {token}
end
local token = redis.call('INCR', KEYS[2])
if token == 1 then
  local time = redis.call('TIME')
  token = tonumber(time[1]) * 1000000 + tonumber(time[2])
end
token = string.format('%.0f', token)
redis.call('SET', KEYS[2], token, 'EX', ARGV[3])
redis.call('SET', KEYS[1], token .. ' ' .. ARGV[1], 'PX', ARGV[2])
return {token}
"""

# ARGV: claim, 'renew' ms | 'release' | 'write' record ms (0: for ever) | 'forget'. Returns 1, or 0.
_CHANGE = """#!lua
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == 'renew' then redis.call('PEXPIRE', KEYS[1], ARGV[3])
elseif ARGV[2] == 'write' then
  if ARGV[4] == '0' then redis.call('SET', KEYS[3], ARGV[3])
  else redis.call('SET', KEYS[3], ARGV[3], 'PX', ARGV[4]) end
else
  redis.call('DEL', KEYS[1])
  if ARGV[2] == 'forget' then redis.call('DEL', KEYS[3]) end
end
return 1
"""


class RedisLeases:
    """``SessionLeases`` on the servers of a ``RedisStore``: ``RedisLeases(store.link)``."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def acquire(self, name: str, holder: str, ttl_s: float) -> Lease:
        """See the protocol."""
        if ttl_s <= 0:
            raise ValueError(f"a lease needs time, got {ttl_s} s")
        begun = clock()
        ttl_ms = max(1, int(ttl_s * 1000))
        kept_s = int(ttl_s) + _SEQUENCE_S
        token, owner, left_ms = self._script(_acquired, _ACQUIRE, name, holder, ttl_ms, kept_s)
        if not token:
            raise HeldByAnother(name, owner, max(left_ms, 0) / 1000)
        return Lease(name, holder, token, ttl_s, begun + ttl_s * (1 - _DRIFT))

    def renew(self, lease: Lease) -> Lease:
        """See the protocol."""
        begun = clock()
        self._change(lease, "renew", max(1, int(lease.ttl_s * 1000)))
        return replace(lease, until=begun + lease.ttl_s * (1 - _DRIFT))

    def release(self, lease: Lease) -> bool:
        """See the protocol."""
        return self._script(as_flag, _CHANGE, lease.name, _claim(lease), "release")

    def write(self, lease: Lease, record: bytes, ttl_s: float | None = None) -> None:
        """See the protocol."""
        ttl_ms = 0 if ttl_s is None else max(1, int(ttl_s * 1000))
        self._change(lease, "write", record, ttl_ms)

    def read(self, name: str, bytes_max: int | None = None) -> bytes | None:
        """See the protocol."""
        key = _keys(name)[2]
        if bytes_max is not None:
            head = self._link.call(key, "GETRANGE", key, 0, bytes_max - 1, read=as_bytes)
            return head or None
        return self._link.call(key, "GET", key, read=as_value, size=RECORD_BYTES_MAX)

    def forget(self, lease: Lease) -> None:
        """See the protocol."""
        self._change(lease, "forget")

    def holder_of(self, name: str) -> str | None:
        """See the protocol."""
        key = _keys(name)[0]
        return self._link.call(key, "GET", key, read=_owner)

    def _change(self, lease: Lease, *what: Argument) -> None:
        if not self._script(as_flag, _CHANGE, lease.name, _claim(lease), *what):
            raise LeaseLost(f"{lease.holder} does not hold {lease.name} any more")

    def _script(self, read: Callable[[Reply], _T], script: str, name: str, *args: Argument) -> _T:
        keys = _keys(name)
        size = sum(len(arg) for arg in args if isinstance(arg, bytes))
        words = ["EVAL", script, len(keys), *keys, *args]
        return self._link.call(keys[0], *words, read=read, size=size)


def _keys(name: str) -> list[bytes]:
    """Lease, sequence and record, in one slot of a cluster."""
    tag = blake3(name.encode()).hexdigest(length=16)
    return [PREFIX + f"lease:{{{tag}}}:{what}".encode() for what in ("by", "seq", "record")]


def _acquired(reply: Reply) -> tuple[int, str, int]:
    """The token; or 0, who holds it, and for how many ms more."""
    first, *rest = as_list(reply) or [None]
    token = as_number(first)
    if len(rest) != (0 if token else 2):
        raise bad("a token, or who has it", reply)
    return (token, "", 0) if token else (0, as_text(rest[0]), as_int(rest[1]))


def _owner(reply: Reply) -> str | None:
    claim = as_value(reply)
    return None if claim is None else as_text(claim.partition(b" ")[2])


def _claim(lease: Lease) -> str:
    return f"{lease.token} {lease.holder}"


class LeaseKeeper:
    """Renews leases in the background, and says when one is lost.

    ``lost`` runs on the keeper's thread, once a lease, as soon as another may hold it: at the
    server's word, or when no renewal came through in time.
    """

    def __init__(self, leases: SessionLeases, lost: Callable[[Lease], None]) -> None:
        self._leases, self._lost = leases, lost
        self._held: dict[str, tuple[Lease, float]] = {}  # and when to renew it
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
        self._thread.start()

    def keep(self, lease: Lease) -> None:
        """Renew it from now on."""
        with self._changed:
            self._held[lease.name] = lease, clock() + lease.ttl_s / 3
            self._changed.notify()

    def current(self, name: str) -> Lease | None:
        """The lease as last renewed, if it is still valid."""
        with self._changed:
            lease, _ = self._held.get(name, (None, 0.0))
        return lease if lease is not None and lease.valid else None

    def drop(self, name: str) -> Lease | None:
        """Renew it no more; the caller releases it."""
        with self._changed:
            lease, _ = self._held.pop(name, (None, 0.0))
            return lease

    def close(self) -> None:
        """End the thread; leases run out by themselves."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                due = min((at for _, at in self._held.values()), default=clock() + 60)
                if not self._stopping:
                    self._changed.wait(max(0.0, due - clock()))
                if self._stopping:
                    return
                now = clock()
                ready = [lease for lease, at in self._held.values() if at <= now]
            for lease in ready:
                self._renew(lease)

    def _renew(self, lease: Lease) -> None:
        try:
            renewed = self._leases.renew(lease)
        except StoreUnavailable as error:
            if lease.valid:  # there is time to try again
                self._replace(lease, lease, lease.ttl_s / 10)
                return
            self._give_up(lease, str(error))
        except LeaseLost as error:
            self._give_up(lease, str(error))
        else:
            self._replace(lease, renewed, lease.ttl_s / 3)

    def _replace(self, old: Lease, new: Lease, wait_s: float) -> None:
        with self._changed:
            if self._held.get(old.name, (None, 0.0))[0] is old:
                self._held[old.name] = new, clock() + wait_s

    def _give_up(self, lease: Lease, why: str) -> None:
        with self._changed:
            if self._held.get(lease.name, (None, 0.0))[0] is not lease:
                return
            del self._held[lease.name]
        log.warning("lease of %s is lost: %s", lease.name, why)
        self._lost(lease)
