"""R24: recovery points are appended as they move, and the file is replaced when it has grown."""

from __future__ import annotations

import random

import pytest

from kafkalite.storage.checkpoints import RecoveryPoint, decode_recovery_points
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.storage.recovery_points import MIN_APPENDED_BYTES, RecoveryPointsFile

PATH = "/data/recovery-points"
COPY = "/data/recovery-points.copy"


@pytest.fixture
def fs() -> MemoryFileSystem:
    fs = MemoryFileSystem()
    fs.make_dirs("/data")
    return fs


def stored(fs: MemoryFileSystem) -> dict[str, RecoveryPoint]:
    again = RecoveryPointsFile(fs, "/data")
    again.open()
    return again.points


def test_changes_are_appended_and_only_if_there_are_any(fs: MemoryFileSystem) -> None:
    points = RecoveryPointsFile(fs, "/data")
    points.open()
    assert points.write({f"log-{number}": RecoveryPoint(number) for number in range(100)})
    first = fs.read_bytes(PATH)
    assert points.write({"log-7": RecoveryPoint(8), "log-9": None})
    appended = fs.read_bytes(PATH)
    assert appended.startswith(first)
    assert len(appended) < len(first) + 100, "a write costs what has changed"
    assert not points.write({"log-7": RecoveryPoint(8)})
    assert fs.read_bytes(PATH) == appended
    assert stored(fs) == points.points
    assert points.points["log-7"] == RecoveryPoint(8) and "log-9" not in points.points


def test_the_file_is_replaced_before_it_is_much_longer_than_its_points(fs: MemoryFileSystem) -> None:
    points = RecoveryPointsFile(fs, "/data")
    largest = 0
    for number in range(3000):
        points.write({"log": RecoveryPoint(number)})
        largest = max(largest, fs.file_size(PATH))
    assert MIN_APPENDED_BYTES < largest < MIN_APPENDED_BYTES + 1024
    assert stored(fs) == {"log": RecoveryPoint(2999)}


def test_r25_the_newer_point_of_the_file_and_its_copy_counts(fs: MemoryFileSystem) -> None:
    points = RecoveryPointsFile(fs, "/data")
    points.write({"a": RecoveryPoint(1), "b": RecoveryPoint(1)})
    older = fs.read_bytes(PATH)
    points.write({"a": RecoveryPoint(2), "c": RecoveryPoint(1)})
    newest = points.points
    fs.write_atomically(PATH, older)
    assert stored(fs) == newest
    fs.unlink(PATH)
    assert stored(fs) == newest
    points.write({"a": RecoveryPoint(3)})
    fs.write_atomically(COPY, older)
    assert stored(fs) == newest | {"a": RecoveryPoint(3)}
    fs.write_atomically(PATH, b"x" + fs.read_bytes(PATH)[1:])
    assert stored(fs) == {"a": RecoveryPoint(1), "b": RecoveryPoint(1)}


def test_a_removed_point_never_comes_back_from_the_copy() -> None:
    for crash_after in range(6):
        fs = MemoryFileSystem(crashable=True)
        fs.make_dirs("/data")
        fs.sync_dir("/")
        points = RecoveryPointsFile(fs, "/data")
        points.write({"a": RecoveryPoint(1), "b": RecoveryPoint(1)})
        points.write({"a": None})
        fs.crash(random.Random(crash_after))
        assert stored(fs) == {"b": RecoveryPoint(1)}


def test_after_a_failure_the_next_write_has_everything(fs: MemoryFileSystem) -> None:
    points = RecoveryPointsFile(fs, "/data")
    points.write({"a": RecoveryPoint(1)})
    fs.fail_next_sync()
    with pytest.raises(OSError):
        points.write({"a": RecoveryPoint(2)})
    assert points.has_failed
    assert points.write({})
    assert not points.has_failed
    assert stored(fs) == {"a": RecoveryPoint(2)}


def test_a_file_that_was_removed_or_cut_meanwhile_is_written_again(fs: MemoryFileSystem) -> None:
    points = RecoveryPointsFile(fs, "/data")
    points.write({"a": RecoveryPoint(1), "b": RecoveryPoint(1)})
    fs.unlink(PATH)
    points.write({"a": RecoveryPoint(2)})
    assert stored(fs) == {"a": RecoveryPoint(2), "b": RecoveryPoint(1)}
    fs.open(PATH).truncate(10)
    points.write({"a": RecoveryPoint(3)})
    assert stored(fs) == {"a": RecoveryPoint(3), "b": RecoveryPoint(1)}
    assert decode_recovery_points(fs.read_bytes(PATH)).problem is None
