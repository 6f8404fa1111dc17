"""HostedPartition: a follower's log is one thread's at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.broker.partitions.waiters import Waiters
from kafkalite.errors import DiskFullError, NotLeaderOrFollowerError
from kafkalite.metadata.image import PartitionState
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages.cluster import ReplicaFetchedPartition
from kafkalite.records.builder import build_batch
from kafkalite.records.header import stamp
from kafkalite.replication.follower import FollowerStep
from kafkalite.replication.partition import Partition
from kafkalite.storage.compaction_swap import SwapWork
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.memory_filesystem import MemoryFileSystem


class BusyDisk:
    """A scheduler whose thread has taken a job and is not done with it."""

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
        future.set_result(job())


def record(offset: int) -> memoryview:
    batch = bytearray(build_batch([b"v"], timestamps_ms=1))
    stamp(batch, base_offset=offset, leader_epoch=0)
    return memoryview(batch)


async def test_what_was_written_before_the_disk_was_full_is_synced() -> None:
    disk = BusyDisk()
    filesystem = MemoryFileSystem()
    log = Log.create(filesystem, "/t-0", LogConfig(preallocate_min_bytes=0, preallocate_max_bytes=0))
    partition = Partition(TopicPartition("t", 0), "id", log, broker_id=2)
    hosted = HostedPartition(partition, Waiters(asyncio.get_running_loop()), disk)  # type: ignore[arg-type]
    hosted.follow(PartitionState((1, 2), (1, 2), 1, 0, 0))
    errors: list[Exception | None] = []

    def take(part: bytes) -> None:
        position = partition.fetch_position()
        hosted.on_fetched(
            answer(len(part), 0), memoryview(part), position, 1, lambda _, error: errors.append(error)
        )

    take(bytes(record(0)))
    disk.marked.clear()
    filesystem.capacity_bytes = filesystem.used_bytes() + len(record(1)) + 10
    take(bytes(record(1)) + bytes(record(2)))
    assert isinstance(errors[1], DiskFullError)
    assert (log.log_end_offset, log.offline_reason) == (2, None)
    assert disk.marked == [hosted]


def answer(size_bytes: int, log_start_offset: int) -> ReplicaFetchedPartition:
    return ReplicaFetchedPartition("id", 0, 0, None, 0, 9, log_start_offset, -1, -1, size_bytes)


async def test_an_answer_that_comes_while_the_disk_has_the_log_is_asked_for_again() -> None:
    log = Log.create(MemoryFileSystem(), "/t-0", LogConfig())
    disk = BusyDisk()
    partition = Partition(TopicPartition("t", 0), "id", log, broker_id=2)
    hosted = HostedPartition(partition, Waiters(asyncio.get_running_loop()), disk)  # type: ignore[arg-type]
    hosted.follow(PartitionState((1, 2), (1, 2), 1, 0, 0))
    steps: list[FollowerStep | None] = []

    def take(part: memoryview, log_start_offset: int) -> None:
        news, position = answer(len(part), log_start_offset), partition.fetch_position()
        hosted.on_fetched(news, part, position, 1, lambda step, _: steps.append(step))

    for offset in range(3):
        take(record(offset), 0)
    take(memoryview(b""), 2)  # the leader has deleted records: that syncs
    assert hosted.is_busy
    log.log_start_offset = 2  # the thread is half done
    take(record(3), 2)
    assert log.log_end_offset == 3
    assert steps[-1] is not None and steps[-1].is_ignored
    log.log_start_offset = 0
    disk.finish()
    assert steps[-1] is not None and steps[-1].log_start_moved
    take(record(3), 2)
    assert log.log_end_offset == 4


def compactable(disk: BusyDisk) -> tuple[HostedPartition, Log, SwapWork, Any]:
    """A follower with ten records in closed segments, and the swap that compaction comes to, in its steps."""
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


async def test_a_swap_and_what_else_removes_come_one_after_the_other() -> None:
    disk = BusyDisk()
    hosted, log, swap, _steps = compactable(disk)
    errors: list[Exception | None] = []
    steps: list[FollowerStep | None] = []
    hosted.swap(swap, errors.append)
    assert hosted.is_deleting
    position = hosted.partition.fetch_position()
    hosted.on_fetched(answer(0, 5), memoryview(b""), position, 1, lambda step, _: steps.append(step))
    assert steps[0] is not None and steps[0].is_ignored  # a log start to be moved: asked for again
    hosted.delete_before(8, errors.append)
    assert len(disk.jobs) == 1
    disk.finish()
    assert swap.is_done
    disk.finish()
    assert errors == [None, None]
    assert log.log_start_offset == 8


async def test_a_swap_waits_for_an_errand_and_is_given_up_if_that_truncates() -> None:
    disk = BusyDisk()
    hosted, log, swap, _steps = compactable(disk)
    errors: list[Exception | None] = []
    diverging = ReplicaFetchedPartition("id", 0, 0, None, 0, 9, 0, 0, 2, 0)
    position = hosted.partition.fetch_position()
    hosted.on_fetched(diverging, memoryview(b""), position, 1, lambda *_: None)
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
    hosted.settle()  # the thread had not begun
    assert isinstance(errors[0], NotLeaderOrFollowerError)
    assert (swap.is_decided, log.segment_count > 2) == (False, True)
