"""The interface to the disk. ``storage.disk`` implements it; implementations in memory serve tests.

Paths are text with ``/``. Every method may raise OSError, and DiskFullError if the disk is full, except
``File.sync``: whatever error it raises, the unsynced data of that file must be considered lost (R26).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kafkalite.storage.layout import TEMPORARY_SUFFIX, parent

Buffer = bytes | bytearray | memoryview


class File(Protocol):
    """An open file. Dropping the last reference closes it; ``close`` closes it at once."""

    def write_at(self, position: int, buffer: Buffer) -> None:
        """Write all of ``buffer``. After an error the bytes from ``position`` on are undefined."""
        ...

    def read_at(self, position: int, length: int) -> bytes:
        """Return up to ``length`` bytes; fewer only at the end of the file."""
        ...

    def map(self, length: int) -> memoryview:
        """Return a read-only view of the first ``length`` bytes, which must exist.

        It shows later writes to those bytes until ``allocate`` makes the file longer; then take a new
        view. It stays valid after close, rename and unlink. Touching bytes that ``truncate`` has
        removed since kills the process.
        """
        ...

    def size(self) -> int: ...

    def allocate(self, length: int) -> None:
        """Make the file at least ``length`` bytes long; new bytes are zero, with space on the disk."""
        ...

    def truncate(self, length: int) -> None: ...

    def sync(self) -> None:
        """Return when the file's bytes and size are on stable storage. May be called from any thread."""
        ...

    def close(self) -> None: ...


class Lock(Protocol):
    def release(self) -> None: ...


class FileSystem(Protocol):
    """A file system. Names are durable only after ``sync_dir`` of the directory that holds them."""

    def open(self, path: str, *, create: bool = False) -> File:
        """Open for reading and writing; ``create`` makes a missing file. Raises FileNotFoundError."""
        ...

    def exists(self, path: str) -> bool: ...

    def file_size(self, path: str) -> int: ...

    def list_dir(self, path: str) -> list[str]:
        """Return the names inside, sorted."""
        ...

    def make_dirs(self, path: str) -> None:
        """Create the directory and its parents. An existing one is no error."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Rename within one directory; replaces ``new``."""
        ...

    def unlink(self, path: str) -> None: ...

    def remove_tree(self, path: str) -> None: ...

    def sync_dir(self, path: str) -> None: ...

    def read_bytes(self, path: str) -> bytes: ...

    def write_atomically(self, path: str, data: bytes, *, sync_name: bool = True) -> None:
        """Replace the whole file durably: a crash leaves the old or the new bytes, never a mix.

        Without ``sync_name`` the new bytes are durable only after ``sync_dir`` of the directory.
        """
        ...

    def run_all(self, jobs: Sequence[Callable[[], None]]) -> list[Exception | None]:
        """Run jobs that wait for the disk, concurrently if that helps. Returns each job's exception or
        None, in order.

        No two jobs may touch the same file. A disk serves many concurrent syncs together.
        """
        ...

    def lock(self, path: str) -> Lock:
        """Hold ``path`` until released. Raises DataDirectoryError if another process holds it."""
        ...


def write_atomically(self: FileSystem, path: str, data: bytes, *, sync_name: bool = True) -> None:
    """Implements ``FileSystem.write_atomically``: the file is durable before it gets its name."""
    temporary = path + TEMPORARY_SUFFIX
    file = self.open(temporary, create=True)
    try:
        file.truncate(0)
        file.write_at(0, data)
        file.sync()
    except BaseException:
        self.unlink(temporary)
        raise
    finally:
        file.close()
    self.rename(temporary, path)
    if sync_name:
        self.sync_dir(parent(path))


def unlink_existing(fs: FileSystem, paths: Iterable[str]) -> None:
    """Unlink the files of ``paths`` that exist, in order."""
    for path in paths:
        if fs.exists(path):
            fs.unlink(path)


def run_one(job: Callable[[], None]) -> Exception | None:
    """Run ``job``. Return its exception, or None."""
    try:
        job()
    except Exception as error:
        return error
    return None
