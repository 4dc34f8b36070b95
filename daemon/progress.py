"""How far long work is: bars on a terminal, lines where there is none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINE_EVERY_S = 5.0


@dataclass(slots=True)
class Task:
    """One piece of work. ``total`` None: not known yet."""

    name: str
    total: int | None
    done: int
    began_s: float
    said_s: float


class Bars:
    """The tasks of one command, drawn on ``console``. Nothing is drawn outside ``shown``."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rich: Progress | None = None
        if console.is_terminal:
            self._rich = Progress(
                TextColumn("{task.description:>24}"), BarColumn(), MofNCompleteColumn(),
                TimeElapsedColumn(), console=console,
            )  # fmt: skip

    @contextmanager
    def shown(self) -> Iterator[Bars]:
        if self._rich is None:
            yield self
            return
        with self._rich:
            yield self

    def start(self, name: str, total: int | None = None) -> Bar:
        """A new task, at 0."""
        return Bar(self._console, self._rich, name, total)


class Bar:
    """One task; ``to`` and ``advance`` move it, and it never goes back."""

    def __init__(
        self, console: Console, rich: Progress | None, name: str, total: int | None
    ) -> None:
        now_s = time.monotonic()
        self._console, self._rich = console, rich
        self._task = Task(name, total, 0, now_s, now_s)
        self._id = None if rich is None else rich.add_task(name, total=total)

    def advance(self, count: int) -> None:
        self.to(self._task.done + count)

    def to(self, done: int, total: int | None = None) -> None:
        """At ``done`` of ``total`` (as before for None)."""
        task = self._task
        task.total = task.total if total is None else total
        was, task.done = task.done, max(task.done, done)
        if self._rich is not None and self._id is not None:
            self._rich.update(self._id, completed=task.done, total=task.total)
            return
        now_s = time.monotonic()
        finished = task.total is not None and was < task.total <= task.done
        if finished or now_s - task.said_s >= LINE_EVERY_S:
            task.said_s = now_s
            of = "" if task.total is None else f" of {task.total:,}"
            seconds = now_s - task.began_s
            line = f"{task.name:>24}: {task.done:,}{of}, {seconds:.1f} s"
            self._console.print(line, highlight=False, soft_wrap=True)
