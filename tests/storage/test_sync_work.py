"""A sync round that runs in another thread while the log is used (R7, R26)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kafkalite.storage.checkpoints import decode_leader_epochs
from kafkalite.storage.filesystem import unlink_existing
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.storage.sync_work import run_together
from proof.recording_filesystem import RecordingFileSystem

DIRECTORY = "/data/log"


@pytest.fixture
def fs() -> MemoryFileSystem:
    return MemoryFileSystem()


@pytest.fixture
def log(fs: MemoryFileSystem, make_batch: Any) -> Log:
    log = Log.create(fs, DIRECTORY, LogConfig(segment_bytes=2048))
    for number in range(30):
        log.append(make_batch(seed=number), now_ms=1, leader_epoch=1 + number // 10)
    return log


def saved_epochs(fs: MemoryFileSystem) -> list[tuple[int, int]]:
    path = f"{DIRECTORY}/leader-epochs"
    return [tuple(entry) for entry in decode_leader_epochs(fs.read_bytes(path), path)[0]]


def test_a_round_in_a_thread_has_the_same_result_as_one_without(fs: MemoryFileSystem, log: Log) -> None:
    work = log.begin_sync()
    assert work is not None
    thread = threading.Thread(target=work.run)
    thread.start()
    thread.join()
    log.finish_sync(work, None)
    assert log.synced_end_offset == 30
    assert saved_epochs(fs) == [(1, 0), (2, 10), (3, 20)]


def test_a_round_that_a_truncation_overtook_does_not_write_old_epochs(fs: MemoryFileSystem, log: Log) -> None:
    work = log.begin_sync()
    assert work is not None
    log.truncate_to(15)
    assert saved_epochs(fs) == [(1, 0), (2, 10)]
    work.run()
    assert saved_epochs(fs) == [(1, 0), (2, 10)]
    log.finish_sync(work, None)
    assert log.synced_end_offset == 15


def test_a_truncation_waits_for_a_write_of_epochs_under_way(
    fs: MemoryFileSystem, log: Log, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = log.begin_sync()
    assert work is not None
    work.run()
    log.finish_sync(work, None)
    log.append(make_batch(), now_ms=1, leader_epoch=4)  # the first epochs are written without a sync
    work = log.begin_sync()
    assert work is not None
    writing, may_go_on = threading.Event(), threading.Event()
    real = fs.write_atomically

    def slow(path: str, data: bytes, *, sync_name: bool = True) -> None:
        if threading.current_thread() is thread:
            writing.set()
            assert may_go_on.wait(10)
        elif path.endswith("leader-epochs"):
            assert may_go_on.is_set(), "two writers at once"
        real(path, data, sync_name=sync_name)

    monkeypatch.setattr(fs, "write_atomically", slow)
    thread = threading.Thread(target=work.run)
    thread.start()
    assert writing.wait(10)
    threading.Timer(0.05, may_go_on.set).start()
    log.truncate_to(15)
    thread.join()
    log.finish_sync(work, None)
    assert saved_epochs(fs) == [(1, 0), (2, 10)]


def test_the_result_for_a_closed_log_is_ignored(log: Log) -> None:
    work = log.begin_sync()
    assert work is not None
    log.close(clean=False)
    log.finish_sync(work, FileNotFoundError(2, "its directory was deleted"))
    assert log.offline_reason is None


def test_a_failed_write_of_the_epochs_is_final(fs: MemoryFileSystem, log: Log) -> None:
    work = log.begin_sync()
    assert work is not None
    fs.fail_next_write()
    with pytest.raises(OSError) as caught:
        work.run()
    log.finish_sync(work, caught.value)
    assert log.offline_reason is not None


def test_files_stay_open_for_a_round_after_their_segments_are_removed(log: Log) -> None:
    work = log.begin_sync()
    assert work is not None
    log.delete_before(30)
    unlink_existing(log._fs, log.take_retired(10**15))
    work.run()
    log.finish_sync(work, None)
    assert log.synced_end_offset == 30


def test_many_new_logs_share_the_sync_of_their_parent(make_batch: Any) -> None:
    fs = RecordingFileSystem(MemoryFileSystem())
    fs.make_dirs("/data")
    logs = [Log.create(fs, f"/data/log{number}", LogConfig()) for number in range(5)]
    for log in logs:
        log.append(make_batch(), now_ms=1, leader_epoch=1)
    works = [log.begin_sync() for log in logs]
    fs.operations.clear()
    assert run_together([work for work in works if work is not None]) == [None] * 5
    synced = [operation.path for operation in fs.operations if operation.kind in {"sync", "sync_dir"}]
    assert synced.count("/data") == 1 and len(synced) == 11, "a segment and a directory each, and the parent"
    for log, work in zip(logs, works, strict=True):
        assert work is not None
        log.finish_sync(work, None)
        assert log.synced_end_offset == 1


def test_a_failed_sync_affects_only_its_log(fs: MemoryFileSystem, make_batch: Any) -> None:
    logs = [Log.create(fs, f"/data/log{number}", LogConfig()) for number in range(3)]
    for log in logs:
        log.append(make_batch(), now_ms=1, leader_epoch=1)
    works = [work for work in (log.begin_sync() for log in logs) if work is not None]
    fs.fail_next_sync()
    errors = run_together(works)
    assert [error is None for error in errors] == [False, True, True]
