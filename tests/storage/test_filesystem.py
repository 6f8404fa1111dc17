"""What every FileSystem must do, tested with the disk (disk.py), memory, and the recorder."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kafkalite.errors import DataDirectoryError, DiskFullError, TooManyOpenFilesError, WrongFileTypeError
from kafkalite.limits import MIB
from kafkalite.storage import disk
from kafkalite.storage.disk import RealFile, RealFileSystem
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.recording_filesystem import RecordingFileSystem


@pytest.fixture(params=["disk", "memory", "crashable", "recording"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[FileSystem, str]]:
    """Yield (a file system, a directory in it)."""
    match request.param:
        case "disk":
            yield RealFileSystem(), str(tmp_path)
        case "memory":
            fs = MemoryFileSystem()
            fs.make_dirs("/d")
            yield fs, "/d"
        case "crashable":
            fs = MemoryFileSystem(crashable=True)
            fs.make_dirs("/d")
            yield fs, "/d"
        case _:
            recording = RecordingFileSystem(MemoryFileSystem())
            recording.make_dirs("/d")
            yield recording, "/d"


def test_bytes_are_read_where_they_were_written(place: tuple[FileSystem, str]) -> None:
    fs, path = place
    file = fs.open(path + "/f", create=True)
    file.write_at(3, b"abc")
    file.write_at(1, memoryview(b"xy"))
    assert file.size() == 6
    assert file.read_at(0, 100) == b"\0xyabc"
    assert file.read_at(4, 1) == b"b"
    assert file.read_at(6, 1) == b""
    file.sync()
    file.close()
    file.close()
    assert fs.read_bytes(path + "/f") == b"\0xyabc"
    assert fs.file_size(path + "/f") == 6


def test_a_map_shows_later_writes_and_outlives_the_file(place: tuple[FileSystem, str]) -> None:
    fs, path = place
    file = fs.open(path + "/f", create=True)
    file.allocate(100_000)
    assert file.size() == 100_000
    view = file.map(100_000)
    file.write_at(99_998, b"ab")
    assert bytes(view[99_998:]) == b"ab"
    assert view.readonly
    fs.rename(path + "/f", path + "/g")
    fs.unlink(path + "/g")
    file.close()
    assert bytes(view[99_997:]) == b"\0ab"


def test_an_empty_map(place: tuple[FileSystem, str]) -> None:
    fs, path = place
    assert len(fs.open(path + "/f", create=True).map(0)) == 0


def test_allocate_grows_only_and_truncate_cuts_and_grows_with_zeros(place: tuple[FileSystem, str]) -> None:
    fs, path = place
    file = fs.open(path + "/f", create=True)
    file.write_at(0, b"abcdef")
    file.allocate(3)
    assert file.read_at(0, 10) == b"abcdef"
    file.truncate(2)
    file.truncate(4)
    assert file.read_at(0, 10) == b"ab\0\0"
    file.allocate(200_000)
    file.write_at(199_999, b"z")
    assert file.read_at(0, 4) == b"ab\0\0"
    assert file.read_at(199_998, 9) == b"\0z"


def test_names(place: tuple[FileSystem, str]) -> None:
    fs, path = place
    fs.make_dirs(path + "/a/b")
    fs.make_dirs(path + "/a/b")
    fs.open(path + "/a/b/f", create=True)
    fs.open(path + "/a/e", create=True)
    assert fs.list_dir(path + "/a") == ["b", "e"]
    fs.sync_dir(path + "/a")
    fs.rename(path + "/a/b", path + "/a/c")
    assert fs.exists(path + "/a/c/f")
    assert not fs.exists(path + "/a/b/f")
    assert not fs.exists(path + "/a/e/f")
    fs.remove_tree(path + "/a/c")
    fs.unlink(path + "/a/e")
    assert fs.list_dir(path + "/a") == []


def test_a_missing_file_is_not_found(place: tuple[FileSystem, str]) -> None:
    fs, path = place
    for action in (fs.open, fs.unlink, fs.read_bytes, fs.file_size, fs.list_dir, fs.sync_dir):
        with pytest.raises(FileNotFoundError):
            action(path + "/missing")
    with pytest.raises(FileNotFoundError):
        fs.rename(path + "/missing", path + "/x")


def test_a_directory_in_the_place_of_a_file_is_an_error_and_set_aside_by_a_write(
    place: tuple[FileSystem, str],
) -> None:
    fs, path = place
    name = path + "/f"

    def put_directory() -> None:
        if fs.exists(name):
            fs.unlink(name)
        fs.make_dirs(name)
        fs.write_atomically(name + "/inside", b"kept")

    put_directory()
    for action in (fs.open, fs.read_bytes, fs.lock):
        with pytest.raises(WrongFileTypeError, match=f"{name} is a directory, but must be a regular file"):
            action(name)
    fs.open(name, create=True).write_at(0, b"new")
    assert fs.read_bytes(name) == b"new"
    with pytest.raises(WrongFileTypeError, match=f"{name} is a regular file, but must be a directory"):
        fs.list_dir(name)
    put_directory()
    fs.write_atomically(name, b"newer")
    assert fs.read_bytes(name) == b"newer"
    put_directory()
    fs.unlink(name)
    assert not fs.exists(name)
    for number in (1, 2, 3):
        assert fs.read_bytes(f"{name}.damaged-{number}/inside") == b"kept"
    put_directory()
    fs.remove_tree(name)
    assert fs.list_dir(path) == ["f.damaged-1", "f.damaged-2", "f.damaged-3"]


def test_an_atomic_write_replaces_the_file_and_leaves_no_other(place: tuple[FileSystem, str]) -> None:
    fs, path = place
    fs.write_atomically(path + "/f", b"a longer text")
    fs.write_atomically(path + "/f", b"short")
    assert fs.read_bytes(path + "/f") == b"short"
    assert fs.list_dir(path) == ["f"]


def test_a_lock_is_held_once(place: tuple[FileSystem, str]) -> None:
    fs, path = place
    lock = fs.lock(path + "/.lock")
    with pytest.raises(DataDirectoryError, match="in use"):
        fs.lock(path + "/.lock")
    lock.release()
    lock.release()
    fs.lock(path + "/.lock").release()


# --- only the disk -------------------------------------------------------------------------------------


def test_files_and_directories_are_private(tmp_path: Path) -> None:
    fs = RealFileSystem()
    fs.make_dirs(str(tmp_path / "d"))
    fs.open(str(tmp_path / "d" / "f"), create=True)
    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "d" / "f").stat().st_mode) == 0o600


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"secret")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    fs = RealFileSystem()
    for action in (fs.open, fs.read_bytes, fs.lock):
        with pytest.raises(WrongFileTypeError, match="link is a symbolic link, but must be a regular file"):
            action(str(tmp_path / "link"))


def test_the_holder_of_a_lock_is_read_without_taking_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, path = RealFileSystem(), str(tmp_path / ".lock")
    assert disk.lock_holder(path) is None
    lock = fs.lock(path)
    with monkeypatch.context() as without:
        without.setattr(disk.fcntl, "flock", None)  # a lock that is tried could refuse a broker that starts
        assert disk.lock_holder(path) == os.getpid()
    monkeypatch.setattr(disk, "_LOCKS_FILE", tmp_path / "missing")  # another system
    assert disk.lock_holder(path) == os.getpid()
    lock.release()
    assert disk.lock_holder(path) is None
    monkeypatch.undo()
    assert disk.lock_holder(path) is None


def test_dropping_a_file_closes_it(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    file = RealFileSystem().open(str(tmp_path / "f"), create=True)
    assert "f>" in repr(file)
    del file
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_partial_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, position: real(fd, bytes(data)[:3], position))
    file = RealFileSystem().open(str(tmp_path / "f"), create=True)
    file.write_at(0, b"0123456789")
    assert file.read_at(0, 99) == b"0123456789"


def fails_with(number: int) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("function", "action"),
    [
        ("pwrite", lambda fs, path: fs.open(path + "/f", create=True).write_at(0, b"x")),
        ("posix_fallocate", lambda fs, path: fs.open(path + "/f", create=True).allocate(1)),
        ("open", lambda fs, path: fs.open(path + "/f", create=True)),
        ("makedirs", lambda fs, path: fs.make_dirs(path + "/x")),
        ("replace", lambda fs, path: fs.rename(path + "/a", path + "/b")),
    ],
)
def test_a_full_disk_has_an_error_of_its_own(
    function: str, action: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, function, fails_with(28))
    with pytest.raises(DiskFullError):
        action(RealFileSystem(), str(tmp_path))
    monkeypatch.setattr(os, function, fails_with(5))
    with pytest.raises(OSError, match="Input/output"):
        action(RealFileSystem(), str(tmp_path))


def test_r26_a_sync_that_finds_the_disk_full_is_a_failed_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RealFileSystem().open(str(tmp_path / "f"), create=True)
    monkeypatch.setattr(os, "fdatasync", fails_with(28))
    with pytest.raises(OSError):
        file.sync()


def test_without_fallocate_files_are_grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", fails_with(95))
    file = RealFileSystem().open(str(tmp_path / "f"), create=True)
    file.allocate(10)
    file.allocate(5)
    assert file.size() == 10


def test_a_failed_atomic_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = RealFileSystem()
    fs.write_atomically(str(tmp_path / "f"), b"old")
    monkeypatch.setattr(os, "pwrite", fails_with(28))
    with pytest.raises(DiskFullError):
        fs.write_atomically(str(tmp_path / "f"), b"new")
    assert fs.read_bytes(str(tmp_path / "f")) == b"old"
    assert fs.list_dir(str(tmp_path)) == ["f"]


def test_a_read_only_file_is_opened_for_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    real = os.open

    def refuse_writing(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse_writing)
    file = RealFileSystem().open(str(tmp_path / "f"))
    assert isinstance(file, RealFile)
    assert file.read_at(0, 9) == b"abc"


def test_a_disk_without_room_for_one_batch_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of the default max.message.bytes may be refused, so the shortage is reported."""
    fs = RealFileSystem()
    disk = os.statvfs(tmp_path)
    fields = {"f_bavail": MIB // 4096, "f_frsize": 4096, "f_blocks": disk.f_blocks}
    assert fs.shortage_of(SimpleNamespace(**fields), MIB + 1) is not None  # type: ignore[arg-type]
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**fields))
    assert "1,048,576 bytes free" in str(fs.shortage(str(tmp_path)))


def test_r54_allocation_keeps_room_for_small_files(place: tuple[FileSystem, str]) -> None:
    fs, path = place
    assert fs.shortage(path) is None
    if not isinstance(fs, MemoryFileSystem):
        return
    file = fs.open(path + "/f", create=True)
    fs.capacity_bytes, fs.min_free_bytes = 10_000_000, 1_000
    file.allocate(9_999_000)
    with pytest.raises(DiskFullError, match="no space left"):
        file.allocate(9_999_001)
    file.allocate(9_999_000)
    assert "full" in str(fs.shortage(path))
    fs.write_atomically(path + "/g", bytes(1_000))
    file.truncate(5_000_000)
    assert fs.shortage(path) is None


def test_r54_a_disk_with_little_space_is_named_with_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = RealFileSystem(min_free_bytes=64 * 2**20, owner="node 3")
    file = fs.open(f"{tmp_path}/f", create=True)
    disk = os.statvfs_result((4096, 4096, 10**6, 20_000, 20_000, 0, 0, 0, 0, 255))  # 78 MiB are free
    monkeypatch.setattr("kafkalite.storage.disk.os.fstatvfs", lambda _fd: disk)
    file.allocate(10 * 2**20)
    with pytest.raises(DiskFullError, match=r"for .*/f: node 3 has 81,920,000 bytes free .* 67,108,864"):
        file.allocate(26 * 2**20)
    tiny = os.statvfs_result((4096, 4096, 1_000, 200, 200, 0, 0, 0, 0, 255))
    assert fs.shortage_of(tiny, 1) is None  # a tenth of it is kept
    assert fs.shortage_of(tiny, 101 * 4096) is not None


def test_r55_without_a_descriptor_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs, path = RealFileSystem(), f"{tmp_path}/f"
    fs.write_atomically(path, b"before")
    opened = os.open

    def refuse_directories(path: str, flags: int, *arguments: int) -> int:
        if flags & os.O_DIRECTORY:
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path, flags, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr("kafkalite.storage.disk.os.open", refuse_directories)
        with pytest.raises(TooManyOpenFilesError, match="no file descriptor left"):
            fs.write_atomically(path, b"after")
        with pytest.raises(TooManyOpenFilesError):
            fs.sync_dir(str(tmp_path))
    assert fs.read_bytes(path) == b"before"
