"""The seam to the disk. ``storage.disk`` is the real one; memory and recording ones serve tests.

Paths are text with ``/``. Every method may raise OSError; where the disk is full, DiskFullError, except
``File.sync``: whatever a sync fails with, the data of that file must be taken for lost (R26).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

Buffer = bytes | bytearray | memoryview


class File(Protocol):
    """One open file. Dropping the last reference closes it; ``close`` does so at once."""

    def write_at(self, position: int, buffer: Buffer) -> None:
        """Write all of ``buffer``. After an error the bytes from ``position`` on are undefined."""
        ...

    def read_at(self, position: int, length: int) -> bytes:
        """Up to ``length`` bytes; fewer only at the end of the file."""
        ...

    def map(self, length: int) -> memoryview:
        """A read-only view over the first ``length`` bytes, which must exist.

        It shows later writes to those bytes as long as the file has not been grown by ``allocate`` since;
        take a new one then. It stays valid after close, rename and unlink. Touching bytes that
        ``truncate`` has cut off since kills the process.
        """
        ...

    def size(self) -> int: ...

    def allocate(self, length: int) -> None:
        """Make the file at least ``length`` bytes long, new ones zero and backed by space on the disk."""
        ...

    def truncate(self, length: int) -> None: ...

    def sync(self) -> None:
        """Return when the file's bytes and size are on stable storage. May be called from any thread."""
        ...

    def close(self) -> None: ...


class Lock(Protocol):
    def release(self) -> None: ...


class FileSystem(Protocol):
    """Directory operations are durable only after ``sync_dir`` of the directory that holds the name."""

    def open(self, path: str, *, create: bool = False) -> File:
        """Open for reading and writing; ``create`` makes a missing file. Raises FileNotFoundError."""
        ...

    def exists(self, path: str) -> bool: ...

    def file_size(self, path: str) -> int: ...

    def list_dir(self, path: str) -> list[str]:
        """The names inside, sorted."""
        ...

    def make_dirs(self, path: str) -> None:
        """Make the directory and its parents; no error if it exists."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Within one directory; replaces ``new``."""
        ...

    def unlink(self, path: str) -> None: ...

    def remove_tree(self, path: str) -> None: ...

    def sync_dir(self, path: str) -> None: ...

    def read_bytes(self, path: str) -> bytes: ...

    def write_atomically(self, path: str, data: bytes, *, sync_name: bool = True) -> None:
        """Replace the whole file durably: a crash leaves the old or the new bytes, never a mix.

        Without ``sync_name`` the new bytes are there for good only after ``sync_dir`` of the directory.
        """
        ...

    def run_all(self, jobs: Sequence[Callable[[], None]]) -> list[Exception | None]:
        """Run jobs that wait for the disk, side by side where that helps: what each raised, in their order.

        Each must touch files of its own. A disk that is asked for many syncs at once does them together.
        """
        ...

    def lock(self, path: str) -> Lock:
        """Hold ``path`` until released or the process ends. Raises DataDirectoryError if another does."""
        ...


def run_one(job: Callable[[], None]) -> Exception | None:
    """Run ``job``. Returns what it raised."""
    try:
        job()
    except Exception as error:
        return error
    return None
