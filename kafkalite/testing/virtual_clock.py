"""VirtualClock: a Clock that moves only when a test advances it."""

from __future__ import annotations

import asyncio
import heapq
import time
from itertools import count
from typing import Final

# The number of iterations of the event loop for woken tasks before time advances. A pass over many logs
# yields to the loop occasionally, and the clock must not overtake it.
_SETTLE_TURNS: Final = 100


class VirtualClock:
    """A clock that moves only in ``advance``. Use it on the event loop of the broker that has it.

    By default it starts at the real time, so that timestamps are plausible.
    """

    def __init__(self, *, wall_ms: int | None = None) -> None:
        self._wall_ms = time.time_ns() // 1_000_000 if wall_ms is None else wall_ms
        self._now_ms = 0
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = count()

    def __repr__(self) -> str:
        return f"<VirtualClock at {self._now_ms} ms, {len(self._sleepers)} sleepers>"

    def wall_ms(self) -> int:
        return self._wall_ms + self._now_ms

    def monotonic_ms(self) -> int:
        return self._now_ms

    async def sleep_ms(self, duration_ms: int) -> None:
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_ms + max(duration_ms, 0), next(self._order), woken))
        await woken

    async def advance(self, duration_ms: int) -> None:
        """Advance by ``duration_ms``. Sleepers wake in the order of their times and run until they wait."""
        end_ms = self._now_ms + duration_ms
        await _settle(self)
        while self._sleepers and self._sleepers[0][0] <= end_ms:
            due_ms, _, woken = heapq.heappop(self._sleepers)
            self._now_ms = max(self._now_ms, due_ms)
            if not woken.done():
                woken.set_result(None)
                await _settle(self)
        self._now_ms = end_ms

    @property
    def sleeper_count(self) -> int:
        """The number of tasks that sleep on this clock."""
        return len(self._sleepers)


async def _settle(clock: VirtualClock) -> None:
    """Run the tasks that were just woken until one sleeps again, at most for ``_SETTLE_TURNS`` iterations."""
    before = clock.sleeper_count
    for _ in range(_SETTLE_TURNS):
        await asyncio.sleep(0)
        if clock.sleeper_count > before:
            break
