"""VirtualClock: sleepers wake in order, at their time, and run before time goes on."""

from __future__ import annotations

import asyncio
import time

import pytest

from kafkalite.errors import CommitFailedError, ConfigError
from kafkalite.testing.cluster import Cluster
from kafkalite.testing.virtual_clock import VirtualClock

HOUR_MS = 3_600_000


async def test_sleepers_wake_in_the_order_of_their_time() -> None:
    clock = VirtualClock(wall_ms=1000)
    woken: list[tuple[str, int]] = []

    async def sleep(name: str, duration_ms: int) -> None:
        await clock.sleep_ms(duration_ms)
        woken.append((name, clock.monotonic_ms()))

    tasks = [asyncio.create_task(sleep(*item)) for item in (("c", 30), ("a", 10), ("b", 10))]
    await clock.advance(9)
    assert woken == []
    await clock.advance(1)
    assert woken == [("a", 10), ("b", 10)]
    await clock.advance(100)
    assert woken[2] == ("c", 30)
    assert clock.monotonic_ms() == 110
    assert clock.wall_ms() == 1110
    await asyncio.gather(*tasks)


async def test_a_loop_runs_once_for_every_interval_that_passes() -> None:
    clock = VirtualClock()
    rounds: list[int] = []

    async def every_minute() -> None:
        while True:
            await clock.sleep_ms(60_000)
            for _ in range(5):
                await asyncio.sleep(0)  # yields to the loop, as a long pass does
            rounds.append(clock.monotonic_ms())

    task = asyncio.create_task(every_minute())
    began = time.perf_counter()
    await clock.advance(24 * 3_600_000)
    assert rounds == [minute * 60_000 for minute in range(1, 1441)]
    assert time.perf_counter() - began < 10
    task.cancel()


async def test_a_cancelled_sleeper_is_passed_over() -> None:
    clock = VirtualClock()
    task = asyncio.create_task(clock.sleep_ms(10))
    await asyncio.sleep(0)
    assert clock.sleeper_count == 1
    assert "1 sleepers" in repr(clock)
    task.cancel()
    await clock.advance(20)
    assert clock.sleeper_count == 0


def test_it_starts_at_the_real_time() -> None:
    assert abs(VirtualClock().wall_ms() - time.time() * 1000) < 60_000


async def test_the_clock_jumps_when_all_tasks_wait() -> None:
    clock = VirtualClock(wall_ms=1_000)
    loop = asyncio.get_running_loop()
    woken: list[tuple[str, int]] = []
    began = time.perf_counter()

    async def sleep(name: str, duration_ms: int, *, by_loop: bool) -> None:
        await (asyncio.sleep(duration_ms / 1000) if by_loop else clock.sleep_ms(duration_ms))
        woken.append((name, clock.monotonic_ms()))

    async with clock.auto_jump(limit_ms=3 * HOUR_MS):
        before_s = loop.time()
        await asyncio.gather(
            sleep("c", HOUR_MS, by_loop=True),
            sleep("a", 10, by_loop=False),
            sleep("b", 20, by_loop=True),
            sleep("d", HOUR_MS + 1, by_loop=False),
        )
        assert woken == [("a", 10), ("b", 20), ("c", HOUR_MS), ("d", HOUR_MS + 1)]
        assert loop.time() - before_s == pytest.approx(3600.001)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.Event().wait()
        await clock.advance(HOUR_MS)
        assert clock.monotonic_ms() == 2 * HOUR_MS + 60_001
    assert time.perf_counter() - began < 5
    assert loop.time() - before_s >= 7_260
    after_s = loop.time()
    await asyncio.sleep(0.02)  # real time again
    assert 0.01 < loop.time() - after_s < 5
    assert clock.monotonic_ms() == 2 * HOUR_MS + 60_001


async def test_tasks_that_wait_for_ever_are_reported() -> None:
    clock = VirtualClock()

    async def tick() -> None:
        while True:
            await clock.sleep_ms(1_000)

    task = asyncio.create_task(tick())
    with pytest.raises(TimeoutError, match="still wait after 60000 ms of virtual time"):
        async with clock.auto_jump(limit_ms=60_000):
            await asyncio.Event().wait()
    task.cancel()
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0


async def test_a_cancelled_block_is_not_a_timeout() -> None:
    clock = VirtualClock()

    async def block() -> None:
        async with clock.auto_jump():
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with clock.auto_jump():  # the first one has ended
        with pytest.raises(ConfigError, match="one auto_jump at a time"):
            async with clock.auto_jump():
                pass


async def test_clients_and_broker_live_in_the_time_that_jumps() -> None:
    clock = VirtualClock()
    began = time.perf_counter()
    async with Cluster(clock=clock) as cluster, clock.auto_jump():
        await cluster.produce("t", [b"1"])
        settings = {"group_id": "g", "auto_offset_reset": "earliest", "enable_auto_commit": False}
        async with cluster.consumer("t", **settings) as consumer:
            record = await consumer.get_one(timeout_ms=5_000)
            assert await consumer.get_many(timeout_ms=30_000) == []  # no record in half a minute
            await consumer.commit(record)
            await asyncio.sleep(300)  # a member that polls no more for max.poll.interval.ms
            with pytest.raises(CommitFailedError):
                await consumer.commit(record)
        assert clock.monotonic_ms() >= 330_000
    assert time.perf_counter() - began < 10
