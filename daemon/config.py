"""Every setting of ``serve``: flag, key of the TOML file, ``DSV4_TIERD_*`` variable, one name.

Later wins: default, file, environment, flag. An unknown key is an error that names it.
"""

from __future__ import annotations

import math
import os
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import psutil  # type: ignore[import-untyped]

from dsv4_tierd.engine.config import EngineConfig
from dsv4_tierd.engine.model.presets import PresetError, parse_preset
from dsv4_tierd.tiering.errors import InvalidRequest
from dsv4_tierd.tiering.store.open import parse_spec
from dsv4_tierd.tiering.units import format_bytes, parse_bytes

ENV_PREFIX = "DSV4_TIERD_"
NOT_SETTINGS = frozenset({"DSV4_TIERD_CACHE"})  # read elsewhere
GIB = 1 << 30

Device = Literal["auto", "cpu", "cuda"]
Tiering = Literal["hisparse", "resident", "off"]
RowFormat = Literal["auto", "fp8", "bf16", "fp32"]
Policy = Literal["through", "on_suspend", "never"]


class CannotStart(Exception):
    """Why this daemon cannot run here; said to the one who starts it, never to a client."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class BadConfig(CannotStart):
    """A setting that does not exist or cannot be what it was set to."""


def _size(default: int | None) -> Any:
    return field(default=default, metadata={"size": True})


def default_state_dir() -> Path:
    """``$XDG_STATE_HOME/dsv4-tierd``, as desktop rules say."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "dsv4-tierd"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Settings of one daemon. Sizes in bytes, times in seconds, lengths in tokens."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8100
    served_model_name: str | None = None
    api_key_file: Path | None = None
    state_dir: Path = field(default_factory=default_state_dir)
    # engine
    device: Device = "auto"
    kv_dtype: RowFormat = "auto"
    tiering: Tiering = "hisparse"
    store: str = field(default="none", repr=False)  # a URL may hold a password
    store_budget: int = _size(64 * GIB)
    device_budget: int = _size(GIB)
    host_budget: int | None = _size(None)  # None: a quarter of the memory, at most 32 GiB
    pin_budget: int | None = _size(None)  # None: half of host_budget
    resume_budget: int | None = _size(None)  # None: an eighth of host_budget
    hot_rows: int | None = None
    idle_tails: int = 64
    chunk_tokens: int | None = None
    max_batch: int = 8
    queue_max: int = 64
    max_tokens_default: int = 8192
    # daemon
    body_bytes_max: int = _size(64 << 20)
    stream_credit_tokens: int = 256
    keepalive_s: float = 5.0
    client_stall_s: float = 600.0
    drain_s: float = 30.0
    probe_s: float = 2.0
    stall_s: float = 60.0
    sessions_max: int = 100_000
    name: str = field(default_factory=socket.gethostname)  # as other daemons are told
    share_sessions: bool = True  # where the store is one that daemons share
    write_policy: Policy | None = None  # None: what the store says, or through
    lease_s: float = 30.0
    choices_max: int = 16
    thinking_default: bool = False
    token_cache_budget: int = _size(64 << 20)

    def __post_init__(self) -> None:
        """Raises BadConfig."""
        checks = [
            (bool(self.model), "model is empty"),
            (0 <= self.port <= 65535, f"port {self.port} is not in 0..65535"),
            (self.hot_rows is None or self.hot_rows > 0, "hot_rows must be positive"),
            (self.idle_tails >= 0, "idle_tails must not be negative"),
            (bool(self.name.strip()), "name is empty"),
            (bool(self.host), "host is empty: it would be every address of the machine"),
        ]
        positive = (
            "chunk_tokens max_batch queue_max max_tokens_default stream_credit_tokens keepalive_s "
            "client_stall_s drain_s probe_s stall_s sessions_max choices_max device_budget lease_s "
            "body_bytes_max"
        )
        given = {name: getattr(self, name) for name in positive.split()}
        checks += [
            (value is None or value > 0, f"{name} must be positive")
            for name, value in given.items()
        ]
        memory = memory_bytes()
        there = f"host_budget must fit into the {format_bytes(memory)} of memory there are"
        checks.append((self.host_budget is None or self.host_budget <= memory, there))
        for passed, message in checks:
            if not passed:
                raise BadConfig(message)
        try:
            parse_preset(self.model)
        except PresetError as error:
            raise BadConfig(f"model: {error}") from error
        try:
            tiers = parse_spec(self.store)
        except InvalidRequest as error:
            raise BadConfig(f"store: {error.message}") from error
        said = {tier.policy.value for tier in tiers if tier.policy} | {self.write_policy} - {None}
        if len(said) > 1:
            raise BadConfig("write_policy and the store's own policy differ: leave one out")

    @property
    def host_budget_bytes(self) -> int:
        return self.host_budget if self.host_budget is not None else default_host_budget()

    @property
    def default_policy(self) -> Policy:
        """The write policy of a session that asks for none."""
        said: list[Policy] = [t.policy.value for t in parse_spec(self.store) if t.policy]
        return self.write_policy or (said[0] if said else "through")

    @property
    def has_near_tier(self) -> bool:
        """Whether the store keeps what its far tier is not sent."""
        return len(parse_spec(self.store)) == 2

    def engine(self) -> EngineConfig:
        """The worker's part."""
        host = self.host_budget_bytes
        return EngineConfig(
            model=str(self.model),
            device=self.device,
            kv_dtype=self.kv_dtype,
            tiering=self.tiering,
            device_budget_bytes=self.device_budget,
            host_budget_bytes=host,
            pin_budget_bytes=host // 2 if self.pin_budget is None else self.pin_budget,
            resume_budget_bytes=host // 8 if self.resume_budget is None else self.resume_budget,
            hot_rows=self.hot_rows,
            idle_tails=self.idle_tails,
            store=self.store,
            store_bytes_max=self.store_budget,
            chunk_tokens=self.chunk_tokens,
            max_batch=self.max_batch,
            queue_max=self.queue_max,
        )


def memory_bytes() -> int:
    """The memory that this process may use: the machine's, or its cgroup's."""
    limit = int(psutil.virtual_memory().total)
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup") / name
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            return min(limit, int(text))
    return limit


def default_host_budget() -> int:
    """A quarter of the memory, at most 32 GiB."""
    return min(32 * GIB, memory_bytes() // 4)


def load_config(
    flags: Mapping[str, Any],
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> ServeConfig:
    """Settings from all sources; flags that are None were not given. Raises BadConfig."""
    environ = os.environ if environ is None else environ
    known = {f.name for f in fields(ServeConfig)}
    merged: dict[str, Any] = {}
    if file is not None:
        merged |= _from_file(file)
    for name, text in environ.items():
        if name.startswith(ENV_PREFIX) and name not in NOT_SETTINGS:
            merged[name[len(ENV_PREFIX) :].lower()] = text
    merged |= {name: value for name, value in flags.items() if value is not None}
    if unknown := sorted(set(merged) - known):
        raise BadConfig(f"unknown setting: {', '.join(unknown)}")
    if not merged.get("model"):
        raise BadConfig("model is missing: the folder of the checkpoint, or preset:flash-mini")
    return ServeConfig(**{name: _convert(name, value) for name, value in merged.items()})


def _from_file(file: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"cannot read {file}: {error}") from error
    return {name.replace("-", "_"): value for name, value in table.items()}


_HINTS = get_type_hints(ServeConfig)
_SIZES = {f.name for f in fields(ServeConfig) if f.metadata.get("size")}


def _convert(name: str, value: Any) -> Any:
    try:
        return _to_type(_HINTS[name], value, size=name in _SIZES)
    except (TypeError, ValueError) as error:
        raise BadConfig(f"{name}: {error}") from error


def _to_type(hint: Any, value: Any, *, size: bool) -> Any:
    if size:
        return parse_bytes(value)
    options = get_args(hint)
    if options and get_origin(options[0]) is Literal:  # one of these words, or none
        options = get_args(options[0])
    if options and isinstance(options[0], str):
        if value not in options:
            raise ValueError(f"{value!r} is not one of {', '.join(options)}")
        return value
    kinds = options or (hint,)
    if bool in kinds:
        return _to_bool(value)
    if Path in kinds:
        if value == "":
            raise ValueError("it is empty")
        return Path(value).expanduser()
    if int in kinds or float in kinds:
        if isinstance(value, bool):
            raise ValueError(f"{value!r} is not a number")
        number = int if int in kinds else float
        if number is int and isinstance(value, float):
            raise ValueError(f"{value!r} is not a whole number")
        try:
            found = number(value)
        except (TypeError, ValueError) as error:
            kind = "whole number" if number is int else "number"
            raise ValueError(f"not a {kind}: {value!r}") from error
        if not math.isfinite(found):
            raise ValueError(f"{value!r} is not a finite number")
        return found
    if isinstance(value, bool | list | dict):
        raise TypeError(f"{value!r} is not text")
    return str(value)


def _to_bool(value: Any) -> bool:
    named = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if str(value).lower() not in named:
        raise ValueError(f"{value!r} is not true or false")
    return named[str(value).lower()]
