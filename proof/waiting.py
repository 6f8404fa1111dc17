"""Lets tests wait for a condition, or for everything that is ready to run, but not for an amount of time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Final

LIMIT_S: Final = 30.0
_FIRST_PAUSE_S: Final = 0.0005
_LAST_PAUSE_S: Final = 0.02


async def eventually(
    condition: Callable[[], object | Awaitable[object]], what: str = "", *, limit_s: float = LIMIT_S
) -> None:
    """Return when ``condition()``, possibly awaited, is true. Raises AssertionError after ``limit_s``."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + limit_s
    pause_s = 0.0
    while True:
        found = condition()
        if isawaitable(found):
            found = await found
        if found:
            return
        assert loop.time() < deadline_s, f"not within {limit_s:g} s: {what or condition}"
        await asyncio.sleep(pause_s)
        pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LAST_PAUSE_S)


async def settle(turns: int = 50) -> None:
    """Run everything that is ready, and everything that this makes ready, to show that something does not
    happen.

    This is sufficient if nothing crosses a thread or a socket: in-process connections and disks in memory.
    """
    for _ in range(turns):
        await asyncio.sleep(0)
