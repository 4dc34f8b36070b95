"""What the client raises.

::

    TierdError                     status, code, param, retry_after_s
    ├── ConnectionFailedError      no answer, or half of one
    ├── BadRequestError            400, 413 and their like: repeating cannot help
    │   ├── AuthenticationError    401
    │   ├── SessionNotFoundError   404
    │   ├── SessionExistsError     409 session_exists
    │   ├── SessionBusyError       409 session_busy
    │   ├── SessionExpiredError    410
    │   └── PreconditionError      412: the session is not as long as thought
    ├── CapacityError              429, 507, exceeds_capacity, out of host or device memory
    └── UnavailableError           503, 504: restarting, draining; a gateway's 502 to 504
"""

from __future__ import annotations

from typing import Any


class TierdError(Exception):
    """Base. ``status`` is None when there was no answer."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str = "",
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


class ConnectionFailedError(TierdError):
    """The daemon did not answer, or stopped in the middle."""


class BadRequestError(TierdError):
    """The caller's fault."""


class AuthenticationError(BadRequestError): ...


class SessionNotFoundError(BadRequestError): ...


class SessionExistsError(BadRequestError): ...


class SessionBusyError(BadRequestError): ...


class SessionExpiredError(BadRequestError): ...


class PreconditionError(BadRequestError): ...


class CapacityError(TierdError):
    """No room now (``retry_after_s``), or ever (None)."""


class UnavailableError(TierdError):
    """The engine is restarting or the daemon is draining."""


_BY_CODE: dict[str, type[TierdError]] = {
    "unauthorized": AuthenticationError,
    "session_not_found": SessionNotFoundError,
    "session_exists": SessionExistsError,
    "session_busy": SessionBusyError,
    "session_expired": SessionExpiredError,
    "precondition_failed": PreconditionError,
    "exceeds_capacity": CapacityError,
    "host_pool_exhausted": CapacityError,
    "device_out_of_memory": CapacityError,
    "pin_budget_exhausted": CapacityError,
    "queue_full": CapacityError,
    "quota_exceeded": CapacityError,
}


def error_from(status: int | None, body: Any, retry_after_s: float | None) -> TierdError:
    """The exception for an error envelope; for anything else, one that shows what came."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):  # a gateway's
        said = f"unexpected answer, status {status}"
        other = UnavailableError if status in (502, 503, 504) else TierdError
        return other(said, status=status, retry_after_s=retry_after_s)
    code = str(error.get("code", ""))
    kind = _BY_CODE.get(code)
    if kind is None and status is not None:
        kind = UnavailableError if status >= 503 else BadRequestError if status < 429 else None
    if kind is None:
        kind = UnavailableError if code in ("engine_restarting", "draining") else TierdError
    return kind(
        str(error.get("message", code)),
        status=status,
        code=code,
        param=error.get("param"),
        retry_after_s=retry_after_s,
    )
