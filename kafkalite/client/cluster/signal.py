"""Lets several tasks wait for a repeated event."""

# Tests: tests/client/test_signal.py

from __future__ import annotations

import asyncio


def wake(waiter: asyncio.Future[None]) -> None:
    """Resolve ``waiter`` unless it is done or cancelled."""
    if not waiter.done():
        waiter.set_result(None)


class Waker:
    """Resolves ``waiter``, unless it is done or cancelled, when it is called."""

    __slots__ = ("waiter",)

    def __init__(self, waiter: asyncio.Future[None]) -> None:
        self.waiter = waiter

    def __call__(self) -> None:
        wake(self.waiter)


class Signal:
    """Wakes all waiting tasks when it is fired. Tasks that wait later are woken when it is fired again."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def is_awaited(self) -> bool:
        """Whether at least one task is waiting."""
        return bool(self._waiters)

    def fire(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            wake(waiter)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Return True when the signal is fired, or False after ``timeout_s`` (None: no limit)."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.append(waiter)
        timer = None if timeout_s is None else loop.call_later(timeout_s, wake, waiter)
        try:
            await waiter
            return waiter not in self._waiters
        finally:
            if timer is not None:
                timer.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)
