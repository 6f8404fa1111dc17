"""The Clock seam: what time it is, and waiting for it.

Broker passes that happen "every so often" (retention, roll, idle reaping) wait through this seam, so a
test lets a week pass in milliseconds. Network deadlines use the event loop's own timers.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def wall_ms(self) -> int:
        """Milliseconds since the Unix epoch. May jump; used for timestamps that people see."""
        ...

    def monotonic_ms(self) -> int:
        """Milliseconds since an arbitrary start. Never goes back; used for every interval."""
        ...

    async def sleep_ms(self, duration_ms: int) -> None:
        """Return when ``monotonic_ms`` has advanced by ``duration_ms``."""
        ...


class SystemClock:
    """The operating system's clocks and the running event loop's timer."""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    async def sleep_ms(self, duration_ms: int) -> None:
        import asyncio

        await asyncio.sleep(duration_ms / 1000)
