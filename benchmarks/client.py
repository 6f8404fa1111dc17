"""The client library: single records produced and consumed, one core for each side."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from benchmarks.harness import Row, rate_row, scratch_dir, server

RECORDS = 600_000


async def _produce(port: int, topic: str, *, keyed: bool) -> float:
    from kafkalite.client.producer.producer import Producer

    value = b"x" * 100
    keys = [b"key-%d" % i for i in range(1000)] if keyed else []
    async with Producer(
        f"127.0.0.1:{port}", acks=1, linger_ms=5, batch_size=256 * 1024, buffer_memory=256 * 1024 * 1024
    ) as producer:
        await producer.send(topic, value)
        send = producer.send_nowait
        start = time.perf_counter()
        for chunk in range(RECORDS // 10_000):
            if keyed:
                for i in range(10_000):
                    send(topic, value, keys[i % 1000])
            else:
                for _ in range(10_000):
                    send(topic, value)
            if chunk % 2:
                await asyncio.sleep(0)  # let the loop run, as any program does
        await producer.flush()
        return RECORDS / (time.perf_counter() - start)


async def _send_many(port: int, topic: str) -> float:
    from kafkalite.client.producer.producer import Producer

    values = [b"x" * 100] * 100_000
    async with Producer(f"127.0.0.1:{port}", acks=1, batch_size=1024 * 1024) as producer:
        await producer.send(topic, b"x")
        start = time.perf_counter()
        for _ in range(20):
            await producer.send_many(topic, values)
        await producer.flush()
        return 20 * len(values) / (time.perf_counter() - start)


async def _iterate(port: int, topic: str) -> float:
    from kafkalite.client.consumer.consumer import Consumer

    async with Consumer(
        topic, bootstrap_servers=f"127.0.0.1:{port}", auto_offset_reset="earliest"
    ) as consumer:
        count = 0
        start = time.perf_counter()
        async for _record in consumer:
            count += 1
            if count == RECORDS:
                break
        return count / (time.perf_counter() - start)


async def _batches(port: int, topic: str) -> float:
    from kafkalite.client.consumer.consumer import Consumer

    async with Consumer(
        topic, bootstrap_servers=f"127.0.0.1:{port}", auto_offset_reset="earliest"
    ) as consumer:
        count = 0
        start = time.perf_counter()
        while count < RECORDS:
            for fetched in await consumer.get_batches(timeout_ms=1000):
                count += len(fetched.batch)
        return count / (time.perf_counter() - start)


async def _create(port: int, *topics: str) -> None:
    from kafkalite.client.admin.admin import Admin

    async with Admin(f"127.0.0.1:{port}") as admin:
        for topic in topics:
            await admin.create_topic(topic, partitions=1)


def _median(measure: Callable[[], Coroutine[Any, Any, float]], runs: int = 3) -> float:
    return statistics.median(uvloop.run(measure()) for _ in range(runs))


def run() -> list[Row]:
    with scratch_dir() as path, server("kafkalite", "--dir", path) as ours:
        uvloop.run(_create(ours.port, "single", "keyed", "many"))
        return [
            rate_row(
                "send_nowait, single records",
                f"{RECORDS:,} × 100 bytes, acks=1, linger 5 ms, 256 KiB batches, until all are acknowledged",
                _median(lambda: _produce(ours.port, "single", keyed=False)),
                "records/s",
                at_least=500_000,
            ),
            Row(
                "send_nowait, keyed records",
                "the same with 1,000 different keys",
                _median(lambda: _produce(ours.port, "keyed", keyed=True)),
                "records/s",
            ),
            Row(
                "send_many, columnar",
                "100,000 values a call, 100 bytes, until all are acknowledged",
                _median(lambda: _send_many(ours.port, "many")),
                "records/s",
            ),
            rate_row(
                "iteration, async for",
                f"{RECORDS:,} × 100 bytes from the page cache",
                _median(lambda: _iterate(ours.port, "single")),
                "records/s",
                at_least=700_000,
            ),
            Row(
                "get_batches, columnar",
                "the same, batches not unpacked",
                _median(lambda: _batches(ours.port, "single")),
                "records/s",
            ),
        ]
