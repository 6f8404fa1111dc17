"""R65 to R67: three processes in three racks, a consumer in one of them, and the death of a node."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kafkalite import Admin, Consumer, Producer
from kafkalite.testing import ProcessCluster
from proof.waiting import eventually

pytestmark = pytest.mark.slow

TOPIC = "near"
#: The longest time without a record that the death of a node may cause, once in ATTEMPTS: a busy machine
#: can stop all of these processes for longer.
LONGEST_PAUSE_S = 2.0
ATTEMPTS = 3
PAUSE_S = 0.005  # between two records


class Reader:
    """Reads in the rack of ``node_id``, and counts the bytes that each node has sent."""

    def __init__(self, servers: str, node_id: int) -> None:
        self.consumer = Consumer(
            TOPIC,
            bootstrap_servers=servers,
            client_rack=f"rack-{node_id}",
            auto_offset_reset="earliest",
            request_timeout_ms=3_000,
        )
        self.bytes_of: Counter[int] = Counter()
        self.values: list[int] = []
        self.longest_pause_s = 0.0
        fetcher: Any = self.consumer._fetcher
        receive = fetcher._on_response

        def count(fetch: Any, message: Any, payload: memoryview, error: Exception | None) -> None:
            self.bytes_of[fetch.plan.node_id] += len(payload)
            receive(fetch, message, payload, error)

        fetcher._on_response = count

    def source(self) -> set[int]:
        """Return the follower that is read."""
        return self.consumer._fetcher.assigned.near_nodes()

    async def read(self) -> None:
        last_s = time.monotonic()
        async for record in self.consumer:
            assert record.value is not None
            self.values.append(int(record.value[:8]))
            now_s = time.monotonic()
            self.longest_pause_s = max(self.longest_pause_s, now_s - last_s)
            last_s = now_s


@asynccontextmanager
async def three_racks(directory: Path) -> AsyncIterator[ProcessCluster]:
    cluster = ProcessCluster(
        directory,
        settings={"replica.selector.class": "RackAwareReplicaSelector", "durability": "page-cache"},
        node_settings={node_id: {"broker.rack": f"rack-{node_id}"} for node_id in (1, 2, 3)},
    )
    async with cluster:
        async with Admin(cluster.bootstrap_servers) as admin:
            await admin.create_topic(TOPIC, 1, 3)
        yield cluster


async def leader_of(cluster: ProcessCluster) -> int:
    view = await cluster.wait(is_whole=True, brokers=3, topics=[TOPIC])
    (partition,) = view.partitions
    return int(partition.state.leader_id)


async def produce(producer: Producer, sent: list[int]) -> None:
    while True:
        await producer.send(TOPIC, b"%08d" % len(sent) + bytes(200))
        sent.append(len(sent))
        await asyncio.sleep(PAUSE_S)


@pytest.mark.parametrize("victim", ["follower", "leader"])
async def test_the_death_of_a_node_makes_a_short_pause_and_no_gap(tmp_path: Path, victim: str) -> None:
    pauses_s: list[float] = []
    while not pauses_s or pauses_s[-1] >= LONGEST_PAUSE_S:
        assert len(pauses_s) < ATTEMPTS, pauses_s
        pauses_s.append(await pause_after_death(tmp_path / str(len(pauses_s)), victim))


async def pause_after_death(directory: Path, victim: str) -> float:
    """Return the longest time without a record, in seconds."""
    async with three_racks(directory) as cluster:
        leader = await leader_of(cluster)
        near, other = (node_id for node_id in (1, 2, 3) if node_id != leader)
        reader, sent = Reader(cluster.bootstrap_servers, near), []
        async with Producer(cluster.bootstrap_servers, request_timeout_ms=2_000) as producer, reader.consumer:
            tasks = [asyncio.create_task(produce(producer, sent)), asyncio.create_task(reader.read())]
            await eventually(lambda: reader.source() == {near} and len(reader.values) > 200, limit_s=20)
            before = Counter(reader.bytes_of)
            assert before[near] > 20 * (before[leader] + before[other]), before

            killed = near if victim == "follower" else leader
            await cluster.kill(killed)
            at_death = len(reader.values)
            await eventually(lambda: len(reader.values) > at_death + 300, limit_s=30)
            pause_s = reader.longest_pause_s

            await cluster.restart(killed)
            await leader_of(cluster)
            after = Counter(reader.bytes_of)
            await eventually(lambda: reader.bytes_of[near] > after[near] + 20_000, limit_s=60)
            tasks[0].cancel()
            await asyncio.wait(tasks[:1])
            await eventually(lambda: len(reader.values) >= len(sent), limit_s=20)
            tasks[1].cancel()
            await asyncio.wait(tasks[1:])
        print(f"{victim}: pause {pause_s:.3f} s, bytes {dict(reader.bytes_of)}, {len(reader.values)} records")
        assert reader.values == list(range(len(reader.values))), "no gap and no duplicate"
        return pause_s


async def test_a_near_consumer_reads_only_in_its_rack(tmp_path: Path) -> None:
    """The whole log of 8 MB and then new records, as fast as the consumer of a leader reads them."""
    count, size_bytes = 8_000, 1_000
    async with three_racks(tmp_path) as cluster:
        leader = await leader_of(cluster)
        near = next(node_id for node_id in (1, 2, 3) if node_id != leader)
        async with Producer(cluster.bootstrap_servers) as producer:
            values = [b"%08d" % number + bytes(size_bytes - 8) for number in range(count)]
            await producer.send_many(TOPIC, values, partition=0)
        found = {}
        for node_id in (leader, near):
            reader = Reader(cluster.bootstrap_servers, node_id)
            async with reader.consumer:
                task = asyncio.create_task(reader.read())
                await eventually(lambda reader=reader: len(reader.values) == count, limit_s=30)
                task.cancel()
                await asyncio.wait({task})
            assert reader.values == list(range(count))
            found[node_id] = {each: total for each, total in reader.bytes_of.items() if total}
        print(f"bytes by node: consumer at the leader {found[leader]}, near consumer {found[near]}")
        assert set(found[leader]) == {leader}
        assert set(found[near]) == {near}
