"""Moves between real nodes: a throttled one beside a client, and a thousand partitions at full speed.

``python -m benchmarks.reassignment --gigabytes 10`` moves more than the suite does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.harness import Row, percentile, plain_row, scratch_dir
from benchmarks.nodes import Nodes, running, until, whole
from kafkalite.client.admin.admin import Admin
from kafkalite.client.producer.producer import Producer
from kafkalite.model import TopicPartition

VALUES = [b"x" * 1000] * 1_000
MB = 10**6

RATE = 10 * MB
THROTTLED_BYTES = 200 * MB
THROTTLED_PARTITIONS = 8
CLIENT_PAUSE_S = 0.01

GIGABYTES = 1.0
PARTITIONS = 1_000

SETTINGS: Mapping[str, Any] = {"default.replication.factor": 1, "min.insync.replicas": 1}
SOURCE, TARGET = 1, 4


async def _place(admin: Admin, topic: str, partitions: int) -> None:
    """Create a topic whose partitions have their only replica on SOURCE."""
    await admin.create_topic(topic, partitions, 1)
    await admin.alter_partition_reassignments(
        {TopicPartition(topic, number): [SOURCE] for number in range(partitions)}
    )
    await until(lambda: _is_at(admin, topic, SOURCE), f"{topic} on node {SOURCE}")


async def _is_at(admin: Admin, topic: str, node_id: int) -> bool:
    (described,) = await admin.describe_topics([topic])
    return all(list(each.replicas) == [node_id] for each in described.partitions)


async def _fill(nodes: Nodes, topic: str, partitions: int, size_bytes: int) -> None:
    batch_bytes = len(VALUES) * len(VALUES[0])
    async with Producer(nodes.bootstrap_servers, buffer_memory=64 * 1024 * 1024) as producer:
        for number in range(max(partitions, size_bytes // batch_bytes)):
            await producer.send_many(topic, VALUES, partition=number % partitions)


async def _move(
    nodes: Nodes,
    admin: Admin,
    topic: str,
    partitions: int,
    *options: str,
    on_begun: Callable[[], object] = lambda: None,
) -> float:
    """Move the topic from SOURCE to TARGET with kl. Return the seconds while moves were in progress."""
    plan = {
        "partitions": [
            {"topic": topic, "partition": number, "replicas": [TARGET]} for number in range(partitions)
        ]
    }
    words = ["-m", "kafkalite", "cluster", "reassign", "apply", "-", "--wait", "-b", nodes.bootstrap_servers]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        *options,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(plan).encode())
    process.stdin.close()

    async def has_begun() -> bool:
        return process.returncode is not None or bool(await admin.list_partition_reassignments())

    async def is_complete() -> bool:
        return not await admin.list_partition_reassignments()

    await until(has_begun, "the beginning of the moves", limit_s=30, pause_s=0.002)
    on_begun()
    seconds = await until(is_complete, "the end of the moves", limit_s=3_600, pause_s=0.1)
    _, said = await process.communicate()
    assert process.returncode == 0, said.decode()
    assert await _is_at(admin, topic, TARGET)
    return seconds


async def _stored_bytes(admin: Admin, topic: str) -> int:
    return sum(log.size_bytes for log in await admin.describe_log_dirs([topic]))


async def _latencies(nodes: Nodes, is_over: Callable[[], bool]) -> list[float]:
    """Return the ms of records that a client sends every CLIENT_PAUSE_S to three replicas in sync."""
    samples: list[float] = []
    async with Producer(nodes.bootstrap_servers, linger_ms=0, acks="all") as producer:
        while not is_over():
            began = time.perf_counter()
            await producer.send("client", b"x" * 100)
            samples.append((time.perf_counter() - began) * 1e3)
            await asyncio.sleep(CLIENT_PAUSE_S)
    return samples


async def _throttled(path: str) -> list[Row]:
    async with running(path, 4, **SETTINGS) as (nodes, admin):
        await admin.create_topic("client", 3, 3, configs={"min.insync.replicas": "2"})
        await until(lambda: whole(admin, "client"), "the client's topic")
        await _place(admin, "moved", THROTTLED_PARTITIONS)
        await _fill(nodes, "moved", THROTTLED_PARTITIONS, THROTTLED_BYTES)
        size_bytes = await _stored_bytes(admin, "moved")
        expected_s = size_bytes / RATE
        end = time.perf_counter() + expected_s
        before = await _latencies(nodes, lambda: time.perf_counter() > end)
        begun = asyncio.Event()
        options = ("--throttle", str(RATE))
        moving = asyncio.create_task(
            _move(nodes, admin, "moved", THROTTLED_PARTITIONS, *options, on_begun=begun.set)
        )
        await begun.wait()
        during = await _latencies(nodes, moving.done)
        rate = size_bytes / await moving
    p99_before, p99 = percentile(before, 0.99), percentile(during, 0.99)
    return [
        Row(
            "a throttled move, rate",
            f"{size_bytes / 1e6:.0f} MB in {THROTTLED_PARTITIONS} partitions, --throttle {RATE / 1e6:g} MB/s;"
            " ratio to the throttle",
            rate / 1e6,
            "MB/s",
            yardstick=RATE / 1e6,
            ratio=rate / RATE,
            target="0.9 to 1.1 ×",
            met=0.9 <= rate / RATE <= 1.1,
        ),
        Row(
            "p99 of a client during a throttled move",
            f"one record at a time, acks=all, 3 replicas with fsync, {len(during)} records; ratio to before",
            p99,
            "ms",
            yardstick=p99_before,
            ratio=p99 / p99_before,
            target="< 2 ×",
            met=p99 < 2 * p99_before,
        ),
    ]


def _received_bytes(nodes: Nodes, node_id: int) -> int:
    """Return how many bytes the node has read with read(2). Its sockets do; its files are mapped."""
    lines = Path(f"/proc/{nodes.processes[node_id].pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


async def _unthrottled(path: str, gigabytes: float, partitions: int) -> list[Row]:
    async with running(path, 4, **SETTINGS) as (nodes, admin):
        await _place(admin, "moved", partitions)
        await _fill(nodes, "moved", partitions, round(gigabytes * 1e9))
        size_bytes = await _stored_bytes(admin, "moved")
        received, cpu = _received_bytes(nodes, TARGET), _cpu_seconds(nodes)
        seconds = await _move(nodes, admin, "moved", partitions)
        received = _received_bytes(nodes, TARGET) - received
        cpu = _cpu_seconds(nodes) - cpu
    what = f"{partitions:,} partitions with {size_bytes / 1e9:.2f} GB, from one node to another, fsync"
    return [
        plain_row("moving partitions, time", what, seconds, "s"),
        plain_row("moving partitions, rate", what, size_bytes / seconds / 1e6, "MB/s"),
        Row(
            "moving partitions, bytes on the wire",
            "received by the new broker; ratio to the bytes of the logs",
            received / 1e6,
            "MB",
            yardstick=size_bytes / 1e6,
            ratio=received / size_bytes,
        ),
        plain_row("moving partitions, CPU", "of all four nodes, per GB", cpu / size_bytes * 1e9, "s"),
    ]


def _cpu_seconds(nodes: Nodes) -> float:
    return sum(map(nodes.cpu_seconds, nodes.processes))


def _in_scratch(measure: Callable[[str], Coroutine[Any, Any, list[Row]]]) -> list[Row]:
    with scratch_dir() as path:
        return uvloop.run(measure(path))


def run(gigabytes: float = GIGABYTES, partitions: int = PARTITIONS) -> list[Row]:
    return _in_scratch(_throttled) + _in_scratch(lambda path: _unthrottled(path, gigabytes, partitions))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reassignment", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=GIGABYTES, help="data of the unthrottled move")
    parser.add_argument(
        "--partitions", type=int, default=PARTITIONS, help="partitions of the unthrottled move"
    )
    chosen = parser.parse_args()
    for row in run(chosen.gigabytes, chosen.partitions):
        print(json.dumps(row.as_dict(), ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
