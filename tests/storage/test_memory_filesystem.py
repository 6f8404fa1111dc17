"""The simulated disk that loses unsynced data."""

from __future__ import annotations

import random

import pytest

from kafkalite.errors import DiskFullError, WrongFileTypeError
from kafkalite.storage.layout import TEMPORARY_SUFFIX
from kafkalite.storage.memory_filesystem import PAGE_BYTES, SECTOR_BYTES, MemoryFileSystem
from proof.disk_trees import disk_with_files, tree_of


def crashed(prepare: object, seed: int) -> MemoryFileSystem:
    fs = MemoryFileSystem(crashable=True)
    fs.make_dirs("/d")
    fs.sync_dir("/")
    prepare(fs)  # type: ignore[operator]
    fs.crash(random.Random(seed))
    return fs


def test_what_was_synced_survives_every_crash() -> None:
    def prepare(fs: MemoryFileSystem) -> None:
        file = fs.open("/d/f", create=True)
        file.write_at(0, b"synced" * 1000)
        file.sync()
        fs.sync_dir("/d")
        file.write_at(6000, b"not synced" * 1000)

    found = {crashed(prepare, seed).read_bytes("/d/f") for seed in range(60)}
    assert all(data[:6000] == b"synced" * 1000 for data in found)
    assert len(found) > 10
    assert any(len(data) == 6000 for data in found)
    assert any(len(data) == 16_000 for data in found)


def test_an_unsynced_overwrite_leaves_old_and_new_sectors() -> None:
    def prepare(fs: MemoryFileSystem) -> None:
        file = fs.open("/d/f", create=True)
        file.write_at(0, b"o" * 3 * PAGE_BYTES)
        file.sync()
        fs.sync_dir("/d")
        file.write_at(0, b"n" * 3 * PAGE_BYTES)

    seen: set[bytes] = set()
    for seed in range(100):
        data = crashed(prepare, seed).read_bytes("/d/f")
        for position in range(0, len(data), SECTOR_BYTES):
            assert len(set(data[position : position + SECTOR_BYTES])) == 1, "a sector is never torn"
        seen.add(data)
    assert b"o" * 3 * PAGE_BYTES in seen
    assert any(b"on" in data for data in seen) and any(b"no" in data for data in seen)


def test_a_name_survives_only_by_a_sync_of_its_directory() -> None:
    def prepare(fs: MemoryFileSystem) -> None:
        fs.open("/d/a", create=True).sync()
        fs.open("/d/b", create=True)
        fs.sync_dir("/d")
        fs.open("/d/c", create=True)
        fs.rename("/d/a", "/d/x")
        fs.unlink("/d/b")

    found = {tuple(crashed(prepare, seed).list_dir("/d")) for seed in range(200)}
    assert ("a", "b") in found
    assert ("c", "x") in found
    assert len(found) == 8
    assert all(("a" in names) != ("x" in names) for names in found), "a rename is done or not"


def test_a_truncation_may_be_undone() -> None:
    def prepare(fs: MemoryFileSystem) -> None:
        file = fs.open("/d/f", create=True)
        file.write_at(0, b"abcdef")
        file.sync()
        fs.sync_dir("/d")
        file.truncate(2)

    assert {crashed(prepare, seed).read_bytes("/d/f") for seed in range(20)} == {b"ab", b"abcdef"}


def test_a_crash_releases_locks() -> None:
    fs = crashed(lambda fs: fs.lock("/d/.lock"), 1)
    fs.lock("/d/.lock")


def test_a_failed_sync_happens_once_and_syncs_nothing() -> None:
    fs = MemoryFileSystem(crashable=True)
    file = fs.open("/f", create=True)
    fs.sync_dir("/")
    file.write_at(0, b"x")
    fs.fail_next_sync()
    with pytest.raises(OSError, match="fdatasync"):
        file.sync()
    assert fs.sync_count == 1
    tree = {seed: crash_copy(fs, seed) for seed in range(20)}
    assert b"" in tree.values()
    file.sync()


def crash_copy(fs: MemoryFileSystem, seed: int) -> bytes:
    root = fs._root
    fs.crash(random.Random(seed))
    data = fs.read_bytes("/f")
    fs._root = root
    return data


def test_writes_fail_as_often_as_requested() -> None:
    fs = MemoryFileSystem()
    file = fs.open("/f", create=True)
    fs.fail_next_write(2)
    for _ in range(2):
        with pytest.raises(OSError, match="pwrite"):
            file.write_at(0, b"x")
    file.write_at(0, b"x")


def test_a_full_disk_writes_what_fits_and_raises() -> None:
    fs = MemoryFileSystem(capacity_bytes=10)
    file = fs.open("/f", create=True)
    file.write_at(0, b"12345678")
    with pytest.raises(DiskFullError):
        file.write_at(8, b"9012")
    assert file.read_at(0, 99) == b"1234567890"
    file.write_at(0, b"x")  # overwriting needs no space
    with pytest.raises(DiskFullError):
        file.allocate(11)
    with pytest.raises(DiskFullError):
        fs.open("/g", create=True)
    with pytest.raises(DiskFullError):
        fs.write_atomically("/f", b"y")
    fs.capacity_bytes = 100
    file.allocate(11)
    assert fs.used_bytes() == 11


def test_a_failed_atomic_write_leaves_no_file() -> None:
    fs = MemoryFileSystem(capacity_bytes=5)
    with pytest.raises(DiskFullError):
        fs.write_atomically("/f", b"too long")
    assert fs.list_dir("/") == []


def test_a_tree_is_loaded_and_returned() -> None:
    fs = disk_with_files({"/a/b/f": b"1", "/g": b"2"}, ["/empty"])
    assert tree_of(fs) == {"/a/b/f": b"1", "/g": b"2"}
    assert fs.list_dir("/empty") == []
    fs.crash(random.Random(1))
    assert tree_of(fs) == {"/a/b/f": b"1", "/g": b"2"}


def test_directories_and_files_are_not_mixed_up() -> None:
    fs = disk_with_files({"/a/f": b""})
    with pytest.raises(WrongFileTypeError, match="/a is a directory, but must be a regular file"):
        fs.open("/a")
    with pytest.raises(WrongFileTypeError, match="/a/f is a regular file, but must be a directory"):
        fs.make_dirs("/a/f/g")
    assert repr(fs.open("/a/f")) == "<MemoryFile /a/f>"


def test_only_a_crashable_disk_can_crash() -> None:
    with pytest.raises(AssertionError, match="crashable"):
        MemoryFileSystem().crash(random.Random(1))


def test_an_atomic_write_survives_every_crash() -> None:
    for seed in range(20):
        fs = MemoryFileSystem(crashable=True)
        fs.open("/other", create=True)
        fs.write_atomically("/f", b"old")
        fs.write_atomically("/f", b"new")
        syncs = fs.sync_count
        fs.crash(random.Random(seed))
        assert fs.list_dir("/") == ["f", "other"], "the sync of the directory includes all names"
        assert (fs.read_bytes("/f"), syncs) == (b"new", 2)


def test_an_atomic_write_removes_the_temporary_file_of_an_interrupted_one() -> None:
    fs = MemoryFileSystem()
    fs.open(f"/f{TEMPORARY_SUFFIX}", create=True).write_at(0, b"half of it")
    fs.write_atomically("/f", b"all")
    assert fs.list_dir("/") == ["f"]
    assert fs.read_bytes("/f") == b"all"


def test_an_atomic_write_without_its_name_may_be_undone_by_a_crash() -> None:
    left: set[bytes] = set()
    for seed in range(20):
        fs = MemoryFileSystem(crashable=True)
        fs.write_atomically("/f", b"old")
        fs.write_atomically("/f", b"new", sync_name=False)
        fs.crash(random.Random(seed))
        left.add(fs.read_bytes("/f"))
    assert left == {b"old", b"new"}
