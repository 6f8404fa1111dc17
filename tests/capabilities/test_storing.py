"""Capabilities F: segments, retention and reading, each shown end to end against an embedded broker."""

from __future__ import annotations

import asyncio
import mmap
import os
from pathlib import Path

import pytest

from kafkalite import Admin, Broker, Consumer, Producer, TopicPartition
from kafkalite.errors import OffsetOutOfRangeError
from kafkalite.records.builder import build_batch
from kafkalite.storage.disk import RealFileSystem
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing import VirtualClock
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
        return sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*") if path.is_file())

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
        async with asyncio.timeout(10):  # files go in a thread, whose time is not the virtual one
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
