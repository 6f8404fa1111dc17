"""Waiters: called at the right offset, after enough bytes, at the deadline, or with an error; never twice."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from kafkalite.broker.partitions.waiters import Waiters
from kafkalite.errors import LogOfflineError

A, B = ("a", 0), ("b", 0)


async def _turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def _note(heard: list[object], offset: int, error: Exception | None) -> None:
    heard.append((offset, error))


def _waiters() -> Waiters:
    return Waiters(asyncio.get_running_loop())


async def test_an_offset_is_reached_when_the_high_watermark_is_at_it() -> None:
    waiters = _waiters()
    heard: list[object] = []
    for offset in (5, 5, 8):
        waiters.committed(A, offset, partial(_note, heard, offset))
    waiters.on_high_watermark(A, 4, 1)
    waiters.on_high_watermark(B, 9, 1)
    assert heard == []
    waiters.on_high_watermark(A, 5, 1)
    assert heard == [(5, None), (5, None)]
    assert len(waiters) == 1
    waiters.on_high_watermark(A, 9, 1)
    assert heard[2:] == [(8, None)]
    assert len(waiters) == 0


async def test_a_cancelled_waiter_is_skipped() -> None:
    waiters = _waiters()
    heard: list[object] = []
    waiters.committed(A, 1, heard.append).is_cancelled = True
    waiters.committed(A, 2, heard.append).is_cancelled = True
    waiters.on_high_watermark(A, 1, 1)
    waiters.on_failed(A, LogOfflineError("gone"))
    assert heard == []
    assert len(waiters) == 0


async def test_a_repeated_batch_waits_at_its_place_in_the_log() -> None:
    """R28: the first copy is further up than the latest append."""
    waiters = _waiters()
    heard: list[Any] = []
    for offset in (3, 5, 4, 3, 9):
        waiters.committed(A, offset, partial(_note, heard, offset))
    waiters.on_high_watermark(A, 4, 0)
    assert [offset for offset, _ in heard] == [3, 3, 4]
    waiters.on_high_watermark(A, 9, 0)
    assert [offset for offset, _ in heard] == [3, 3, 4, 5, 9]


async def test_the_synced_end_and_the_high_watermark_are_waited_for_apart() -> None:
    waiters = _waiters()
    heard: list[Any] = []
    waiters.committed(A, 1, partial(_note, heard, 1))
    waiters.synced(A, 1, partial(_note, heard, -1))
    assert len(waiters) == 2
    waiters.on_synced(A, 1)
    assert heard == [(-1, None)]
    waiters.synced(A, 2, partial(_note, heard, -2))
    error = LogOfflineError("gone")
    waiters.on_uncommittable(A, error)
    waiters.on_synced(A, 2)
    assert heard == [(-1, None), (1, error), (-2, None)]
    assert len(waiters) == 0


async def test_a_fetch_wakes_after_enough_bytes_of_any_of_its_partitions() -> None:
    waiters = _waiters()
    woken: list[str] = []
    waiters.appended([A, B, A], 10, lambda: woken.append("x"))
    assert len(waiters) == 1
    waiters.on_high_watermark(A, 1, 4)
    waiters.on_high_watermark(B, 1, 5)
    await _turns()
    assert woken == []
    waiters.on_high_watermark(B, 2, 1)
    waiters.on_high_watermark(B, 3, 100)
    assert woken == ["x"]
    assert len(waiters) == 0


async def test_a_cancelled_fetch_is_never_woken() -> None:
    waiters = _waiters()
    woken: list[str] = []
    waiter = waiters.appended([A, B], 1, lambda: woken.append("x"))
    waiter.cancel()
    waiter.cancel()
    waiter.wake()
    waiters.on_high_watermark(A, 1, 100)
    await _turns()
    assert woken == []


async def test_a_failure_reaches_every_waiter_of_that_partition() -> None:
    waiters = _waiters()
    heard: list[Exception | None] = []
    woken: list[str] = []
    waiters.committed(A, 1, heard.append)
    waiters.committed(B, 1, heard.append)
    waiters.appended([A, B], 1, lambda: woken.append("x"))
    error = LogOfflineError("disk")
    waiters.on_failed(A, error)
    await _turns()
    assert heard == [error]
    assert woken == ["x"]
    assert len(waiters) == 1


async def test_a_stop_wakes_every_fetch() -> None:
    waiters = _waiters()
    woken: list[str] = []
    waiters.appended([A], 1, lambda: woken.append("a"))
    waiters.appended([B, A], 1, lambda: woken.append("b"))
    waiters.release()
    await _turns()
    assert sorted(woken) == ["a", "b"]
    assert len(waiters) == 0


async def test_a_callback_may_wait_again_for_the_same_partition() -> None:
    waiters = _waiters()
    heard: list[object] = []

    def again(error: Exception | None) -> None:
        heard.append(error)
        waiters.committed(A, 2, heard.append)

    waiters.committed(A, 1, again)
    waiters.on_high_watermark(A, 1, 1)
    assert len(waiters) == 1
    waiters.on_high_watermark(A, 2, 1)
    assert heard == [None, None]
