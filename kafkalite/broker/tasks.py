"""Tasks with an owner that cancels them.

``asyncio.TaskGroup`` does not fit: the task that entered it must leave it, but different tasks may start and
stop a broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


class Signal(asyncio.Event):
    """An event that can start a task when it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.on_set: Callable[[], object] | None = None  #: called once, when the event is set the next time

    def set(self) -> None:
        super().set()
        if self.on_set is not None:
            on_set, self.on_set = self.on_set, None
            on_set()


class TaskSet:
    """The tasks of one owner. ``on_failure`` is called with every exception of a task except cancellation."""

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._tasks: dict[
            asyncio.Task[Any], None
        ] = {}  # in the order of their start, so that simulated runs are deterministic
        self._cancelled: set[asyncio.Task[Any]] = set()  #: those that ``cancel`` need not cancel again
        self._signals: list[Signal] = []

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, coroutine: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._on_done)
        return task

    def start_when(self, signal: Signal, run: Callable[[], Coroutine[Any, Any, Any]], *, name: str) -> None:
        """Start ``run()`` as a task when ``signal`` is set, unless the tasks are cancelled before."""
        if signal.is_set():
            self.start(run(), name=name)
        else:
            self._signals.append(signal)
            signal.on_set = lambda: self.start(run(), name=name)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        if task not in self._tasks:
            return  # ``cancel`` has handled it
        del self._tasks[task]
        self._cancelled.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)

    def begin_cancel(self) -> None:
        """Cancel all tasks. Most of them end in this or the next turn of the loop. ``cancel`` must follow."""
        for signal in self._signals:
            signal.on_set = None
        for task in self._tasks:
            if task not in self._cancelled:
                self._cancelled.add(task)
                task.remove_done_callback(self._on_done)  # ``cancel`` calls it, in fewer turns of the loop
                task.cancel()

    async def cancel(self) -> None:
        """Cancel all tasks and return when they have ended."""
        self.begin_cancel()
        tasks = list(self._tasks)
        await _all_ended(tasks)
        for task in tasks:
            self._on_done(task)


class SharedTasks(Generic[K, T]):
    """Runs at most one task for each key at a time; several callers can wait for its result."""

    def __init__(self) -> None:
        self._tasks: dict[K, asyncio.Task[T]] = {}

    async def run(self, key: K, begin: Callable[[], Coroutine[Any, Any, T]], *, name: str) -> T:
        """Return the result of the running task for ``key``. Start ``begin()`` as that task if there is none.

        The task continues if its callers are cancelled. Raises the errors of the task.
        """
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.get_running_loop().create_task(begin(), name=name)
            task.add_done_callback(lambda done: self._on_done(key, done))
        return await asyncio.shield(task)

    def _on_done(self, key: K, done: asyncio.Task[T]) -> None:
        self._tasks.pop(key, None)
        if not done.cancelled():
            done.exception()  # the waiting callers raise it; without callers asyncio must not log it

    async def close(self) -> None:
        """Cancel all tasks and return when they have ended."""
        await cancel_all(list(self._tasks.values()))


async def cancel_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel ``tasks`` and return when they have ended."""
    for task in tasks:
        task.cancel()
    await _all_ended(tasks)


async def _all_ended(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Return when ``tasks``, which were cancelled, have ended. Their callbacks may run later."""
    if not all(task.done() for task in tasks):
        await asyncio.sleep(0)  # most tasks end in this turn of the loop, which costs less than a wait
        running = [task for task in tasks if not task.done()]
        if running:
            await asyncio.wait(running)


async def first_of(*waits: Awaitable[object]) -> None:
    """Return when at least one of ``waits`` has ended, and cancel the rest."""
    futures = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in futures:
            future.cancel()
