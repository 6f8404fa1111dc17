"""Consumer groups: the first record, the time of a rebalance, the cost of members that come and go."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from typing import Any

import uvloop

from benchmarks.harness import Row, ServerProcess, percentile, plain_row, scratch_dir, server, time_row
from kafkalite.client.admin.admin import Admin
from kafkalite.client.consumer.consumer import Consumer
from kafkalite.client.producer.producer import Producer

ROUND_TRIPS = 20
MEMBERS, PARTITIONS = 100, 1_000
HANDOVERS = 10
COMERS, AT_ONCE, WAVES = 500, 5, 3
CROWD_PER_S = 100
PROBES_PER_S = 100


async def _round_trip() -> float:
    """Return the milliseconds from an empty embedded broker to the first record read through a group."""
    from kafkalite.broker.broker import Broker

    async with Broker(listeners="inproc://") as broker:
        servers = broker.bootstrap_servers
        start = time.perf_counter()
        async with Admin(servers) as admin:
            await admin.create_topic("first", partitions=1)
        async with (
            Producer(servers, linger_ms=0) as producer,
            Consumer(
                "first", group_id="g", bootstrap_servers=servers, auto_offset_reset="earliest"
            ) as consumer,
        ):
            await producer.send("first", b"x")
            assert await consumer.get_one(timeout_ms=5_000) is not None
            return (time.perf_counter() - start) * 1e3


class Members:
    """Consumers of one group, each read by a task of its own, and their partitions."""

    def __init__(self, servers: str, topic: str, group: str) -> None:
        self._servers, self._topic, self._group = servers, topic, group
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self.consumers: list[Consumer] = []

    async def __aenter__(self) -> Members:
        return self

    async def __aexit__(self, *problem: Any) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    async def join(self, count: int) -> None:
        consumers = [
            Consumer(
                self._topic,
                group_id=self._group,
                bootstrap_servers=self._servers,
                auto_offset_reset="earliest",
            )
            for _ in range(count)
        ]
        for consumer in await asyncio.gather(
            *(self._stack.enter_async_context(consumer) for consumer in consumers)
        ):
            self.consumers.append(consumer)
            self._tasks.append(asyncio.create_task(self._read(consumer)))

    async def _read(self, consumer: Consumer) -> None:
        while True:
            await consumer.get_many()

    async def until_shared(self, partitions: int) -> None:
        """Wait until every partition has an owner, with at most one partition more for some members."""
        least, rest = divmod(partitions, len(self.consumers))
        most = least + bool(rest)
        while True:
            held = [len(consumer.assignment()) for consumer in self.consumers]
            if sum(held) == partitions and min(held) >= least and max(held) <= most:
                return
            await asyncio.sleep(0.001)


async def _rebalance(ours: ServerProcess) -> tuple[float, float, float]:
    """Return (seconds until 100 members share 1,000 partitions, seconds until another one does, CPU seconds).

    The CPU seconds are those of the broker.
    """
    servers = f"127.0.0.1:{ours.port}"
    async with Admin(servers) as admin:
        await admin.create_topic("wide", partitions=PARTITIONS)
    async with Members(servers, "wide", "many") as members:
        await members.join(1)
        await members.until_shared(PARTITIONS)
        cpu, start = ours.cpu_seconds(), time.perf_counter()
        await members.join(MEMBERS - 1)
        await members.until_shared(PARTITIONS)
        all_joined, spent = time.perf_counter() - start, ours.cpu_seconds() - cpu
        start = time.perf_counter()
        await members.join(1)
        await members.until_shared(PARTITIONS)
        return all_joined, time.perf_counter() - start, spent


async def _handover(servers: str) -> float:
    """Return the median milliseconds from a third member's start until it owns its one of three
    partitions.
    """
    async with Admin(servers) as admin:
        await admin.create_topic("three", partitions=3)
    samples: list[float] = []
    for number in range(HANDOVERS):
        async with Members(servers, "three", f"handover-{number}") as members:
            await members.join(2)
            await members.until_shared(3)
            start = time.perf_counter()
            await members.join(1)
            await members.until_shared(3)
            samples.append((time.perf_counter() - start) * 1e3)
    return statistics.median(samples)


async def _probe(servers: str, latencies: list[float], is_over: asyncio.Event) -> None:
    """Until ``is_over``, send records and add the milliseconds from send to receipt to ``latencies``."""
    async with (
        Producer(servers, linger_ms=0) as producer,
        Consumer("probe", bootstrap_servers=servers, auto_offset_reset="latest") as consumer,
    ):
        while not is_over.is_set():
            start = time.perf_counter()
            await producer.send("probe", b"x")
            assert await consumer.get_one(timeout_ms=10_000) is not None
            latencies.append((time.perf_counter() - start) * 1e3)
            await asyncio.sleep(1 / PROBES_PER_S)


async def _come_and_go(servers: str, number: int) -> None:
    consumer = Consumer(
        "probe", group_id=f"passer-{number % 10}", bootstrap_servers=servers, auto_offset_reset="earliest"
    )
    async with consumer:
        await consumer.get_many(timeout_ms=20)


async def _crowd(servers: str, per_s: float) -> None:
    """Run COMERS consumers, AT_ONCE at a time, at most ``per_s`` per second."""
    for first in range(0, COMERS, AT_ONCE):
        start = time.perf_counter()
        await asyncio.gather(*(_come_and_go(servers, first + i) for i in range(AT_ONCE)))
        await asyncio.sleep(max(0.0, AT_ONCE / per_s - (time.perf_counter() - start)))


def _crowd_process(servers: str, per_s: float) -> None:
    uvloop.run(_crowd(servers, per_s))


async def _probed(servers: str, meanwhile: Awaitable[Any]) -> float:
    """Return the p99 of the probe during ``meanwhile``."""
    latencies: list[float] = []
    is_over = asyncio.Event()
    probe = asyncio.create_task(_probe(servers, latencies, is_over))
    await meanwhile
    is_over.set()
    await probe
    return percentile(latencies, 0.99)


async def _passers(ours: ServerProcess) -> tuple[float, float, list[float]]:
    """Return the p99 alone and with the crowd, in ms, and the broker's memory after each round, in MiB."""
    servers = f"127.0.0.1:{ours.port}"
    async with Admin(servers) as admin:
        await admin.create_topic("probe", partitions=1)
    alone = await _probed(servers, asyncio.sleep(5))
    memory: list[float] = []
    context = multiprocessing.get_context("spawn")

    async def crowds() -> None:
        for _ in range(WAVES):
            process = context.Process(target=_crowd_process, args=(servers, CROWD_PER_S))
            process.start()
            while process.is_alive():
                await asyncio.sleep(0.1)
            assert process.exitcode == 0, process.exitcode
            memory.append(ours.resident_mib())

    return alone, await _probed(servers, crowds()), memory


def run() -> list[Row]:
    trips = [uvloop.run(_round_trip()) for _ in range(ROUND_TRIPS)]
    with scratch_dir() as path, server("kafkalite", "--dir", path) as ours:
        handover = uvloop.run(_handover(f"127.0.0.1:{ours.port}"))
    with scratch_dir() as path, server("kafkalite", "--dir", path) as ours:
        together, one_more, spent = uvloop.run(_rebalance(ours))
    with scratch_dir() as path, server("kafkalite", "--dir", path) as ours:
        alone, busy, memory = uvloop.run(_passers(ours))
    crowd = f"{COMERS} consumers of 10 groups join, read, leave, {CROWD_PER_S} a second; {WAVES} times"
    return [
        time_row(
            "group round trip",
            f"embedded broker: create topic, send, join, first record; median of {ROUND_TRIPS}",
            statistics.median(trips),
            "ms",
            at_most=50,
        ),
        plain_row(
            "group round trip, worst", "of the same, the first one's imports included", max(trips), "ms"
        ),
        plain_row(
            "a third member gets its partition",
            f"three partitions, connection and join included, median of {HANDOVERS}",
            handover,
            "ms",
        ),
        plain_row(
            f"rebalance, {MEMBERS} members",
            f"{MEMBERS - 1} join one that has {PARTITIONS:,} partitions, until all are shared evenly;"
            " members on one core",
            together,
            "s",
        ),
        plain_row("... the broker's part", "CPU of its process", spent, "s"),
        plain_row("... and one member more", "until it has its share", one_more, "s"),
        time_row(
            "memory after consumers came and went",
            f"{crowd}: the broker after the last time; yardstick: after the first",
            memory[-1],
            "MiB",
            yardstick=memory[0],
            at_most=1.1,
        ),
        time_row(
            "p99 of another consumer meanwhile",
            "send to get of single records, in another process; yardstick: the same alone, before",
            busy,
            "ms",
            yardstick=alone,
            at_most=2,
        ),
    ]
