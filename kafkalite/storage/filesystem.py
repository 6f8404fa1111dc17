"""The interface to the disk. ``disk`` implements it with real files, ``memory_filesystem`` in memory.

Paths are text with ``/``. Every method may raise OSError, DiskFullError if the disk is full, and
TooManyOpenFilesError if no file descriptor is left. After any error of ``File.sync``, the unsynced data of
that file must be considered lost (R26).

A directory, symbolic link, pipe, socket or device in the place of a file is never read: WrongFileTypeError is
raised at once. But ``open`` with ``create`` renames it to a name with ``.damaged-`` and creates the file, and
``rename`` and ``unlink`` give such a name to a directory in the place of a file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from kafkalite.limits import MIB
from kafkalite.log_fields import Fields
from kafkalite.storage.layout import DAMAGED_SUFFIX, DELETED_SUFFIX, TEMPORARY_SUFFIX, parent

logger = logging.getLogger(__name__)

#: Less space than this for records counts as a shortage. A batch of the default max.message.bytes needs less.
SHORTAGE_BYTES: Final = 2 * MIB

Buffer = bytes | bytearray | memoryview


class File(Protocol):
    """An open file. ``close`` closes it at once; dropping the last reference closes it too."""

    def write_at(self, position: int, buffer: Buffer) -> None:
        """Write all of ``buffer``. After an error the bytes from ``position`` on are undefined."""
        ...

    def read_at(self, position: int, length: int) -> bytes:
        """Return up to ``length`` bytes. Fewer are returned only at the end of the file."""
        ...

    def map(self, length: int) -> memoryview:
        """Return a read-only view of the first ``length`` bytes, which must exist.

        The view shows later writes to those bytes until the file becomes longer; then a new view is needed.
        The view remains valid after close, rename and unlink. Accessing bytes that ``truncate`` has removed
        may kill the process.
        """
        ...

    def size(self) -> int: ...

    def allocate(self, length: int) -> None:
        """Make the file at least ``length`` bytes long. New bytes are zero. Their disk space is reserved if
        the operating system supports that.

        Raises DiskFullError, also if less free space than a configured minimum would remain (R54).
        """
        ...

    def truncate(self, length: int) -> None: ...

    def sync(self) -> None:
        """Wait until the file's bytes and size are on stable storage. May be called from any thread."""
        ...

    def close(self) -> None: ...


class Lock(Protocol):
    def release(self) -> None: ...


class Space(NamedTuple):
    """The size of a disk, and the bytes on it that are free for this process."""

    total_bytes: int
    free_bytes: int


class FileSystem(Protocol):
    """A file system. A new, changed or removed name is durable only after ``sync_dir`` of its directory."""

    #: Whether the files are in memory: no call waits, open files use no descriptors, and only one thread may
    #: use the file system.
    is_memory: bool

    def open(self, path: str, *, create: bool = False) -> File:
        """Open a file for reading and, if it is writable, for writing. If ``create``, create a missing file.

        Raises FileNotFoundError, WrongFileTypeError.
        """
        ...

    def exists(self, path: str) -> bool: ...

    def file_size(self, path: str) -> int: ...

    def list_dir(self, path: str) -> list[str]:
        """Return the names in the directory, sorted. Raises FileNotFoundError, WrongFileTypeError."""
        ...

    def make_dirs(self, path: str) -> None:
        """Create the directory and its missing parents. Has no effect if the directory exists."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Rename a file or directory. An existing file ``new`` is replaced.

        ``new`` is in the same directory, or in another one on the same disk. Then both directories must be
        synced, that of ``new`` first.
        """
        ...

    def unlink(self, path: str) -> None: ...

    def remove_tree(self, path: str) -> None: ...

    def sync_dir(self, path: str) -> None: ...

    def shortage(self, path: str) -> str | None:
        """Return why files in the directory ``path`` cannot grow by SHORTAGE_BYTES, or why no file descriptor
        was left in the last seconds. Return None if there is neither problem."""
        ...

    def space(self, path: str) -> Space:
        """Return the size of the disk on which the directory ``path`` is, and its free bytes."""
        ...

    def boot_id(self) -> str:
        """Return the id of the system's current boot, or "" if it is unknown. A reboot may lose unsynced
        bytes."""
        ...

    def file_id(self, path: str) -> str:
        """Return a text that a copy of the file does not have, even one with the same name, content and times
        (``cp -a``). Raises FileNotFoundError."""
        ...

    def read_bytes(self, path: str) -> bytes:
        """Return the whole file. Raises FileNotFoundError, WrongFileTypeError."""
        ...

    def write_atomically(self, path: str, data: bytes, *, sync_name: bool = True) -> None:
        """Create a file or replace all of its bytes, durably. A crash leaves the old or the new bytes.

        If ``sync_name`` is False, the new bytes are durable only after ``sync_dir`` of the directory.
        """
        ...

    def run_all(self, jobs: Sequence[Callable[[], None]]) -> list[Exception | None]:
        """Run jobs that wait for the disk, concurrently if that is faster. Return one item per job, in order:
        its exception, or None.

        No two jobs may use the same file. A disk serves many concurrent syncs together.
        """
        ...

    def lock(self, path: str) -> Lock:
        """Lock the file ``path`` until the returned lock is released. Raises DataDirectoryError if it is
        already locked."""
        ...


def write_atomically(self: FileSystem, path: str, data: bytes, *, sync_name: bool = True) -> None:
    """Implements ``FileSystem.write_atomically``. The content is durable before the file gets its name."""
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


def set_aside(fs: FileSystem, path: str) -> str:
    """Rename the file or directory at ``path``, which must exist, to the next free name with ``.damaged-``
    and a number. Return the new path."""
    kept = damaged_name(fs, path)
    fs.rename(path, kept)
    logger.warning("renamed a path that is not a regular file %s", Fields(path=path, kept=kept))
    return kept


def damaged_name(fs: FileSystem, path: str) -> str:
    """Return ``path`` with ``.damaged-`` and the first number for which no such file exists."""
    number = 1
    while fs.exists(kept := f"{path}{DAMAGED_SUFFIX}{number}"):
        number += 1
    return kept


def retired_name(fs: FileSystem, path: str) -> str:
    """Return the first free name for the directory ``path`` of a log that is to be removed later."""
    retired = path + DELETED_SUFFIX
    while fs.exists(retired):  # an earlier log of this name, which is not removed yet
        retired += DELETED_SUFFIX
    return retired


def unlink_existing(fs: FileSystem, paths: Iterable[str]) -> None:
    """Unlink the files of ``paths`` that exist, in order."""
    for path in paths:
        if fs.exists(path):
            fs.unlink(path)


def run_one(job: Callable[[], None]) -> Exception | None:
    """Run ``job`` and return its exception, or None."""
    try:
        job()
    except Exception as error:
        return error
    return None
