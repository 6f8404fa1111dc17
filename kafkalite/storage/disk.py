"""The operating system's file system: pwrite, fdatasync, mmap, posix_fallocate.

Files are created with mode 0600, directories with 0700, and missing parents of a directory with the default
mode. Only regular files are opened as files: symbolic links are refused, and a pipe or a device could block.
Maps are read-only, because a store into a map on a full disk kills the process before an error can be
returned.
"""

# Tests: tests/storage/test_filesystem.py

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from kafkalite.errors import (
    DataDirectoryError,
    DiskFullError,
    StorageError,
    StorageExhaustedError,
    TooManyOpenFilesError,
    WrongFileTypeError,
)
from kafkalite.storage.filesystem import (
    SHORTAGE_BYTES,
    Buffer,
    File,
    Space,
    run_one,
    set_aside,
    write_atomically,
)
from kafkalite.storage.layout import parent

_FILE_MODE: Final = 0o600
_DIRECTORY_MODE: Final = 0o700
#: O_NONBLOCK changes nothing for regular files; the open of a pipe would wait for a writer without it.
_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_OPEN_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_BOOT_ID_FILE: Final = Path("/proc/sys/kernel/random/boot_id")
_GET_GENERATION: Final = 0x80087601  #: FS_IOC_GETVERSION of Linux on 64 bits
_LOCKS_FILE: Final = Path("/proc/locks")
_FULL_HINT: Final = "free space; nothing was lost"
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}
_NO_DESCRIPTOR: Final = {errno.EMFILE, errno.ENFILE}
#: For how long ``shortage`` reports that a file could not be opened. Clients repeat a read more often.
_REFUSAL_S: Final = 10.0
_READ_ONLY: Final = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_FALLOCATE: Final = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}

#: The number of concurrent syncs. Each waits for a commit of the file system's journal, which concurrent
# syncs share: 1,000 syncs of 500 new logs took 1,950 ms with 1 thread, 240 ms with 4 and 160 ms with 16
# (ext4).
SYNC_THREADS: Final = 16


def _exhausted(error: OSError, path: str) -> StorageExhaustedError | None:
    """Return the error for an exhausted resource, or None if ``error`` has another cause."""
    if error.errno in _FULL:
        return DiskFullError(f"no space left for {path}: {error.strerror}", hint=_FULL_HINT)
    if error.errno in _NO_DESCRIPTOR:
        return TooManyOpenFilesError(
            f"no file descriptor left for {path}: {error.strerror}",
            hint="raise the limit of open files, or lower max.connections; nothing was lost",
        )
    return None


@contextmanager
def _translating(path: str) -> Iterator[None]:
    """Convert an OSError to a StorageExhaustedError if its cause is an exhausted resource."""
    try:
        yield
    except OSError as error:
        exhausted = _exhausted(error, path)
        if exhausted is None:
            raise
        raise exhausted from error


_TYPE_NAMES: Final = {
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def _wrong_type(path: str, mode: int, *, expected: int = stat.S_IFREG) -> WrongFileTypeError | None:
    """Return the error for a file whose ``mode`` is not that of the ``expected`` type, or None."""
    if stat.S_IFMT(mode) == expected:
        return None
    actual = _TYPE_NAMES.get(stat.S_IFMT(mode), "a file of unknown type")
    return WrongFileTypeError(path=path, expected=_TYPE_NAMES[expected], actual=actual)


def _open_regular(path: str, flags: int) -> int:
    """Return a descriptor of a regular file.

    Raises WrongFileTypeError without waiting for anything if ``path`` is of another type; OSError,
    StorageExhaustedError.
    """
    try:
        with _translating(path):
            fd = os.open(path, flags, _FILE_MODE)
    except FileNotFoundError:
        raise
    except OSError as error:  # EISDIR, ELOOP for a link, ENXIO for a socket
        wrong = None
        with suppress(OSError):
            wrong = _wrong_type(path, os.lstat(path).st_mode)
        if isinstance(error, NotADirectoryError):
            wrong = _not_a_directory(path)
        raise wrong or error from error
    wrong = _wrong_type(path, os.fstat(fd).st_mode)
    if wrong is not None:
        os.close(fd)
        raise wrong
    return fd


def _open_directory(path: str) -> int:
    try:
        with _translating(path):
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except NotADirectoryError as error:
        raise _not_a_directory(path) or error from error


def _not_a_directory(path: str) -> WrongFileTypeError | None:
    """Return the error for the first existing path among ``path`` and its parents, or None if that path is a
    directory."""
    while True:
        try:
            return _wrong_type(path, Path(path).stat().st_mode, expected=stat.S_IFDIR)
        except OSError:
            if path == parent(path):
                return None
            path = parent(path)


class RealFile:
    """A file descriptor. Dropping the last reference to the object closes it."""

    __slots__ = ("_fd", "_fs", "_path")

    def __init__(self, fd: int, path: str, fs: RealFileSystem) -> None:
        self._fd = fd
        self._path = path
        self._fs = fs

    def __repr__(self) -> str:
        return f"<RealFile {self._path}>"

    def __del__(self) -> None:
        self.close()

    def write_at(self, position: int, buffer: Buffer) -> None:
        try:
            written = os.pwrite(self._fd, buffer, position)
            if written != len(buffer):
                self._write_rest(position, buffer, written)
        except OSError as error:  # no context manager: this is called for every append
            exhausted = _exhausted(error, self._path)
            if exhausted is None:
                raise
            raise exhausted from error

    def _write_rest(self, position: int, buffer: Buffer, written: int) -> None:
        view = memoryview(buffer)
        while written < len(view):
            written += os.pwrite(self._fd, view[written:], position + written)

    def read_at(self, position: int, length: int) -> bytes:
        parts: list[bytes] = []
        while length > 0:
            part = os.pread(self._fd, length, position)
            if not part:
                break
            parts.append(part)
            position += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def map(self, length: int) -> memoryview:
        if length == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(self._fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def allocate(self, length: int) -> None:
        shortage = self._fs.shortage_of(os.fstatvfs(self._fd), length - self.size())
        if shortage is not None:
            raise DiskFullError(f"no space left for {self._path}: {shortage}", hint=_FULL_HINT)
        try:
            with _translating(self._path):
                os.posix_fallocate(self._fd, 0, length)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
            if length > self.size():  # no space can be reserved; a later write reports a full disk
                os.ftruncate(self._fd, length)

    def truncate(self, length: int) -> None:
        os.ftruncate(self._fd, length)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class RealLock:
    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class RealFileSystem:
    """The operating system's file system. One object can serve several data directories.

    Its threads start with the first ``run_all`` of more than one job, and end when the object is dropped.
    """

    __slots__ = ("_last_refusal", "_min_free_bytes", "_owner", "_threads")

    is_memory = False

    def __init__(self, *, min_free_bytes: int = 0, owner: str = "") -> None:
        """``File.allocate`` leaves ``min_free_bytes`` of the disk free for small files, or a tenth of the
        disk if that is less (R54).

        ``owner`` is the name of the node in errors.
        """
        self._min_free_bytes = min_free_bytes
        self._owner = owner
        #: When an open last failed because no descriptor was left, and the message.
        self._last_refusal = (-math.inf, "")
        self._threads: ThreadPoolExecutor | None = None

    def open(self, path: str, *, create: bool = False) -> File:
        try:
            return self._open(path, _OPEN_FLAGS)
        except FileNotFoundError:
            if not create:
                raise
        except WrongFileTypeError:
            if not create:
                raise
            set_aside(self, path)
        except OSError as error:
            if error.errno not in _READ_ONLY or create:
                raise
            return self._open(path, _READ_FLAGS)  # read-only, for inspection
        return self._open(path, _OPEN_FLAGS | os.O_CREAT)

    def _open(self, path: str, flags: int) -> RealFile:
        try:
            return RealFile(_open_regular(path, flags), path, self)
        except TooManyOpenFilesError as error:
            self._last_refusal = time.monotonic(), error.message
            raise

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def file_size(self, path: str) -> int:
        return os.lstat(path).st_size

    def list_dir(self, path: str) -> list[str]:
        try:
            with _translating(path):
                return sorted(os.listdir(path))  # noqa: PTH208 - called for thousands of directories at start
        except NotADirectoryError as error:
            raise _not_a_directory(path) or error from error

    def make_dirs(self, path: str) -> None:
        try:
            with _translating(path):
                os.makedirs(path, mode=_DIRECTORY_MODE, exist_ok=True)  # noqa: PTH103 - text paths throughout
        except (FileExistsError, NotADirectoryError) as error:
            raise _not_a_directory(path) or error from error

    def rename(self, old: str, new: str) -> None:
        with _translating(new):
            try:
                os.replace(old, new)  # noqa: PTH105 - text paths throughout
            except IsADirectoryError:
                set_aside(self, new)
                os.replace(old, new)  # noqa: PTH105 - text paths throughout

    def unlink(self, path: str) -> None:
        try:
            os.unlink(path)  # noqa: PTH108 - text paths throughout
        except IsADirectoryError:
            set_aside(self, path)

    def remove_tree(self, path: str) -> None:
        with _translating(path):
            shutil.rmtree(path)

    def sync_dir(self, path: str) -> None:
        fd = _open_directory(path)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def shortage(self, path: str) -> str | None:
        refused_s, problem = self._last_refusal
        if time.monotonic() < refused_s + _REFUSAL_S:
            return problem
        shortage = self.shortage_of(os.statvfs(path), SHORTAGE_BYTES)
        return None if shortage is None else f"no space left in {path}: {shortage}"

    def shortage_of(self, disk: os.statvfs_result, wanted_bytes: int) -> str | None:
        """Return why no file on ``disk`` may grow by ``wanted_bytes``, or None."""
        free_bytes = disk.f_bavail * disk.f_frsize
        kept_bytes = min(self._min_free_bytes, disk.f_blocks * disk.f_frsize // 10)
        if wanted_bytes <= 0 or free_bytes - wanted_bytes >= kept_bytes:
            return None
        kept = f", of which {kept_bytes:,} are kept for metadata" if kept_bytes else ""
        return f"{self._owner or 'the disk'} has {free_bytes:,} bytes free there{kept}"

    def space(self, path: str) -> Space:
        disk = os.statvfs(path)
        return Space(disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize)

    def boot_id(self) -> str:
        try:
            with _translating(str(_BOOT_ID_FILE)):
                return _BOOT_ID_FILE.read_text().strip()
        except OSError:  # not Linux
            return ""

    def file_id(self, path: str) -> str:
        with _translating(path):
            descriptor = os.open(path, _READ_FLAGS)
        try:
            status = os.fstat(descriptor)
            # Numbers of inodes are used again, with another generation.
            generation = fcntl.ioctl(descriptor, _GET_GENERATION, bytes(8))
            return f"{status.st_ino}.{generation.hex()}"
        except OSError:  # the file system has no generations
            return f"{status.st_ino}.{status.st_ctime_ns}"  # no program can set the time of the last change
        finally:
            os.close(descriptor)

    def read_bytes(self, path: str) -> bytes:
        file = self._open(path, _READ_FLAGS)
        return file.read_at(0, file.size())

    def write_atomically(self, path: str, data: bytes, *, sync_name: bool = True) -> None:
        if not sync_name:
            write_atomically(self, path, data, sync_name=False)
            return
        # Open the directory first: if no descriptor is left, the file must stay unchanged.
        fd = _open_directory(parent(path))
        try:
            write_atomically(self, path, data, sync_name=False)
            os.fsync(fd)
        finally:
            os.close(fd)

    def run_all(self, jobs: Sequence[Callable[[], None]]) -> list[Exception | None]:
        if len(jobs) < 2:
            return [run_one(job) for job in jobs]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(SYNC_THREADS, "kafkalite-disk")
        return list(self._threads.map(run_one, jobs))

    def lock(self, path: str) -> RealLock:
        fd = _open_regular(path, _OPEN_FLAGS | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _pid_in(fd)
            os.close(fd)
            raise DataDirectoryError(
                f"{parent(path)} is in use by {f'process {holder}' if holder else 'another process'}",
                hint="stop it, or choose another directory",
            ) from error
        with suppress(OSError):  # if the disk is full, other processes cannot read who holds the lock
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d" % os.getpid(), 0)
        return RealLock(fd)


def lock_holder(path: str) -> int | None:
    """Return the id of the process that has locked the file ``path``. Return None if no process has, or if
    the file cannot be read.

    On Linux this does not try to take the lock, because a process that starts meanwhile would be refused.
    """
    try:
        fd = _open_regular(path, _READ_FLAGS)
    except (OSError, StorageError):
        return None
    try:
        holder = _pid_in(fd)
        locks = _flock_holders(os.fstat(fd).st_ino)
        if locks is not None:
            return holder if holder in locks else None
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return holder
    else:
        return None
    finally:
        os.close(fd)


def _flock_holders(inode: int) -> set[int] | None:
    """Return the ids of the processes that hold, or wait for, a flock on a file with this inode number; None
    if the system does not list locks."""
    try:
        lines = _LOCKS_FILE.read_text().splitlines()
    except OSError:  # not Linux
        return None
    rows = [line.replace("->", "").split() for line in lines]
    return {int(row[4]) for row in rows if row[1] == "FLOCK" and row[5].rpartition(":")[2] == str(inode)}


def _pid_in(fd: int) -> int | None:
    text = os.pread(fd, 20, 0)
    return int(text) if text.isdigit() else None
