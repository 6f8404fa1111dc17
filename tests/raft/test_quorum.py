"""Waiting for an offset."""

from __future__ import annotations

import asyncio

import pytest

from kafkalite.raft.quorum import OffsetWaiters


async def test_waiters_are_completed_up_to_the_offset():
    waiters = OffsetWaiters()
    first, second, third = (waiters.add(offset) for offset in (2, 3, 5))
    waiters.reach(1)
    assert not first.done()
    waiters.reach(3)
    assert (first.done(), second.done(), third.done()) == (True, True, False)
    waiters.fail(OSError("the disk"))
    with pytest.raises(OSError, match="the disk"):
        await third


async def test_cancelled_waiters_are_dropped():
    waiters = OffsetWaiters()
    for _ in range(100):
        waiters.add(9).cancel()
    kept = waiters.add(9)
    assert waiters._waiting == [(9, kept)]
    waiters.reach(9)
    await asyncio.wait_for(kept, 30)
