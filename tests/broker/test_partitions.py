"""Partitions: the image's partitions become logs; a log that can't be opened is offline, with the reason."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafkalite.broker.broker import Broker
from kafkalite.broker.partitions.partitions import log_config, partition_settings
from kafkalite.client.admin.admin import Admin
from kafkalite.client.admin.cluster_health import look, look_at_disks
from kafkalite.client.cluster.coordinator import GROUP_KEY
from kafkalite.errors import DiskFullError, ErrorCode, NotCoordinatorError, StorageError
from kafkalite.metadata.image import EMPTY
from kafkalite.metadata.topic_config import topic_settings
from kafkalite.model import TimestampType, TopicPartition
from kafkalite.protocol.messages.admin import DeleteTopicsRequest
from kafkalite.protocol.messages.groups import FindCoordinatorRequest
from kafkalite.replication.partition import Partition
from kafkalite.storage.disk import RealFileSystem
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.log_store import LogStore
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing.wire import WireClient

Make = Callable[..., Any]


def test_kafkas_defaults_are_the_logs_defaults() -> None:
    assert log_config(topic_settings(EMPTY, "t", {}), 3) == LogConfig()


def test_every_setting_reaches_the_log() -> None:
    settings = topic_settings(
        EMPTY,
        "t",
        {
            "segment.bytes": 2000,
            "segment.ms": 3,
            "segment.jitter.ms": 1,
            "segment.index.bytes": 100,
            "index.interval.bytes": 5,
            "retention.ms": 6,
            "retention.bytes": 7,
            "max.message.bytes": 800,
            "message.timestamp.type": "LogAppendTime",
            "durability": "page-cache",
            "file.delete.delay.ms": 9,
            "preallocate": True,
            "min.insync.replicas": 2,
            "message.timestamp.before.max.ms": 10,
            "message.timestamp.after.max.ms": 11,
        },
    )
    assert log_config(settings, 1) == LogConfig(
        segment_bytes=2000,
        segment_ms=3,
        segment_jitter_ms=1,
        segment_index_bytes=100,
        index_interval_bytes=5,
        retention_ms=6,
        retention_bytes=7,
        max_message_bytes=800,
        timestamp_type=TimestampType.LOG_APPEND_TIME,
        durability="page-cache",
        file_delete_delay_ms=9,
        preallocate_min_bytes=2000,
        preallocate_max_bytes=2000,
    )
    more = partition_settings(settings)
    assert more.min_insync_replicas == 2
    assert more.message_timestamp_before_max_ms == 10
    assert more.message_timestamp_after_max_ms == 11


@pytest.mark.parametrize(
    ("of_partition", "of_topic", "expected"),
    [
        ("-1", "-1", -1),
        ("-1", "100", 33),
        ("20", "100", 20),
        ("50", "100", 33),
        ("50", "-1", 50),
        ("-1", "0", 0),
    ],
)
def test_a_partition_has_an_equal_share_of_the_topics_size(
    of_partition: str, of_topic: str, expected: int
) -> None:
    defaults = {"retention.bytes": int(of_partition), "retention.topic.bytes": int(of_topic)}
    assert log_config(topic_settings(EMPTY, "t", defaults), 3).retention_bytes == expected


async def test_a_damaged_log_is_offline_and_the_others_serve(
    tmp_path: Path, new_topic: Make, batch_of: Make, produce: Make, fetch: Make
) -> None:
    broker = Broker(log_dirs=tmp_path, listeners="inproc://")
    await broker.start()
    async with WireClient(broker.address) as wire:
        await wire.call(new_topic("t", 2, **{"segment.bytes": "1024"}))
        for partition in (0, 1):
            for _ in range(4):
                batch = batch_of(b"x" * 600)
                await wire.call(produce(batch, partition=partition), batch)
    await broker.kill()
    (directory,) = tmp_path.glob("*-0")
    (directory / "log-state").write_text("garbage")
    async with Broker(log_dirs=tmp_path, listeners="inproc://") as again, WireClient(again.address) as wire:
        batch = batch_of()
        (bad,) = (await wire.call(produce(batch), batch)).partitions
        assert bad.error_code == ErrorCode.KAFKA_STORAGE_ERROR
        assert directory.name in bad.error_message
        (good,) = (await wire.call(fetch(0, partition=1))).partitions
        assert (good.error_code, good.high_watermark) == (0, 4)
        assert again.statistics().offline_partition_count == 1
        assert again.statistics().damaged_partition_count == 1
        assert {s.partition: s.offline_reason is None for s in again.partitions.stored()} == {
            0: False,
            1: True,
        }


async def test_a_coordinator_without_a_log_names_the_cause(
    broker: Broker, wire: WireClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise DiskFullError("no space left")

    monkeypatch.setattr(broker._store, "create_log", refuse)
    await wire.call(FindCoordinatorRequest(GROUP_KEY, ["g"]))
    with pytest.raises(NotCoordinatorError) as refused:
        broker._services.coordinators.groups("g")
    assert re.fullmatch(r"broker 1 cannot lead __consumer_offsets-\d+ now: no space left", str(refused.value))


async def test_a_log_that_cannot_be_created_is_offline_until_its_topic_is_deleted(
    tmp_path: Path, new_topic: Make, batch_of: Make, produce: Make, monkeypatch: Any
) -> None:
    async with Broker(log_dirs=tmp_path, listeners="inproc://") as broker, WireClient(broker.address) as wire:

        def refuse(*_arguments: object, **_options: object) -> None:
            raise OSError("no more i-nodes")

        with monkeypatch.context() as patched:
            patched.setattr(broker._store, "create_log", refuse)
            await wire.call(new_topic("t"))
        batch = batch_of()
        (result,) = (await wire.call(produce(batch), batch)).partitions
        assert result.error_code == ErrorCode.KAFKA_STORAGE_ERROR
        assert "no more i-nodes" in result.error_message
        assert len(broker.partitions) == 1
        assert [s.offline_reason for s in broker.partitions.stored()] == ["no more i-nodes"]


async def test_r55_a_log_that_lacked_a_descriptor_is_opened_later(
    tmp_path: Path, new_topic: Make, batch_of: Make, produce: Make, monkeypatch: Any
) -> None:
    async with Broker(log_dirs=tmp_path, listeners="inproc://") as broker, WireClient(broker.address) as wire:
        batch = batch_of()

        def refuse(*_arguments: object, **_options: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as patched:
            patched.setattr("kafkalite.storage.disk.os.open", refuse)
            await wire.call(new_topic("t"))
            (result,) = (await wire.call(produce(batch), batch)).partitions
            assert result.error_code == ErrorCode.KAFKA_STORAGE_ERROR
            assert "no file descriptor left" in result.error_message
            broker.partitions.retry()
            assert broker.partitions.damaged() == []  # so that it still leads when it is opened
        broker.partitions.retry()
        (result,) = (await wire.call(produce(batch), batch)).partitions
        assert (result.error_code, result.base_offset) == (0, 0)
        assert broker.statistics().offline_partition_count == 0


async def test_a_role_that_a_passing_error_prevented_is_taken_later(
    broker: Broker, wire: WireClient, new_topic: Make, batch_of: Make, produce: Make, monkeypatch: Any
) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise StorageError("too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Partition, "become_leader", refuse)
        await wire.call(new_topic("t"))
        await wire.call(new_topic("gone"))
    batch = batch_of()
    (result,) = (await wire.call(produce(batch), batch)).partitions
    assert result.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert result.error_message == "broker 1 cannot lead t-0 now: too many open files"
    await wire.call(DeleteTopicsRequest(1000, ["gone"]))
    with monkeypatch.context() as patched:
        patched.setattr(Partition, "become_leader", refuse)
        broker.partitions.retry()
    broker.partitions.retry()
    (result,) = (await wire.call(produce(batch), batch)).partitions
    assert (result.error_code, result.base_offset) == (0, 0)
    assert not broker.partitions._roleless


async def test_a_directory_that_vanished_is_damage_and_never_an_empty_log(
    tmp_path: Path, new_topic: Make, batch_of: Make, produce: Make, caplog: Any
) -> None:
    """R25: a log with records by the checkpoint is not created again."""
    async with Broker(log_dirs=tmp_path, listeners="inproc://") as broker, WireClient(broker.address) as wire:
        await wire.call(new_topic("t"))
        batch = batch_of()
        await wire.call(produce(batch), batch)
    (directory,) = tmp_path.glob("*-0")
    directory.rename(tmp_path / ("0" * 32 + "-0"))
    async with Broker(log_dirs=tmp_path, listeners="inproc://") as again, WireClient(again.address) as wire:
        (result,) = (await wire.call(produce(batch), batch)).partitions
        assert result.error_code == ErrorCode.KAFKA_STORAGE_ERROR
        assert "missing" in result.error_message
        assert "unknown directory" in caplog.text


async def test_r63_a_log_that_could_not_be_deleted_is_not_the_log_of_the_next_topic_of_its_name(
    tmp_path: Path, new_topic: Make, batch_of: Make, produce: Make, monkeypatch: Any
) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async with Broker(log_dirs=tmp_path, listeners="inproc://") as broker, WireClient(broker.address) as wire:
        batch = batch_of()
        await wire.call(new_topic("t"))
        await wire.call(produce(batch), batch)
        with monkeypatch.context() as patch:
            patch.setattr(LogStore, "delete_log", refuse)
            await wire.call(DeleteTopicsRequest(1000, ["t"]))
        await wire.call(new_topic("t"))
        (result,) = (await wire.call(produce(batch), batch)).partitions
        assert result.error_code == ErrorCode.KAFKA_STORAGE_ERROR
        assert "delete that one first" in result.error_message
    async with Broker(log_dirs=tmp_path, listeners="inproc://") as again, WireClient(again.address) as wire:
        (result,) = (await wire.call(produce(batch), batch)).partitions
        assert (result.error_code, result.base_offset) == (0, 0)


async def test_preallocation_and_durability_follow_the_topic(
    broker: Broker, wire: WireClient, new_topic: Make
) -> None:
    await wire.call(new_topic("t", durability="page-cache"))
    (hosted,) = broker.partitions
    assert not hosted.partition.log.config.synced_only
    assert str(hosted) == "t-0"


async def test_r54_a_full_disk_leaves_room_for_metadata(
    new_topic: Make, batch_of: Make, produce: Make, fetch: Make
) -> None:
    disk = MemoryFileSystem(capacity_bytes=2**20)
    disk.min_free_bytes = 2**18
    async with (
        Broker(log_dirs="/d", listeners="inproc://", filesystem=disk) as broker,
        WireClient(broker.address) as wire,
    ):
        await wire.call(new_topic("t"))
        batch = batch_of(bytes(os.urandom(50_000)))
        codes = []
        while not codes or codes[-1] == 0:
            (result,) = (await wire.call(produce(batch), batch)).partitions
            codes.append(result.error_code)
        assert codes[-1] == ErrorCode.KAFKA_STORAGE_ERROR
        assert all("no space left in /d" in str(each.offline_reason) for each in broker.partitions.stored())
        for number in range(12):
            created = await wire.call(new_topic(f"topic-{number}"))
            assert [topic.error_code for topic in created.topics] == [0]
        (read,) = (await wire.call(fetch(0, max_bytes=1))).partitions
        assert read.error_code == 0
        disk.capacity_bytes = None
        (result,) = (await wire.call(produce(batch), batch)).partitions
        assert (result.error_code, result.base_offset) == (0, codes.count(0))
        assert all(each.offline_reason is None for each in broker.partitions.stored())


async def test_r55_the_status_of_the_cluster_names_a_lack_of_descriptors_that_fails_reads(
    new_topic: Make,
    batch_of: Make,
    produce: Make,
    fetch: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = os.open

    def refuse_segments(path: str, flags: int, *arguments: int) -> int:
        if path.endswith(".log"):
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path, flags, *arguments)

    settings: dict[str, Any] = {"log_dirs": str(tmp_path), "filesystem": RealFileSystem()}
    async with (
        Broker(listeners="inproc://", **settings) as broker,
        WireClient(broker.address) as wire,
        Admin(broker.address) as admin,
    ):
        await wire.call(new_topic("t"))
        batch = batch_of(b"x")
        await wire.call(produce(batch), batch)

        async def problems() -> list[str]:
            return (await look_at_disks(admin._cluster, await look(admin._cluster)))[0]

        assert await problems() == []
        hosted = broker.partitions.find(TopicPartition("t", 0))
        assert hosted is not None
        hosted.partition.log.release()  # as after a minute without a reader
        with monkeypatch.context() as patched:
            patched.setattr("kafkalite.storage.disk.os.open", refuse_segments)
            (read,) = (await wire.call(fetch(0))).partitions
            assert read.error_code == ErrorCode.KAFKA_STORAGE_ERROR
        (problem,) = await problems()
        assert problem.startswith("broker 1 refuses records in 1 log: no file descriptor left for ")
        monkeypatch.setattr("kafkalite.storage.disk._REFUSAL_S", 0)
        (read,) = (await wire.call(fetch(0))).partitions
        assert read.error_code == 0
        assert await problems() == []
