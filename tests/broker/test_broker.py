"""Broker: start and stop in order, at most once, with or without a disk, and its statistics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafkalite.broker.broker import Broker
from kafkalite.broker.config import BrokerConfig
from kafkalite.errors import ConfigError, DataDirectoryError, ListenError
from kafkalite.protocol.messages import metadata
from kafkalite.raft.journal import JOURNAL_FILE
from kafkalite.rng import seeded_rng
from kafkalite.storage import layout
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing import VirtualClock
from kafkalite.testing.wire import WireClient

Make = Callable[..., Any]


async def test_defaults_are_memory_and_a_port_of_the_systems_choice() -> None:
    async with Broker() as broker:
        host, port = broker.address.split(":")
        assert host == "127.0.0.1"
        assert int(port) > 0
        assert broker.bootstrap_servers == broker.address
        assert broker.config.log_dirs is None
        assert broker.is_running
        assert "running at 127.0.0.1" in repr(broker)
        async with WireClient(broker.address) as wire:
            answer = await wire.call(metadata.MetadataRequest(None, False))
            assert answer.brokers[0].address == broker.address
    assert "stopped" in repr(broker)


async def test_brokers_without_a_socket_have_names_of_their_own() -> None:
    async with Broker(listeners="inproc://") as one, Broker(listeners="inproc://") as other:
        assert one.address.startswith("inproc://")
        assert one.address != other.address
        assert one.cluster_id != other.cluster_id


async def test_several_listeners_each_advertise_themselves() -> None:
    async with Broker(listeners="127.0.0.1:0,inproc://") as broker:
        assert len(broker.addresses) == 2
        for address in broker.addresses:
            async with WireClient(address) as wire:
                answer = await wire.call(metadata.MetadataRequest(None, False))
                assert answer.brokers[0].address == address


async def test_clients_are_given_the_advertised_address() -> None:
    broker = Broker(listeners="inproc://advertised", advertised_listeners="kafka.example:9092")
    async with broker, WireClient("inproc://advertised") as wire:
        answer = await wire.call(metadata.MetadataRequest(None, False))
        assert answer.brokers[0].address == "kafka.example:9092"
        assert broker.address == "kafka.example:9092"


async def test_with_an_rng_all_identifiers_of_a_node_are_drawn_from_it() -> None:
    journals: list[bytes] = []
    for _ in range(2):
        disk = MemoryFileSystem()
        settings = BrokerConfig.from_settings({"listeners": "inproc://same", "log_dirs": "/data"})
        clock = VirtualClock(wall_ms=0)
        async with Broker(settings, clock=clock, rng=seeded_rng(7), filesystem=disk) as broker:
            assert broker.is_running
        journals.append(disk.read_bytes(f"/data/{layout.METADATA_DIRECTORY}/{JOURNAL_FILE}"))
    assert journals[0] == journals[1]


async def test_stopping_twice_and_stopping_what_never_started_is_harmless() -> None:
    never = Broker(listeners="inproc://")
    await never.stop()
    broker = Broker(listeners="inproc://")
    await broker.start()
    await asyncio.gather(broker.stop(), broker.stop())
    await broker.stop()
    await broker.wait_stopped()
    with pytest.raises(AssertionError, match="started once"):
        await broker.start()


def test_a_config_and_settings_together_are_refused() -> None:
    with pytest.raises(TypeError, match="not both"):
        Broker(BrokerConfig(), num_partitions=2)
    with pytest.raises(ConfigError, match="did you mean"):
        Broker(num_partitons=2)


async def test_data_and_topics_survive_a_restart(
    tmp_path: Path, new_topic: Make, batch_of: Make, produce: Make, fetch: Make
) -> None:
    cluster_id = ""
    for expected in (0, 1, 2):
        async with Broker(log_dirs=tmp_path, listeners="inproc://") as broker:
            assert cluster_id in ("", broker.cluster_id)
            cluster_id = broker.cluster_id
            async with WireClient(broker.address) as wire:
                await wire.call(new_topic("t", 3))
                batch = batch_of()
                (result,) = (await wire.call(produce(batch, partition=2), batch)).partitions
                assert (result.error_code, result.base_offset) == (0, expected)
                (read,) = (await wire.call(fetch(0, partition=2))).partitions
                assert read.high_watermark == expected + 1


async def test_acknowledged_records_survive_a_kill(
    new_topic: Make, batch_of: Make, produce: Make, fetch: Make
) -> None:
    disk = MemoryFileSystem()
    first = Broker(log_dirs="/data", listeners="inproc://", filesystem=disk)
    await first.start()
    async with WireClient(first.address) as wire:
        await wire.call(new_topic("t"))
        batch = batch_of(b"a", b"b")
        await wire.call(produce(batch), batch)
    await first.kill()
    second = Broker(log_dirs="/data", listeners="inproc://", filesystem=disk)
    async with second, WireClient(second.address) as wire:
        (read,) = (await wire.call(fetch(0))).partitions
        assert (read.high_watermark, read.length_bytes) == (2, len(batch))


async def test_a_port_in_use_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with Broker() as first:
        second = Broker(listeners=first.address, log_dirs=tmp_path)
        with pytest.raises(ListenError, match="the port is in use"):
            await second.start()
    async with Broker(listeners="inproc://", log_dirs=tmp_path):
        pass  # the directory was released


async def test_the_directory_of_another_cluster_is_refused(tmp_path: Path) -> None:
    async with Broker(log_dirs=tmp_path, cluster_id="ours", listeners="inproc://") as broker:
        assert broker.cluster_id == "ours"
    with pytest.raises(DataDirectoryError, match="belongs to cluster ours, not theirs"):
        await Broker(log_dirs=tmp_path, cluster_id="theirs", listeners="inproc://").start()
    with pytest.raises(DataDirectoryError, match="belongs to node 1, not 2"):
        await Broker(log_dirs=tmp_path, node_id=2, listeners="inproc://").start()


async def test_two_brokers_cannot_share_a_directory(tmp_path: Path) -> None:
    async with Broker(log_dirs=tmp_path, listeners="inproc://"):
        with pytest.raises(DataDirectoryError):
            await Broker(log_dirs=tmp_path, listeners="inproc://").start()


async def test_statistics_count_what_happened(
    broker: Broker, wire: WireClient, new_topic: Make, batch_of: Make, produce: Make, fetch: Make
) -> None:
    await wire.call(new_topic("t", 2))
    batch = batch_of()
    await wire.call(produce(batch), batch)
    await wire.call(fetch(0))
    statistics = broker.statistics()
    assert statistics.state == "running"
    assert statistics.requests == {"PRODUCE": 1, "FETCH": 1, "API_VERSIONS": 1, "CREATE_TOPICS": 1}
    assert (statistics.topic_count, statistics.partition_count) == (1, 2)
    assert statistics.appended_bytes == statistics.fetched_bytes == len(batch)
    assert (statistics.sync_rounds, statistics.synced_logs) == (1, 1)
    assert (statistics.connection_count, statistics.connections_accepted) == (1, 1)
    assert statistics.offline_partition_count == 0


async def test_without_a_disk_nothing_waits_for_one(new_topic: Make, batch_of: Make, produce: Make) -> None:
    async with Broker(listeners="inproc://") as broker, WireClient(broker.address) as wire:
        await wire.call(new_topic("t", durability="fsync"))
        batch = batch_of()
        assert (await wire.call(produce(batch), batch)).partitions[0].error_code == 0
        assert broker.statistics().sync_rounds == 0


async def test_no_task_is_left_after_a_stop() -> None:
    before = asyncio.all_tasks()
    async with Broker(listeners="inproc://") as broker, WireClient(broker.address):
        assert len(asyncio.all_tasks() - before) == broker.statistics().task_count
    assert asyncio.all_tasks() == before


async def test_a_disk_that_fails_to_sync_takes_the_partition_offline_not_the_broker(
    new_topic: Make, batch_of: Make, produce: Make, fetch: Make
) -> None:
    disk = MemoryFileSystem(crashable=True)
    async with (
        Broker(log_dirs="/data", listeners="inproc://", filesystem=disk) as broker,
        WireClient(broker.address) as wire,
    ):
        await wire.call(new_topic("t", 2))
        batch = batch_of()
        await wire.call(produce(batch), batch)
        disk.fail_next_sync()
        (result,) = (await wire.call(produce(batch), batch)).partitions
        assert result.error_code == 56
        assert "offline" in result.error_message
        (again,) = (await wire.call(produce(batch), batch)).partitions
        assert again.error_code == 56
        (read,) = (await wire.call(fetch(0))).partitions
        assert (read.error_code, read.high_watermark) == (0, 1)  # reads continue below the high watermark
        (other,) = (await wire.call(produce(batch, partition=1), batch)).partitions
        assert other.error_code == 0
        assert broker.statistics().offline_partition_count == 1


async def test_a_full_disk_is_a_temporary_error(
    new_topic: Make, batch_of: Make, produce: Make, fetch: Make
) -> None:
    disk = MemoryFileSystem(capacity_bytes=400_000)
    async with (
        Broker(log_dirs="/data", listeners="inproc://", filesystem=disk) as broker,
        WireClient(broker.address) as wire,
    ):
        await wire.call(new_topic("t", **{"max.message.bytes": "200000"}))
        batch = batch_of(b"x" * 100_000)
        codes = [(await wire.call(produce(batch), batch)).partitions[0].error_code for _ in range(8)]
        assert codes[0] == 0
        assert codes[-1] == 56
        acknowledged = codes.count(0)
        (read,) = (await wire.call(fetch(0))).partitions
        assert read.high_watermark == acknowledged
        disk.capacity_bytes = None
        (result,) = (await wire.call(produce(batch), batch)).partitions
        assert (result.error_code, result.base_offset) == (0, acknowledged)
        assert broker.is_running


@pytest.mark.parametrize("config", ["127.0.0.1:9092", {"listeners": "127.0.0.1:9092"}, 9092])
def test_a_wrong_argument_names_what_a_broker_takes(config):
    with pytest.raises(TypeError, match=r"BrokerConfig or settings as keywords, not .*Broker\(listeners="):
        Broker(config)
