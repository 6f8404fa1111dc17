"""Snapshots, restores and resets of an embedded broker, and what clients that stay connected see."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from types import FrameType

import pytest

from kafkalite.client.admin.admin import Admin
from kafkalite.errors import ConfigError, KafkaliteError, TransactionStateError, UnknownProducerIdError
from kafkalite.model import TopicPartition
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing import Cluster, SyncCluster, drop_next
from kafkalite.testing.snapshots import Snapshot

KEY = TopicPartition("t", 0)


async def values(cluster: Cluster, topic: str) -> list[bytes | None]:
    return [record.value for record in await cluster.records(topic)]


async def topics(cluster: Cluster) -> dict[str, int]:
    async with cluster.admin() as admin:
        return {one.name: len(one.partitions) for one in await admin.list_topics()}


async def test_a_restore_brings_back_topics_records_and_configs() -> None:
    async with Cluster() as cluster:
        await cluster.create_topic("t", configs={"retention.ms": "1000000000"})
        await cluster.create_topic("gone", partitions=2)
        await cluster.create_topic("same")
        await cluster.produce("t", [b"1", b"2"])
        await cluster.produce("gone", [b"3"], partition=1)
        snapshot = await cluster.snapshot()
        assert repr(snapshot) == "<Snapshot of 3 topics>"
        untouched = cluster.broker.partitions.find(TopicPartition("same", 0))
        for _ in range(3):
            async with cluster.admin() as admin:
                await admin.delete_topics(["gone"])
                await admin.alter_configs("topic", "t", {"retention.ms": "5", "segment.bytes": "20000"})
                await admin.create_partitions("t", 3)
                await cluster.create_topic("gone", partitions=5)
                await cluster.produce("gone", [b"other"], partition=4)
                await cluster.produce("new", [b"4"])
                await cluster.produce("t", [b"5"], partition=0)
                await cluster.restore(snapshot)
                assert await topics(cluster) == {"t": 1, "gone": 2, "same": 1}
                described = await admin.describe_configs("topic", "t")
                assert {name: one.value for name, one in described.items() if one.value == "5"} == {}
                assert described["retention.ms"].value == "1000000000"
            assert await values(cluster, "t") == [b"1", b"2"]
            assert [(r.partition, r.offset, r.value) for r in await cluster.records("gone")] == [(1, 0, b"3")]
        assert cluster.broker.partitions.find(TopicPartition("same", 0)) is untouched


async def test_a_restore_sets_the_configs_of_brokers_back() -> None:
    async with Cluster() as cluster, cluster.admin() as admin:
        await admin.alter_configs("broker", "1", {"log.retention.ms": "70000", "log.segment.bytes": "90000"})
        snapshot = await cluster.snapshot()
        await admin.alter_configs(
            "broker", "1", {"log.retention.ms": "5", "log.segment.bytes": None, "log.retention.bytes": "7"}
        )
        await cluster.restore(snapshot)
        described = await admin.describe_configs("broker", "1")
        assert described["log.retention.ms"].value == "70000"
        assert described["log.segment.bytes"].value == "90000"
        assert described["log.retention.bytes"].value != "7"


@pytest.mark.parametrize("fault", ["write", "sync", "space"])
async def test_a_restore_ends_the_faults_of_the_file_system(fault: str) -> None:
    async with Cluster() as cluster:
        await cluster.produce("t", [b"1"])
        snapshot = await cluster.snapshot()
        await cluster.produce("t", [b"2"])
        filesystem = cluster.filesystem
        assert isinstance(filesystem, MemoryFileSystem)
        if fault == "write":
            filesystem.fail_next_write(1_000)
        elif fault == "sync":
            filesystem.fail_next_sync(1_000, loses_pages=True)
        else:
            filesystem.capacity_bytes = filesystem.used_bytes()
        await cluster.restore(snapshot)
        await cluster.produce("t", [b"3"])
        assert await values(cluster, "t") == [b"1", b"3"]


async def test_a_snapshot_keeps_the_log_start() -> None:
    async with Cluster() as cluster, cluster.admin() as admin:
        await cluster.produce("t", [b"1", b"2", b"3"])
        await admin.delete_records({KEY: 2})
        snapshot = await cluster.snapshot()
        await cluster.produce("t", [b"4"])
        await admin.delete_records({KEY: 4})
        await cluster.restore(snapshot)
        assert [(r.offset, r.value) for r in await cluster.records("t")] == [(2, b"3")]
        await admin.delete_records({KEY: 3})
        empty = await cluster.snapshot()
        await cluster.produce("t", [b"5"])
        await cluster.restore(empty)
        assert await cluster.records("t") == []
        await cluster.produce("t", [b"6"])
        assert [(r.offset, r.value) for r in await cluster.records("t")] == [(3, b"6")]


@pytest.mark.parametrize("is_idempotent", [True, False])
async def test_a_producer_that_stays_connected_goes_on_after_the_restored_records(
    is_idempotent: bool,
) -> None:
    async with Cluster() as cluster, cluster.producer(enable_idempotence=is_idempotent) as producer:
        await producer.send("t", b"1")
        snapshot = await cluster.snapshot()
        for round_ in range(3):
            for value in (b"2", b"3"):
                await producer.send("t", value)
            await cluster.restore(snapshot)
            assert (await asyncio.wait_for(producer.send("t", b"x%d" % round_), 30)).offset == 1
            assert await values(cluster, "t") == [b"1", b"x%d" % round_]


async def test_a_consumer_that_stays_connected_finds_that_its_records_are_gone() -> None:
    async with (
        Cluster() as cluster,
        cluster.consumer(auto_offset_reset="earliest") as tolerant,
        cluster.consumer(auto_offset_reset="none") as strict,
    ):
        await cluster.produce("t", [b"1"])
        snapshot = await cluster.snapshot()
        await cluster.produce("t", [b"2", b"3"])
        for consumer in (tolerant, strict):
            consumer.assign([KEY])
            await consumer.seek(KEY, 0)
            read: list[bytes | None] = []
            while len(read) < 3:
                read += [record.value for record in await consumer.get_many(timeout_ms=5_000)]
        await cluster.restore(snapshot)
        await cluster.produce("t", [b"4", b"5", b"6"])
        again = [record.value for record in await tolerant.get_many(timeout_ms=10_000)]
        assert again[0] in (b"1", b"4"), "it goes on at the last common record, or at the start"
        assert b"2" not in again
        with pytest.raises(KafkaliteError, match="t-0"):
            await strict.get_many(timeout_ms=10_000)


async def test_a_group_goes_on_at_the_restored_offset() -> None:
    async with Cluster() as cluster:
        await cluster.produce("t", [b"1", b"2", b"3"])
        settings = {"group_id": "g", "auto_offset_reset": "earliest", "enable_auto_commit": False}
        async with cluster.consumer("t", **settings) as consumer:
            await consumer.commit(await consumer.get_one(timeout_ms=5_000))
        snapshot = await cluster.snapshot()
        for _ in range(2):
            async with cluster.consumer("t", **settings) as consumer:
                record = await consumer.get_one(timeout_ms=5_000)
                assert record.value == b"2"
                await consumer.commit(record)
            await cluster.restore(snapshot)
        # A member that stays is unknown to the restored group, and joins again.
        async with cluster.consumer("t", **settings) as consumer:
            assert (await consumer.get_one(timeout_ms=5_000)).value == b"2"
            await cluster.restore(snapshot)
            await cluster.produce("t", [b"4"])
            async with asyncio.timeout(20):
                while (await consumer.get_one(timeout_ms=5_000)).value != b"4":
                    pass


async def test_a_transaction_that_is_open_fails_and_the_next_one_works() -> None:
    async with Cluster() as cluster:
        async with cluster.producer(transactional_id="x") as producer:
            async with producer.transaction():
                await producer.send("t", b"1")
            snapshot = await cluster.snapshot()
            await producer.begin_transaction()
            await producer.send("t", b"2")
            await cluster.restore(snapshot)
            with pytest.raises(KafkaliteError):
                await asyncio.wait_for(producer.commit_transaction(), 20)
            assert await values(cluster, "t") == [b"1"]
        async with cluster.producer(transactional_id="x") as producer, producer.transaction():
            await producer.send("t", b"3")
        async with cluster.consumer(
            auto_offset_reset="earliest", isolation_level="read_committed"
        ) as consumer:
            consumer.assign([KEY])
            read: list[bytes | None] = []
            while len(read) < 2:
                read += [record.value for record in await consumer.get_many(timeout_ms=5_000)]
        assert read == [b"1", b"3"]


async def test_a_reset_leaves_an_empty_broker_to_clients_that_stay() -> None:
    async with Cluster() as cluster:
        address, cluster_id = cluster.bootstrap_servers, cluster.broker.cluster_id
        first: list[int] = []
        async with cluster.producer() as producer, cluster.admin() as admin:
            for round_ in range(3):
                with suppress(UnknownProducerIdError):  # as after any deletion of a topic
                    await producer.send("t", b"lost")
                await producer.send("t", b"%d" % round_)
                async with cluster.consumer("t", group_id="g", auto_offset_reset="earliest") as consumer:
                    read: list[bytes | None] = []
                    while b"%d" % round_ not in read:
                        read += [record.value for record in await consumer.get_many(timeout_ms=5_000)]
                    assert set(read) <= {b"lost", b"%d" % round_}
                first.append(cluster.broker.image.next_producer_id)
                cluster.intercept("Fetch", drop_next(None))
                await cluster.reset()
                assert len(cluster.requests) == 0
                # A client that stays may create its topic again with its next request for metadata.
                assert not cluster.broker.image.topics
                assert await admin.list_groups() == []
        assert (cluster.bootstrap_servers, cluster.broker.cluster_id) == (address, cluster_id)
        assert first == sorted(first)
        assert cluster.broker.image.next_producer_id >= first[-1] > 0, "no producer id is assigned twice"


async def calls_of_a_reset(topic_count: int) -> int:
    """Return how many functions of kafkalite are called while a broker with so many topics is reset."""
    calls = 0

    def count(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call" and "kafkalite" in frame.f_globals.get("__name__", "")

    async with Cluster() as cluster:
        for number in range(topic_count):
            await cluster.produce(f"topic-{number}", [b"1"])
        sys.setprofile(count)
        try:
            await cluster.reset()
        finally:
            sys.setprofile(None)
    return calls


async def test_a_reset_does_not_work_through_the_topics() -> None:
    await calls_of_a_reset(1)  # modules are loaded
    assert await calls_of_a_reset(60) < await calls_of_a_reset(1) + 30


async def test_a_reset_takes_few_turns_of_the_loop_and_few_calls() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with Cluster() as cluster:
        await cluster.produce("t", [b"1"])
        counting = asyncio.create_task(count())
        await asyncio.sleep(0)
        before = turns
        await cluster.reset()
        assert turns - before <= 3
        counting.cancel()
    assert await calls_of_a_reset(1) < 740, "a reset takes less than a millisecond"


async def test_a_snapshot_survives_a_reset() -> None:
    async with Cluster() as cluster:
        await cluster.produce("t", [b"1"])
        snapshot = await cluster.snapshot()
        await cluster.reset()
        await cluster.produce("t", [b"2"])
        await cluster.produce("u", [b"3"])
        await cluster.restore(snapshot)
        assert await values(cluster, "t") == [b"1"]
        assert set(await topics(cluster)) == {"t"}
        await cluster.restore(Snapshot())
        assert await topics(cluster) == {}


@pytest.mark.parametrize("arguments", [{"brokers": 2}, {"storage": "disk"}])
async def test_only_one_broker_in_memory_has_snapshots(arguments: dict[str, object]) -> None:
    async with Cluster(**arguments) as cluster:  # type: ignore[arg-type]
        for call in (cluster.snapshot(), cluster.reset(), cluster.restore(Snapshot())):
            with pytest.raises(ConfigError, match="one broker with storage='memory'"):
                await call


def test_the_blocking_twin() -> None:
    with SyncCluster() as cluster:
        cluster.produce("t", [b"1"])
        snapshot = cluster.snapshot()
        cluster.produce("t", [b"2"])
        cluster.restore(snapshot)
        assert [record.value for record in cluster.records("t")] == [b"1"]
        cluster.reset()
        assert cluster.statistics().topic_count == 0


async def test_an_admin_that_stays_sees_each_state() -> None:
    async with Cluster() as cluster, Admin(cluster.bootstrap_servers) as admin:
        await cluster.create_topic("a")
        snapshot = await cluster.snapshot()
        await cluster.create_topic("b")
        await cluster.restore(snapshot)
        assert [one.name for one in await admin.list_topics()] == ["a"]
        await cluster.reset()
        assert await admin.list_topics() == []


async def test_a_snapshot_with_an_open_transaction_is_refused() -> None:
    async with Cluster() as cluster, cluster.producer(transactional_id="x") as producer:
        await producer.begin_transaction()
        await producer.send("t", b"1")
        with pytest.raises(TransactionStateError, match="t-0 has an open transaction"):
            await cluster.snapshot()
        await producer.commit_transaction()
        snapshot = await cluster.snapshot()
        await cluster.restore(snapshot)
        async with producer.transaction():  # nothing had changed, so the producer is not fenced
            await producer.send("t", b"2")
        assert await values(cluster, "t") == [b"1", b"2"]
