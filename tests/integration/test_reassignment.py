"""Partitions move to other brokers while clients write, whichever broker is down (R60 to R63)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from kafkalite.client.admin.admin import Admin
from kafkalite.errors import BrokerError, InvalidReplicationFactorError, InvalidRequestError
from kafkalite.metadata.image import ClusterImage, PartitionState
from kafkalite.model import OFFSETS_TOPIC, TopicPartition
from kafkalite.raft import controller_node
from kafkalite.storage import layout
from kafkalite.storage.filesystem import FileSystem
from kafkalite.testing import Cluster

TP = TopicPartition("t", 0)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Four brokers and a controller apart."""
    async with Cluster(brokers=4, controllers=1) as cluster:
        yield cluster


def state(cluster: Cluster, tp: TopicPartition = TP) -> PartitionState:
    found = newest(cluster).partition(*tp)
    assert found is not None
    return found


def newest(cluster: Cluster) -> ClusterImage:
    running = [one for one in cluster.brokers.values() if one.is_running]
    return max((broker.image for broker in running), key=lambda image: image.metadata_offset)


def moving(cluster: Cluster) -> bool:
    return any(state.is_reassigning for state in newest(cluster).topics["t"].partitions)


async def moved(cluster: Cluster, *replicas: int, tp: TopicPartition = TP) -> None:
    def is_moved() -> bool:
        now = state(cluster, tp)
        return now.replicas == replicas and not now.is_reassigning and set(now.isr) == set(replicas)

    await cluster.wait_until(is_moved, what=f"replicas {replicas}")


async def reassign(admin: Admin, cluster: Cluster, *replicas: int) -> None:
    await admin.alter_partition_reassignments({TP: list(replicas)}, allow_replication_factor_change=True)
    await moved(cluster, *replicas)


async def create(admin: Admin, cluster: Cluster) -> tuple[list[int], int]:
    """Create the topic t with three replicas. Return them and the broker that has none."""
    await admin.create_topic("t", replication_factor=3, configs={"min.insync.replicas": "2"})
    replicas = list(state(cluster).replicas)
    (spare,) = set(cluster.brokers) - set(replicas)
    return replicas, spare


def files_of(cluster: Cluster, node_id: int) -> tuple[FileSystem, str]:
    filesystem = cluster.nodes[node_id].filesystem
    assert filesystem is not None
    return filesystem, f"/cluster/node-{node_id}"


def logs_of(cluster: Cluster, node_id: int) -> list[str]:
    """The names of the directories with logs."""
    filesystem, path = files_of(cluster, node_id)
    return [name for name in filesystem.list_dir(path) if layout.parse_log_directory_name(name)]


def present(cluster: Cluster, node_id: int) -> list[str]:
    """The names of the directories with logs of the topic t."""
    topic_id = cluster.brokers[node_id].image.topics["t"].topic_id
    return [name for name in logs_of(cluster, node_id) if name == layout.log_directory_name(topic_id, 0)]


def read_files(cluster: Cluster, node_id: int) -> tuple[str, dict[str, bytes]]:
    filesystem, path = files_of(cluster, node_id)
    (name,) = present(cluster, node_id)
    files = filesystem.list_dir(f"{path}/{name}")
    return name, {one: bytes(filesystem.read_bytes(f"{path}/{name}/{one}")) for one in files}


def write_files(cluster: Cluster, node_id: int, name: str, files: dict[str, bytes]) -> None:
    filesystem, path = files_of(cluster, node_id)
    filesystem.make_dirs(f"{path}/{name}")
    for file, content in files.items():
        filesystem.write_atomically(f"{path}/{name}/{file}", content)


async def values(cluster: Cluster, count: int) -> list[bytes]:
    async with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        found: list[bytes] = []
        async with asyncio.timeout(20):
            async for record in consumer:
                assert record.value is not None
                found.append(bytes(record.value))
                if len(found) == count:
                    break
    return found


async def test_a_partition_moves_while_clients_write(cluster: Cluster) -> None:
    async with cluster.admin() as admin, cluster.producer() as producer:
        (a, b, c), d = await create(admin, cluster)
        sent = 0

        async def write() -> None:
            nonlocal sent
            while True:
                await producer.send("t", str(sent).encode())
                sent += 1

        writing = asyncio.create_task(write())
        await cluster.wait_until(lambda: sent > 50, what="records")
        await admin.alter_partition_reassignments({TP: [d, b, c]})
        await moved(cluster, d, b, c)  # the leader, a, is removed
        assert state(cluster).leader == d
        assert await admin.list_partition_reassignments() == {}
        seen = sent
        await cluster.wait_until(lambda: sent > seen + 50, what="records after the move")
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert await values(cluster, sent) == [str(number).encode() for number in range(sent)]
        await cluster.wait_until(
            lambda: cluster.brokers[a].partitions.find(TP) is None, what="the log of a removed replica"
        )
        assert present(cluster, a) == []


async def test_a_removed_replica_answers_that_it_has_none(cluster: Cluster) -> None:
    async with cluster.admin() as admin:
        (a, b, c), d = await create(admin, cluster)
        await admin.alter_partition_reassignments({TP: [d, b, c]})
        await moved(cluster, d, b, c)
        await cluster.wait_until(lambda: cluster.brokers[a].partitions.find(TP) is None, what="no replica")
        with pytest.raises(BrokerError, match="has no replica of t-0"):
            cluster.brokers[a].partitions.leader("t", 0)


async def test_a_move_waits_for_a_dead_broker_and_can_be_cancelled(cluster: Cluster) -> None:
    async with cluster.admin() as admin, cluster.producer() as producer:
        (a, b, c), d = await create(admin, cluster)
        await cluster.kill(d)
        await admin.alter_partition_reassignments({TP: [d, b, c]})
        found = (await admin.list_partition_reassignments())[TP]
        assert (found.replicas, found.adding_replicas, found.removing_replicas) == ((a, b, c, d), (d,), (a,))
        await producer.send("t", b"0")
        await admin.alter_partition_reassignments({TP: None})
        await moved(cluster, a, b, c)
        await cluster.start(d)
        await admin.alter_partition_reassignments({TP: [d, b, c]})
        await moved(cluster, d, b, c)
        assert await values(cluster, 1) == [b"0"]


async def test_a_replica_that_was_removed_while_its_broker_was_down_is_deleted_at_its_start(
    cluster: Cluster,
) -> None:
    """R63: the broker replays the record of the removal."""
    async with cluster.admin() as admin:
        (a, b, c), d = await create(admin, cluster)
        await cluster.kill(c)
        await admin.alter_partition_reassignments({TP: [a, b, d]})
        await moved(cluster, a, b, d)
        await cluster.start(c)
        await cluster.wait_until(lambda: not present(cluster, c), what="the deletion")
        assert cluster.brokers[c].partitions.find(TP) is None


async def test_the_log_of_a_replica_that_was_removed_and_returned_outlives_restarts(cluster: Cluster) -> None:
    """R63: a broker that starts replays the old removal, too."""
    async with cluster.admin() as admin, cluster.producer() as producer:
        await admin.create_topic("t", replication_factor=1)
        (first,) = state(cluster).replicas
        other = next(node_id for node_id in cluster.brokers if node_id != first)
        await producer.send("t", b"0")
        for node_id in (other, first):
            await admin.alter_partition_reassignments({TP: [node_id]})
            await moved(cluster, node_id)
        for _ in range(2):
            await cluster.kill(first)
            await cluster.start(first)
            assert await values(cluster, 1) == [b"0"]


@pytest.mark.parametrize("is_voter", [True, False])
@pytest.mark.parametrize("is_down", [False, True])
@pytest.mark.parametrize("is_orderly", [False, True])
async def test_a_broker_that_replays_a_removal_opens_the_log_of_the_present_topic_of_that_name(
    is_voter: bool, is_down: bool, is_orderly: bool
) -> None:
    """R63: the topic is deleted after its replica has left the broker, and created again. ``is_down``: the
    broker sees the removal only after the deletion, and before the creation."""
    async with Cluster(brokers=3, controllers=0 if is_voter else 1) as cluster:
        async with cluster.admin() as admin:
            await admin.create_topic("t", replication_factor=1)
            (first,) = state(cluster).replicas
            others = [node_id for node_id in cluster.brokers if node_id != first]
            # A producer that stayed open would create the deleted topic when it refreshes its metadata.
            async with cluster.producer() as producer:
                for number in range(3):
                    await producer.send("t", b"old %d" % number)
            (old,) = present(cluster, first)
            # A second replica, because only then the replica can leave while its broker is down.
            await reassign(admin, cluster, first, others[0])
            if is_down:
                await cluster.kill(first)
            await reassign(admin, cluster, others[0])
            await admin.delete_topics(["t"])
            if is_down:
                await cluster.start(first)
            await cluster.wait_until(lambda: old not in logs_of(cluster, first), what="the deletion")
            await admin.create_topic("t", replication_factor=3)
            await reassign(admin, cluster, first)
        async with cluster.producer() as producer:
            await producer.send("t", b"new")
        assert await values(cluster, 1) == [b"new"]
        await (cluster.stop if is_orderly else cluster.kill)(first)
        await cluster.start(first)
        assert await values(cluster, 1) == [b"new"]
        broker = cluster.brokers[first]
        assert broker.partitions.damaged_count == broker.partitions.offline_count == 0
        assert logs_of(cluster, first) == present(cluster, first), "no other log is left"


async def test_files_of_a_removed_replica_are_not_used_when_it_returns(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """R62: the broker has not replayed the removal, for example because a snapshot of the metadata hid it."""
    async with cluster.admin() as admin, cluster.producer() as producer:
        (a, b, c), d = await create(admin, cluster)
        await producer.send("t", b"0")
        await cluster.stop(c)
        name, files = read_files(cluster, c)
        await admin.alter_partition_reassignments({TP: [a, b, d]})
        await moved(cluster, a, b, d)
        await cluster.start(c)
        await cluster.wait_until(lambda: not present(cluster, c), what="the deletion")
        write_files(cluster, c, name, files)
        with caplog.at_level(logging.WARNING):
            await admin.alter_partition_reassignments({TP: [a, b, c]})
            await moved(cluster, a, b, c)
        assert "log of a removed replica retired" in caplog.text
        caplog.clear()
        await cluster.kill(c)  # now the files are those of the present replica
        await cluster.start(c)
        await moved(cluster, a, b, c)
        assert "log of a removed replica retired" not in caplog.text
        assert present(cluster, c) == [name]
        assert await values(cluster, 1) == [b"0"]


async def test_the_number_of_replicas_changes_only_on_request(cluster: Cluster) -> None:
    async with cluster.admin() as admin:
        (a, b, _), d = await create(admin, cluster)
        with pytest.raises(InvalidReplicationFactorError, match="allow_replication_factor_change"):
            await admin.alter_partition_reassignments({TP: [a, b]})
        await admin.alter_partition_reassignments({TP: [a, b]}, allow_replication_factor_change=True)
        await moved(cluster, a, b)
        await admin.alter_partition_reassignments({TP: [a, b, d]}, allow_replication_factor_change=True)
        await moved(cluster, a, b, d)


async def test_an_unregistered_broker_stops_and_its_id_is_retired(cluster: Cluster) -> None:
    async with cluster.admin() as admin:
        (a, b, c), d = await create(admin, cluster)
        with pytest.raises(InvalidRequestError, match="has 1 replicas: move them first"):
            await admin.unregister_broker(a)
        await admin.alter_partition_reassignments({TP: [b, c, d]})
        await moved(cluster, b, c, d)
        broker = cluster.brokers[a]
        await admin.unregister_broker(a)
        await cluster.wait_until(lambda: not broker.is_running, what="the unregistered broker to stop")
        assert [one.node_id for one in (await admin.describe_cluster()).brokers] == sorted([b, c, d])


async def test_internal_topics_grow_when_brokers_join() -> None:
    cluster = Cluster(brokers=3, controllers=1)
    try:
        await cluster.start(101, 1)
        async with cluster.admin() as admin:
            await admin.create_topic("t", replication_factor=1)
        async with cluster.consumer("t", group_id="g") as consumer:
            await consumer.commit({TopicPartition("t", 0): 0})
            tp = TopicPartition(OFFSETS_TOPIC, 0)
            await cluster.wait_until(
                lambda: cluster.brokers[1].image.partition(*tp) is not None, what="the internal topic"
            )
            assert state(cluster, tp).replicas == (1,)
            await cluster.start(2, 3)
            await cluster.wait_until(
                lambda: len(state(cluster, tp).isr) == 3 and not state(cluster, tp).is_reassigning,
                what="three replicas",
            )
    finally:
        await cluster.close()


@pytest.mark.parametrize("is_enabled", [True, False])
async def test_a_new_broker_takes_its_share_by_itself_if_that_is_enabled(
    is_enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_node, "REBALANCE_DELAY_MS", 200)
    async with (
        Cluster(brokers=3, controllers=1, auto_rebalance_enable=is_enabled) as cluster,
        cluster.admin() as admin,
    ):
        await admin.create_topic("t", 12, replication_factor=1)
        on_two = {TopicPartition("t", number): [1 + number % 2] for number in range(12)}
        await admin.alter_partition_reassignments(on_two)

        def held() -> list[int]:
            states = newest(cluster).topics["t"].partitions
            assert not any(state.is_reassigning for state in states)
            return [sum(node_id in state.replicas for state in states) for node_id in (1, 2, 3)]

        if is_enabled:
            await cluster.wait_until(lambda: not moving(cluster) and held() == [4, 4, 4], what="equal shares")
        else:
            await cluster.wait_until(lambda: not moving(cluster) and held() == [6, 6, 0], what="two brokers")
            await asyncio.sleep(0.5)
            assert held() == [6, 6, 0]
