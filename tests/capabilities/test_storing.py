"""Capabilities F: segments, retention and reading, each shown end to end against an embedded broker."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kafkalite import Admin, Broker, Consumer, Producer, TopicPartition
from kafkalite.errors import KafkaliteError, OffsetOutOfRangeError
from kafkalite.protocol.connection import ClientConnection
from kafkalite.protocol.messages import data
from kafkalite.records.builder import build_batch
from kafkalite.storage.disk import RealFile, RealFileSystem
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.storage.segment import CRC_BYTES
from kafkalite.testing import Cluster, VirtualClock
from proof.recording_filesystem import RecordingFileSystem

DAY_MS = 24 * 60 * 60 * 1000
T0 = TopicPartition("t", 0)


async def _start_offset(admin: Admin, partition: TopicPartition = T0) -> int:
    return (await admin.list_offsets([partition], "earliest"))[partition].offset


async def test_a_log_is_many_segments_and_only_closed_ones_go() -> None:
    """F2: a segment rolls at its size and at its age; deletion is by whole segment, never the last."""
    clock = VirtualClock()
    async with Broker(clock=clock) as broker, Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic(
            "t", configs={"segment.bytes": "4096", "segment.ms": "60000", "retention.ms": str(DAY_MS)}
        )
        async with Producer(broker.bootstrap_servers) as producer:
            for _ in range(10):
                await producer.send("t", os.urandom(1000), timestamp_ms=clock.wall_ms())
            (before,) = await admin.describe_log_dirs(["t"])
            assert before.segment_count >= 3
            await clock.advance(70_000)
            await producer.send("t", b"young", timestamp_ms=clock.wall_ms())
            (rolled,) = await admin.describe_log_dirs(["t"])
            assert rolled.segment_count == before.segment_count + 1
            await clock.advance(2 * DAY_MS)
            (after,) = await admin.describe_log_dirs(["t"])
            assert after.segment_count == 1
            assert after.log_end_offset == 11


async def test_seven_days_pass_and_old_segments_are_gone() -> None:
    """F3: the default retention is 604800000 ms; a reader below the log start gets the named error."""
    clock = VirtualClock()
    async with Broker(clock=clock) as broker, Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("t", configs={"segment.bytes": "4096"})
        assert (await admin.describe_configs("topic", "t"))["retention.ms"].value == "604800000"
        async with Producer(broker.bootstrap_servers) as producer:
            for _ in range(8):
                await producer.send("t", os.urandom(1000), timestamp_ms=clock.wall_ms())
            await clock.advance(4 * DAY_MS)
            assert await _start_offset(admin) == 0
            for _ in range(8):
                await producer.send("t", os.urandom(1000), timestamp_ms=clock.wall_ms())
            await clock.advance(3 * DAY_MS + 600_000)
        start = await _start_offset(admin)
        assert 4 <= start <= 8
        async with Consumer(
            bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest"
        ) as consumer:
            consumer.assign([T0])
            await consumer.seek(T0, 0)
            (record, *_) = await consumer.get_many(1, timeout_ms=5000)
            assert record.offset == start
        async with Consumer(bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="none") as consumer:
            consumer.assign([T0])
            await consumer.seek(T0, 0)
            with pytest.raises(Exception) as failure:
                await consumer.get_many(1, timeout_ms=5000)
            assert isinstance(failure.value.__cause__, OffsetOutOfRangeError) or isinstance(
                failure.value, OffsetOutOfRangeError
            )


async def test_size_retention_keeps_at_most_the_limit_and_a_segment() -> None:
    """F4"""
    clock = VirtualClock()
    async with Broker(clock=clock) as broker, Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("t", configs={"segment.bytes": "8192", "retention.bytes": "20000"})
        async with Producer(broker.bootstrap_servers) as producer:
            for _ in range(60):
                await producer.send("t", os.urandom(1000), timestamp_ms=clock.wall_ms())
        await clock.advance(600_000)
        (log,) = await admin.describe_log_dirs(["t"])
        assert 20_000 - 8192 <= log.size_bytes <= 20_000 + 8192
        assert log.log_end_offset == 60


async def test_size_retention_of_a_topic_is_shared_by_its_partitions() -> None:
    """F11: a share for each partition, less when there are more partitions; retention.bytes may be less."""
    clock = VirtualClock()
    async with Broker(clock=clock) as broker, Admin(broker.bootstrap_servers) as admin:
        configs = {"segment.bytes": "4096", "retention.topic.bytes": "80000"}
        await admin.create_topic("t", partitions=4, configs=configs)

        async def sizes() -> list[int]:
            await clock.advance(600_000)
            return [log.size_bytes for log in await admin.describe_log_dirs(["t"])]

        async with Producer(broker.bootstrap_servers) as producer:
            for number in range(240):
                await producer.send("t", os.urandom(1000), partition=number % 4, timestamp_ms=clock.wall_ms())
        for size in await sizes():
            assert 20_000 - 4096 <= size <= 20_000 + 4096
        await admin.create_partitions("t", 8)
        assert max(await sizes()) <= 10_000 + 4096
        await admin.alter_configs("topic", "t", {"retention.bytes": "5000"})
        assert max(await sizes()) <= 5_000 + 4096


async def test_two_topics_with_two_retentions() -> None:
    """F5"""
    clock = VirtualClock()
    async with Broker(clock=clock) as broker, Admin(broker.bootstrap_servers) as admin:
        for days in (1, 3):
            await admin.create_topic(f"days-{days}", configs={"retention.ms": str(days * DAY_MS)})
        async with Producer(broker.bootstrap_servers) as producer:
            for topic in ("days-1", "days-3"):
                await producer.send(topic, b"x", timestamp_ms=clock.wall_ms())
        await clock.advance(2 * DAY_MS)
        assert await _start_offset(admin, TopicPartition("days-1", 0)) == 1
        assert await _start_offset(admin, TopicPartition("days-3", 0)) == 0


async def test_purging_frees_disk_space_by_itself(tmp_path: Path) -> None:
    """F6"""

    def used() -> int:
        blocks = 0
        for path in tmp_path.rglob("*"):
            with suppress(FileNotFoundError):  # purged meanwhile
                blocks += path.stat().st_blocks if path.is_file() else 0
        return blocks * 512

    clock = VirtualClock()
    async with (
        Broker(clock=clock, log_dirs=str(tmp_path)) as broker,
        Admin(broker.bootstrap_servers) as admin,
    ):
        await admin.create_topic("t", configs={"segment.bytes": "1048576", "retention.ms": str(DAY_MS)})
        async with Producer(broker.bootstrap_servers) as producer:
            for _ in range(16):
                await producer.send("t", os.urandom(500_000), timestamp_ms=clock.wall_ms())
        before = used()
        assert before > 7_000_000
        await clock.advance(2 * DAY_MS)
        async with asyncio.timeout(30):  # files go in a thread, whose time is not the virtual one
            while used() >= before / 4:
                await clock.advance(60_000)
                await asyncio.sleep(0.001)


async def test_delete_records_moves_the_log_start(tmp_path: Path) -> None:
    async with Broker(log_dirs=str(tmp_path)) as broker, Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("t")
        async with Producer(broker.bootstrap_servers) as producer:
            await producer.send_many("t", [b"x"] * 100)
        assert (await admin.delete_records({T0: 40}))[T0] == 40
    async with Broker(log_dirs=str(tmp_path)) as broker, Admin(broker.bootstrap_servers) as admin:
        assert await _start_offset(admin) == 40


def test_a_fetch_hands_out_the_segment_map_itself(tmp_path: Path) -> None:
    """F8: what the log gives to the socket are views over the mapped file, not copies of it."""
    fs = RealFileSystem()
    log = Log.create(fs, str(tmp_path / "log"), LogConfig())
    for i in range(20):
        log.append(build_batch([os.urandom(5000)], timestamps_ms=i), now_ms=i, leader_epoch=0)
    part = log.read(0, max_bytes=1 << 20, up_to=log.log_end_offset)
    assert part.size_bytes > 100_000
    for view in part.buffers:
        assert isinstance(view, memoryview)
        assert view.readonly
        owner = view.obj
        assert isinstance(owner, mmap.mmap) or isinstance(getattr(owner, "obj", None), mmap.mmap)
    log.close(clean=True)


def test_an_append_is_one_write_behind_the_last() -> None:
    """F7: appends are contiguous, and reading what was written opens and reads no file again."""
    fs = RecordingFileSystem(MemoryFileSystem())
    log = Log.create(fs, "/log", LogConfig())
    batches = [build_batch([os.urandom(500)], timestamps_ms=i) for i in range(50)]
    for i, batch in enumerate(batches):
        log.append(batch, now_ms=i, leader_epoch=0)
    writes = [op for op in fs.operations if op.kind == "write" and op.path.endswith(".log")]
    assert len(writes) == len(batches)
    position = 0
    for write, batch in zip(writes, batches, strict=True):
        assert (write.position, len(write.data)) == (position, len(batch))
        position += len(batch)


async def test_an_acknowledged_record_survives_a_power_failure() -> None:
    """F1: an acknowledged record is on the disk; a power failure takes what the system had only in memory."""
    async with Cluster(brokers=1) as cluster:
        await cluster.create_topic("t")
        values = [b"%d" % number for number in range(100)]
        async with cluster.producer() as producer:
            for value in values:
                await producer.send("t", value)
        await cluster.crash()
        await cluster.start()
        assert [record.value for record in await cluster.records("t")] == values


@pytest.mark.parametrize("durability", ["page-cache", "fsync"])
async def test_writing_behind_waits_for_no_disk(
    durability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F7: with ``durability=page-cache`` a record is acknowledged while the disk is stuck; the operating
    system writes it later. With ``fsync`` it is acknowledged when the disk has it."""
    is_free = threading.Event()
    is_free.set()
    sync = RealFile.sync

    def sync_when_free(file: RealFile) -> None:
        assert is_free.wait(30)
        sync(file)

    monkeypatch.setattr(RealFile, "sync", sync_when_free)
    async with Broker(log_dirs=str(tmp_path)) as broker, Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("t", configs={"durability": durability})
        async with Producer(broker.bootstrap_servers, delivery_timeout_ms=10_000) as producer:
            await producer.send("t", b"0")
            is_free.clear()
            try:
                sending = asyncio.ensure_future(producer.send("t", b"1"))
                done, _ = await asyncio.wait([sending], timeout=10 if durability == "page-cache" else 0.5)
                assert bool(done) == (durability == "page-cache")
            finally:
                is_free.set()
            assert (await sending).offset == 1


async def test_hot_records_are_read_again_without_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F7: what was read once is read again from the map: no file is opened, mapped or read."""
    calls: list[str] = []

    def count(name: str, is_counted: Callable[..., bool]) -> None:
        call = getattr(RealFile, name)

        def counted(file: RealFile, *arguments: Any) -> Any:
            result = call(file, *arguments)
            if file._path.endswith(".log") and is_counted(*arguments):
                calls.append(name)
            return result

        monkeypatch.setattr(RealFile, name, counted)

    async with Broker(log_dirs=str(tmp_path)) as broker, Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("t", configs={"segment.bytes": "65536"})
        values = [os.urandom(1000) for _ in range(300)]
        async with Producer(broker.bootstrap_servers, max_request_size=8192) as producer:
            await producer.send_many("t", values)
        async with Consumer(bootstrap_servers=broker.bootstrap_servers) as consumer:
            consumer.assign([T0])

            async def read_all() -> list[bytes | None]:
                await consumer.seek(T0, 0)
                found: list[bytes | None] = []
                while len(found) < len(values):
                    found += [record.value for record in await consumer.get_many(timeout_ms=5000)]
                return found

            assert await read_all() == values
            count("__init__", lambda *_: True)
            count("map", lambda *_: True)
            count("read_at", lambda _, length: length > CRC_BYTES)  # a checkpoint reads two checksums
            for _ in range(3):
                assert await read_all() == values
            assert calls == []


def test_a_fetch_is_sent_from_the_map_without_a_copy(tmp_path: Path) -> None:
    """F8: while a broker sends a response of 24 MB through a socket, it never allocates a twentieth of it."""
    size_bytes = 24 * 1024 * 1024
    peaks: list[int] = []

    def fetch_and_drop(address: str, request: data.FetchRequest) -> int:
        """Return how many bytes the response has; they are received in pieces of 64 KiB."""
        host, _, port = address.rpartition(":")
        piece, received = bytearray(65536), 0
        wire = ClientConnection("raw")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"".join(map(bytes, wire.handshake()[1])))
            while not wire.buffer_updated(connection.recv_into(wire.get_buffer(-1))):
                pass
            connection.sendall(b"".join(map(bytes, wire.send(request)[1])))
            while received < size_bytes:
                count = connection.recv_into(piece)
                assert count
                received += count
        return received

    async def fetch() -> None:
        async with Broker(log_dirs=str(tmp_path), listeners="127.0.0.1:0") as broker:
            async with Admin(broker.bootstrap_servers) as admin:
                await admin.create_topic("t")
            async with Producer(broker.bootstrap_servers) as producer:
                value = os.urandom(64 * 1024)
                await producer.send_many("t", [value] * (size_bytes // len(value)))
            asked = data.FetchPartition("t", 0, -1, 0, 2 * size_bytes)
            request = data.FetchRequest(0, 1, 2 * size_bytes, 0, [asked])
            for _ in range(2):  # the first one maps the segment and checks its batches
                tracemalloc.start()
                assert await asyncio.to_thread(fetch_and_drop, broker.address, request) >= size_bytes
                peaks.append(tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(fetch())
    assert max(peaks) < size_bytes / 20


async def test_a_topic_may_exceed_one_server_and_a_partition_may_not() -> None:
    """F10: three disks of 8 MB hold 12 MB of one topic; a partition is refused where its disk is full."""
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", partitions=12, replication_factor=1)
        for node in cluster.nodes.values():
            assert isinstance(node.filesystem, MemoryFileSystem)
            node.filesystem.capacity_bytes = 8_000_000
        values = [os.urandom(1000)] * 1000
        async with cluster.producer(delivery_timeout_ms=2_000) as producer:
            for partition in range(12):
                await producer.send_many("t", values, partition=partition)
            async with Admin(cluster.bootstrap_servers) as admin:
                assert sum(log.size_bytes for log in await admin.describe_log_dirs(["t"])) > 12_000_000
            with pytest.raises(KafkaliteError, match=r"full|space"):
                for _ in range(8):
                    await producer.send_many("t", values, partition=0)
