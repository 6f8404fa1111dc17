"""Lets requests wait for a partition: produce requests for their batches, fetches for more bytes.

All code here runs on the broker's loop. An append to a partition without waiters costs at most two dictionary
lookups here. A request that ends early (response sent, expired, disconnected) cancels its waiters.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

Key = tuple[str, int]
"""(topic, partition). A TopicPartition is also a Key."""


@dataclass(slots=True, eq=False)
class ReachedWaiter:
    """Waits until a partition's high watermark, synced end or low watermark is at least ``offset``.

    ``callback`` is then called with None, or earlier with an error if waiting has become useless.
    """

    offset: int  #: exclusive end of the awaited batch, or the new log start of a deletion
    callback: Callable[[Exception | None], None]
    is_cancelled: bool = False


@dataclass(slots=True, eq=False)
class AppendedWaiter:
    """Waits until ``missing_bytes`` more bytes are readable in its partitions together.

    If ``is_readable`` is not None, it must also return True for the partition that has new bytes: a fetch
    with isolation level read_committed ends at the last stable offset, which may be below those bytes.
    """

    waiters: Waiters
    keys: tuple[Key, ...]
    missing_bytes: int
    callback: Callable[[], None]
    is_readable: Callable[[Key], bool] | None = None
    is_woken: bool = False

    def wake(self) -> None:
        """Remove this waiter and call its callback. No effect after the first call or ``cancel``."""
        if not self.is_woken:
            self.cancel()
            self.callback()

    def cancel(self) -> None:
        """Remove this waiter from every partition. Idempotent."""
        if not self.is_woken:
            self.is_woken = True
            self.waiters.remove(self)


@dataclass(slots=True, eq=False)
class _Queues:
    """The waiters for one kind of offset, by partition. A queue is in ascending order of offsets."""

    by_key: dict[Key, deque[ReachedWaiter]] = field(default_factory=dict)

    def add(self, key: Key, offset: int, callback: Callable[[Exception | None], None]) -> ReachedWaiter:
        waiter = ReachedWaiter(offset, callback)
        queue = self.by_key.get(key)
        if queue is None:
            queue = self.by_key[key] = deque()
        if not queue or queue[-1].offset <= offset:
            queue.append(waiter)
            return waiter
        index = len(queue)  # a repeated batch waits for the lower offset of its first copy (R28)
        while index and queue[index - 1].offset > offset:
            index -= 1
        queue.insert(index, waiter)
        return waiter

    def advance(self, key: Key, offset: int) -> None:
        queue = self.by_key.get(key)
        if queue is None:
            return
        while queue and queue[0].offset <= offset:
            waiter = queue.popleft()
            if not waiter.is_cancelled:
                waiter.callback(None)
        if not queue and self.by_key.get(key) is queue:
            del self.by_key[key]

    def fail(self, key: Key, error: Exception) -> None:
        for waiter in self.by_key.pop(key, ()):
            if not waiter.is_cancelled:
                waiter.callback(error)


class Waiters:
    """All waiters of one broker, for every partition."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        #: Called when records become readable or synced, before any waiter.
        self.on_change: Callable[[], None] = lambda: None
        self._committed = _Queues()
        self._synced = _Queues()
        self._deleted = _Queues()
        #: Called with a key, an offset and a callback. Calls ``callback(None)`` when the high watermark is at
        #: least ``offset``, or ``callback(error)`` if waiting has become useless.
        self.committed = self._committed.add
        #: Like ``committed``, for the end (exclusive) of the records synced on this broker's disk.
        self.synced = self._synced.add
        #: Like ``committed``, for the low watermark: the lowest log start of the in-sync replicas.
        self.deleted = self._deleted.add
        self._appended: dict[Key, dict[AppendedWaiter, None]] = {}

    def __len__(self) -> int:
        """Return the number of waiters."""
        fetches = {waiter for waiters in self._appended.values() for waiter in waiters}
        kinds = (self._committed, self._synced, self._deleted)
        queues = [queue for kind in kinds for queue in kind.by_key.values()]
        return sum(map(len, queues)) + len(fetches)

    def appended(
        self,
        keys: Iterable[Key],
        missing_bytes: int,
        callback: Callable[[], None],
        is_readable: Callable[[Key], bool] | None = None,
    ) -> AppendedWaiter:
        """Call ``callback`` once, when ``missing_bytes`` more bytes of ``keys`` together are readable.

        It is called earlier if one of the partitions fails (``on_failed``), or at a stop. ``is_readable`` is
        described in ``AppendedWaiter``; it must not raise.
        """
        waiter = AppendedWaiter(self, tuple(dict.fromkeys(keys)), missing_bytes, callback, is_readable)
        for key in waiter.keys:
            self._appended.setdefault(key, {})[waiter] = None
        return waiter

    def on_high_watermark(self, key: Key, high_watermark: int, readable_bytes: int) -> None:
        """Call each callback that waits for ``high_watermark`` or less.

        For each fetch that waits for this partition, count ``readable_bytes`` as newly readable. Wake the
        fetch if it now has enough bytes and its ``is_readable``, if any, returns True.
        """
        self.on_change()
        if self._committed.by_key:
            self._committed.advance(key, high_watermark)
        if not self._appended:
            return
        waiting = self._appended.get(key)
        if waiting is not None:
            for fetch in list(waiting):
                fetch.missing_bytes -= readable_bytes
                if fetch.missing_bytes <= 0 and (fetch.is_readable is None or fetch.is_readable(key)):
                    fetch.wake()

    def on_synced(self, key: Key, synced_end_offset: int) -> None:
        """Call each callback that waits for ``synced_end_offset`` (end of the synced records) or less."""
        self.on_change()
        if self._synced.by_key:
            self._synced.advance(key, synced_end_offset)

    def awaits_deletion(self, key: Key) -> bool:
        """Whether a deletion waits for the low watermark of this partition."""
        return key in self._deleted.by_key

    def on_low_watermark(self, key: Key, low_watermark: int) -> None:
        """Call each callback that waits for ``low_watermark`` (lowest log start in the ISR) or less."""
        self._deleted.advance(key, low_watermark)

    def on_failed(self, key: Key, error: Exception) -> None:
        """Fail all waiters of a partition with ``error``, and wake the fetches that wait for it."""
        self._committed.fail(key, error)
        self._synced.fail(key, error)
        self._deleted.fail(key, error)
        for fetch in list(self._appended.get(key, ())):
            fetch.wake()

    def on_uncommittable(self, key: Key, error: Exception) -> None:
        """Fail the partition's waiters for the high watermark, which cannot move at present (R6)."""
        self._committed.fail(key, error)

    def release(self) -> None:
        """Wake every waiting fetch, which then responds with the available data. Called at a stop."""
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
