"""The cost before the first record: imports, ``kl --help``, an embedded broker, many partitions."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from typing import Any

from benchmarks import wire
from benchmarks.harness import (
    Row,
    ServerProcess,
    best_wall_seconds,
    percentile,
    plain_row,
    scratch_dir,
    server,
    time_row,
)
from kafkalite.protocol.messages import admin, data, groups
from kafkalite.records.builder import build_batch


def processes() -> list[Row]:
    bare = best_wall_seconds([sys.executable, "-c", "pass"])
    imported = best_wall_seconds([sys.executable, "-c", "import kafkalite"])
    helped = best_wall_seconds([sys.executable, "-m", "kafkalite", "--help"])
    return [
        plain_row("bare interpreter", "python -c pass, whole process", bare * 1e3, "ms"),
        time_row("import kafkalite", "over the bare interpreter", (imported - bare) * 1e3, "ms", at_most=30),
        time_row("kl --help", "whole process", helped * 1e3, "ms", at_most=120),
    ]


async def _embedded() -> tuple[float, float, float]:
    from kafkalite.broker.broker import Broker
    from kafkalite.client.admin.admin import Admin
    from kafkalite.client.producer.producer import Producer

    async with Broker(listeners="inproc://"):
        pass  # modules are loaded; only the broker is measured below
    ready: list[float] = []
    for _ in range(20):
        start = time.perf_counter()
        async with Broker(listeners="127.0.0.1:0"):
            ready.append(time.perf_counter() - start)
    samples: list[float] = []
    async with Broker(listeners="inproc://") as broker:
        async with Admin(broker.bootstrap_servers) as administrator:
            await administrator.create_topic("t", partitions=1)
        async with Producer(broker.bootstrap_servers, acks=1, linger_ms=0) as producer:
            for i in range(3200):
                start = time.perf_counter()
                await producer.send("t", b"x" * 100)
                if i >= 200:
                    samples.append(time.perf_counter() - start)
    return statistics.median(ready) * 1e3, percentile(samples, 0.5) * 1e6, max(ready) * 1e3


async def _first() -> float:
    start = time.perf_counter()
    from kafkalite.broker.broker import Broker

    async with Broker():
        return (time.perf_counter() - start) * 1e3


def embedded() -> list[Row]:
    first = asyncio.run(_first())
    ready, round_trip, _worst = asyncio.run(_embedded())
    return [
        time_row(
            "embedded broker ready",
            "TCP on a system-chosen port, in memory, median of 20",
            ready,
            "ms",
            at_most=30,
        ),
        plain_row("embedded broker ready, first in the process", "imports included", first, "ms"),
        time_row(
            "in-process round trip p50",
            "one 100-byte record, inproc transport, acks=1",
            round_trip,
            "µs",
            at_most=100,
        ),
    ]


def many_partitions() -> list[Row]:
    topics, partitions = 1000, 5
    with scratch_dir() as path:
        with server("kafkalite", "--dir", path) as ours:
            session = wire.Session(ours.port)
            start = time.perf_counter()
            for first in range(0, topics, 100):
                answer = session.call(
                    admin.CreateTopicsRequest(
                        60_000,
                        False,
                        [admin.NewTopic(f"topic-{i}", partitions, 1, {}) for i in range(first, first + 100)],
                    )
                ).message
                assert all(topic.error_code == 0 for topic in answer.topics), answer
            created = time.perf_counter() - start
            session.close()
        start = time.perf_counter()
        again = ServerProcess("kafkalite", "--dir", path)
        started = time.perf_counter() - start
        try:
            time.sleep(2)
            before = again.cpu_seconds()
            time.sleep(10)
            idle = (again.cpu_seconds() - before) / 10 * 100
            memory = again.resident_mib()
        finally:
            start = time.perf_counter()
            again.stop()
            stopped = time.perf_counter() - start
    workload = f"{topics:,} topics, {topics * partitions:,} partitions"
    return [
        plain_row("creation", workload, created, "s"),
        time_row("start after a clean stop", workload, started, "s", at_most=10),
        time_row("idle CPU", f"{workload}, over 10 s", idle, "%", at_most=2),
        plain_row("resident memory", workload, memory, "MiB"),
        plain_row("clean stop", workload, stopped, "s"),
    ]


def create_objects(session: wire.Session, *, topics: int, partitions: int, others: int) -> None:
    """Create ``topics`` with ``partitions`` each, a record in those of the first thousand, and ``others`` groups
    with an offset, transactional ids, and producer ids with a record."""
    names = [f"topic-{number}" for number in range(topics)]
    for first in range(0, topics, 100):
        new = [admin.NewTopic(name, partitions, 1, {}) for name in names[first : first + 100]]
        answer = session.call(admin.CreateTopicsRequest(600_000, False, new)).message
        assert all(topic.error_code == 0 for topic in answer.topics), answer
    for name in names[:1_000]:  # their files stay open
        parts = [(name, number, build_batch([b"x"])) for number in range(partitions)]
        _produce(session, parts)
    for number in range(others):
        entry = groups.CommittedOffset(names[number % topics], 0, 1, 0, None, 0, "", 0, None)
        _retried(session, groups.OffsetCommitRequest(f"group-{number}", "", -1, None, [entry]))
        _retried(session, data.InitProducerIdRequest(f"transactional-{number}", 60_000, -1, -1))
        batch = build_batch([b"x"], producer_id=10**9 + number, producer_epoch=0, base_sequence=0)
        _produce(session, [(names[0], 0, batch)])


def _produce(session: wire.Session, parts: list[tuple[str, int, bytearray]]) -> None:
    request = data.ProduceRequest(
        -1, 60_000, None, [data.ProducePartition(topic, number, len(batch)) for topic, number, batch in parts]
    )
    answer = session.call(request, tuple(batch for _, _, batch in parts)).message
    assert all(one.error_code == 0 for one in answer.partitions), answer


def _retried(session: wire.Session, request: Any) -> None:
    """Send the request again while its coordinator is being loaded."""
    for _ in range(600):
        answer = session.call(request).message
        if answer.error_code == 0:
            return
        kind = 0 if isinstance(request, groups.OffsetCommitRequest) else 1
        session.call(groups.FindCoordinatorRequest(kind, ["any"]))  # creates the internal topic
        time.sleep(0.1)
    raise AssertionError(answer)


def start_after_kill(*, topics: int, partitions: int = 1, others: int = 0) -> tuple[float, float]:
    """Return wall and CPU seconds of a start after kill -9, until the last group's offset is served."""
    with scratch_dir() as path:
        with server("kafkalite", "--dir", path) as first:
            session = wire.Session(first.port)
            create_objects(session, topics=topics, partitions=partitions, others=others)
            session.close()
            first.kill()
        start = time.perf_counter()
        with server("kafkalite", "--dir", path) as again:
            session = wire.Session(again.port)
            for number in range(0, others, 100):  # some of each coordinator
                _retried(session, groups.OffsetFetchRequest(f"group-{number}", "", -1, True, None))
                _retried(session, data.InitProducerIdRequest(f"transactional-{number}", 60_000, -1, -1))
            _produce(session, [("topic-0", 0, build_batch([b"x"]))])
            wall, cpu = time.perf_counter() - start, again.cpu_seconds()
            session.close()
    return wall, cpu


def after_kill() -> list[Row]:
    partitions, _ = start_after_kill(topics=1_000, partitions=5)
    others, _ = start_after_kill(topics=20_000, others=20_000)
    workload = "20,000 topics, groups, transactional ids and producers"
    return [
        time_row("start after kill -9", "1,000 topics, 5,000 partitions", partitions, "s", at_most=10),
        time_row("start after kill -9", workload, others, "s", at_most=20),
    ]


def run() -> list[Row]:
    return [*processes(), *embedded(), *many_partitions(), *after_kill()]
