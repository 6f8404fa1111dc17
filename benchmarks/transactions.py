"""The cost of transactions compared with plain produce, and of reading committed records."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable

import uvloop

from benchmarks.harness import Row, paired, plain_row, scratch_dir, server
from kafkalite.client.admin.admin import Admin
from kafkalite.client.consumer.consumer import Consumer
from kafkalite.client.producer.producer import Producer

VALUE = b"x" * 100
PARTITIONS = 3
SECONDS = 2.0
READ_RECORDS = 2_000_000
BLOCKS = (100, 10_000)


class Load:
    """Blocks of records into one topic of one broker, each acknowledged before the next."""

    def __init__(self, port: int) -> None:
        self.servers = f"127.0.0.1:{port}"

    def run(self, job: Callable[[], Awaitable[float]]) -> float:
        return uvloop.run(job())  # type: ignore[arg-type]

    async def create(self, *topics: str) -> None:
        async with Admin(self.servers) as admin:
            for topic in topics:
                await admin.create_topic(topic, partitions=PARTITIONS)

    async def plain(self, size: int) -> float:
        """Send blocks of ``size`` records without transactions. Return the records per second."""
        values = [VALUE] * size
        async with Producer(self.servers) as producer:
            await producer.send_many("plain", values)
            count, start = 0, time.perf_counter()
            while time.perf_counter() - start < SECONDS:
                await producer.send_many("plain", values)
                count += size
            return count / (time.perf_counter() - start)

    async def transactional(self, size: int) -> float:
        """Send blocks of ``size`` records, each in a transaction. Return the records per second."""
        values = [VALUE] * size
        async with Producer(self.servers, transactional_id=f"bench-{size}") as producer:
            async with producer.transaction():
                await producer.send_many("transactional", values)
            count, start = 0, time.perf_counter()
            while time.perf_counter() - start < SECONDS:
                async with producer.transaction():
                    await producer.send_many("transactional", values)
                count += size
            return count / (time.perf_counter() - start)

    async def fill(self, topic: str, size: int) -> None:
        """Write transactions of ``size`` records, every tenth aborted, for ``read``."""
        values = [VALUE] * size
        committed = number = 0
        async with Producer(self.servers, transactional_id=f"fill-{topic}") as producer:
            while committed < READ_RECORDS // (1 if size > 100 else 20):
                number += 1
                await producer.begin_transaction()
                await producer.send_many(topic, values, partition=0)
                if number % 10:
                    await producer.commit_transaction()
                    committed += size
                else:
                    await producer.abort_transaction()

    async def read(self, topic: str, isolation_level: str) -> float:
        """Read a topic by batches. Return the records per second, not counting skipped records."""
        async with Consumer(
            topic,
            bootstrap_servers=self.servers,
            auto_offset_reset="earliest",
            isolation_level=isolation_level,  # type: ignore[arg-type]
        ) as consumer:
            count, start = 0, time.perf_counter()
            while fetched := await consumer.get_batches(timeout_ms=200):
                count += sum(len(one.batch) for one in fetched)
                end = time.perf_counter()
            return count / (end - start)


def _ratio(load: Load, size: int) -> tuple[float, float]:
    return paired(
        lambda: load.run(lambda: load.transactional(size)), lambda: load.run(lambda: load.plain(size))
    )


def _rows(durability: str) -> list[Row]:
    rows: list[Row] = []
    with scratch_dir() as path, server("kafkalite", "--dir", path, "--durability", durability) as ours:
        load = Load(ours.port)
        uvloop.run(load.create("plain", "transactional"))
        for size in BLOCKS:
            with_one, without = _ratio(load, size)
            rows.append(
                Row(
                    f"transactions of {size:,}, {durability}",
                    f"100-byte records, {PARTITIONS} partitions, acks=all, one after the other;"
                    " yardstick: the same blocks without",
                    with_one,
                    "records/s",
                    without,
                    with_one / without,
                )
            )
    return rows


def _latency() -> Row:
    async def measure(servers: str) -> float:
        samples: list[float] = []
        async with Producer(servers, transactional_id="latency", linger_ms=0) as producer:
            for _ in range(220):
                start = time.perf_counter()
                async with producer.transaction():
                    await producer.send("one", VALUE)
                samples.append((time.perf_counter() - start) * 1e3)
        return statistics.median(samples[20:])

    with scratch_dir() as path, server("kafkalite", "--dir", path) as ours:
        load = Load(ours.port)
        uvloop.run(load.create("one"))
        median = uvloop.run(measure(load.servers))
    return plain_row("a transaction of one record", "begin to committed, fsync, median of 200", median, "ms")


def _reading() -> list[Row]:
    rows: list[Row] = []
    with scratch_dir() as path, server("kafkalite", "--dir", path, "--durability", "page-cache") as ours:
        load = Load(ours.port)
        for size in BLOCKS:
            topic = f"read-{size}"
            uvloop.run(load.create(topic))
            uvloop.run(load.fill(topic, size))
            committed, uncommitted = paired(
                lambda topic=topic: load.run(lambda: load.read(topic, "read_committed")),  # type: ignore[misc]
                lambda topic=topic: load.run(lambda: load.read(topic, "read_uncommitted")),  # type: ignore[misc]
            )
            rows.append(
                Row(
                    f"read_committed, transactions of {size:,}",
                    "get_batches, every tenth transaction aborted; yardstick: read_uncommitted",
                    committed,
                    "records/s",
                    uncommitted,
                    committed / uncommitted,
                )
            )
    return rows


def run() -> list[Row]:
    return [*_rows("page-cache"), *_rows("fsync"), _latency(), *_reading()]
