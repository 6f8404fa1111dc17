"""Runs Raft in a thread with its own event loop, or on the broker's loop.

A sync of the journal blocks the loop on which Raft runs. In a thread of its own, Raft delays nothing else.
Brokers whose storage is in memory, and simulated brokers, run Raft on the broker's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from kafkalite.loop_thread import LoopThread, call_on

T = TypeVar("T")


class Runner(Protocol):
    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop on which Raft runs. A ``ThreadRunner`` has it only after ``start``."""
        ...

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Run ``function`` on ``loop`` soon, in the order of the calls. Thread-safe. Has no effect if the
        loop is closed."""
        call_on(self.loop, function, *args)

    def offload(self, work: Callable[[], T], done: Callable[[T | BaseException], object]) -> None:
        """Run ``work``, in another thread if possible, then call ``done`` on ``loop`` with the result or
        exception. Call ``offload`` on ``loop``."""
        ...


class InlineRunner(Runner):
    """Runs Raft on the broker's loop: the given loop, or the loop that runs at first use."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def offload(self, work: Callable[[], T], done: Callable[[T | BaseException], object]) -> None:
        self.call(done, _outcome(work))

    def start(self) -> None:
        """Do nothing, because the loop is already running."""

    def stop(self) -> None:
        """Do nothing, because the runner does not own the loop."""


class ThreadRunner(Runner):
    """Runs Raft in a thread with its own loop, from ``start`` to ``stop``."""

    def __init__(self, name: str = "raft") -> None:
        self._name = name
        self._thread: LoopThread | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        assert self._thread is not None, "start the runner first"
        return self._thread.loop

    def start(self) -> None:
        assert self._thread is None, "the runner has been started already"
        self._thread = LoopThread(self._name)

    def offload(self, work: Callable[[], T], done: Callable[[T | BaseException], object]) -> None:
        future = self.loop.run_in_executor(None, _outcome, work)
        future.add_done_callback(lambda finished: None if finished.cancelled() else done(finished.result()))

    def stop(self) -> None:
        """Stop the loop, cancel its tasks, and wait for the thread. Idempotent."""
        if self._thread is not None:
            self._thread.close()


def _outcome(work: Callable[[], T]) -> T | BaseException:
    try:
        return work()
    except Exception as error:
        return error
