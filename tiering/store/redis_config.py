"""Which server, which limits: what a store's URL says.

::

    redis://[[user]:password@]host[:port][/db]        one server; a cluster is recognised
    rediss://…                                        the same over TLS
    unix:///path/to/socket[?db=0]                     a socket file
    redis+cluster://[user:password@]host:port[,host:port…]
    redis+sentinel://[user:password@]host[:port][,host[:port]…]/service[/db]
    rediss+cluster://…  rediss+sentinel://…           the same over TLS

Options in the query are redis-py's (``ssl_ca_certs``, ``ssl_cert_reqs``, …; those for the Sentinels
with ``sentinel_`` before their names), and ours: ``ttl_s``, ``tenant_bytes_max``, ``deadline_s``,
``connect_timeout_s``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlencode, urlsplit

from dsv4_tierd.tiering.errors import InvalidRequest

SCHEMES = (
    *("redis", "rediss", "unix"),
    *("redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel"),
)
_PORT = 6379
_SENTINEL_PORT = 26379
_PORT_ERROR = "a port is not a number (in a password, '@', '/', '?' and '#' are percent-encoded)"


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """Where and how much. ``bytes_max``: of this identity, all tenants; 0 keeps nothing out.

    ``tenant_bytes_max``: of one tenant; 0 for no bound. ``ttl_s``: objects that nobody reads for
    so long go; 0 for never. ``deadline_s``: a call may take so long, and ``rate_min`` (bytes a
    second) longer for what it carries. ``pin_share``: of the bytes that may be pinned.
    """

    url: str = field(repr=False)  # it may hold a password
    bytes_max: int
    tenant_bytes_max: int = 0
    ttl_s: float = 0.0
    deadline_s: float = 2.0
    connect_timeout_s: float = 0.5
    rate_min: int = 32 << 20
    value_bytes: int = 4 << 20
    commit_bytes: int = 32 << 20
    pin_share: float = 0.5

    def __post_init__(self) -> None:
        for name in ("deadline_s", "connect_timeout_s", "rate_min", "value_bytes", "commit_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.ttl_s < 0 or self.tenant_bytes_max < 0 or self.bytes_max < 0:
            raise ValueError("ttl_s, tenant_bytes_max and bytes_max must not be negative")


@dataclass(frozen=True, slots=True)
class Target:
    """A URL taken apart. ``mode``: server, cluster or sentinel. ``settings``: redis-py's own."""

    mode: str
    url: str
    hosts: tuple[tuple[str, int], ...]
    service: str
    db: int
    tls: bool
    username: str | None
    password: str | None = field(repr=False)
    settings: dict[str, Any] = field(repr=False)

    @property
    def shown(self) -> str:
        """The URL without its secrets."""
        return self.url

    def scrubbed(self, text: str) -> str:
        """``text`` without this URL's passwords, however they are written."""
        secrets = {self.password, *(v for k, v in self.settings.items() if "password" in k)}
        forms = {form for each in secrets if each for form in _written(str(each))}
        for form in sorted(forms, key=len, reverse=True):
            text = text.replace(form, "***")
        return text


def _written(secret: str) -> set[str]:
    """As it stands, percent-encoded, and within the repr of a string or of bytes."""
    encoded = {quote(secret), quote(secret, safe=""), quote_plus(secret)}
    return {secret, *encoded, repr(secret)[1:-1], repr(secret.encode())[2:-1]}


_OURS: dict[str, type[int | float]] = {
    "ttl_s": float,
    "tenant_bytes_max": int,
    "deadline_s": float,
    "connect_timeout_s": float,
}
assert {*_OURS} <= {field.name for field in fields(RedisConfig)}


def parse(config: RedisConfig) -> tuple[RedisConfig, Target]:
    """The configuration with the URL's options applied, and whom to talk to.

    Raises InvalidRequest, naming what is wrong with the URL; never repeats a password.
    """
    try:
        parts = urlsplit(config.url)
    except ValueError:  # its text may hold a password
        raise InvalidRequest("a Redis URL's host is not one", param="store") from None
    if parts.scheme not in SCHEMES:
        raise InvalidRequest(f"not a Redis URL: {parts.scheme}://…", param="store")
    if parts.fragment:
        raise InvalidRequest("a password with '#' must be written as %23", param="store")
    if "@" in parts.path and parts.scheme != "unix":
        raise InvalidRequest("a password with '/' must be written as %2F", param="store")
    changes: dict[str, Any] = {}
    rest: list[tuple[str, str]] = []
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _OURS:
            rest.append((name, value))
            continue
        try:
            changes[name] = _OURS[name](value)
        except ValueError:
            raise InvalidRequest(f"{name}={value}: not a number", param="store") from None
    try:
        config = replace(config, **changes)
    except ValueError as error:
        raise InvalidRequest(str(error), param="store") from error
    _, _, mode = parts.scheme.partition("+")
    if mode:
        return config, _several(mode, parts, rest)
    try:
        _ = parts.port
    except ValueError:  # its text may be half a password
        raise InvalidRequest(_PORT_ERROR, param="store") from None
    # Not urlunsplit, which leaves out the slashes of unix:///path.
    plain = f"{parts.scheme}://{parts.netloc}{parts.path}?{urlencode(rest)}".rstrip("?")
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    target = _settings(plain)
    db = target.pop("db", 0)
    host = target.pop("host", "localhost"), target.pop("port", _PORT)
    tls = parts.scheme == "rediss"
    user, password = target.pop("username", None), target.pop("password", None)
    return config, Target("server", shown, (host,), "", db, tls, user, password, target)


def _several(mode: str, parts: Any, rest: list[tuple[str, str]]) -> Target:
    tls = parts.scheme.startswith("rediss")
    credentials, _, hosts = parts.netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    default = _SENTINEL_PORT if mode == "sentinel" else _PORT
    found = []
    for each in hosts.split(","):
        try:
            one = urlsplit(f"//{each}")
            found.append((one.hostname or "localhost", one.port or default))
        except ValueError:
            raise InvalidRequest(_PORT_ERROR, param="store") from None
    service, _, db = parts.path.strip("/").partition("/")
    if mode == "sentinel" and not service:
        raise InvalidRequest("a Sentinel URL ends with /service", param="store")
    if mode == "cluster" and parts.path.strip("/"):
        raise InvalidRequest("a cluster has one database: no path", param="store")
    if db and not db.isdigit():
        raise InvalidRequest(f"not a database number: {db!r}", param="store")
    settings = _settings(f"{'rediss' if tls else 'redis'}://unused?{urlencode(rest)}")
    for name in ("host", "port", "db"):
        settings.pop(name, None)
    return Target(
        mode,
        f"{parts.scheme}://{hosts}{parts.path}",
        tuple(found),
        service,
        int(db or 0),
        tls,
        unquote(username) or None,
        unquote(password) or None,
        settings,
    )


def _settings(url: str) -> dict[str, Any]:
    """redis-py's reading of a URL."""
    try:
        from redis.connection import parse_url
    except ModuleNotFoundError:
        raise InvalidRequest(
            "--store redis://… needs the extra: pip install 'dsv4-tierd[redis]'", param="store"
        ) from None
    try:
        settings: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise InvalidRequest(str(error), param="store") from error
    return settings
