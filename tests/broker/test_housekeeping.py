"""Seven days pass in milliseconds: segments roll, age and are deleted; readers of deleted offsets are
refused.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kafkalite.broker.broker import Broker
from kafkalite.broker.partitions.housekeeping import LOGS_PER_TURN
from kafkalite.errors import ErrorCode, TooManyOpenFilesError
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages import data
from kafkalite.protocol.messages.admin import DeleteTopicsRequest
from kafkalite.storage.log import Log
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing.virtual_clock import VirtualClock
from kafkalite.testing.wire import WireClient
from proof.disk_trees import tree_of

Make = Callable[..., Any]

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


async def _range(wire: WireClient, topic: str) -> tuple[int, int]:
    """[log start offset, high watermark) of partition 0."""
    start, end = [
        (
            await wire.call(data.ListOffsetsRequest(0, [data.ListOffsetsPartition(topic, 0, -1, when)]))
        ).partitions[0]
        for when in (-2, -1)
    ]
    return start.offset, end.offset


async def test_two_topics_with_different_retention_are_both_honoured(
    new_topic: Make, batch_of: Make, produce: Make, fetch: Make
) -> None:
    clock = VirtualClock()
    disk = MemoryFileSystem()
    async with Broker(log_dirs="/d", listeners="inproc://", clock=clock, filesystem=disk) as broker:
        async with WireClient(broker.address) as wire:
            await wire.call(new_topic("week", **{"segment.ms": str(DAY_MS)}))
            await wire.call(
                new_topic("day", **{"segment.ms": str(6 * HOUR_MS), "retention.ms": str(2 * DAY_MS)})
            )
        began = time.perf_counter()
        for day in range(10):
            async with WireClient(broker.address) as wire:  # an old one would have been reaped as idle
                for topic in ("week", "day"):
                    batch = batch_of(b"day %d" % day, timestamp_ms=clock.wall_ms())
                    assert (await wire.call(produce(batch, topic), batch)).partitions[0].error_code == 0
            await clock.advance(DAY_MS)
        assert time.perf_counter() - began < 20

        async with WireClient(broker.address) as wire:
            week_start, week_end = await _range(wire, "week")
            day_start, day_end = await _range(wire, "day")
            assert week_end == day_end == 10
            assert week_start == 3  # records of days 0 to 2 are seven days and older
            assert day_start == 8
            (old,) = (await wire.call(fetch(0, "week"))).partitions
            assert old.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
            assert (old.log_start_offset, old.high_watermark) == (3, 10)
            (kept,) = (await wire.call(fetch(3, "week"))).partitions
            assert (kept.error_code, kept.length_bytes > 0) == (0, True)
        await clock.advance(HOUR_MS)  # file.delete.delay.ms is over as well
        assert not [name for name in tree_of(disk) if name.endswith(".deleted")]


async def test_size_limits_keep_the_youngest_segments(new_topic: Make, batch_of: Make, produce: Make) -> None:
    clock = VirtualClock()
    async with Broker(listeners="inproc://", clock=clock) as broker, WireClient(broker.address) as wire:
        await wire.call(new_topic("t", **{"segment.bytes": "2000", "retention.bytes": "3000"}))
        for _ in range(20):
            batch = batch_of(b"x" * 900, timestamp_ms=clock.wall_ms())
            await wire.call(produce(batch), batch)
        await clock.advance(broker.config.log_retention_check_interval_ms)
        start, end = await _range(wire, "t")
        assert end == 20
        assert 14 <= start <= 18


async def test_recovery_points_follow_the_synced_end(new_topic: Make, batch_of: Make, produce: Make) -> None:
    clock = VirtualClock()
    disk = MemoryFileSystem()
    async with (
        Broker(log_dirs="/d", listeners="inproc://", clock=clock, filesystem=disk) as broker,
        WireClient(broker.address) as wire,
    ):
        await wire.call(new_topic("t", durability="page-cache"))
        batch = batch_of(b"a", b"b", timestamp_ms=clock.wall_ms())
        await wire.call(produce(batch), batch)
        interval_ms = broker.config.log_flush_offset_checkpoint_interval_ms
        await clock.advance(interval_ms)
        assert broker.statistics().synced_logs == 1  # the page cache is written out if no client waits for it
        await clock.advance(interval_ms)
        assert b" 2 " in disk.read_bytes("/d/recovery-points")


async def test_a_pass_yields_and_survives_errors(new_topic: Make, monkeypatch: Any, caplog: Any) -> None:
    clock = VirtualClock()
    disk = MemoryFileSystem()
    async with (
        Broker(log_dirs="/d", listeners="inproc://", clock=clock, filesystem=disk) as broker,
        WireClient(broker.address) as wire,
    ):
        await wire.call(new_topic("t", 2 * LOGS_PER_TURN))
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.create_task(count_turns())
        await asyncio.sleep(0)
        turns = 0
        await broker.housekeeping.retain()
        counting.cancel()
        assert turns >= 1

        def refuse(*_arguments: object) -> None:
            raise OSError("no luck")

        monkeypatch.setattr(broker._store, "begin_removal", refuse)
        monkeypatch.setattr(broker._store, "begin_checkpoint", lambda: refuse)
        await broker.housekeeping.retain()
        await broker.housekeeping.record()
        assert caplog.text.count("no luck") == 2
        monkeypatch.undo()


async def test_the_loop_never_waits_for_a_sync_or_a_removal(
    new_topic: Make, batch_of: Make, produce: Make, monkeypatch: Any, tmp_path: Path
) -> None:
    """Creating and deleting topics, rolling, deleting segments, recovery points: all on a real disk."""
    calls: list[tuple[str, bool]] = []

    def watch(module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if not str(arguments[0]).endswith(".producers"):  # of producers, some KiB
                calls.append((name, threading.current_thread() is threading.main_thread()))
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    clock = VirtualClock()
    async with (
        Broker(log_dirs=str(tmp_path / "d"), listeners="inproc://") as broker,
        WireClient(broker.address) as wire,
    ):
        for module, name in ((os, "fsync"), (os, "fdatasync"), (os, "unlink"), (shutil, "rmtree")):
            watch(module, name)
        monkeypatch.setattr(broker.housekeeping, "_clock", clock)
        await wire.call(new_topic("t", 3, **{"segment.bytes": "2000", "file.delete.delay.ms": "0"}))
        for _ in range(5):
            batch = batch_of(b"x" * 900, timestamp_ms=clock.wall_ms())
            assert (await wire.call(produce(batch), batch)).partitions[0].error_code == 0
        hosted = broker.partitions.find(TopicPartition("t", 0))
        assert hosted is not None
        deleted: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        hosted.delete_before(4, deleted.set_result)
        assert await deleted is None
        await broker.housekeeping.record()
        await broker.housekeeping.retain()
        await wire.call(DeleteTopicsRequest(1000, ["t"]))
        await broker.housekeeping.record()
        await broker.housekeeping.retain()
        await clock.advance(60_000)
        await broker.housekeeping.retain()
        assert {*calls} == {(name, False) for name in ("fsync", "fdatasync", "unlink", "rmtree")}
        assert not [name for name in os.listdir(tmp_path / "d") if name.endswith(".deleted")]


async def test_r55_a_log_that_cannot_be_opened_does_not_stop_the_passes(
    new_topic: Make, monkeypatch: Any
) -> None:
    refused: list[str] = []

    def refuse(log: Log, *_: Any) -> float:
        refused.append(log.directory)
        raise TooManyOpenFilesError("no free file descriptor")

    monkeypatch.setattr(Log, "maintenance_due_ms", refuse)
    clock = VirtualClock()
    async with (
        Broker(log_dirs="/d", listeners="inproc://", clock=clock, filesystem=MemoryFileSystem()) as broker,
        WireClient(broker.address) as wire,
    ):
        await wire.call(new_topic("t"))
        await clock.advance(HOUR_MS)
        assert len(refused) > 1, "it is tried again"
        assert broker.is_running


async def test_a_log_that_fails_does_not_stop_the_pass(
    new_topic: Make, batch_of: Make, produce: Make, caplog: Any
) -> None:
    clock = VirtualClock()
    disk = MemoryFileSystem()
    async with (
        Broker(log_dirs="/d", listeners="inproc://", clock=clock, filesystem=disk) as broker,
        WireClient(broker.address) as wire,
    ):
        await wire.call(new_topic("t", 2, **{"retention.ms": "1000", "segment.ms": "1000"}))
        for partition in (0, 1):
            batch = batch_of(b"old", timestamp_ms=clock.wall_ms())
            await wire.call(produce(batch, partition=partition), batch)
        clock._now_ms += 10_000
        disk.fail_next_write(2)  # the first write is of a producers' snapshot, which is optional
        await broker.housekeeping.retain()
        starts = sorted(hosted.log_start_offset for hosted in broker.partitions)
        assert starts[1] == 1
        assert "housekeeping failed" in caplog.text
        assert broker.is_running
