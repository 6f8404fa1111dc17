"""Runs slow functions of clients in a few threads, in which the clients' hosts take turns (S24)."""

# Tests: tests/broker/test_fair_threads.py

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Job(Generic[T]):
    function: Callable[[], T]
    done: asyncio.Future[T]


class FairThreads(Generic[T]):
    """Owns ``count`` threads and the functions that wait for a thread. Used on one event loop.

    If functions of several hosts wait, the hosts take turns, with one function in each turn. So the wait of a
    host depends on the number of hosts that wait, not on how many functions of another host wait.
    """

    def __init__(self, count: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._idle = count
        #: The functions of each host that waits, the next host first. Invariant: no queue is empty.
        self._waiting: OrderedDict[str, OrderedDict[_Job[T], None]] = OrderedDict()

    def run(self, host: str, function: Callable[[], T]) -> asyncio.Future[T]:
        """Return a future of the result of ``function``, which runs when it is the turn of ``host``.

        If the future is cancelled before that, the function never runs.
        """
        job = _Job(function, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(host, OrderedDict())[job] = None
        job.done.add_done_callback(lambda _: self._forget(host, job))
        self._start()
        return job.done

    def _forget(self, host: str, job: _Job[T]) -> None:
        """Drop a job that was cancelled before it began, so that it takes no turn and no memory."""
        queue = self._waiting.get(host)
        if queue is not None and job in queue:
            del queue[job]
            if not queue:
                del self._waiting[host]

    def _start(self) -> None:
        while self._idle and self._waiting:
            host, queue = self._waiting.popitem(last=False)
            job, _ = queue.popitem(last=False)
            if queue:
                self._waiting[host] = queue  # behind the other hosts
            if job.done.cancelled():
                continue
            self._idle -= 1
            working = asyncio.get_running_loop().run_in_executor(self._executor, job.function)
            working.add_done_callback(partial(self._finish, job.done))

    def _finish(self, done: asyncio.Future[T], working: asyncio.Future[T]) -> None:
        self._idle += 1
        if working.cancelled():
            done.cancel()
        elif (error := working.exception()) is None:
            if not done.done():
                done.set_result(working.result())
        elif not done.done():
            done.set_exception(error)
        self._start()

    def close(self) -> None:
        """End the threads when the functions that they run have ended. Functions that wait never run."""
        for queue in self._waiting.values():
            for job in queue:
                job.done.cancel()
        self._waiting.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)
