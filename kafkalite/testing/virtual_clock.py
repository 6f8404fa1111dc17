"""VirtualClock: a Clock that moves only when a test advances it or, in ``auto_jump``, when all tasks wait."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Final

from kafkalite.errors import ConfigError

# The maximum number of iterations of the event loop for woken tasks before time advances. A broker task that
# processes many logs yields to the loop in between, and must end before time advances.
_SETTLE_TURNS: Final = 100
_LEAST_TURNS: Final = 5


class VirtualClock:
    """A clock whose time changes only in ``advance``, ``auto_jump`` and ``move_to``. Use it on the broker's
    event loop.

    The monotonic time starts at 0. By default the wall clock starts at the real time, so that timestamps are
    plausible.
    """

    def __init__(self, *, wall_ms: int | None = None) -> None:
        self._wall_ms = time.time_ns() // 1_000_000 if wall_ms is None else wall_ms
        self._now_ms = 0
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = count()
        self._jumps: _Jumps | None = None

    def __repr__(self) -> str:
        return f"<VirtualClock at {self._now_ms} ms, {self.sleeper_count} sleepers>"

    def wall_ms(self) -> int:
        return self._wall_ms + self._now_ms

    def monotonic_ms(self) -> int:
        return self._now_ms

    def monotonic_ns(self) -> int:
        return self._now_ms * 1_000_000

    async def sleep_ms(self, duration_ms: int) -> None:
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_ms + max(duration_ms, 0), next(self._order), woken))
        await woken

    async def advance(self, duration_ms: int) -> None:
        """Advance by ``duration_ms``. Tasks that sleep on this clock wake in the order of their times, each
        at its time, and run before the time advances further. Inside ``auto_jump``, sleep for ``duration_ms``
        instead."""
        if self._jumps is not None:
            await self.sleep_ms(duration_ms)
            return
        end_ms = self._now_ms + duration_ms
        await _settle(self)
        while self._sleepers and self._sleepers[0][0] <= end_ms:
            due_ms, _, woken = heapq.heappop(self._sleepers)
            self._now_ms = max(self._now_ms, due_ms)
            if not woken.done():
                woken.set_result(None)
                await _settle(self)
        self._now_ms = end_ms

    @asynccontextmanager
    async def auto_jump(self, *, limit_ms: int = 3_600_000) -> AsyncIterator[None]:
        """While the block runs, jump to the next timer whenever all tasks of this event loop wait.

        This clock and the loop's timers move together, so ``asyncio.sleep`` and timeouts of clients take no
        real time either. The broker (with ``inproc`` and memory) and its clients must run in this loop. After
        the block, the loop's time advances normally again and never goes back.

        Raises TimeoutError if the block does not end within ``limit_ms`` of virtual time, for example because
        its tasks wait for something that never happens. Raises ConfigError for an event loop without a
        selector, and inside another ``auto_jump`` of this clock.
        """
        loop = asyncio.get_running_loop()
        if self._jumps is not None or not hasattr(loop, "_selector"):
            allowed = "one auto_jump at a time, in an event loop of asyncio"
            raise ConfigError(key="loop", value=repr(loop), allowed=allowed)
        owner = asyncio.current_task()
        assert owner is not None
        self._jumps = jumps = _Jumps(self, loop, owner, limit_ms)
        try:
            yield
        except asyncio.CancelledError:
            if not jumps.is_exceeded or owner.uncancel():
                raise
            raise TimeoutError(f"the tasks still wait after {limit_ms} ms of virtual time") from None
        finally:
            self._jumps = None
            jumps.end()

    def next_ms(self) -> int | None:
        """Return the monotonic time (ms) at which the next sleeping task wakes, maybe in the past; None if no
        task sleeps."""
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        return self._sleepers[0][0] if self._sleepers else None

    def move_to(self, now_ms: int) -> None:
        """Advance the monotonic time to ``now_ms``, unless it is later already. Wake the sleeping tasks that
        are due, in the order of their times."""
        self._now_ms = max(self._now_ms, now_ms)
        while self._sleepers and self._sleepers[0][0] <= self._now_ms:
            _, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)

    @property
    def sleeper_count(self) -> int:
        """The number of tasks that sleep on this clock."""
        return sum(not woken.done() for _, _, woken in self._sleepers)


class _Jumps:
    """Replaces the selector of an event loop. If nothing is ready, advances the time of clock and loop."""

    def __init__(self, clock: VirtualClock, loop: Any, owner: asyncio.Task[Any], limit_ms: int) -> None:
        self._clock = clock
        self._loop = loop
        self._owner = owner
        self._selector = loop._selector
        self._real_time = loop.time
        self._began_s = self._now_s = loop.time()
        self._began_ms = clock.monotonic_ms()
        self._limit_ms = limit_ms
        self.is_exceeded = False
        loop._selector = self
        loop.time = lambda: self._now_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._selector, name)

    def end(self) -> None:
        """Restore the loop's selector, and let the loop's time advance normally from now on."""
        self._loop._selector = self._selector
        real_time = self._real_time
        ahead_s = self._now_s - real_time()
        self._loop.time = lambda: real_time() + ahead_s

    def select(self, timeout_s: float | None = None) -> Any:
        """Return the ready events. If there are none, advance the time to the next timer instead of waiting.
        Wait if there is no timer."""
        events = self._selector.select(0)
        if events or timeout_s == 0:
            return events
        next_ms = self._clock.next_ms()
        sleeper_s = math.inf if next_ms is None else self._began_s + (next_ms - self._began_ms) / 1000
        timer_s = math.inf if timeout_s is None else self._now_s + timeout_s
        next_s = min(timer_s, sleeper_s)
        if next_s == math.inf or self.is_exceeded:
            return self._selector.select(timeout_s)
        self._now_s = max(self._now_s, next_s)
        passed_ms = int((self._now_s - self._began_s) * 1000 + 1e-6)
        if passed_ms > self._limit_ms:
            self.is_exceeded = True
            self._owner.cancel()
        self._clock.move_to(self._began_ms + passed_ms)
        return []


async def _settle(clock: VirtualClock) -> None:
    """Let tasks run until all tasks of the loop wait. Stop earlier if, after a few iterations, another task
    sleeps on the clock, and in any case after ``_SETTLE_TURNS`` iterations."""
    before = clock.sleeper_count
    ready = getattr(asyncio.get_running_loop(), "_ready", None)  # uvloop does not have this attribute
    for turn in range(_SETTLE_TURNS):
        await asyncio.sleep(0)
        if ready is not None and not ready:
            break
        if clock.sleeper_count > before and turn >= _LEAST_TURNS:
            break
