"""unsubscribe, and getmany of some partitions: aiokafka's names, on both twins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from kafkalite import Broker, Consumer, Producer, RebalanceListener, TopicPartition, sync
from kafkalite.errors import ClientError, NotSubscribedError
from kafkalite.testing import Cluster

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
SETTINGS: dict[str, Any] = {"auto_offset_reset": "earliest"}


class Log(RebalanceListener):
    def __init__(self) -> None:
        self.revoked: list[TopicPartition] = []

    def on_revoked(self, partitions: Any) -> None:
        self.revoked += partitions


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster() as running:
        await running.create_topic("t", partitions=2)
        for partition in (0, 1):
            await running.produce("t", [b"%d-%d" % (partition, n) for n in range(3)], partition=partition)
        yield running


async def _members(cluster: Cluster, group: str) -> list[Any]:
    async with cluster.admin() as admin:
        return list((await admin.describe_group(group)).members)


async def test_unsubscribing_commits_revokes_and_leaves_the_group(cluster: Cluster) -> None:
    log = Log()
    async with cluster.consumer(group_id="g", **SETTINGS) as consumer:
        consumer.subscribe("t", listener=log)
        assert len(await consumer.get_many(timeout_ms=5_000)) > 0
        read = {tp: at.offset for tp, at in consumer.positions().items()}
        await consumer.unsubscribe()
        assert (consumer.subscription(), consumer.assignment()) == ([], [])
        assert sorted(log.revoked) == [T0, T1]
        async with asyncio.timeout(30):
            while await _members(cluster, "g"):
                await asyncio.sleep(0.01)
        async with cluster.admin() as admin:
            committed = await admin.committed_offsets("g")
        assert {tp: at.offset for tp, at in committed.items()} == {tp: at for tp, at in read.items() if at}
        with pytest.raises(NotSubscribedError):
            await consumer.get_many(timeout_ms=0)
        # It is no member any more, so it stays away until it subscribes again.
        consumer.subscribe("t", listener=log)
        await cluster.produce("t", [b"new"], partition=0)
        values: list[Any] = []
        async with asyncio.timeout(30):
            while b"new" not in values:
                values += [record.value for record in await consumer.get_many(timeout_ms=5_000)]
        assert len(await _members(cluster, "g")) == 1


async def test_the_partitions_go_to_the_other_member_at_once(cluster: Cluster) -> None:
    async with (
        cluster.consumer("t", group_id="g", **SETTINGS) as leaving,
        cluster.consumer("t", group_id="g", **SETTINGS) as staying,
    ):
        async with asyncio.timeout(30):
            while len(staying.assignment()) != 1 or len(leaving.assignment()) != 1:
                for consumer in (staying, leaving):
                    await consumer.get_many(timeout_ms=10)
            await leaving.unsubscribe()
            while len(staying.assignment()) != 2:
                await staying.get_many(timeout_ms=50)


async def test_after_unsubscribing_partitions_may_be_assigned(cluster: Cluster) -> None:
    async with cluster.consumer("t", group_id="g", enable_auto_commit=False, **SETTINGS) as consumer:
        await consumer.get_one(timeout_ms=5_000)
        with pytest.raises(ClientError, match="assigned its partitions"):
            consumer.assign([T1])
        await consumer.unsubscribe()
        consumer.assign([T1])
        assert (await consumer.get_one(timeout_ms=5_000)).value == b"1-0"  # type: ignore[union-attr]
        await consumer.unsubscribe()
        await consumer.unsubscribe()  # idempotent
    async with cluster.consumer("t", **SETTINGS) as alone:
        await alone.get_one(timeout_ms=5_000)
        await alone.unsubscribe()
        assert alone.assignment() == []


async def test_a_listener_that_raises_does_not_keep_the_membership(cluster: Cluster) -> None:
    class Broken(RebalanceListener):
        def on_revoked(self, partitions: Any) -> None:
            raise ZeroDivisionError

    async with cluster.consumer(group_id="g", **SETTINGS) as consumer:
        consumer.subscribe("t", listener=Broken())
        await consumer.get_one(timeout_ms=5_000)
        with pytest.raises(ZeroDivisionError):
            await consumer.unsubscribe()
        assert consumer.assignment() == []
        async with asyncio.timeout(30):
            while await _members(cluster, "g"):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("group_id", [None, "g"])
async def test_getmany_of_some_partitions_leaves_the_others_for_later(
    cluster: Cluster, group_id: str | None
) -> None:
    async with cluster.consumer("t", group_id=group_id, **SETTINGS) as consumer:
        found: dict[TopicPartition, list[Any]] = {}
        while len(found.get(T1, [])) < 3:
            for tp, records in (await consumer.getmany(T1, timeout_ms=5_000, max_records=2)).items():
                found.setdefault(tp, []).extend(record.value for record in records)
        assert found == {T1: [b"1-0", b"1-1", b"1-2"]}
        # Nothing more in T1: the call waits, although records of T0 are buffered.
        assert await consumer.getmany(T1, timeout_ms=100) == {}
        rest = await consumer.getmany(T0, T1, timeout_ms=5_000)
        assert {tp: [r.value for r in records] for tp, records in rest.items()} == {
            T0: [b"0-0", b"0-1", b"0-2"]
        }
        with pytest.raises(ClientError, match="t-7 is not assigned"):
            await consumer.getmany(TopicPartition("t", 7))


async def test_a_loop_of_calls_that_do_not_wait_gets_the_records(cluster: Cluster) -> None:
    async with cluster.consumer("t", **SETTINGS) as consumer:
        for _ in range(10_000):
            if found := await consumer.getmany():
                break
        assert found


async def test_getmany_of_a_partition_fetches_it_although_the_buffers_of_others_are_full(
    cluster: Cluster,
) -> None:
    await cluster.create_topic("full", partitions=2)
    for _ in range(3):
        await cluster.produce("full", [b"x" * 1_000] * 20, partition=0)
    await cluster.produce("full", [b"late"], partition=1)
    full, late = TopicPartition("full", 0), TopicPartition("full", 1)
    async with cluster.consumer(fetch_max_bytes=10_000, max_partition_fetch_bytes=10_000, **SETTINGS) as one:
        one.assign([full])
        assert len((await one.getmany(full, timeout_ms=5_000, max_records=1))[full]) == 1
        one.assign([full, late])
        found = await one.getmany(late, timeout_ms=5_000)
        assert [record.value for record in found[late]] == [b"late"]
        assert one._assigned.partitions[full].buffered_bytes >= 10_000, "the buffer was full all the time"


def test_the_blocking_twin() -> None:
    with sync.Broker() as broker, sync.Admin(broker.address) as admin:
        admin.create_topic("t", partitions=2)
        with sync.Producer(broker.address) as producer:
            for partition in (0, 1):
                producer.send_many("t", [b"0", b"1", b"2"], partition=partition)
        with sync.Consumer("t", bootstrap_servers=broker.address, group_id="g", **SETTINGS) as consumer:
            first = consumer.get_many(1, timeout_ms=5_000)[0]
            other = T1 if first.partition == 0 else T0
            by_partition = consumer.getmany(other, timeout_ms=5_000)
            assert {tp: [r.value for r in records] for tp, records in by_partition.items()} == {
                other: [b"0", b"1", b"2"]
            }
            left: list[Any] = []
            while len(left) < 2:
                for tp, records in consumer.getmany(timeout_ms=5_000).items():
                    assert tp != other
                    left += [record.value for record in records]
            assert left == [b"1", b"2"], "buffered records are neither lost nor returned twice"
            consumer.unsubscribe()
            assert consumer.assignment() == []
        assert admin.committed_offsets("g")[other].offset == 3


def test_both_twins_group_by_one_function() -> None:
    from kafkalite.client.blocking import consumer as blocking
    from kafkalite.client.consumer import consumer

    assert blocking.consumer.by_partition is consumer.by_partition
    assert consumer.by_partition([]) == {}


async def test_a_closed_consumer_can_not_unsubscribe() -> None:
    async with Broker(listeners="inproc://") as broker, Producer(broker.address) as producer:
        await producer.send("t", b"1")
        consumer = Consumer("t", bootstrap_servers=broker.address)
        with pytest.raises(ClientError, match="the consumer is new"):
            await consumer.unsubscribe()
