"""Periodic passes rest while nothing happens, and have their effects at the same times as if they did not."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

import kafkalite
from kafkalite.broker.activity import MAX_REST_MS, Activity
from kafkalite.broker.partitions.housekeeping import Housekeeping
from kafkalite.broker.server.server import Server
from kafkalite.protocol.messages.metadata import DescribeClusterRequest
from kafkalite.testing import Cluster, VirtualClock, WireClient

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS


async def _passes(idle_ms: float, *, may_rest: bool = True, touched_at_ms: int = -1) -> list[int]:
    """Return the times of the passes of half a day, in minutes."""
    clock = VirtualClock()
    activity = Activity(clock, may_rest=may_rest)
    pace = activity.every(MINUTE_MS)
    passes: list[int] = []

    async def run() -> None:
        while True:
            pace.begin()
            passes.append(clock.monotonic_ms() // MINUTE_MS)
            await pace.rest(idle_ms)

    task = asyncio.create_task(run())
    if touched_at_ms >= 0:
        await clock.advance(touched_at_ms)
        activity.touch()
        await clock.advance(DAY_MS // 2 - touched_at_ms)
    else:
        await clock.advance(DAY_MS // 2)
    task.cancel()
    return passes


async def test_a_pass_rests_until_something_may_be_due() -> None:
    every_minute = list(range(721))
    assert await _passes(0) == every_minute
    assert await _passes(math.inf, may_rest=False) == every_minute
    assert await _passes(math.inf) == [0]
    assert await _passes(200 * MINUTE_MS + 5) == [0, 200, 400, 600]
    assert MAX_REST_MS == DAY_MS


async def test_activity_ends_the_rest_at_the_next_interval() -> None:
    assert await _passes(math.inf, touched_at_ms=10 * MINUTE_MS + 1) == [0, 11]
    assert await _passes(math.inf, touched_at_ms=10 * MINUTE_MS) == [0, 10]
    assert await _passes(math.inf, touched_at_ms=0) == [0, 1]


async def test_activity_during_a_pass_is_not_missed() -> None:
    clock = VirtualClock()
    activity = Activity(clock)
    pace, other = activity.every(MINUTE_MS), activity.every(MINUTE_MS)
    pace.begin()
    activity.touch()
    other.begin()  # the pass of another task does not hide it
    task = asyncio.create_task(pace.rest(math.inf))
    await clock.advance(MINUTE_MS)
    assert task.done()


@pytest.mark.parametrize("size", [1, 30])
async def test_a_week_of_an_idle_broker_takes_few_passes(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """160,000 passes a week without rests: reaper, retention, checkpoints and cleaner."""
    clock = VirtualClock()
    passes = 0
    for kind, name in ((Housekeeping, "retain"), (Housekeeping, "checkpoint"), (Server, "reap")):
        original = getattr(kind, name)

        def counted(*args: Any, original: Any = original) -> Any:
            nonlocal passes
            passes += 1
            return original(*args)

        monkeypatch.setattr(kind, name, counted)
    async with Cluster(clock=clock) as cluster:
        for number in range(size):
            await cluster.create_topic(f"t{number}")
        await cluster.produce("t0", [b"1"])
        consumer = cluster.consumer("t0", group_id="g", auto_offset_reset="earliest")
        async with consumer:  # __consumer_offsets is compacted
            assert (await consumer.get_one(timeout_ms=5000)).value == b"1"
        await clock.advance(7 * DAY_MS)
        assert passes < 1_000


@pytest.mark.parametrize("may_rest", [True, False])
async def test_retention_has_its_effect_at_the_same_time(
    may_rest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Activity.__init__
    monkeypatch.setattr(
        Activity, "__init__", lambda self, clock, **_: original(self, clock, may_rest=may_rest)
    )
    clock = VirtualClock()
    key = kafkalite.TopicPartition("t", 0)
    async with Cluster(clock=clock) as cluster:
        await cluster.create_topic("t", configs={"retention.ms": str(102 * MINUTE_MS)})
        await clock.advance(10 * HOUR_MS)
        async with cluster.producer() as producer, cluster.admin() as admin:
            await producer.send("t", b"1", timestamp_ms=clock.wall_ms())
            deleted = []
            for minute in range(90, 130):
                await clock.advance(90 * MINUTE_MS if minute == 90 else MINUTE_MS)
                if (await admin.list_offsets([key], "earliest"))[key].offset:
                    deleted.append(minute)
            assert deleted[0] == 106  # the pass of every fifth minute; the first one began after 30 s


async def test_a_connection_is_closed_ten_minutes_after_its_last_request() -> None:
    """The reaper rests meanwhile: a request or a response ends its rest, so that it notes when it came."""
    clock = VirtualClock()
    async with Cluster(clock=clock) as cluster, WireClient(cluster.bootstrap_servers) as wire:
        await clock.advance(5 * MINUTE_MS)
        await wire.call(DescribeClusterRequest())
        await clock.advance(9 * MINUTE_MS + 50_000)
        assert not wire.is_closed
        await clock.advance(20_000)
        assert wire.is_closed
