"""The Clock interface, which returns the time and lets a task sleep.

Periodic work of the broker (retention, segment roll, idle connections) uses this interface, so that a test
can simulate a week in milliseconds. Network deadlines use the event loop's own timers.
"""

# Tests: tests/testing/test_virtual_clock.py

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def wall_ms(self) -> int:
        """Return milliseconds since the Unix epoch, for timestamps. May jump forward or back."""
        ...

    def monotonic_ms(self) -> int:
        """Return milliseconds since an arbitrary start, for measuring intervals. Never decreases."""
        ...

    def monotonic_ns(self) -> int:
        """Return the time of ``monotonic_ms`` in nanoseconds, for measuring how long code runs."""
        ...

    async def sleep_ms(self, duration_ms: int) -> None:
        """Sleep until ``monotonic_ms`` has advanced by ``duration_ms``."""
        ...


class SystemClock:
    """The operating system's clocks and the running event loop's timer."""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    async def sleep_ms(self, duration_ms: int) -> None:
        import asyncio

        await asyncio.sleep(duration_ms / 1000)
