"""LogCopy: a copy replaces a log only when it is complete and synced, whatever ends the process (R85)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kafkalite.errors import LogDirNotFoundError, LogMovingError, LogOfflineError, StorageError
from kafkalite.model import TopicPartition
from kafkalite.records.builder import build_batch
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.log_copy import LogCopy
from kafkalite.storage.log_dirs import LogDirs
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.damage.directories import losses_of_a_move

A, B = "/disks/a", "/disks/b"
CONFIG = LogConfig(segment_bytes=2048, preallocate_min_bytes=0)
TP = TopicPartition("t", 0)
TOPIC_ID = f"{1:032x}"
WANTED = {TP: (TOPIC_ID, CONFIG)}
RNG = random.Random(1)


def open_dirs(fs: Any) -> LogDirs:
    dirs = LogDirs.open(fs, [A, B], cluster_id="c", node_id=1, rng=RNG)
    dirs.load(WANTED)
    return dirs


def log_of(dirs: LogDirs) -> Log:
    log = dirs.get(TP)
    assert log is not None
    return log


def append(log: Log, count: int, epoch: int = 0) -> None:
    for _ in range(count):
        log.append(bytearray(build_batch([b"x" * 300])), now_ms=0, leader_epoch=epoch)


def sync(log: Log) -> None:
    work = log.begin_sync()
    assert work is not None
    work.run()
    log.finish_sync(work, None)


def copy_all(copy: LogCopy) -> None:
    copy.begin(copy.read(1))
    while copy.lag:
        copy.append(copy.read(1000), 0)


def move(dirs: LogDirs, path: str = B) -> Log:
    copy = dirs.begin_copy(TP, path)
    copy_all(copy)
    copy.source.freeze()
    dirs.complete_copy(copy)
    return dirs.replace_by_copy(TP, copy)


def batches(log: Log) -> bytes:
    found = log.read(log.log_start_offset, max_bytes=1 << 20, up_to=log.log_end_offset)
    return b"".join(found.buffers)


@pytest.fixture
def fs() -> MemoryFileSystem:
    return MemoryFileSystem(crashable=True)


@pytest.fixture
def dirs(fs: MemoryFileSystem) -> LogDirs:
    found = open_dirs(fs)
    append(log_of(found), 4, epoch=1)
    append(log_of(found), 6, epoch=2)
    sync(log_of(found))
    return found


class TestCopying:
    def test_the_copy_has_the_same_batches_epochs_and_ends(self, dirs: LogDirs) -> None:
        old = log_of(dirs)
        before = batches(old), old.leader_epochs, old.log_end_offset
        new = move(dirs)
        assert (batches(new), new.leader_epochs, new.log_end_offset) == before
        assert (dirs.path_of(TP), new.synced_end_offset) == (B, 10)

    def test_a_copy_begins_at_the_log_start(self, dirs: LogDirs) -> None:
        log_of(dirs).delete_before(7)
        new = move(dirs)
        assert (new.log_start_offset, new.log_end_offset) == (7, 10)

    def test_the_copy_is_appended_to_and_found_after_each_kind_of_end(
        self, dirs: LogDirs, fs: MemoryFileSystem
    ) -> None:
        append(move(dirs), 1, epoch=2)
        sync(log_of(dirs))
        for clean in (True, False):
            dirs.close(clean=clean)
            dirs = open_dirs(fs)
            assert (dirs.path_of(TP), log_of(dirs).log_end_offset, log_of(dirs).is_damaged) == (B, 11, False)
        fs.crash(random.Random(3))
        again = open_dirs(fs)
        assert (again.path_of(TP), log_of(again).log_end_offset) == (B, 11)

    def test_the_files_of_the_log_are_retired(self, dirs: LogDirs, fs: MemoryFileSystem) -> None:
        move(dirs)
        assert fs.exists(f"{A}/{TOPIC_ID}-0.deleted")
        removal = dirs.begin_removal(0)
        removal = removal or dirs.begin_removal(10**9)
        assert removal is not None
        removal()
        assert not fs.exists(f"{A}/{TOPIC_ID}-0.deleted")
        assert fs.list_dir(f"{B}/moving") == []

    def test_it_moves_back(self, dirs: LogDirs) -> None:
        before = batches(log_of(dirs))
        move(dirs)
        assert batches(move(dirs, A)) == before
        assert dirs.path_of(TP) == A


class TestValidity:
    def test_a_frozen_log_is_read_and_takes_no_append(self, dirs: LogDirs) -> None:
        log = log_of(dirs)
        log.freeze()
        for attempt in (lambda: append(log, 1), lambda: log.truncate_to(3), log.roll):
            with pytest.raises(LogMovingError):
                attempt()
        assert batches(log)
        log.unfreeze()
        append(log, 1, epoch=2)
        assert log.log_end_offset == 11

    def test_a_truncation_makes_the_copy_invalid(self, dirs: LogDirs) -> None:
        copy = dirs.begin_copy(TP, B)
        copy_all(copy)
        assert copy.is_valid
        log_of(dirs).truncate_to(5)
        assert not copy.is_valid

    def test_a_deletion_beyond_the_copy_makes_it_invalid(self, dirs: LogDirs) -> None:
        copy = dirs.begin_copy(TP, B)
        copy.begin(copy.read(1))
        copy.append(copy.read(1), 0)
        log_of(dirs).delete_before(1)
        assert copy.is_valid
        log_of(dirs).delete_before(8)
        assert not copy.is_valid

    def test_an_incomplete_copy_is_refused(self, dirs: LogDirs) -> None:
        copy = dirs.begin_copy(TP, B)
        copy.begin(copy.read(1))
        with pytest.raises(AssertionError, match="lacks batches"):
            copy.complete()

    def test_an_offline_log_is_not_copied(self, dirs: LogDirs) -> None:
        copy = dirs.begin_copy(TP, B)
        log_of(dirs).mark_damaged("for this test")
        with pytest.raises(LogOfflineError, match="for this test"):
            copy.read()
        with pytest.raises(LogOfflineError, match="for this test"):
            dirs.begin_copy(TP, B)
        with pytest.raises(LogDirNotFoundError):
            dirs.begin_copy(TP, "/elsewhere")

    def test_a_discarded_copy_leaves_nothing(self, dirs: LogDirs, fs: MemoryFileSystem) -> None:
        copy = dirs.begin_copy(TP, B)
        copy_all(copy)
        copy.discard()
        assert fs.list_dir(f"{B}/moving") == []

    def complete(self, dirs: LogDirs) -> LogCopy:
        copy = dirs.begin_copy(TP, B)
        copy_all(copy)
        copy.source.freeze()
        dirs.complete_copy(copy)
        return copy

    @pytest.mark.parametrize("seed", range(6))
    def test_a_named_copy_is_discarded_durably(self, dirs: LogDirs, fs: MemoryFileSystem, seed: int) -> None:
        move(dirs)
        move(dirs, A)  # which leaves a .deleted directory in B
        copy = self.complete(dirs)
        copy.discard()
        assert {f"{TOPIC_ID}-0.deleted", f"{TOPIC_ID}-0.deleted.deleted"} <= set(fs.list_dir(B))
        dirs.forget_copy(copy)
        copy.source.unfreeze()
        append(log_of(dirs), 1, epoch=2)
        sync(log_of(dirs))
        fs.crash(random.Random(seed))
        assert f"{TOPIC_ID}-0" not in fs.list_dir(B)
        again = open_dirs(fs)
        assert (again.path_of(TP), log_of(again).log_end_offset, log_of(again).is_damaged) == (A, 11, False)

    def test_a_directory_with_a_copy_that_cannot_be_discarded_is_doubted(
        self, dirs: LogDirs, fs: MemoryFileSystem
    ) -> None:
        other = TopicPartition("u", 0)
        dirs.create_log(other, f"{2:032x}", CONFIG)
        assert dirs.path_of(other) == B
        copy = self.complete(dirs)
        fs.fail_disk(B)
        with pytest.raises(OSError, match="simulated failure"):
            copy.discard()
        dirs.doubt(copy)
        dirs.close(clean=False)
        fs.heal()
        again = LogDirs.open(fs, [A, B], node_id=1)
        again.load({other: (f"{2:032x}", CONFIG)})
        assert again.is_from_older_copy(other)

    @pytest.mark.parametrize("seed", range(6))
    def test_a_retired_source_stays_retired_after_a_power_loss(
        self, dirs: LogDirs, fs: MemoryFileSystem, seed: int
    ) -> None:
        copy = self.complete(dirs)
        dirs.replace_by_copy(TP, copy)
        copy.sync_retirement()
        fs.crash(random.Random(seed))
        assert f"{TOPIC_ID}-0" not in fs.list_dir(A)

    def test_a_start_removes_an_unfinished_copy(self, dirs: LogDirs, fs: MemoryFileSystem) -> None:
        copy_all(dirs.begin_copy(TP, B))
        dirs.close(clean=False)
        again = open_dirs(fs)
        assert (again.path_of(TP), log_of(again).log_end_offset) == (A, 10)
        assert not fs.exists(f"{B}/moving")

    def test_a_copy_that_cannot_be_synced_does_not_replace(self, dirs: LogDirs, fs: MemoryFileSystem) -> None:
        copy = dirs.begin_copy(TP, B)
        copy_all(copy)
        copy.source.freeze()
        fs.fail_disk(B)
        with pytest.raises((OSError, StorageError)):
            dirs.complete_copy(copy)
        copy.source.unfreeze()
        append(log_of(dirs), 1, epoch=2)
        assert (dirs.path_of(TP), log_of(dirs).log_end_offset) == (A, 11)


def test_a_power_loss_at_any_step_of_a_move_loses_nothing() -> None:
    assert list(losses_of_a_move()) == []
