"""Signals: every waiting task is woken, and each wait has its own time limit."""

from __future__ import annotations

import asyncio

from kafkalite.client.cluster.signal import Signal


async def test_firing_wakes_all_waiting_tasks_once() -> None:
    signal = Signal()
    waits = [asyncio.ensure_future(signal.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    assert signal.is_awaited
    signal.fire()
    assert not signal.is_awaited
    assert await asyncio.gather(*waits) == [True, True, True]
    assert not await signal.wait(0), "the signal is not remembered"


async def test_a_wait_that_ends_early_leaves_the_others() -> None:
    signal = Signal()
    first, second = (asyncio.ensure_future(signal.wait()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert not await signal.wait(0)
    assert signal.is_awaited
    signal.fire()
    assert await second
    assert first.cancelled()
    assert not signal.is_awaited
