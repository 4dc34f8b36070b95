"""Every error that may cross a process or the wire.

::

    TierError
    ├── BadRequest                the caller's fault; repeating it cannot help
    │   ├── InvalidRequest          400 invalid_request
    │   ├── InvalidTokenIds         400 invalid_token_ids
    │   ├── UnsupportedCombination  400 unsupported_combination
    │   ├── ContextLengthExceeded   400 context_length_exceeded
    │   ├── ExceedsCapacity         400 exceeds_capacity
    │   ├── Unauthorized            401 unauthorized
    │   ├── SessionNotFound         404 session_not_found
    │   ├── NotFound                404 not_found
    │   ├── MethodNotAllowed        405 method_not_allowed
    │   ├── SessionExists           409 session_exists
    │   ├── SessionBusy             409 session_busy
    │   ├── NotPinned               409 not_pinned
    │   ├── SessionExpired          410 session_expired
    │   ├── PreconditionFailed      412 precondition_failed
    │   └── BodyTooLarge            413 body_too_large
    ├── Refused                   no room now; carries retry_after_s
    │   ├── QueueFull               429 queue_full
    │   ├── QuotaExceeded           429 quota_exceeded
    │   ├── HostPoolExhausted       503 host_pool_exhausted
    │   ├── DeviceOutOfMemory       503 device_out_of_memory
    │   └── PinBudgetExhausted      507 pin_budget_exhausted
    ├── TransferFailed            bytes that did not arrive whole; recomputed, never served
    │                               500 transfer_failed
    └── Unavailable               a part of the service is away
        ├── EngineRestarting        503 engine_restarting
        ├── Draining                503 draining
        ├── StoreUnavailable        503 store_unavailable
        └── ResumeTimeout           504 resume_timeout

Bugs are assertions, not members of this tree.
"""

from __future__ import annotations

from typing import ClassVar


class TierError(Exception):
    """Base of the tree. ``code`` is the wire code, ``status`` the HTTP status."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequest(TierError):
    """The caller's fault."""

    status = 400


class InvalidRequest(BadRequest):
    code = "invalid_request"


class InvalidTokenIds(BadRequest):
    code = "invalid_token_ids"


class UnsupportedCombination(BadRequest):
    code = "unsupported_combination"


class ContextLengthExceeded(BadRequest):
    code = "context_length_exceeded"


class ExceedsCapacity(BadRequest):
    """Could never fit, however long one waits."""

    code = "exceeds_capacity"


class Unauthorized(BadRequest):
    code = "unauthorized"
    status = 401


class SessionNotFound(BadRequest):
    code = "session_not_found"
    status = 404


class NotFound(BadRequest):
    code = "not_found"
    status = 404


class MethodNotAllowed(BadRequest):
    """The route is there, for other methods."""

    code = "method_not_allowed"
    status = 405


class SessionExists(BadRequest):
    code = "session_exists"
    status = 409


class SessionBusy(BadRequest):
    code = "session_busy"
    status = 409


class NotPinned(BadRequest):
    code = "not_pinned"
    status = 409


class SessionExpired(BadRequest):
    code = "session_expired"
    status = 410


class PreconditionFailed(BadRequest):
    code = "precondition_failed"
    status = 412


class BodyTooLarge(BadRequest):
    code = "body_too_large"
    status = 413


class Refused(TierError):
    """No room now. ``retry_after_s`` says when to come back."""

    status = 503

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = 1.0
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)


class QueueFull(Refused):
    code = "queue_full"
    status = 429


class QuotaExceeded(Refused):
    code = "quota_exceeded"
    status = 429


class HostPoolExhausted(Refused):
    code = "host_pool_exhausted"


class DeviceOutOfMemory(Refused):
    """What no plan counts did not fit: activations beside weights and pools."""

    code = "device_out_of_memory"


class PinBudgetExhausted(Refused):
    code = "pin_budget_exhausted"
    status = 507


class TransferFailed(TierError):
    """A short read, a wrong checksum, an I/O error: the caller recomputes."""

    code = "transfer_failed"


class Unavailable(TierError):
    """A part of the service is away."""

    status = 503

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = 1.0
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)


class EngineRestarting(Unavailable):
    code = "engine_restarting"


class Draining(Unavailable):
    code = "draining"


class StoreUnavailable(Unavailable):
    code = "store_unavailable"


class ResumeTimeout(Unavailable):
    code = "resume_timeout"
    status = 504


def error_classes() -> dict[str, type[TierError]]:
    """Wire code to class, for every leaf of the tree."""
    found: dict[str, type[TierError]] = {}
    pending: list[type[TierError]] = [TierError]
    while pending:
        cls = pending.pop()
        pending.extend(cls.__subclasses__())
        if "code" in vars(cls):
            assert cls.code not in found, f"two classes share the code {cls.code}"
            found[cls.code] = cls
    return found


def from_code(
    code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
) -> TierError:
    """The error that a wire code stands for; an unknown code gives a plain TierError."""
    return error_classes().get(code, TierError)(message, param=param, retry_after_s=retry_after_s)
