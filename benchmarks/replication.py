"""Three nodes and one: replicated produce with and without fsync, round trips, a follower that catches up."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from benchmarks import yardsticks
from benchmarks.harness import Row, percentile, plain_row, scratch_dir
from benchmarks.nodes import Nodes, running, until, whole
from kafkalite.client.admin.admin import Admin
from kafkalite.client.producer.producer import Producer
from kafkalite.model import TopicPartition

PRODUCE_SECONDS = 4.0
VALUES = [b"x" * 1000] * 10_000
CATCH_UP_BYTES = 1_000_000_000
DURABILITIES = ("page-cache", "fsync")


async def _produce(bootstrap: str, topic: str, acks: Any) -> float:
    """Return the MB/s of values that one producer sends to one partition for PRODUCE_SECONDS."""
    async with Producer(bootstrap, acks=acks, buffer_memory=64 * 1024 * 1024) as producer:
        await producer.send_many(topic, VALUES[:1000], partition=0)
        start = time.perf_counter()
        count = 0
        while time.perf_counter() - start < PRODUCE_SECONDS:
            await producer.send_many(topic, VALUES, partition=0)
            count += len(VALUES)
        return count * len(VALUES[0]) / (time.perf_counter() - start) / 1e6


async def _round_trip(bootstrap: str, topic: str, acks: Any) -> float:
    """Return the median milliseconds from sending one record to its acknowledgement."""
    samples = []
    async with Producer(bootstrap, acks=acks, linger_ms=0) as producer:
        for _ in range(50):
            await producer.send(topic, b"x" * 100, partition=0)
        for _ in range(300):
            start = time.perf_counter()
            await producer.send(topic, b"x" * 100, partition=0)
            samples.append((time.perf_counter() - start) * 1e3)
    return percentile(samples, 0.5)


async def _measure(path: str, count: int) -> dict[tuple[str, str, str], float]:
    """Return {(measure, durability, acks): result} of a cluster of ``count`` nodes."""
    found: dict[tuple[str, str, str], float] = {}
    async with running(path, count) as (nodes, admin):
        for durability in DURABILITIES:
            await admin.create_topic(durability, 1, count, configs={"durability": durability})
            for acks in ("all", "1"):
                bootstrap = nodes.bootstrap_servers
                found["rate", durability, acks] = await _produce(bootstrap, durability, acks)
                found["time", durability, acks] = await _round_trip(bootstrap, durability, acks)
    return found


async def _catch_up(path: str) -> tuple[float, float]:
    """Return MB/s and seconds in which a returning follower fetches CATCH_UP_BYTES and is in sync again."""
    async with running(path) as (nodes, admin):
        await admin.create_topic("big", 1, 3, configs={"durability": "page-cache"})
        follower = await _follower(admin)
        nodes.kill(follower)
        await _fill(nodes)
        start = time.perf_counter()
        nodes.start(follower)
        await until(lambda: whole(admin, "big"), "the follower in sync", limit_s=120)
        seconds = time.perf_counter() - start
        end = (await admin.list_offsets([TopicPartition("big", 0)], "latest"))[TopicPartition("big", 0)]
        return end.offset * len(VALUES[0]) / seconds / 1e6, seconds


async def _follower(admin: Admin) -> int:
    partition = (await admin.describe_topic("big")).partitions[0]
    controller_id = (await admin.describe_cluster()).controller_id
    followers = [node_id for node_id in partition.replicas if node_id != partition.leader_id]
    return next(node_id for node_id in followers if node_id != controller_id)


async def _fill(nodes: Nodes) -> None:
    async with Producer(nodes.bootstrap_servers, buffer_memory=64 * 1024 * 1024) as producer:
        for _ in range(CATCH_UP_BYTES // (len(VALUES) * len(VALUES[0]))):
            await producer.send_many("big", VALUES, partition=0)


def _in_scratch(measure: Callable[[str], Coroutine[Any, Any, Any]]) -> Any:
    with scratch_dir() as path:
        return uvloop.run(measure(path))


def run() -> list[Row]:
    rows = [row for row in yardsticks.run() if row.name in {"bare append", "append + fdatasync"}]
    one = _in_scratch(lambda path: _measure(path, 1))
    three = _in_scratch(lambda path: _measure(path, 3))
    for durability in DURABILITIES:
        rate = three["rate", durability, "all"]
        for name, other in (
            ("acks=1", three["rate", durability, "1"]),
            ("a single broker", one["rate", durability, "all"]),
        ):
            rows.append(
                Row(
                    f"produce, 3 replicas, {durability}, vs {name}",
                    f"send_many, 1,000-byte values, acks=all, min.insync.replicas 2; ratio to {name}",
                    rate,
                    "MB/s",
                    yardstick=other,
                    ratio=rate / other,
                )
            )
        took = three["time", durability, "all"]
        alone = one["time", durability, "all"]
        rows.append(
            Row(
                f"round trip, 3 replicas, {durability}",
                "one record, linger 0, acks=all, median; ratio to a single broker",
                took,
                "ms",
                yardstick=alone,
                ratio=took / alone,
            )
        )
    rate, seconds = _in_scratch(_catch_up)
    rows.append(
        plain_row(
            "a follower catches up",
            f"{CATCH_UP_BYTES / 1e9:g} GB behind, from its start to being in sync ({seconds:.1f} s)",
            rate,
            "MB/s",
        )
    )
    return rows
