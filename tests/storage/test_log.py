"""One log in memory, from appending to deleting. Tests log.py and segment_list.py."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kafkalite.errors import (
    CorruptBatchError,
    DiskFullError,
    LogOfflineError,
    MessageTooLargeError,
    OffsetOutOfRangeError,
    TooManyOpenFilesError,
)
from kafkalite.limits import MAX_SEGMENT_BYTES
from kafkalite.model import NO_TIMESTAMP, TimestampType
from kafkalite.records.header import check, parse_header
from kafkalite.storage.checkpoints import CleanEnd
from kafkalite.storage.filesystem import unlink_existing
from kafkalite.storage.inspect import verify_log
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.storage.offset_index import OffsetIndex
from proof.recording_filesystem import RecordingFileSystem

DIRECTORY = "/data/log"
Batches = list[tuple[int, bytes]]
MakeBatch = Callable[..., bytearray]
ReadAll = Callable[..., Batches]
Sync = Callable[[Log], None]


@pytest.fixture
def fs() -> MemoryFileSystem:
    fs = MemoryFileSystem(crashable=True)
    fs.make_dirs("/data")
    fs.sync_dir("/")
    return fs


@pytest.fixture
def config() -> LogConfig:
    return LogConfig(segment_bytes=4096, index_interval_bytes=512, preallocate_min_bytes=1024)


@pytest.fixture
def log(fs: MemoryFileSystem, config: LogConfig) -> Log:
    return Log.create(fs, DIRECTORY, config)


@pytest.fixture
def fill(make_batch: MakeBatch) -> Callable[..., Batches]:
    """fill(log, count, records=, **make_batch's) -> the appended batches, as (base offset, bytes)"""

    def fill(
        log: Log, count: int, *, records: int = 1, epoch: int = 1, now_ms: int = 1, **how: Any
    ) -> Batches:
        appended = []
        for number in range(count):
            batch = make_batch(records, **({"seed": log.log_end_offset + number} | how))
            base_offset = log.append(batch, now_ms=now_ms, leader_epoch=epoch).base_offset
            appended.append((base_offset, bytes(batch)))
        return appended

    return fill


def apply_retention(
    log: Log, now_ms: int, wall_ms: int | None = None, *, up_to: int | None = None
) -> list[str]:
    """Do what the retention pass of a broker does. Return the names of the segments that it retired."""
    if up_to is None:
        up_to = log.synced_end_offset if log.config.synced_only else log.log_end_offset
    offset = log.retention_offset(now_ms if wall_ms is None else wall_ms, up_to=up_to)
    bases = list(log._segments.bases)
    log.delete_before(offset)
    unlink_existing(log._fs, log.take_retired(now_ms))
    return [f"{base:020d}.log" for base in bases if base not in log._segments.bases]


# --- appending -----------------------------------------------------------------------------------------


def test_the_leader_stamps_offset_and_epoch_and_nothing_else(
    log: Log, make_batch: MakeBatch, read_all: ReadAll
) -> None:
    batch = make_batch(3, base_offset=77, leader_epoch=-1)
    before = bytes(batch)
    first = log.append(batch, now_ms=5, leader_epoch=7)
    assert first == (0, 2, NO_TIMESTAMP, 3, False)
    second = log.append(memoryview(make_batch(2)), now_ms=5, leader_epoch=7, header=check(make_batch(2)))
    assert (second.base_offset, second.last_offset, second.log_end_offset) == (3, 4, 5)
    ((_, stored), _) = read_all(log)
    header = check(stored)
    assert (header.base_offset, header.leader_epoch) == (0, 7)
    assert stored[16:] == before[16:]


def test_log_append_time_is_stamped_and_checksummed(
    fs: MemoryFileSystem, config: LogConfig, make_batch: MakeBatch, read_all: ReadAll
) -> None:
    log = Log.create(fs, DIRECTORY, replace(config, timestamp_type=TimestampType.LOG_APPEND_TIME))
    appended = log.append(make_batch(2, timestamp_ms=5), now_ms=99, leader_epoch=0)
    assert appended.log_append_time_ms == 99
    header = check(read_all(log)[0][1])
    assert header.max_timestamp_ms == 99
    assert header.timestamp_type is TimestampType.LOG_APPEND_TIME
    assert log.max_timestamp() == (99, 0)


def test_a_damaged_batch_is_refused(log: Log, make_batch: MakeBatch) -> None:
    batch = make_batch()
    batch[-1] ^= 1
    with pytest.raises(CorruptBatchError):
        log.append(batch, now_ms=0, leader_epoch=0)
    assert log.log_end_offset == 0


def test_a_batch_over_max_message_bytes_is_refused(log: Log, make_batch: MakeBatch) -> None:
    log.reconfigure(replace(log.config, max_message_bytes=100))
    with pytest.raises(MessageTooLargeError, match="161 bytes"):
        log.append(make_batch(), now_ms=0, leader_epoch=0)


def test_a_batch_larger_than_a_segment_gets_one_of_its_own(log: Log, fill: Any, read_all: ReadAll) -> None:
    written = fill(log, 1) + fill(log, 1, body_bytes=9000) + fill(log, 2)
    assert log.segment_count == 3
    assert read_all(log) == written


# --- following (R1) ------------------------------------------------------------------------------------


def test_r1_a_follower_keeps_the_leaders_bytes(
    log: Log, fs: MemoryFileSystem, config: LogConfig, fill: Any, read_all: ReadAll
) -> None:
    written = fill(log, 20, records=2, epoch=1) + fill(log, 20, epoch=4)
    follower = Log.create(fs, "/data/follower", config)
    data = b"".join(batch for _, batch in written)
    cut = sum(len(batch) for _, batch in written[:17])
    follower.append_as_follower(data[:cut], now_ms=0)
    follower.append_as_follower(memoryview(data)[cut:], now_ms=0)
    follower.append_as_follower(b"", now_ms=0)
    assert read_all(follower) == written
    assert follower.leader_epochs == log.leader_epochs == [(1, 0), (4, 40)]
    assert follower.segment_count > 1


@pytest.mark.parametrize("problem", ["gap", "epoch", "crc", "cut"])
def test_r1_a_follower_refuses_a_batch_that_is_not_next_and_writes_nothing(
    problem: str, log: Log, fill: Any, make_batch: MakeBatch
) -> None:
    fill(log, 2, epoch=5)
    good = make_batch(base_offset=2, leader_epoch=5)
    bad = make_batch(base_offset=4 if problem == "gap" else 3, leader_epoch=4 if problem == "epoch" else 5)
    if problem == "crc":
        bad[-1] ^= 1
    data = bytes(good + bad)[: -1 if problem == "cut" else None]
    with pytest.raises(CorruptBatchError):
        log.append_as_follower(data, now_ms=0)
    assert log.log_end_offset == 2


# --- reading -------------------------------------------------------------------------------------------


def test_a_read_returns_whole_batches_from_the_one_that_holds_the_offset(
    log: Log, fill: Any, split_batches: Any
) -> None:
    written = fill(log, 10, records=3)
    piece = log.read(7, max_bytes=400, up_to=30)
    assert split_batches(b"".join(piece.buffers)) == written[2:4]
    assert piece.next_offset == 12
    assert piece.size_bytes == 322
    assert all(view.readonly for view in piece.buffers)


@pytest.mark.parametrize("max_bytes", [0, 1, 160, 161, 162, 321, 322, 323, 100_000])
def test_only_the_first_batch_may_exceed_the_size(max_bytes: int, log: Log, fill: Any) -> None:
    fill(log, 5)
    for offset in range(5):
        piece = log.read(offset, max_bytes=max_bytes, up_to=5)
        count = max(1, min(max_bytes // 161, 5 - offset))
        assert (piece.size_bytes, piece.next_offset) == (161 * count, offset + count)
        strict = log.read(offset, max_bytes=max_bytes, up_to=5, at_least_one=False)
        assert strict.size_bytes == 161 * min(max_bytes // 161, 5 - offset)


def test_nothing_at_or_above_up_to_is_returned(log: Log, fill: Any) -> None:
    fill(log, 10, records=2)
    assert log.read(0, max_bytes=10_000, up_to=6).next_offset == 6
    assert log.read(0, max_bytes=10_000, up_to=7).next_offset == 6, "a batch that reaches above is left out"
    assert log.read(0, max_bytes=10_000, up_to=6).next_offset == 6
    assert log.read(6, max_bytes=10_000, up_to=7) == ([], 0, 6)
    assert log.read(8, max_bytes=10_000, up_to=3) == ([], 0, 8)
    assert log.read(0, max_bytes=10_000, up_to=999).next_offset == 20


def test_the_log_end_is_in_range_and_offsets_above_are_not(log: Log, fill: Any) -> None:
    assert log.read(0, max_bytes=1, up_to=9) == ([], 0, 0)
    fill(log, 3)
    assert log.read(3, max_bytes=1, up_to=9) == ([], 0, 3)
    for offset in (-1, 4):
        with pytest.raises(OffsetOutOfRangeError, match=r"outside \[0, 3\]"):
            log.read(offset, max_bytes=1, up_to=9)


def test_one_read_continues_into_the_next_segments(log: Log, fill: Any, split_batches: Any) -> None:
    written = fill(log, 100)
    assert log.segment_count == 4
    piece = log.read(10, max_bytes=9000, up_to=100)
    assert len(piece.buffers) == 3
    assert split_batches(b"".join(piece.buffers)) == written[10 : piece.next_offset]
    assert 9000 - 161 < piece.size_bytes <= 9000


def test_views_stay_valid_after_the_log_is_closed(log: Log, fill: Any) -> None:
    written = fill(log, 60)
    piece = log.read(0, max_bytes=2000, up_to=60)
    log.roll()
    log.delete_before(60)
    unlink_existing(log._fs, log.take_retired(10**15))
    log.close(clean=True)
    assert b"".join(piece.buffers) == b"".join(batch for _, batch in written)[: piece.size_bytes]


@pytest.mark.parametrize("body_bytes", [30, 300, 700])
def test_any_offset_is_found_by_walking_less_than_one_index_interval(
    body_bytes: int, log: Log, fill: Any, walked: Callable[[], int]
) -> None:
    fill(log, 300, records=3, body_bytes=body_bytes)
    for offset in [*range(0, 900, 7), *range(899, 0, -11)]:
        before = walked()
        piece = log.read(offset, max_bytes=1, up_to=900)
        assert parse_header(piece.buffers[0]).base_offset == offset - offset % 3
        assert walked() - before < 512 + piece.size_bytes  # the returned batch is passed over too


def test_reading_in_order_continues_where_the_last_read_ended(
    log: Log, fill: Any, read_all: ReadAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = fill(log, 200)
    searched: list[int] = []
    search = OffsetIndex.entry_before_offset

    def entry_before_offset(index: OffsetIndex, relative_offset: int) -> tuple[int, int]:
        searched.append(relative_offset)
        return search(index, relative_offset)

    monkeypatch.setattr(OffsetIndex, "entry_before_offset", entry_before_offset)
    assert read_all(log, max_bytes=700) == written
    assert set(searched) == {0}, "only for the beginning of a segment"


# --- time ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reopened", [False, True])
def test_any_timestamp_is_found_by_walking_less_than_one_interval(
    reopened: bool, log: Log, fs: MemoryFileSystem, make_batch: MakeBatch, walked: Callable[[], int]
) -> None:
    times = [1000 + (number * 37) % 400 + number for number in range(300)]
    for time in times:
        log.append(make_batch(2, timestamp_ms=time), now_ms=0, leader_epoch=0)
    if reopened:
        end = close_and_mark(log)
        log = Log.open_clean(fs, DIRECTORY, log.config, end)
    for wanted in range(900, 1800, 3):
        expected = next(((time, 2 * number) for number, time in enumerate(times) if time >= wanted), None)
        before = walked()
        assert log.offset_for_timestamp(wanted) == expected
        assert walked() - before < 512
    assert log.max_timestamp() == (max(times), 2 * times.index(max(times)))


def test_an_empty_log_has_no_time(log: Log) -> None:
    assert log.offset_for_timestamp(0) is None
    assert log.max_timestamp() is None


def test_batches_without_timestamps_are_never_found(log: Log, fill: Any) -> None:
    fill(log, 20, timestamp_ms=NO_TIMESTAMP)
    assert log.offset_for_timestamp(0) is None
    assert log.max_timestamp() is None


def test_a_timestamp_below_the_log_start_is_not_found(log: Log, make_batch: MakeBatch) -> None:
    for time in [500, 100, 200, 300, *[50] * 30, 400]:
        log.append(make_batch(2, timestamp_ms=time), now_ms=0, leader_epoch=0)
    assert log.offset_for_timestamp(150) == (500, 0)
    log.delete_before(3)
    assert log.offset_for_timestamp(60) == (100, 3), "the batch with the log start counts from there"
    assert log.offset_for_timestamp(150) == (200, 4)
    assert log.offset_for_timestamp(350) == (400, 68)
    assert log.offset_for_timestamp(450) is None


# --- rolling -------------------------------------------------------------------------------------------


def test_a_full_segment_is_closed_and_gives_its_spare_space_back(
    log: Log, fs: MemoryFileSystem, fill: Any
) -> None:
    fill(log, 30)
    assert log.segment_count == 2
    names = [name for name in fs.list_dir(DIRECTORY) if name.endswith(".log")]
    assert names == ["00000000000000000000.log", "00000000000000000025.log"]
    assert fs.file_size(f"{DIRECTORY}/{names[0]}") == 25 * 161


def test_a_segment_is_rolled_by_age_at_an_append_or_on_request(log: Log, fill: Any) -> None:
    log.reconfigure(replace(log.config, segment_ms=1000))
    fill(log, 1, now_ms=5000)
    fill(log, 1, now_ms=5999)
    assert not log.maybe_roll(5999)
    assert log.segment_count == 1
    fill(log, 1, now_ms=6000)
    assert log.segment_count == 2
    assert log.maybe_roll(7000)
    assert log.segment_count == 3
    assert not log.maybe_roll(99_000), "an empty segment has no age"


def test_jitter_lets_segments_roll_earlier_and_not_all_at_once(fs: MemoryFileSystem, fill: Any) -> None:
    config = LogConfig(segment_ms=1000, segment_jitter_ms=400)
    ages = set()
    for number in range(12):
        log = Log.create(fs, f"/data/{number}", config)
        fill(log, 1, now_ms=0)
        ages.add(next(age for age in range(1001) if log.maybe_roll(age)))
    assert min(ages) > 600 and max(ages) <= 1000
    assert len(ages) > 6


def test_a_reopened_segment_has_the_age_of_its_first_batch(log: Log, fs: MemoryFileSystem, fill: Any) -> None:
    config = replace(log.config, segment_ms=1000)
    fill(log, 1, now_ms=5000, timestamp_ms=5000)
    log = Log.open_clean(fs, DIRECTORY, config, close_and_mark(log))
    fill(log, 1, now_ms=5900)
    assert log.segment_count == 1
    log.reconfigure(config)
    assert log.maybe_roll(6000)


def test_a_segment_is_rolled_when_its_index_is_full(log: Log, fill: Any) -> None:
    log.reconfigure(replace(log.config, segment_bytes=1 << 20, segment_index_bytes=24))
    fill(log, 40)
    assert log.segment_count > 2


def test_a_segment_is_rolled_before_relative_offsets_overflow(log: Log, make_batch: MakeBatch) -> None:
    log.append(make_batch(), now_ms=0, leader_epoch=0)
    log.log_end_offset = MAX_SEGMENT_BYTES  # as if the log had two thousand million records
    assert log.append(make_batch(1), now_ms=0, leader_epoch=0).last_offset == MAX_SEGMENT_BYTES
    assert log.segment_count == 1
    log.append(make_batch(1), now_ms=0, leader_epoch=0)
    assert log.segment_count == 2


def test_rolling_an_empty_segment_does_nothing(log: Log) -> None:
    assert log.roll() is log.roll()
    assert log.segment_count == 1


# --- syncing (R7, R26) ---------------------------------------------------------------------------------


def test_r7_only_batches_written_before_the_round_count_as_synced(log: Log, fill: Any) -> None:
    assert log.begin_sync() is None
    fill(log, 3)
    work = log.begin_sync()
    assert work is not None
    assert log.begin_sync() is None, "one round at a time"
    fill(log, 2)
    work.run()
    log.finish_sync(work, None)
    assert (log.synced_end_offset, log.log_end_offset) == (3, 5)
    assert log.has_unsynced


def test_appending_does_not_sync(log: Log, fs: MemoryFileSystem, fill: Any) -> None:
    fill(log, 100)
    assert log.segment_count > 3
    assert fs.sync_count == 0


def test_a_round_syncs_every_segment_that_was_filled_since(
    log: Log, fs: MemoryFileSystem, fill: Any, sync: Sync, read_all: ReadAll
) -> None:
    written = fill(log, 100)
    sync(log)
    assert not log.has_unsynced
    for seed in range(10):
        copy = MemoryFileSystem(crashable=True)
        copy._root = fs._root
        copy.crash(random.Random(seed))
        assert read_all(Log.recover(copy, DIRECTORY, log.config, may_lack_unsynced=True)) == written


@pytest.mark.parametrize("during_sync", ["roll", "delete", "truncate"])
def test_the_result_of_a_round_is_right_whatever_happens_meanwhile(
    during_sync: str, log: Log, fill: Any, sync: Sync, read_all: ReadAll
) -> None:
    written = fill(log, 60)
    work = log.begin_sync()
    assert work is not None
    if during_sync == "roll":
        written += fill(log, 60)
    elif during_sync == "delete":
        log.delete_before(50)
        written = written[50:]
    else:
        log.truncate_to(40)
        written = written[:40] + fill(log, 30)
    work.run()
    log.finish_sync(work, None)
    assert log.synced_end_offset == {"roll": 60, "delete": 60, "truncate": 40}[during_sync]
    sync(log)
    assert log.synced_end_offset == log.log_end_offset
    assert read_all(log)[-len(written) :] == written


def test_r26_a_failed_sync_is_final(
    log: Log, fs: MemoryFileSystem, fill: Any, make_batch: MakeBatch, read_all: ReadAll
) -> None:
    written = fill(log, 3)
    fs.fail_next_sync()
    work = log.begin_sync()
    assert work is not None
    with pytest.raises(OSError) as caught:
        work.run()
    log.finish_sync(work, caught.value)
    assert log.synced_end_offset == 0
    assert "sync failed" in str(log.offline_reason)
    assert log.begin_sync() is None
    assert log.clean_end is None
    for write in (
        lambda: log.append(make_batch(), now_ms=0, leader_epoch=1),
        lambda: log.append_as_follower(make_batch(base_offset=3, leader_epoch=1), now_ms=0),
        lambda: log.truncate_to(1),
        lambda: log.delete_before(1),
        lambda: log.roll(),
    ):
        with pytest.raises(LogOfflineError, match="sync failed"):
            write()
    assert not log.maybe_roll(10**15)
    assert read_all(log) == written, "reading goes on"
    log.close(clean=True)


def test_r26_a_failed_write_is_final(
    log: Log, fs: MemoryFileSystem, fill: Any, make_batch: MakeBatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    fill(log, 1)
    fs.fail_next_write()
    with pytest.raises(LogOfflineError):
        log.append(make_batch(), now_ms=0, leader_epoch=1)
    assert log.log_end_offset == 1
    assert [record.msg for record in caplog.records] == ["log offline %s"]
    assert "offline" in repr(log)


def test_a_process_without_descriptors_does_not_take_the_log_offline(
    log: Log, fs: MemoryFileSystem, fill: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(log, 3)

    def refuse(*_: Any, **__: Any) -> None:
        raise TooManyOpenFilesError("no file descriptor left")

    with monkeypatch.context() as patch:
        patch.setattr(fs, "open", refuse)
        with pytest.raises(TooManyOpenFilesError):
            log.roll()
        log.close(clean=False)
        with pytest.raises(TooManyOpenFilesError):
            log.read(0, max_bytes=1, up_to=3)
    assert log.offline_reason is None
    assert log.read(0, max_bytes=1, up_to=3).next_offset == 1
    fill(log, 1)


def test_r55_a_sync_without_descriptors_is_repeated(
    log: Log, fs: MemoryFileSystem, fill: Any, sync: Sync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of new files are synced by a descriptor of their directory."""
    fill(log, 3)

    def refuse(_path: str) -> None:
        raise TooManyOpenFilesError("no file descriptor left")

    work = log.begin_sync()
    assert work is not None
    with monkeypatch.context() as patch:
        patch.setattr(fs, "sync_dir", refuse)
        with pytest.raises(TooManyOpenFilesError) as caught:
            work.run()
    log.finish_sync(work, caught.value)
    assert (log.offline_reason, log.synced_end_offset) == (None, 0)
    sync(log)
    assert log.synced_end_offset == 3


def test_a_full_disk_for_the_epochs_refuses_the_first_batch_and_loses_nothing(
    log: Log, fs: MemoryFileSystem, fill: Any, make_batch: MakeBatch, read_all: ReadAll
) -> None:
    written = fill(log, 3)
    fs.capacity_bytes = fs.used_bytes()
    with pytest.raises(DiskFullError):
        log.append(make_batch(), now_ms=1, leader_epoch=7)
    assert (log.offline_reason, log.log_end_offset, read_all(log)) == (None, 3, written)
    fs.capacity_bytes = None
    assert log.append(make_batch(), now_ms=1, leader_epoch=7).base_offset == 3
    assert [tuple(one) for one in log.leader_epochs][-1] == (7, 3)


def test_a_full_disk_for_the_epochs_is_not_a_failed_sync(
    log: Log, fs: MemoryFileSystem, fill: Any, make_batch: MakeBatch, sync: Sync
) -> None:
    fill(log, 2)
    sync(log)
    log.append(make_batch(), now_ms=1, leader_epoch=7)
    fs.capacity_bytes = fs.used_bytes()
    work = log.begin_sync()
    assert work is not None
    with pytest.raises(DiskFullError) as caught:
        work.run()
    log.finish_sync(work, caught.value)
    assert log.offline_reason is None
    assert log.synced_end_offset == 2
    fs.capacity_bytes = None
    sync(log)
    assert log.synced_end_offset == 3


# --- a full disk ---------------------------------------------------------------------------------------


def test_a_full_disk_refuses_a_batch_and_loses_nothing(
    log: Log, fs: MemoryFileSystem, fill: Any, make_batch: MakeBatch, read_all: ReadAll, sync: Sync
) -> None:
    written = fill(log, 10)
    sync(log)
    fs.capacity_bytes = fs.used_bytes() + 100
    for _ in range(50):
        try:
            written += fill(log, 1)
        except DiskFullError:
            break
    else:
        raise AssertionError("the disk never got full")
    for _ in range(3):
        with pytest.raises(DiskFullError):
            log.append(make_batch(seed=9), now_ms=0, leader_epoch=1)
    assert read_all(log) == written
    assert log.offline_reason is None
    fs.capacity_bytes = None
    written += fill(log, 40)
    sync(log)
    assert read_all(log) == written
    log.close(clean=False)
    assert read_all(Log.recover(fs, DIRECTORY, log.config)) == written


def test_r26_on_a_full_disk_retention_still_frees_space(
    log: Log, fs: MemoryFileSystem, fill: Any, sync: Sync
) -> None:
    fill(log, 60)
    sync(log)
    log.reconfigure(replace(log.config, retention_bytes=0))
    fs.capacity_bytes = fs.used_bytes()
    with pytest.raises(DiskFullError):
        fill(log, 60)
    log.delete_before(30)
    apply_retention(log, 0, up_to=50)
    apply_retention(log, 60_000, up_to=50)
    assert log.log_start_offset == 50
    assert log.offline_reason is None
    fill(log, 5)


def test_a_full_disk_at_the_roll_changes_nothing(log: Log, fs: MemoryFileSystem, fill: Any) -> None:
    fill(log, 3)
    fs.capacity_bytes = fs.used_bytes()
    with pytest.raises(DiskFullError):
        log.roll()
    assert log.segment_count == 1
    fs.capacity_bytes = None
    log.roll()
    assert log.segment_count == 2


def test_a_disk_that_cannot_reserve_space_may_fill_in_the_middle_of_a_write(
    log: Log,
    fs: MemoryFileSystem,
    fill: Any,
    read_all: ReadAll,
    monkeypatch: pytest.MonkeyPatch,
    torn_tail_cuts: Any,
) -> None:
    written = fill(log, 3)
    file = log.roll().file
    real = type(file).write_at
    calls = []

    def fill_up(self: Any, position: int, buffer: Any) -> None:
        calls.append(position)
        if len(calls) == 1:
            real(self, position, memoryview(buffer)[:70])
            raise DiskFullError("full")
        real(self, position, buffer)

    monkeypatch.setattr(type(file), "write_at", fill_up)
    with pytest.raises(DiskFullError):
        fill(log, 1)
    monkeypatch.undo()
    assert read_all(log) == written
    log.close(clean=False)
    assert read_all(Log.recover(fs, DIRECTORY, log.config)) == written
    assert torn_tail_cuts() == [], "the half of a batch was wiped"


# --- epochs --------------------------------------------------------------------------------------------


def test_r2_r4_epochs_follow_the_batches(log: Log, fill: Any) -> None:
    fill(log, 3, epoch=2)
    fill(log, 4, epoch=5)
    log.start_epoch(8)
    assert log.latest_epoch == 8
    assert log.leader_epochs == [(2, 0), (5, 3), (8, 7)]
    assert log.end_offset_for_epoch(1) == (1, 0)
    assert log.end_offset_for_epoch(3) == (2, 3)
    assert log.end_offset_for_epoch(5) == (5, 7)
    assert log.end_offset_for_epoch(9) == (8, 7)
    log.forget_empty_epoch()
    assert log.latest_epoch == 5
    log.start_epoch(9)
    fill(log, 1, epoch=10)
    assert log.leader_epochs == [(2, 0), (5, 3), (10, 7)]


# --- truncating (R4, R5) -------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1, 30, 59, 60, 61, 150, 199])
def test_r4_truncation_cuts_whole_batches_and_stays_cut(
    offset: int, log: Log, fs: MemoryFileSystem, fill: Any, read_all: ReadAll, sync: Sync
) -> None:
    written = fill(log, 50, records=2, epoch=1) + fill(log, 50, records=2, epoch=2)
    sync(log)
    assert log.truncate_to(offset) == offset - offset % 2
    written = written[: offset // 2]
    assert read_all(log) == written
    assert log.synced_end_offset == log.log_end_offset
    assert log.latest_epoch == (2 if offset > 101 else 1 if offset > 1 else -1)
    written += fill(log, 30, epoch=3)
    assert read_all(log) == written
    sync(log)
    log.close(clean=False)
    reopened = Log.recover(fs, DIRECTORY, log.config, log.recovery_point)
    assert read_all(reopened) == written
    assert reopened.leader_epochs == log.leader_epochs


def test_truncating_at_the_end_only_forgets_an_empty_epoch(log: Log, fill: Any) -> None:
    fill(log, 3)
    log.start_epoch(9)
    assert log.truncate_to(3) == log.truncate_to(99) == 3
    assert log.leader_epochs == [(1, 0)]


def test_no_log_is_truncated_below_its_start(log: Log, fill: Any) -> None:
    fill(log, 30, records=3)
    log.delete_before(20)
    with pytest.raises(OffsetOutOfRangeError):
        log.truncate_to(19)
    assert log.truncate_to(20) == 18, "the batch that holds the log start goes whole"
    assert log.log_start_offset == log.log_end_offset == 18


def test_a_failure_within_a_truncation_takes_the_log_offline(
    log: Log, fs: MemoryFileSystem, fill: Any, sync: Sync
) -> None:
    fill(log, 30)
    sync(log)
    fs.fail_next_write()
    with pytest.raises(LogOfflineError):
        log.truncate_to(10)


def test_a_full_disk_before_a_truncation_changes_nothing(
    log: Log, fs: MemoryFileSystem, fill: Any, sync: Sync, read_all: ReadAll
) -> None:
    written = fill(log, 30)
    sync(log)
    log.close(clean=True)
    log = Log.open_clean(fs, DIRECTORY, log.config, CleanEnd(0, 30))
    fs.capacity_bytes = fs.used_bytes()
    with pytest.raises(DiskFullError):
        log.truncate_to(10)
    assert read_all(log) == written


# --- deleting ------------------------------------------------------------------------------------------


def test_delete_records_moves_the_start_and_retires_segments_below(
    log: Log, fs: MemoryFileSystem, fill: Any, read_all: ReadAll
) -> None:
    written = fill(log, 100, epoch=1) + fill(log, 10, epoch=2)
    assert log.delete_before(30) == 30
    assert log.delete_before(10) == 30, "it never moves back"
    assert read_all(log) == written[30:]
    assert log.leader_epochs == [(1, 30), (2, 100)]
    with pytest.raises(OffsetOutOfRangeError):
        log.read(29, max_bytes=1, up_to=99)
    with pytest.raises(OffsetOutOfRangeError):
        log.delete_before(111)
    assert "00000000000000000000.log.deleted" in fs.list_dir(DIRECTORY)
    apply_retention(log, 0)
    apply_retention(log, 59_999)
    assert "00000000000000000000.log.deleted" in fs.list_dir(DIRECTORY)
    apply_retention(log, 60_000)
    assert "00000000000000000000.log.deleted" not in fs.list_dir(DIRECTORY)
    log.close(clean=False)
    assert read_all(Log.recover(fs, DIRECTORY, log.config)) == written[30:]


def test_all_records_can_be_deleted(log: Log, fs: MemoryFileSystem, fill: Any, read_all: ReadAll) -> None:
    fill(log, 30)
    assert log.delete_before(30) == 30
    assert read_all(log) == []
    assert log.read(30, max_bytes=1, up_to=99) == ([], 0, 30)
    written = fill(log, 3)
    assert [base for base, _ in written] == [30, 31, 32]
    assert read_all(log) == written


def test_retention_by_time_takes_the_active_segment_when_all_of_it_is_old(
    log: Log, fill: Any, sync: Sync
) -> None:
    week_ms = 7 * 24 * 3600 * 1000
    fill(log, 60, timestamp_ms=1000)
    fill(log, 10, timestamp_ms=5000)
    sync(log)
    assert apply_retention(log, 1000 + week_ms) == []
    names = apply_retention(log, 0, 1001 + week_ms)
    assert names == ["00000000000000000000.log", "00000000000000000025.log"]
    assert log.log_start_offset == 50
    assert apply_retention(log, 0, 5001 + week_ms) == ["00000000000000000050.log"]
    assert (log.log_start_offset, log.log_end_offset, log.segment_count) == (70, 70, 1)
    assert fill(log, 1)[0][0] == 70


def test_retention_by_size_and_only_what_is_synced(log: Log, fill: Any, sync: Sync) -> None:
    fill(log, 100)
    log.reconfigure(replace(log.config, retention_bytes=5000))
    assert apply_retention(log, 0) == []
    sync(log)
    assert len(apply_retention(log, 0)) == 2
    assert 5000 <= log.size_bytes < 5000 + 4096


def test_with_page_cache_durability_unsynced_segments_may_go(log: Log, fill: Any) -> None:
    fill(log, 100)
    log.reconfigure(replace(log.config, retention_bytes=0, durability="page-cache"))
    assert len(apply_retention(log, 0, up_to=60)) == 2
    assert len(apply_retention(log, 0)) == 2
    assert log.log_start_offset == 100


def test_without_a_delay_retired_files_are_removed_at_once(
    log: Log, fs: MemoryFileSystem, fill: Any, sync: Sync
) -> None:
    fill(log, 60)
    sync(log)
    log.reconfigure(replace(log.config, retention_bytes=0, file_delete_delay_ms=0))
    apply_retention(log, 5)
    assert [name for name in fs.list_dir(DIRECTORY) if name.endswith(".deleted")] == []


# --- opening and closing -------------------------------------------------------------------------------


def close_and_mark(log: Log) -> CleanEnd:
    log.close(clean=True)
    end = log.clean_end
    assert end is not None
    return end


def test_a_cleanly_closed_log_is_opened_without_touching_a_file(  # LogStore compares the files before
    log: Log, fs: MemoryFileSystem, fill: Any, read_all: ReadAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = fill(log, 70, epoch=3)
    log.delete_before(5)
    end = close_and_mark(log)
    assert end[:2] == (5, 70)
    for name in ("open", "read_bytes", "list_dir", "exists", "file_size"):
        monkeypatch.setattr(fs, name, None)
    log = Log.open_clean(fs, DIRECTORY, log.config, end)
    assert (log.log_start_offset, log.log_end_offset, log.synced_end_offset) == (5, 70, 70)
    assert not log.is_open
    assert log.release_idle() == 0
    log.close(clean=True)
    monkeypatch.undo()
    log = Log.open_clean(fs, DIRECTORY, log.config, end)
    assert read_all(log) == written[5:]
    assert log.is_open
    assert log.latest_epoch == 3
    written += fill(log, 30, epoch=3)
    assert read_all(log) == written[5:]


def test_a_clean_close_leaves_nothing_to_walk(
    log: Log, fs: MemoryFileSystem, fill: Any, walked: Callable[[], int]
) -> None:
    fill(log, 70)
    end = close_and_mark(log)
    log = Log.open_clean(fs, DIRECTORY, log.config, end)
    log.read(69, max_bytes=1, up_to=70)
    assert walked() == 0


@pytest.mark.parametrize("damage", ["missing", "flipped", "cut", "foreign", "empty"])
@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
def test_damaged_indexes_are_rebuilt(
    damage: str,
    suffix: str,
    log: Log,
    fs: MemoryFileSystem,
    fill: Any,
    read_all: ReadAll,
    walked: Callable[[], int],
) -> None:
    written = [one for number in range(100) for one in fill(log, 1, timestamp_ms=1000 + number)]
    end = close_and_mark(log)
    for name in fs.list_dir(DIRECTORY):
        if not name.endswith(suffix):
            continue
        path = f"{DIRECTORY}/{name}"
        data = bytearray(fs.read_bytes(path))
        fs.unlink(path)
        if damage == "flipped":
            data[len(data) // 2] ^= 255
        elif damage == "cut":
            del data[len(data) // 2 :]
        elif damage == "foreign":
            other = ".timeindex" if suffix == ".index" else ".index"
            data = bytearray(fs.read_bytes(path.removesuffix(suffix) + other))
        elif damage == "empty":
            data = bytearray()
        if damage != "missing":
            fs.open(path, create=True).write_at(0, data)
    log = Log.open_clean(fs, DIRECTORY, log.config, end)
    assert read_all(log) == written
    for offset in range(0, 100, 9):
        before = walked()
        assert log.offset_for_timestamp(1000 + offset) == (1000 + offset, offset)
        assert walked() - before < 512


def test_a_wrong_index_is_detected_and_rebuilt(
    log: Log, fs: MemoryFileSystem, fill: Any, read_all: ReadAll, caplog: pytest.LogCaptureFixture
) -> None:
    written = fill(log, 100)
    end = close_and_mark(log)
    first, second = (f"{DIRECTORY}/{offset:020d}.index" for offset in (0, 25))
    data = fs.read_bytes(second)
    fs.unlink(first)
    fs.open(first, create=True).write_at(0, data)
    first, second = (f"{DIRECTORY}/{offset:020d}.timeindex" for offset in (0, 25))
    data = fs.read_bytes(second)
    fs.unlink(first)
    fs.open(first, create=True).write_at(0, data)
    log = Log.open_clean(fs, DIRECTORY, log.config, end)
    assert read_all(log) == written


def test_r24_damage_found_while_reading_takes_the_log_offline(
    log: Log, fs: MemoryFileSystem, fill: Any
) -> None:
    fill(log, 60)
    end = close_and_mark(log)
    file = fs.open(f"{DIRECTORY}/00000000000000000000.log")
    file.write_at(161 * 3 + 16, b"\x07")
    for suffix in (".index", ".timeindex"):
        fs.unlink(f"{DIRECTORY}/00000000000000000000{suffix}")
    log = Log.open_clean(fs, DIRECTORY, log.config, end)
    with pytest.raises(LogOfflineError, match="damaged at position 483"):
        log.read(0, max_bytes=1, up_to=60)
    for offset in (3, 55, 60):
        with pytest.raises(LogOfflineError):
            log.read(offset, max_bytes=1, up_to=60)
    with pytest.raises(LogOfflineError):
        log.offset_for_bytes(0, 4, max_bytes=1)
    assert log.read(0, max_bytes=1 << 20, up_to=60).next_offset == 3
    assert log.offset_for_bytes(0, 3, max_bytes=1000).end_offset == 3
    assert log.offset_for_timestamp(1) == (1000, 0)
    assert log.offline_reason is not None


@pytest.mark.parametrize(
    "action", ["offset_for_timestamp", "max_timestamp", "truncate", "append", "retention"]
)
def test_r24_every_operation_that_finds_damage_reports_it(
    action: str, log: Log, fs: MemoryFileSystem, fill: Any
) -> None:
    fill(log, 20)
    end = close_and_mark(log)
    fs.open(f"{DIRECTORY}/00000000000000000000.log").write_at(16, b"\x07")
    for suffix in (".index", ".timeindex"):
        fs.unlink(f"{DIRECTORY}/00000000000000000000{suffix}")
    log = Log.open_clean(fs, DIRECTORY, log.config, end)
    with pytest.raises(LogOfflineError):
        match action:
            case "offset_for_timestamp":
                log.offset_for_timestamp(1)
            case "max_timestamp":
                log.max_timestamp()
            case "truncate":
                log.truncate_to(3)
            case "append":
                fill(log, 1)
            case _:
                apply_retention(log, 0)


def test_segments_missing_after_a_clean_stop_are_damage(log: Log, fs: MemoryFileSystem, fill: Any) -> None:
    fill(log, 60)
    end = close_and_mark(log)
    fs.unlink(f"{DIRECTORY}/00000000000000000000.log")
    log = Log.open_clean(fs, DIRECTORY, log.config, end)
    with pytest.raises(LogOfflineError, match="expected a segment with offset 0"):
        log.read(30, max_bytes=1, up_to=60)


def test_a_log_that_cannot_be_opened_refuses_reads_and_writes(
    fs: MemoryFileSystem, config: LogConfig
) -> None:
    log = Log.damaged(fs, DIRECTORY, config, "no reason")
    for call in (
        lambda: log.read(0, max_bytes=1, up_to=1),
        lambda: log.roll(),
        lambda: log.truncate_to(0),
        lambda: log.delete_before(0),
    ):
        with pytest.raises(LogOfflineError, match="no reason"):
            call()
    assert not log.is_open
    log.close(clean=True)


def test_damage_found_while_serving_leaves_the_sound_part_readable(
    log: Log, fill: Any, make_batch: MakeBatch
) -> None:
    """R24: the error names the cause, the number of records in doubt and the command."""
    written = fill(log, 10)
    damage = log.mark_damaged("no reason", sound_end_offset=4, records_in_doubt=6)
    assert log.mark_damaged("another reason") is damage is log.damage
    read = log.read(0, max_bytes=100_000, up_to=10)
    assert read.next_offset == 4
    assert b"".join(read.buffers) == b"".join(bytes(batch) for _, batch in written[:4])
    for refused in (
        lambda: log.read(4, max_bytes=1, up_to=10),
        lambda: log.read(7, max_bytes=1, up_to=10),
        lambda: log.append(make_batch(1), now_ms=1, leader_epoch=1),
    ):
        with pytest.raises(LogOfflineError, match=r"no reason.*at least 6 records in doubt") as caught:
            refused()
        assert f"kl log accept-loss {DIRECTORY}" in caught.value.hint
        assert str(caught.value).count("kl log accept-loss") == 1
    assert log.clean_end is None


def test_a_failed_sync_at_closing_is_raised(log: Log, fs: MemoryFileSystem, fill: Any) -> None:
    fill(log, 1)
    fs.fail_next_sync()
    with pytest.raises(OSError):
        log.close(clean=True)
    assert log.clean_end is None


def test_idle_files_are_closed_and_opened_again(log: Log, fill: Any, read_all: ReadAll, sync: Sync) -> None:
    written = fill(log, 100)
    assert log.release_idle() == 0, "nothing is let go before it is synced"
    sync(log)
    assert log.release_idle() == 0, "everything was just used"
    assert log.release_idle() == log.segment_count
    assert log.release_idle() == 0
    assert read_all(log) == written
    written += fill(log, 1)
    assert read_all(log) == written


def test_a_leftover_directory_has_no_records(
    fs: MemoryFileSystem, config: LogConfig, fill: Any, read_all: ReadAll
) -> None:
    fs.make_dirs(DIRECTORY)
    fs.open(f"{DIRECTORY}/00000000000000000000.log", create=True).write_at(0, b"noise" * 100)
    log = Log.create(fs, DIRECTORY, config)
    assert read_all(log) == []
    written = fill(log, 2)
    assert read_all(log) == written


def test_repr_and_properties_show_the_state(log: Log, fill: Any) -> None:
    fill(log, 3)
    assert repr(log) == "<Log /data/log [0, 3)>"
    assert log.directory == DIRECTORY
    assert log.segment_count == 1
    assert log.recovery_point[:2] == (0, 0)


@pytest.mark.parametrize("action", ["truncate", "delete", "roll", "follow", "retain", "retire"])
def test_r26_a_write_that_fails_anywhere_takes_the_log_offline(
    action: str,
    log: Log,
    fs: MemoryFileSystem,
    fill: Any,
    make_batch: MakeBatch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill(log, 30)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        if action == "follow":
            fs.fail_next_write()
        elif action == "retire":
            patch.setattr(fs, "rename", refuse)
        elif action == "roll":
            patch.setattr(fs, "open", refuse)
        else:
            patch.setattr(fs, "write_atomically", refuse)
        with pytest.raises(LogOfflineError, match="write failed"):
            match action:
                case "truncate":
                    log.truncate_to(3)
                case "delete":
                    log.delete_before(3)
                case "retain" | "retire":
                    log.reconfigure(replace(log.config, retention_bytes=0, durability="page-cache"))
                    apply_retention(log, 0)
                case "roll":
                    log.roll()
                case _:
                    log.append_as_follower(make_batch(base_offset=30, leader_epoch=1), now_ms=0)
    # The log start has moved durably before a segment is retired.
    first = 30 if action == "retire" else 29
    assert log.read(first, max_bytes=1, up_to=30).next_offset == 30


def test_a_first_segment_that_cannot_be_created_takes_the_log_offline(
    log: Log, fs: MemoryFileSystem, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(fs, "open", refuse)
    with pytest.raises(LogOfflineError):
        log.append(make_batch(), now_ms=0, leader_epoch=0)


def test_the_roll_time_follows_a_change_of_configuration(log: Log, fill: Any) -> None:
    fill(log, 1, now_ms=100)
    log.reconfigure(replace(log.config, segment_ms=50))
    assert not log.maybe_roll(149)
    assert log.maybe_roll(150)


@pytest.mark.parametrize("action", ["truncate", "boundary", "delete", "retain", "sync", "recover"])
def test_every_operation_has_made_its_names_durable_when_it_returns(
    action: str, config: LogConfig, fill: Any, sync: Sync
) -> None:
    fs = RecordingFileSystem(MemoryFileSystem())
    fs.make_dirs("/data")
    log = Log.create(fs, DIRECTORY, config)
    fill(log, 80)
    if action != "sync":
        sync(log)
    if action in {"truncate", "boundary"}:
        log.truncate_to(25 if action == "boundary" else 40)
    elif action == "delete":
        log.delete_before(60)
    elif action == "retain":
        log.reconfigure(replace(config, retention_bytes=0))
        apply_retention(log, 0)
    elif action == "recover":
        fs.open(f"{DIRECTORY}/00000000000000000050.log").write_at(200, b"x")
        fs.open(f"{DIRECTORY}/00000000000000000900.index", create=True)
        for name in ("25.index", "50.index", "25.timeindex", "50.timeindex"):
            fs.unlink(f"{DIRECTORY}/" + name.rjust(20 + len(name) - 2, "0"))
        assert Log.recover(fs, DIRECTORY, config).log_end_offset == 51
    else:
        sync(log)
    unsynced: list[str] = []
    for operation in fs.operations:
        if operation.kind == "sync_dir" and operation.path == DIRECTORY:
            unsynced.clear()
        elif operation.kind in {"create", "rename", "unlink"} and not operation.path.endswith(
            ("index", ".producers")
        ):
            if operation.new_path.endswith(".deleted"):
                continue  # a start removes files below the log start whatever their name is
            unsynced.append(f"{operation.kind} {operation.path}")
    assert unsynced == []


def test_r5_after_a_truncation_the_indexes_describe_the_log(
    log: Log, fs: MemoryFileSystem, fill: Any, sync: Sync
) -> None:
    directory = f"/data/{'0' * 32}-0"
    config = replace(log.config, segment_bytes=1 << 20, index_interval_bytes=1)
    log = Log.create(fs, directory, config)
    fill(log, 200)
    sync(log)
    log.truncate_to(100)
    fill(log, 150, records=2, epoch=2)
    sync(log)
    close_and_mark(log)
    verdict = verify_log(fs, directory)
    assert verdict.findings == []
    assert verdict.log_end_offset == 400
    assert fs.file_size(f"{directory}/00000000000000000000.index") > 249 * 8


def test_a_truncated_log_survives_even_if_the_directory_was_never_synced(
    fs: MemoryFileSystem, config: LogConfig, fill: Any, read_all: ReadAll
) -> None:
    log = Log.create(fs, "/data/new", config)
    written = fill(log, 10)
    log.truncate_to(5)
    for seed in range(10):
        copy = MemoryFileSystem(crashable=True)
        copy._root = fs._root
        copy.crash(random.Random(seed))
        assert read_all(Log.recover(copy, "/data/new", config, may_lack_unsynced=True)) == written[:5]


def test_the_retention_of_a_log_without_appends_since_its_start_is_due_in_time(
    fs: MemoryFileSystem, make_batch: Any
) -> None:
    config = LogConfig(segment_ms=1_000, retention_ms=5_000)
    log = Log.create(fs, DIRECTORY, config)
    log.append(make_batch(), now_ms=1, leader_epoch=1)
    newest_ms = next(log._segments.summaries()).max_timestamp_ms
    log.close(clean=True)
    opened = Log.recover(fs, DIRECTORY, config)
    assert opened.maintenance_due_ms(newest_ms, -1) == newest_ms + 5_000 + 1
    opened.reconfigure(LogConfig(retention_ms=-1))
    assert opened.maintenance_due_ms(newest_ms, -1) == math.inf, "it rolls after its next append only"


def test_the_maintenance_of_a_log_that_was_just_configured_is_due_at_once(
    fs: MemoryFileSystem, make_batch: Any, sync: Any
) -> None:
    config = LogConfig(segment_ms=1_000, retention_ms=-1)
    log = Log.create(fs, DIRECTORY, config)
    log.append(make_batch(), now_ms=1, leader_epoch=1)
    sync(log)
    log.release_idle()
    log.release_idle()
    log.maybe_roll(500)
    assert 500 < log.maintenance_due_ms(500, -1) < 10_000
    log.reconfigure(config)
    assert log.maintenance_due_ms(500, -1) == 500
