"""VirtualClock: sleepers wake in order, at their time, and run before time goes on."""

from __future__ import annotations

import asyncio
import time

from kafkalite.testing.virtual_clock import VirtualClock


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
