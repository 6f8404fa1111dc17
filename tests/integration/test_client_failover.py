"""Clients while leaders are killed under them: what was acknowledged is there once, and in order."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from kafkalite.client.consumer.consumer import Consumer
from kafkalite.client.producer.delivery import Delivery
from kafkalite.client.producer.producer import Producer
from kafkalite.model import Record, TopicPartition
from kafkalite.testing.cluster import Cluster

SAFE = {"min.insync.replicas": "2"}


async def _all_records(cluster: Cluster, topic: str) -> dict[int, list[Record]]:
    """What a consumer that comes afterwards finds, by partition, up to the ends."""
    async with cluster.consumer(topic, auto_offset_reset="earliest") as consumer:
        ends = await consumer.end_offsets(consumer.assignment())
        found: dict[int, list[Record]] = {tp.partition: [] for tp in ends}
        while any((consumer.position(tp) or 0) < end for tp, end in ends.items()):
            for record in await consumer.get_many(10_000, timeout_ms=10_000):
                found[record.partition].append(record)
        return found


async def _send_until(stopped: asyncio.Event, producer: Producer, partitions: int) -> list[Delivery]:
    """A record every millisecond or so: its value is its number, its partition goes round."""
    deliveries = []
    while not stopped.is_set():
        for _ in range(10):
            number = len(deliveries)
            value = b"%d" % number
            deliveries.append(producer.send_nowait("t", value, partition=number % partitions))
        await asyncio.sleep(0.01)  # 1,000 records a second
    return deliveries


async def _kill_leaders(cluster: Cluster, rounds: int, *, crash: bool, pause_s: float = 0.4) -> None:
    for number in range(rounds):
        victim = cluster.leader("t", number % 3)
        await (cluster.crash(victim) if crash else cluster.kill(victim))
        await cluster.wait_until(
            lambda victim=victim: all(cluster.leader("t", p) not in {victim, -1} for p in range(3)),  # type: ignore[misc]
            what=f"leaders other than {victim}",
        )
        await asyncio.sleep(pause_s)
        await cluster.start(victim)
        await cluster.wait_until(
            lambda victim=victim: all(  # type: ignore[misc]
                victim in state.isr for state in _partitions(cluster)
            ),
            what=f"{victim} in every ISR",
        )


def _partitions(cluster: Cluster) -> list:  # type: ignore[type-arg]
    image = cluster.brokers[cluster.controller_id or 1].image
    return list(image.topics["t"].partitions)


def _check(found: dict[int, list[Record]], deliveries: list[Delivery]) -> None:
    """Every acknowledged record is in the log once, at its acknowledged offset, in the order of sending."""
    assert [d for d in deliveries if d.exception() is not None] == [], "two brokers were always there"
    for partition, records in found.items():
        numbers = [int(record.value or b"-1") for record in records]
        assert [n for n, count in Counter(numbers).items() if count > 1] == [], "duplicates"
        assert numbers == sorted(numbers), f"partition {partition} is out of order"
        assert [record.offset for record in records] == list(range(len(records)))
    by_number = {int(record.value or b"-1"): record for records in found.values() for record in records}
    for number, delivery in enumerate(deliveries):
        assert number in by_number, f"record {number} was acknowledged and is not there"
        metadata = delivery.result()
        assert by_number[number].offset == metadata.offset
    assert len(by_number) == len(deliveries)


@pytest.mark.parametrize("crash", [False, True], ids=["kill", "power loss"])
async def test_nothing_is_lost_or_doubled_while_leaders_are_killed(crash: bool) -> None:
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", 3, replication_factor=3, configs=SAFE)
        stopped = asyncio.Event()
        async with cluster.producer(linger_ms=0) as producer:
            sending = asyncio.ensure_future(_send_until(stopped, producer, 3))
            await asyncio.sleep(0.2)  # a load before the first kill
            await _kill_leaders(cluster, 4, crash=crash)
            stopped.set()
            deliveries = await sending
            await producer.flush()
        assert len(deliveries) > 500
        _check(await _all_records(cluster, "t"), deliveries)


async def test_a_consumer_reads_on_across_fail_overs() -> None:
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", 3, replication_factor=3, configs=SAFE)
        stopped = asyncio.Event()
        seen: dict[int, list[int]] = {0: [], 1: [], 2: []}

        async def read(consumer: Consumer) -> None:
            async for record in consumer:
                seen[record.partition].append(record.offset)

        async with (
            cluster.consumer("t", auto_offset_reset="earliest") as consumer,
            cluster.producer() as producer,
        ):
            reading = asyncio.ensure_future(read(consumer))
            sending = asyncio.ensure_future(_send_until(stopped, producer, 3))
            await _kill_leaders(cluster, 3, crash=False)
            stopped.set()
            sent = Counter(delivery.batch.partition for delivery in await sending)
            await producer.flush()
            ends = await consumer.end_offsets([TopicPartition("t", p) for p in range(3)])
            await cluster.wait_until(lambda: all(len(seen[tp.partition]) >= end for tp, end in ends.items()))
            reading.cancel()
        for partition, offsets in seen.items():
            assert offsets == list(range(sent[partition])), "no record skipped, none given twice"


async def test_large_windows_survive_a_fail_over_in_order() -> None:
    """send_many has five batches of a partition under way when the leader dies."""
    values = [b"%d" % number for number in range(60_000)]
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", 3, replication_factor=3, configs=SAFE)
        async with cluster.producer(max_request_size=8192, buffer_memory=64 * 1024 * 1024) as producer:
            sending = asyncio.ensure_future(producer.send_many("t", values, partition=0))
            await asyncio.sleep(0.05)  # in the middle of the records
            await cluster.kill(cluster.leader("t", 0))
            async with asyncio.timeout(30):
                placed = await sending
        assert sum(batch.record_count for batch in placed) == len(values)
        found = (await _all_records(cluster, "t"))[0]
        assert [record.value for record in found] == values


async def test_a_topic_without_enough_replicas_is_waited_for() -> None:
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", 1, replication_factor=3, configs=SAFE)
        async with cluster.producer() as producer:
            await producer.send("t", b"0")
            leader = cluster.leader("t", 0)
            others = [node_id for node_id in cluster.brokers if node_id != leader]
            await cluster.kill(*others)
            waiting = asyncio.ensure_future(producer.send("t", b"1"))
            await asyncio.sleep(1.0)  # a whole session: about time
            assert not waiting.done(), "one replica is not two"
            await cluster.start(*others)
            async with asyncio.timeout(20):
                assert (await waiting).offset == 1
        found = (await _all_records(cluster, "t"))[0]
        assert [record.value for record in found] == [b"0", b"1"]


async def test_a_broker_that_does_not_know_a_topic_takes_no_position_away() -> None:
    """As after an answer of one that lags behind: metadata is without the topic until the next one."""
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", 1, replication_factor=3)
        await cluster.produce("t", [b"%d" % number for number in range(100)])
        tp = TopicPartition("t", 0)
        async with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
            assert len(await _take(consumer, 100)) == 100
            consumer._cluster.metadata.topics.clear()
            consumer._on_cluster_change()
            assert consumer.position(tp) == 100
            await cluster.produce("t", [b"100"])
            assert [record.offset for record in await _take(consumer, 1)] == [100]


async def _take(consumer: Consumer, count: int) -> list[Record]:
    records: list[Record] = []
    async with asyncio.timeout(30):
        while len(records) < count:
            records += await consumer.get_many(count - len(records), timeout_ms=5000)
    return records
