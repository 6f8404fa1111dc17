"""Several data directories on one node: a failed disk takes only its partitions, a replaced one is filled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kafkalite import Admin
from kafkalite.broker.broker import Broker
from kafkalite.errors import DataDirectoryError, DeliveryTimeoutError
from kafkalite.model import TopicPartition
from kafkalite.storage.layout import LOG_DIR_STARTS_FILE
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing import Cluster
from kafkalite.testing.virtual_clock import VirtualClock
from proof.waiting import eventually

PARTITIONS = 4


@pytest.fixture
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafkalite.broker.partitions.housekeeping.PROBE_INTERVAL_MS", 20)


def homes(cluster: Cluster, node_id: int) -> dict[str, set[int]]:
    """Return the partitions of the topic t in each data directory of a node, by the directory's name."""
    return {
        state.path.rpartition("/")[2]: {tp.partition for tp in state.logs if tp.topic == "t"}
        for state in cluster.brokers[node_id].partitions.directories()
    }


def offline(cluster: Cluster, node_id: int) -> set[int]:
    return {one.partition for one in cluster.brokers[node_id].partitions.stored() if one.offline_reason}


async def produce_to_all(cluster: Cluster, value: bytes) -> None:
    async with cluster.producer() as producer:
        await asyncio.gather(*(producer.send("t", value, partition=n) for n in range(PARTITIONS)))


async def values(cluster: Cluster) -> list[bytes]:
    return sorted(record.value or b"" for record in await cluster.records("t"))


def in_sync(cluster: Cluster, count: int) -> bool:
    states = cluster.broker.image.topics["t"].partitions
    return all(len(state.isr) == count for state in states)


@asynccontextmanager
async def three_nodes(**settings: Any) -> AsyncIterator[Cluster]:
    async with Cluster(brokers=3, disks=2, **settings) as cluster:
        await cluster.create_topic("t", PARTITIONS, replication_factor=3)
        await produce_to_all(cluster, b"1")
        yield cluster


def led_from_second_disk(cluster: Cluster, node_id: int) -> set[int]:
    return {n for n in homes(cluster, node_id)["disk-2"] if cluster.leader("t", n) == node_id}


@pytest.mark.usefixtures("quick_probes")
class TestFailedDisk:
    """R81"""

    async def test_only_its_partitions_are_led_elsewhere(self) -> None:
        async with three_nodes() as cluster:
            node_id = next(n for n in (1, 2, 3) if led_from_second_disk(cluster, n))
            failed = homes(cluster, node_id)["disk-2"]
            others = set(range(PARTITIONS)) - failed
            assert others
            epochs = [state.leader_epoch for state in cluster.broker.image.topics["t"].partitions]
            cluster.fail_disk(node_id, 2)
            async with cluster.producer() as producer:
                for number in range(PARTITIONS):
                    await producer.send("t", b"2", partition=number)
            for number, state in enumerate(cluster.broker.image.topics["t"].partitions):
                assert (node_id in state.isr) == (number in others)
                assert state.leader != node_id or number in others
                assert (state.leader_epoch == epochs[number]) == (number in others)
            assert offline(cluster, node_id) & set(range(PARTITIONS)) == failed
            assert cluster.brokers[node_id].is_running
            assert await values(cluster) == [b"1"] * PARTITIONS + [b"2"] * PARTITIONS

    async def test_it_is_noticed_without_a_write(self) -> None:
        async with three_nodes() as cluster:
            node_id = next(n for n in (1, 2, 3) if led_from_second_disk(cluster, n))
            number = min(led_from_second_disk(cluster, node_id))
            cluster.fail_disk(node_id, 2)
            await cluster.wait_until(lambda: cluster.leader("t", number) not in {node_id, -1})

    async def test_a_new_partition_gets_another_directory(self) -> None:
        async with three_nodes() as cluster:
            cluster.fail_disk(1, 2)
            await cluster.wait_until(lambda: offline(cluster, 1))
            await cluster.create_topic("u", PARTITIONS, replication_factor=3)
            async with cluster.producer() as producer:
                for number in range(PARTITIONS):
                    await producer.send("u", b"1", partition=number)
            await cluster.wait_until(lambda: in_sync_of(cluster, "u"))

    async def test_the_directory_and_the_reason_are_described(self) -> None:
        async with three_nodes() as cluster:
            cluster.fail_disk(2, 2)
            await cluster.wait_until(lambda: offline(cluster, 2))
            async with Admin(cluster.bootstrap_servers, **cluster.client_settings) as admin:
                first, second = (await admin.describe_directories(["t"]))[2]
                logs = [log for log in await admin.describe_log_dirs(["t"]) if log.node_id == 2]
            assert (first.failure, second.total_bytes) == (None, -1)
            assert "has failed" in str(second.failure)
            assert {log.partition for log in logs if log.path == second.path} == offline(cluster, 2) & set(
                range(9)
            )
            assert sum(first.size_bytes.values()) > 0

    async def test_a_partition_without_another_copy_is_offline(self) -> None:
        async with Cluster(disks=2) as cluster:
            await cluster.create_topic("t", PARTITIONS)
            await produce_to_all(cluster, b"1")
            cluster.fail_disk(1, 2)
            failed = homes(cluster, 1)["disk-2"]
            async with cluster.producer(delivery_timeout_ms=400, request_timeout_ms=200) as producer:
                for number in range(PARTITIONS):
                    if number not in failed:
                        await producer.send("t", b"2", partition=number)
                with pytest.raises(DeliveryTimeoutError, match="is offline"):
                    await producer.send("t", b"2", partition=min(failed))

    async def test_one_failed_file_is_not_a_failed_disk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # The failing sync must be that of a log, not that of a probe.
        monkeypatch.setattr("kafkalite.broker.partitions.housekeeping.PROBE_INTERVAL_MS", 10**7)
        async with three_nodes() as cluster:
            filesystem = cluster.nodes[1].filesystem
            assert isinstance(filesystem, MemoryFileSystem)
            await cluster.wait_until(lambda: in_sync(cluster, 3))
            filesystem.fail_next_sync()
            await produce_to_all(cluster, b"2")
            await cluster.wait_until(lambda: not in_sync(cluster, 3))
            await asyncio.sleep(0)
            assert all(state.failure is None for state in cluster.brokers[1].partitions.directories())


def in_sync_of(cluster: Cluster, topic: str) -> bool:
    return all(len(state.isr) == 3 for state in cluster.broker.image.topics[topic].partitions)


class TestReplacedDisk:
    """R82"""

    @pytest.mark.parametrize("is_clean", [True, False])
    async def test_it_is_filled_from_the_other_replicas(self, is_clean: bool) -> None:
        async with three_nodes() as cluster:
            lost = homes(cluster, 1)["disk-2"]
            await (cluster.stop(1) if is_clean else cluster.kill(1))
            cluster.replace_disk(1, 2)
            await produce_to_all(cluster, b"2")
            await cluster.start(1)
            await cluster.wait_until(lambda: in_sync(cluster, 3))
            assert homes(cluster, 1)["disk-2"] == lost
            ends = [cluster.brokers[1].partitions.find(TopicPartition("t", n)) for n in range(PARTITIONS)]
            assert [one.log_end_offset for one in ends if one is not None] == [2] * PARTITIONS
            await cluster.stop(2, 3)

    async def test_the_only_copy_is_offline_until_the_loss_is_accepted(self) -> None:
        async with Cluster(disks=2) as cluster:
            await cluster.create_topic("t", PARTITIONS)
            await produce_to_all(cluster, b"1")
            lost = homes(cluster, 1)["disk-2"]
            await cluster.stop()
            cluster.replace_disk(1, 2)
            for _ in range(2):
                await cluster.start()
                assert offline(cluster, 1) & set(range(PARTITIONS)) >= lost
                await cluster.stop()

    async def test_all_nodes_at_once_lose_no_record_of_which_a_copy_is_left(self) -> None:
        """Two nodes lose a disk while all are down. The replica with the records leads, not a new log."""
        async with three_nodes() as cluster:
            await cluster.wait_until(lambda: in_sync(cluster, 3))
            await cluster.kill()
            for node_id in (1, 2):
                cluster.replace_disk(node_id, 2)
            await cluster.start(1, 2, 3)
            await cluster.wait_until(lambda: in_sync(cluster, 3))
            assert await values(cluster) == [b"1"] * PARTITIONS


class TestOlderCopy:
    """R83"""

    async def test_its_logs_are_fetched_again_in_each_start_until_they_are_complete(self) -> None:
        async with three_nodes() as cluster:
            suspects = homes(cluster, 1)["disk-2"]
            file = f"{cluster.directories(1)[1]}/{LOG_DIR_STARTS_FILE}"
            disk = cluster.nodes[1].filesystem
            assert disk is not None
            older = disk.read_bytes(file)
            await cluster.stop(1)
            await cluster.start(1)
            await cluster.wait_until(lambda: in_sync(cluster, 3))
            await cluster.stop(1)
            disk.write_atomically(file, older)
            await cluster.start(1)
            await cluster.wait_until(lambda: in_sync(cluster, 3))
            kept = [name for name in disk.list_dir(cluster.directories(1)[1]) if ".damaged-" in name]
            assert len(kept) >= len(suspects)
            await cluster.wait_until(lambda: disk.read_bytes(file) != older)  # it is trusted again
            await cluster.stop(1)
            await cluster.start(1)
            assert cluster.brokers[1].partitions.damaged_count == 0


class TestStart:
    """R80"""

    async def test_a_directory_of_another_node_stops_the_start(self) -> None:
        disk = MemoryFileSystem()
        async with Broker(listeners="inproc://", log_dirs="/a,/b", filesystem=disk, cluster_id="c"):
            pass
        with pytest.raises(DataDirectoryError, match="/b belongs to node 1, not 2"):
            await Broker(
                listeners="inproc://", log_dirs="/c,/b", filesystem=disk, cluster_id="c", node_id=2
            ).start()

    async def test_an_idle_node_notices_a_failed_disk(self) -> None:
        clock = VirtualClock()
        async with Cluster(disks=2, clock=clock) as cluster:
            await cluster.create_topic("t", PARTITIONS)
            cluster.fail_disk(1, 2)
            await clock.advance(1_000)
            await eventually(lambda: offline(cluster, 1))
            assert offline(cluster, 1) >= homes(cluster, 1)["disk-2"]
