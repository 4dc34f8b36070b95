"""Long verbs that answer at once: what each is doing, until somebody asks."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dsv4_tierd.tiering.errors import NotFound, QueueFull, TierError

OPERATIONS_MAX = 4_096


class OperationState(StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class Operation:
    """One verb, on one session or (None) on none, running or ended."""

    id: str
    verb: str
    salt: str
    session_id: str | None
    created_s: float = field(default_factory=time.time)
    ended_s: float | None = None
    state: OperationState = OperationState.RUNNING
    progress: tuple[int, int] | None = None
    result: dict[str, Any] | None = None
    error: TierError | None = None
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    def outcome(self) -> dict[str, Any]:
        """The result of an ended one. Raises its TierError."""
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


class Operations:
    """Bounded: ended ones are forgotten oldest first, running ones refuse new ones."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._known: OrderedDict[str, Operation] = OrderedDict()

    def start(self, operation: Operation, work: Coroutine[Any, Any, dict[str, Any]]) -> Operation:
        """Run ``work``; its result or TierError ends up in the operation. Raises QueueFull."""
        self.make_room()
        self._known[operation.id] = operation
        self._tasks.create_task(_run(operation, work), name=f"{operation.verb} {operation.id}")
        return operation

    def make_room(self) -> None:
        """For one more. Raises QueueFull."""
        if len(self._known) < OPERATIONS_MAX:
            return
        for id, operation in self._known.items():
            if operation.state is not OperationState.RUNNING:
                del self._known[id]
                return
        raise QueueFull(f"{OPERATIONS_MAX} operations are running")

    def get(self, salt: str, id: str) -> Operation:
        """Raises NotFound, also for another salt's."""
        operation = self._known.get(id)
        if operation is None or operation.salt != salt:
            raise NotFound(f"there is no operation {id!r}")
        return operation

    def running(self) -> int:
        return sum(o.state is OperationState.RUNNING for o in self._known.values())


def new_operation(verb: str, salt: str, session_id: str | None) -> Operation:
    """One with a fresh id, not started."""
    return Operation(id=f"op-{uuid.uuid4().hex}", verb=verb, salt=salt, session_id=session_id)


async def _run(operation: Operation, work: Coroutine[Any, Any, dict[str, Any]]) -> None:
    try:
        operation.result = await work
        operation.state = OperationState.DONE
    except TierError as error:
        operation.error, operation.state = error, OperationState.FAILED
    except asyncio.CancelledError:
        operation.error = TierError("the daemon stopped before this had ended")
        operation.state = OperationState.FAILED
        raise
    except Exception as error:  # noqa: BLE001  a bug ends its operation, not the daemon
        operation.error, operation.state = TierError(f"a bug: {error!r}"), OperationState.FAILED
    finally:
        operation.ended_s = time.time()
        operation.finished.set()
