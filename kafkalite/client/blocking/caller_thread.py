"""Runs a blocking consumer's rebalance listener in the thread that called the consumer.

While that thread waits for the loop thread, the loop thread may pass it a call. The call may itself wait for
the loop thread, so waits can be nested.
"""

# Tests: tests/client/test_blocking_consumer.py

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from kafkalite.client.cluster.signal import wake
from kafkalite.client.group.rebalance_listener import RebalanceListener
from kafkalite.errors import ClientError
from kafkalite.loop_thread import SIGNAL_TURN_S, LoopThread
from kafkalite.model import TopicPartition

T = TypeVar("T")

_Calls = SimpleQueue[Callable[[], None] | None]
_Method = Callable[[Sequence[TopicPartition]], Awaitable[None] | None]


class CallerThread:
    """Runs coroutines on the loop thread while the calling thread waits and executes their listener calls."""

    def __init__(self, loop_thread: LoopThread) -> None:
        self._loop_thread = loop_thread
        self._waits: list[_Calls] = []  # the innermost wait is last
        self._has_listener = False

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result or raise its error.

        Ctrl-C interrupts the wait and cancels the coroutine. Raises the errors of
        ``LoopThread.check_outside``.
        """
        if not self._has_listener:
            return self._loop_thread.run(coroutine)
        self._loop_thread.check_outside(coroutine)
        calls: _Calls = SimpleQueue()
        self._waits.append(calls)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop_thread.loop)
        future.add_done_callback(lambda _: calls.put(None))
        try:
            while True:
                try:
                    call = calls.get(timeout=SIGNAL_TURN_S)
                except Empty:
                    continue
                if call is None:
                    return future.result()
                call()
        except BaseException:
            future.cancel()
            raise
        finally:
            self._waits.remove(calls)

    def listener(self, listener: RebalanceListener) -> RebalanceListener:
        """Wrap ``listener`` so that its methods are called in the thread that waits in ``run``."""
        self._has_listener = True
        return _ForwardingListener(self, listener)

    async def call_back(self, method: _Method, partitions: Sequence[TopicPartition]) -> None:
        """Make the thread that waits in ``run`` call ``method``. Raises the method's exception.

        Raises ClientError if no thread waits in ``run``.
        """
        if not self._waits:
            raise ClientError("no thread waits in a call that could run the rebalance listener")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        raised: list[BaseException] = []

        def call() -> None:
            try:
                result = method(partitions)
                if inspect.isawaitable(result):
                    self.run(_awaited(result))
            except Exception as error:
                raised.append(error)
            finally:
                loop.call_soon_threadsafe(wake, done)

        self._waits[-1].put(call)
        await done
        if raised:
            raise raised[0]


class _ForwardingListener(RebalanceListener):
    """Calls a user's listener in the user's thread."""

    def __init__(self, caller: CallerThread, listener: RebalanceListener) -> None:
        self._caller = caller
        self._listener = listener

    async def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        await self._caller.call_back(self._listener.on_assigned, partitions)

    async def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        await self._caller.call_back(self._listener.on_revoked, partitions)

    async def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        await self._caller.call_back(self._listener.on_lost, partitions)


async def _awaited(result: Awaitable[None]) -> None:
    await result
