"""Who waits for a partition to move: produce requests for the high watermark, fetches for more bytes.

Everything happens on the broker's loop. A partition nobody waits for costs one dictionary lookup per
append; a waiter that goes away (answered, expired, disconnected) takes itself out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

Key = tuple[str, int]
"""Topic and partition; a TopicPartition is one."""


class ReachedWaiter:
    """Waits until a partition's high watermark is at least ``offset`` (exclusive end of a batch)."""

    __slots__ = ("callback", "is_cancelled", "offset")

    def __init__(self, offset: int, callback: Callable[[Exception | None], None]) -> None:
        self.offset = offset
        self.callback = callback
        self.is_cancelled = False


class AppendedWaiter:
    """Waits until ``missing_bytes`` more can be read from any of its partitions, or its time is over."""

    __slots__ = ("_waiters", "callback", "is_woken", "keys", "missing_bytes", "timer")

    def __init__(
        self, waiters: Waiters, keys: tuple[Key, ...], missing_bytes: int, callback: Callable[[], None]
    ) -> None:
        self._waiters = waiters
        self.keys = keys
        self.missing_bytes = missing_bytes
        self.callback = callback
        self.is_woken = False
        self.timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        """Call back once, in a later turn of the loop: the appender answers its own client first."""
        if not self.is_woken:
            self.cancel()
            self._waiters.loop.call_soon(self.callback)

    def cancel(self) -> None:
        """Take this waiter out of every partition. Harmless when it is out already."""
        if not self.is_woken:
            self.is_woken = True
            if self.timer is not None:
                self.timer.cancel()
            self._waiters.remove(self)


class Waiters:
    """All waiters of one broker.

    Invariant: the offsets in one partition's queue do not decrease, because appends are asked in log order.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._reached: dict[Key, deque[ReachedWaiter]] = {}
        self._appended: dict[Key, dict[AppendedWaiter, None]] = {}

    def __len__(self) -> int:
        """How many wait now."""
        fetches = {waiter for waiters in self._appended.values() for waiter in waiters}
        return sum(map(len, self._reached.values())) + len(fetches)

    def reached(self, key: Key, offset: int, callback: Callable[[Exception | None], None]) -> ReachedWaiter:
        """Call ``callback(None)`` when the high watermark is at least ``offset``, or with what went wrong."""
        waiter = ReachedWaiter(offset, callback)
        queue = self._reached.get(key)
        if queue is None:
            queue = self._reached[key] = deque()
        assert not queue or queue[-1].offset <= offset, f"{key}: {queue[-1].offset} is awaited after {offset}"
        queue.append(waiter)
        return waiter

    def appended(
        self, keys: Iterable[Key], missing_bytes: int, max_wait_ms: int, callback: Callable[[], None]
    ) -> AppendedWaiter:
        """Call ``callback`` once: after ``missing_bytes`` became readable, or after ``max_wait_ms``."""
        waiter = AppendedWaiter(self, tuple(dict.fromkeys(keys)), missing_bytes, callback)
        for key in waiter.keys:
            self._appended.setdefault(key, {})[waiter] = None
        waiter.timer = self.loop.call_later(max_wait_ms / 1000, waiter.wake)
        return waiter

    def on_high_watermark(self, key: Key, high_watermark: int, readable_bytes: int) -> None:
        """The partition may be read up to ``high_watermark`` now, ``readable_bytes`` more than before."""
        if not self._reached and not self._appended:
            return
        queue = self._reached.get(key)
        if queue is not None:
            while queue and queue[0].offset <= high_watermark:
                waiter = queue.popleft()
                if not waiter.is_cancelled:
                    waiter.callback(None)
            if not queue:
                self._reached.pop(key, None)
        waiting = self._appended.get(key)
        if waiting is not None:
            for fetch in list(waiting):
                fetch.missing_bytes -= readable_bytes
                if fetch.missing_bytes <= 0:
                    fetch.wake()

    def on_failed(self, key: Key, error: Exception) -> None:
        """The partition takes no more (or is gone): every waiter is told now, not at its deadline."""
        for waiter in self._reached.pop(key, ()):
            if not waiter.is_cancelled:
                waiter.callback(error)
        for fetch in list(self._appended.get(key, ())):
            fetch.wake()

    def release(self) -> None:
        """Wake every fetch: the broker stops and answers with what there is."""
        for waiting in list(self._appended.values()):
            for fetch in list(waiting):
                fetch.wake()

    def remove(self, waiter: AppendedWaiter) -> None:
        for key in waiter.keys:
            waiting = self._appended.get(key)
            if waiting is not None:
                waiting.pop(waiter, None)
                if not waiting:
                    del self._appended[key]
