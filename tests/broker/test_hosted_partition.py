"""HostedPartition: only one thread at a time uses a follower's log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from kafkalite.broker.partitions.hosted_partition import READ_NEAR_MS, HostedPartition
from kafkalite.broker.partitions.waiters import Waiters
from kafkalite.errors import DiskFullError, NotLeaderOrFollowerError, OffsetNotAvailableError
from kafkalite.metadata.image import PartitionState
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages.cluster import ReplicaFetchedPartition, ReplicaFetchPartition
from kafkalite.records.builder import build_batch
from kafkalite.records.header import check, stamp
from kafkalite.replication.follower import NextFetch
from kafkalite.replication.partition import Partition
from kafkalite.storage.compaction_swap import SwapWork
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import PAGE_CACHE, LogConfig
from kafkalite.storage.memory_filesystem import MemoryFileSystem


class BusyDisk:
    """A scheduler whose thread has taken a job and has not finished it."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Future[Any]]] = []
        self.marked: list[HostedPartition] = []

    def mark(self, hosted: HostedPartition) -> None:
        self.marked.append(hosted)

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.append((job, future))
        return future

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> None:
        callback()

    def finish(self) -> None:
        job, future = self.jobs.pop()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)


class Listener:
    """The fetcher's listener."""

    def __init__(self) -> None:
        self.outcomes: list[NextFetch | Exception] = []

    def on_progress(self, outcome: NextFetch | Exception) -> None:
        self.outcomes.append(outcome)


class Follower:
    """The watcher of a follower's fetches."""

    def on_appended(self, size_bytes: int) -> None: ...

    is_read = False

    def on_moved(self) -> None: ...

    def on_read_near(self, *, is_read: bool = True) -> None:
        self.is_read = is_read

    def on_role_changed(self) -> None: ...


def record(offset: int) -> memoryview:
    batch = bytearray(build_batch([b"v"], timestamps_ms=1))
    stamp(batch, base_offset=offset, leader_epoch=0)
    return memoryview(batch)


async def test_records_written_before_the_disk_was_full_are_synced() -> None:
    disk = BusyDisk()
    filesystem = MemoryFileSystem()
    log = Log.create(filesystem, "/t-0", LogConfig(preallocate_min_bytes=0, preallocate_max_bytes=0))
    partition = Partition(TopicPartition("t", 0), "id", log, broker_id=2)
    hosted = HostedPartition(partition, Waiters(asyncio.get_running_loop()), disk)  # type: ignore[arg-type]
    hosted.follow(PartitionState((1, 2), (1, 2), 1, 0, 0))

    def take(part: bytes) -> None:
        position = partition.fetch_position()
        assert hosted.on_fetched(answer(len(part), 0), memoryview(part), position, 1) is NextFetch.AFTER_SYNC

    take(bytes(record(0)))
    disk.marked.clear()
    filesystem.capacity_bytes = filesystem.used_bytes() + len(record(1)) + 10
    with pytest.raises(DiskFullError):
        take(bytes(record(1)) + bytes(record(2)))
    assert (log.log_end_offset, log.offline_reason) == (2, None)
    assert disk.marked == [hosted]


async def test_r68_a_follower_syncs_at_once_until_it_is_in_sync() -> None:
    disk = BusyDisk()
    log = Log.create(MemoryFileSystem(), "/t-0", LogConfig(durability=PAGE_CACHE))
    partition = Partition(TopicPartition("t", 0), "id", log, broker_id=2)
    hosted = HostedPartition(partition, Waiters(asyncio.get_running_loop()), disk)  # type: ignore[arg-type]
    listener = hosted.listener = Listener()

    def take(offset: int) -> None:
        response = answer(len(record(offset)), 0)
        hosted.on_fetched(response, record(offset), partition.fetch_position(), 1)

    hosted.follow(PartitionState((1, 2), (1,), 1, 0, 0))
    take(0)
    work = hosted.begin_sync()
    assert (disk.marked, work is not None) == ([hosted], True)
    assert work is not None
    work.run()
    hosted.finish_sync(work, None)
    assert listener.outcomes == [NextFetch.NOW]
    assert partition.fetch_position().synced_end_offset == 1
    hosted.follow(PartitionState((1, 2), (1, 2), 1, 0, 1))
    take(1)
    assert disk.marked == [hosted]
    hosted.follow(PartitionState((1, 2), (1,), 1, 0, 2))  # what it has copied may be missing elsewhere
    assert disk.marked == [hosted, hosted]


async def test_batches_from_before_a_change_to_fsync_are_synced() -> None:
    disk = BusyDisk()
    log = Log.create(MemoryFileSystem(), "/t-0", LogConfig(durability=PAGE_CACHE))
    partition = Partition(TopicPartition("t", 0), "id", log, broker_id=1)
    hosted = HostedPartition(partition, Waiters(asyncio.get_running_loop()), disk)  # type: ignore[arg-type]
    hosted.lead(PartitionState((1,), (1,), 1, 0, 0), now_ms=0, known_high_watermark=0)
    batch = bytearray(build_batch([b"v"], timestamps_ms=1))
    partition.append(batch, check(batch), 1)
    disk.marked.clear()
    hosted.reconfigure(LogConfig(durability=PAGE_CACHE), partition.settings)
    assert disk.marked == []
    hosted.reconfigure(LogConfig(), partition.settings)
    assert disk.marked == [hosted]


def answer(size_bytes: int, log_start_offset: int) -> ReplicaFetchedPartition:
    return ReplicaFetchedPartition("id", 0, 0, None, 0, 9, log_start_offset, -1, -1, size_bytes)


async def test_a_response_that_comes_while_the_disk_has_the_log_must_be_repeated() -> None:
    log = Log.create(MemoryFileSystem(), "/t-0", LogConfig())
    disk = BusyDisk()
    partition = Partition(TopicPartition("t", 0), "id", log, broker_id=2)
    hosted = HostedPartition(partition, Waiters(asyncio.get_running_loop()), disk)  # type: ignore[arg-type]
    hosted.follow(PartitionState((1, 2), (1, 2), 1, 0, 0))
    listener = hosted.listener = Listener()

    def take(part: memoryview, log_start_offset: int) -> NextFetch | None:
        response, position = answer(len(part), log_start_offset), partition.fetch_position()
        return hosted.on_fetched(response, part, position, 1)

    for offset in range(3):
        take(record(offset), 0)
    assert take(memoryview(b""), 2) is None  # the leader has deleted records: that syncs
    assert hosted.is_busy
    assert hosted.fetch_position() is None
    log.log_start_offset = 2  # the thread is half done
    assert take(record(3), 2) is NextFetch.REPEATED
    assert log.log_end_offset == 3
    log.log_start_offset = 0
    assert listener.outcomes == []
    disk.finish()
    assert listener.outcomes == [NextFetch.NOW]
    take(record(3), 2)
    assert log.log_end_offset == 4


async def test_records_from_before_the_role_wake_a_fetch_when_they_are_committed() -> None:
    """They were appended before this object or this role counted: before a restart or a change of leader."""
    log = Log.create(MemoryFileSystem(), "/t-0", LogConfig())
    for offset in range(3):
        log.append_as_follower(record(offset), now_ms=1)
    partition = Partition(TopicPartition("t", 0), "id", log, broker_id=2)
    waiters, woken = Waiters(asyncio.get_running_loop()), []
    hosted = HostedPartition(partition, waiters, BusyDisk())  # type: ignore[arg-type]
    hosted.follow(PartitionState((1, 2), (1, 2), 1, 0, 0))
    waiters.appended([hosted.key], 50, lambda: woken.append(partition.high_watermark))
    hosted.on_fetched(answer(0, 0), memoryview(b""), partition.fetch_position(), 1)
    assert woken == [3]


async def test_disk_work_waits_for_a_sync_and_reports_its_error() -> None:
    log = Log.create(MemoryFileSystem(), "/t-0", LogConfig())
    disk = BusyDisk()
    partition = Partition(TopicPartition("t", 0), "id", log, broker_id=2)
    hosted = HostedPartition(partition, Waiters(asyncio.get_running_loop()), disk)  # type: ignore[arg-type]
    hosted.follow(PartitionState((1, 2), (1, 2), 1, 0, 0))
    listener = hosted.listener = Listener()
    hosted.on_fetched(answer(len(record(0)), 0), record(0), partition.fetch_position(), 1)
    work = hosted.begin_sync()
    assert work is not None
    refused = answer(0, 0)._replace(error_code=6)
    assert hosted.on_fetched(refused, memoryview(b""), partition.fetch_position(), 1) is None
    assert (hosted.is_busy, disk.jobs, hosted.begin_sync()) == (True, [], None)
    work.run()
    hosted.finish_sync(work, None)
    assert listener.outcomes == [NextFetch.NOW]
    disk.finish()
    assert isinstance(listener.outcomes[1], NotLeaderOrFollowerError)
    assert not hosted.is_busy


async def test_a_sync_that_fails_because_its_log_was_deleted_is_not_repeated() -> None:
    """The broker stopped: a later round tried to open the files of the log, which were gone."""
    disk, log = BusyDisk(), Log.create(MemoryFileSystem(), "/t-0", LogConfig())
    partition = Partition(TopicPartition("t", 0), "id", log, broker_id=1)
    hosted = HostedPartition(partition, Waiters(asyncio.get_running_loop()), disk)  # type: ignore[arg-type]
    log.append_as_follower(record(0), now_ms=1)
    work = hosted.begin_sync()
    assert work is not None
    log.close(clean=False)
    hosted.finish_sync(work, FileNotFoundError(2, "No such file or directory"))  # BusyDisk postpones nothing
    log.synced_end_offset = 0
    assert log.has_unsynced
    assert hosted.begin_sync() is None


async def test_a_log_whose_files_cannot_be_opened_for_a_sync_is_offline_and_no_other_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk, log = BusyDisk(), Log.create(MemoryFileSystem(), "/t-0", LogConfig())
    partition = Partition(TopicPartition("t", 0), "id", log, broker_id=1)
    hosted = HostedPartition(partition, Waiters(asyncio.get_running_loop()), disk)  # type: ignore[arg-type]
    log.append_as_follower(record(0), now_ms=1)

    def lost(*_arguments: object, **_keywords: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(Log, "_sync_work", lost)
    assert hosted.begin_sync() is None
    assert "No such file or directory" in (log.offline_reason or "")


def compactable(disk: BusyDisk) -> tuple[HostedPartition, Log, SwapWork, Any]:
    """A follower with ten records in closed segments, and the swap of a compaction pass, with its steps."""
    log = Log.create(MemoryFileSystem(), "/t-0", LogConfig(is_compacted=True, segment_bytes=1024))
    partition = Partition(TopicPartition("t", 0), "id", log, broker_id=2)
    hosted = HostedPartition(partition, Waiters(asyncio.get_running_loop()), disk)  # type: ignore[arg-type]
    hosted.follow(PartitionState((1, 2), (1, 2), 1, 0, 0))
    for number in range(10):
        batch = build_batch([b"%d" % number + bytes(200)], [b"key"], timestamps_ms=1)
        log.append(batch, now_ms=1, leader_epoch=0)
    log.roll()
    sync = log.begin_sync()
    assert sync is not None
    sync.run()
    log.finish_sync(sync, None)
    work = log.begin_compaction(1, 10, 100)
    assert work is not None
    steps = work.steps()
    result: bytes | None = None
    while not isinstance(step := steps.send(result), SwapWork):
        result = step()
    return hosted, log, step, steps


async def test_r41_a_replica_that_is_not_in_sync_fetches_nothing_while_segments_are_replaced() -> None:
    disk = BusyDisk()
    hosted, log, swap, _steps = compactable(disk)
    hosted.lead(PartitionState((2, 3, 4), (2, 3), 2, 1, 1), now_ms=1, known_high_watermark=0)

    def fetch(node_id: int) -> None:
        asked = ReplicaFetchPartition("id", 0, 1, log.log_end_offset, -1, 0, 0)
        hosted.on_replica_fetch(node_id, 1, asked, Follower(), 1)

    fetch(4)
    hosted.swap(swap, lambda error: None)
    fetch(3)
    with pytest.raises(OffsetNotAvailableError):
        fetch(4)
    disk.finish()
    assert swap.is_done
    fetch(4)


async def test_r66_a_follower_that_consumers_read_stays_known_in_its_next_session() -> None:
    log = Log.create(MemoryFileSystem(), "/t-0", LogConfig(durability=PAGE_CACHE))
    partition = Partition(TopicPartition("t", 0), "id", log, broker_id=1)
    hosted = HostedPartition(partition, Waiters(asyncio.get_running_loop()), BusyDisk())  # type: ignore[arg-type]

    def fetch(watcher: Follower, now_ms: int) -> Follower:
        leader_epoch = hosted.leader_epoch
        asked = ReplicaFetchPartition("id", 0, leader_epoch, 0, -1, 0, 0)
        hosted.on_replica_fetch(2, 1, asked, watcher, now_ms)
        return watcher

    hosted.lead(PartitionState((1, 2), (1, 2), 1, 0, 0), now_ms=0, known_high_watermark=0)
    first = fetch(Follower(), 1)
    assert not first.is_read
    assert hosted.near_replica(0, lambda _: True, 5) == 2
    assert first.is_read
    second = fetch(Follower(), 6)
    assert second.is_read
    fetch(second, 5 + READ_NEAR_MS)
    assert not second.is_read
    hosted.near_replica(0, lambda _: True, 5)
    hosted.lead(PartitionState((1, 2), (1, 2), 1, 1, 1), now_ms=7, known_high_watermark=0)
    assert not fetch(Follower(), 8).is_read  # consumers ask the leader again in each epoch


async def test_a_swap_and_other_deletions_run_one_after_the_other() -> None:
    disk = BusyDisk()
    hosted, log, swap, _steps = compactable(disk)
    errors: list[Exception | None] = []
    hosted.swap(swap, errors.append)
    assert hosted.idle_log() is None
    position = hosted.partition.fetch_position()
    again = hosted.on_fetched(answer(0, 5), memoryview(b""), position, 1)
    assert again is NextFetch.REPEATED  # another log start: fetched again later
    hosted.delete_before(8, errors.append)
    assert len(disk.jobs) == 1
    disk.finish()
    assert swap.is_done
    disk.finish()
    assert errors == [None, None]
    assert log.log_start_offset == 8


async def test_a_swap_waits_for_exclusive_work_and_is_given_up_if_that_truncates() -> None:
    disk = BusyDisk()
    hosted, log, swap, _steps = compactable(disk)
    errors: list[Exception | None] = []
    diverging = ReplicaFetchedPartition("id", 0, 0, None, 0, 9, 0, 0, 2, 0)
    position = hosted.partition.fetch_position()
    hosted.on_fetched(diverging, memoryview(b""), position, 1)
    assert hosted.is_busy
    hosted.swap(swap, errors.append)
    assert len(disk.jobs) == 1
    disk.finish()
    assert (errors, swap.is_done, log.log_end_offset) == ([None], False, 2)


async def test_a_change_of_role_waits_for_a_swap_under_way() -> None:
    disk = BusyDisk()
    hosted, log, swap, _steps = compactable(disk)
    errors: list[Exception | None] = []
    hosted.swap(swap, errors.append)
    hosted.complete_work()  # the thread had not begun
    assert isinstance(errors[0], NotLeaderOrFollowerError)
    assert (swap.is_decided, log.segment_count > 2) == (False, True)
