"""The embedded broker of tests: ready, first record, snapshots, a week of virtual time, simulated seeds."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from pathlib import Path

from benchmarks.harness import Row, plain_row, time_row
from kafkalite.testing import Cluster, VirtualClock

TOPICS = 100
WEEK_MS = 7 * 24 * 60 * 60 * 1000
EXAMPLES = Path(__file__).resolve().parent.parent / "docs/testing.md"


async def _first_records() -> tuple[float, float]:
    """Return the median times until a broker serves, and until a new group has received its first record."""
    ready: list[float] = []
    grouped: list[float] = []
    for _ in range(20):
        start = time.perf_counter()
        async with Cluster() as cluster:
            ready.append(time.perf_counter() - start)
            await cluster.produce("t", [b"1"])
            start = time.perf_counter()
            async with cluster.consumer("t", group_id="g", auto_offset_reset="earliest") as consumer:
                await consumer.get_one(timeout_ms=5_000)
                grouped.append(time.perf_counter() - start)
    return statistics.median(ready), statistics.median(grouped)


async def _snapshots() -> tuple[float, float]:
    """Return the median times of a reset of TOPICS topics, and of a restore after a record to one of them."""
    resets: list[float] = []
    restores: list[float] = []
    async with Cluster() as cluster:
        for _ in range(15):
            async with cluster.producer(acks=1) as producer:
                for number in range(TOPICS):
                    await producer.send(f"topic-{number}", b"1")
                snapshot = await cluster.snapshot()
                for _ in range(5):
                    await producer.send("topic-7", b"2")
                    start = time.perf_counter()
                    await cluster.restore(snapshot)
                    restores.append(time.perf_counter() - start)
            start = time.perf_counter()
            await cluster.reset()
            resets.append(time.perf_counter() - start)
    return statistics.median(resets), statistics.median(restores)


async def _week(topics: int) -> float:
    """Return the median time of a week in which an old record of each topic is deleted."""
    samples: list[float] = []
    for _ in range(5):
        clock = VirtualClock()
        async with Cluster(clock=clock) as cluster, cluster.producer() as producer:
            for number in range(topics):
                await cluster.create_topic(f"t{number}", configs={"retention.ms": str(WEEK_MS // 2)})
                await producer.send(f"t{number}", b"old", timestamp_ms=clock.wall_ms())
            start = time.perf_counter()
            await clock.advance(WEEK_MS)
            samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _example() -> float:
    """Return the time of the simulated test in docs/testing.md, which has 200 seeds."""
    (code,) = [block for block in EXAMPLES.read_text().split("```") if "@kafkalite.simulate(" in block]
    names: dict[str, object] = {}
    exec(code.removeprefix("python\n"), names)
    test = names["test_every_order_is_shipped"]
    start = time.perf_counter()
    test()  # type: ignore[operator]
    return time.perf_counter() - start


def run() -> list[Row]:
    asyncio.run(_first_records())  # modules are loaded
    gc.collect()
    ready, grouped = asyncio.run(_first_records())
    reset, restore = asyncio.run(_snapshots())
    week, busy_week = asyncio.run(_week(1)), asyncio.run(_week(TOPICS))
    memory = "in memory, inproc, median"
    return [
        time_row("embedded cluster ready", f"one broker {memory}", ready * 1e3, "ms", at_most=1),
        time_row("first record of a group", f"a new group, {memory}", grouped * 1e3, "ms", at_most=10),
        time_row("reset", f"{TOPICS} topics with a record each", reset * 1e3, "ms", at_most=1),
        time_row("restore", f"{TOPICS} topics, one of them changed", restore * 1e3, "ms", at_most=1),
        time_row("a week of virtual time", "one topic with retention", week * 1e3, "ms", at_most=20),
        plain_row("a week of virtual time", f"{TOPICS} topics, each deletes a record", busy_week * 1e3, "ms"),
        time_row("200 simulated seeds", "the example of docs/testing.md", _example(), "s", at_most=30),
    ]
