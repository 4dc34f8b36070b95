"""What redis-py's errors mean, in words of our own: some of its texts hold passwords."""

from __future__ import annotations

import re

from dsv4_tierd.tiering.store.redis_config import Target

# What is looked for in a text, and what is said of it.
_REASONS = {
    r"[Cc]onnection refused": "connection refused",
    r"network:ConnectionError": "no connection",
    r"timed out|TimeoutError": "no answer in time",
    r"certificate verify failed": "certificate verify failed",
    r"WRONGPASS|AuthenticationError|invalid (username-)?password": "wrong user name or password",
    r"NOAUTH|Authentication required|without any password": "a password is needed, or none",
    r"NOPERM": "the user may not do that",
    r"Cluster mode is not enabled": "it is not a cluster",
    r"[Nn]ame or service not known|name resolution|getaddrinfo": "the host's name is not known",
    r"[Nn]o route to host": "no route to the host",
    r"reset by peer|[Cc]onnection closed": "the connection was closed",
}
_DETAILS = (
    r"connecting to [\w.\-\[\]:]+:\d+",
    r"unexpected keyword argument '\w+'",
)


class Unreachable(OSError):
    """What redis-py did not do, and why."""


def in_own_words(error: Exception, target: Target, *, several: bool) -> str:
    """Why it failed. ``several``: it asked several servers, and may quote its connections.

    What no server's answer explains (a bug on one that came wrong) is not quoted either.
    """
    import redis

    text = str(error)
    if not several and isinstance(error, OSError | TypeError | redis.RedisError):
        return target.scrubbed(text) or type(error).__name__
    found = [said for pattern, said in _REASONS.items() if re.search(pattern, text)]
    details = [match[0] for pattern in _DETAILS if (match := re.search(pattern, text))]
    hosts = ", ".join(f"{host}:{port}" for host, port in target.hosts)
    what = f"Sentinels of {target.service!r}" if target.mode == "sentinel" else target.mode
    why = "; ".join([type(error).__name__, *details, *found])
    return target.scrubbed(f"{what} at {hosts}: {why}")
