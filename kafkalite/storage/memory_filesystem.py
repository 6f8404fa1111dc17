"""A file system in memory, for brokers without a disk and for tests that simulate disk faults.

A map that was taken before a file grew may show only the old content, as the map of a real file does. With
``crashable``, the file system also records what was synced, and ``crash`` produces a state that a power loss
may leave: every unsynced 4 KiB page is kept, lost or torn at a 512-byte sector, each file has its old or its
new size, and every directory operation since the last sync of its directory is done or undone.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from typing import Final

from kafkalite.errors import DataDirectoryError, DiskFullError, WrongFileTypeError
from kafkalite.rng import Rng
from kafkalite.storage.filesystem import (
    SHORTAGE_BYTES,
    Buffer,
    File,
    Space,
    run_one,
    set_aside,
    write_atomically,
)
from kafkalite.storage.layout import TEMPORARY_SUFFIX, parent

PAGE_BYTES: Final = 4096
SECTOR_BYTES: Final = 512
#: Files of at least this size use an anonymous map, in which pages that were never written use no memory.
_MAP_FROM_BYTES: Final = 64 * 1024
#: The size that ``space`` reports without a limit.
_UNLIMITED_BYTES: Final = 1 << 40


class _Inode:
    """The content of one file. ``synced``, ``dirty_pages`` and ``lost_pages`` are used only if ``crashable``
    is True."""

    __slots__ = ("_buffer", "_view", "crashable", "dirty_pages", "lost_pages", "number", "size", "synced")

    def __init__(self, data: bytes = b"", *, crashable: bool) -> None:
        self._buffer: bytearray | mmap.mmap = bytearray(data)
        self._view = memoryview(self._buffer)
        self.size = len(data)
        self.number = 0  #: given by ``file_id``, and kept after a power loss
        self.crashable = crashable
        self.synced = bytes(data)
        self.dirty_pages: set[int] = set()
        self.lost_pages: set[int] = set()  # clean, but not on disk

    def read(self, position: int, length: int) -> bytes:
        return bytes(self._view[position : min(position + length, self.size)])

    def map(self, length: int) -> memoryview:
        return self._view[:length].toreadonly()

    def write(self, position: int, buffer: Buffer) -> None:
        end = position + len(buffer)
        self.resize(max(end, self.size))
        self._view[position:end] = buffer
        if self.crashable and end > position:
            written = range(position // PAGE_BYTES, (end - 1) // PAGE_BYTES + 1)
            self.dirty_pages.update(written)
            self.lost_pages.difference_update(written)

    def resize(self, size: int) -> None:
        if size > len(self._buffer):
            self._reserve(size)
        elif size < self.size:
            self._view[size : self.size] = bytes(self.size - size)
        self.size = size

    def _reserve(self, size: int) -> None:
        """Move the content to a larger buffer. Maps that were taken before keep the old buffer."""
        if size < _MAP_FROM_BYTES:
            buffer: bytearray | mmap.mmap = bytearray(size)
        else:
            buffer = mmap.mmap(-1, max(size, 2 * len(self._buffer)))
        view = memoryview(buffer)
        view[: self.size] = self._view[: self.size]
        self._buffer, self._view = buffer, view

    def sync(self) -> None:
        if self.crashable:
            content = self._view[: self.size]
            if self.lost_pages:
                content = memoryview(bytearray(content))
            for page in self.lost_pages:
                position, end = page * PAGE_BYTES, min((page + 1) * PAGE_BYTES, self.size)
                if position < end:
                    content[position:end] = self.synced[position:end].ljust(end - position, b"\0")
            self.synced = bytes(content)
            self.dirty_pages.clear()

    def lose_dirty_pages(self) -> None:
        """Mark the dirty pages as clean without writing them, as a failed sync does. Later syncs skip each of
        these pages until it is written again."""
        self.lost_pages |= self.dirty_pages
        self.dirty_pages.clear()

    def after_crash(self, rng: Rng) -> _Inode:
        """Return the file with a content that it may have after a power loss."""
        size = self.size if rng.randrange(2) else len(self.synced)
        contents = bytearray(size)
        contents[: len(self.synced)] = self.synced[:size]
        for page in sorted(self.dirty_pages):
            position = page * PAGE_BYTES
            end = min(position + PAGE_BYTES, self.size, size)
            if position >= end:
                continue
            new = bytes(self._view[position:end])
            sectors = -(-len(new) // SECTOR_BYTES)
            choice = rng.randrange(3)
            if choice == 0:  # the whole page reached the disk
                contents[position:end] = new
            elif choice == 1:  # the page was torn: only its head or its tail reached the disk
                cut = rng.randrange(sectors + 1) * SECTOR_BYTES
                if rng.randrange(2):
                    contents[position : min(position + cut, end)] = new[:cut]
                else:
                    contents[min(position + cut, end) : end] = new[cut:]
        inode = _Inode(bytes(contents), crashable=True)
        inode.number = self.number
        return inode


class _Directory:
    """A directory: {name: file or directory} now and at its last sync. ``pending`` are the operations since
    then; it is used only by a crashable file system."""

    __slots__ = ("entries", "pending", "synced")

    def __init__(self) -> None:
        self.entries: dict[str, _Inode | _Directory] = {}
        self.synced: dict[str, _Inode | _Directory] = {}
        self.pending: list[tuple[str, str, _Inode | _Directory | None]] = []

    def after_crash(self, rng: Rng) -> _Directory:
        """Return the directory after a power loss. Each operation since the last sync is done or undone."""
        names = dict(self.synced)
        prefix = rng.randrange(len(self.pending) + 1) if rng.randrange(2) else None
        for number, operation in enumerate(self.pending):
            kept = number < prefix if prefix is not None else bool(rng.randrange(2))
            if kept:
                apply_name_operation(names, operation)
        left = _Directory()
        for name, node in names.items():
            left.entries[name] = node.after_crash(rng)
        left.synced = dict(left.entries)
        return left


def apply_name_operation(
    names: dict[str, _Inode | _Directory], operation: tuple[str, str, _Inode | _Directory | None]
) -> None:
    """Apply ``operation``, (kind, name, file or directory), to ``names``. A rename has the name ``old/new``,
    and is skipped if the old name does not exist because an earlier operation was undone."""
    kind, name, node = operation
    if kind == "unlink":
        names.pop(name, None)
    elif kind == "link" and node is not None:
        names[name] = node
    elif kind == "rename":
        old, _, new = name.partition("/")
        if old in names:
            names[new] = names.pop(old)


class MemoryFile:
    __slots__ = ("_fs", "_inode", "_path")

    def __init__(self, fs: MemoryFileSystem, inode: _Inode, path: str) -> None:
        self._fs = fs
        self._inode = inode
        self._path = path

    def __repr__(self) -> str:
        return f"<MemoryFile {self._path}>"

    def write_at(self, position: int, buffer: Buffer) -> None:
        room = self._fs.room_for(self._inode.size, position + len(buffer))
        if room < position + len(buffer):  # like a disk, write what fits before reporting that it is full
            self._inode.write(position, memoryview(buffer)[: max(room - position, 0)])
            raise DiskFullError(f"no space left for {self._path}", hint="free space; nothing was lost")
        self._fs.check_writable(self._path)
        self._inode.write(position, buffer)

    def read_at(self, position: int, length: int) -> bytes:
        return self._inode.read(position, length)

    def map(self, length: int) -> memoryview:
        assert length <= self._inode.size, "a map beyond the end of a file kills the process when touched"
        return self._inode.map(length)

    def size(self) -> int:
        return self._inode.size

    def allocate(self, length: int) -> None:
        if length <= self._inode.size:
            return
        wanted = length + self._fs.min_free_bytes
        if self._fs.room_for(self._inode.size, wanted) < wanted:
            raise DiskFullError(f"no space left for {self._path}", hint="free space; nothing was lost")
        self._inode.resize(length)

    def truncate(self, length: int) -> None:
        self._inode.resize(length)

    def sync(self) -> None:
        try:
            self._fs.check_sync(self._path)
        except OSError:
            if self._fs.loses_pages:
                self._inode.lose_dirty_pages()
            raise
        self._inode.sync()

    def close(self) -> None:
        pass


class MemoryLock:
    __slots__ = ("_fs", "_path")

    def __init__(self, fs: MemoryFileSystem, path: str) -> None:
        self._fs = fs
        self._path = path

    def release(self) -> None:
        self._fs.locked.discard(self._path)


class MemoryFileSystem:
    """Files in memory. ``capacity_bytes`` limits the sum of file sizes and may be changed; None: no limit.

    ``crashable`` enables ``crash``, at the cost of copying each file when it is synced.
    """

    is_memory = True

    def __init__(self, *, capacity_bytes: int | None = None, crashable: bool = False) -> None:
        self._root = _Directory()
        self._crashable = crashable
        self._failing_syncs = 0
        self.loses_pages = False
        self._failing_writes = 0
        self.capacity_bytes = capacity_bytes
        self.min_free_bytes = 0  #: kept free by ``File.allocate`` (R54)
        self.locked: set[str] = set()
        self.sync_count = 0
        self.boot_count = 0
        self._numbers = count(1)
        self._failed_disks: tuple[str, ...] = ()
        self.spaces: dict[str, Space] = {}  #: what ``space`` returns for these paths

    def crash(self, rng: Rng) -> None:
        """Simulate a power loss. ``rng`` decides which unsynced pages and names survive. Locks are released.

        Files that are open now show the old content and must not be used again.
        """
        assert self._crashable, "made without crashable=True: nothing is known of what was synced"
        self._root = self._root.after_crash(rng)
        self.boot_count += 1
        self.locked.clear()

    def fail_next_sync(self, count: int = 1, *, loses_pages: bool = False) -> None:
        """Make the next ``count`` syncs of files fail (R26).

        If ``loses_pages``, each failing sync also marks the unsynced pages of its file as clean, as Linux
        does. Later syncs then skip each of these pages until it is written again.
        """
        self._failing_syncs = count
        self.loses_pages = loses_pages

    def fail_next_write(self, count: int = 1) -> None:
        """Make the next ``count`` writes fail with an error other than a full disk."""
        self._failing_writes = count

    def fail_disk(self, path: str) -> None:
        """Make everything in the directory ``path`` fail as on a broken disk, until ``heal``: writes, syncs,
        and all use of names. Files that are open can still be read, as from the page cache."""
        self._failed_disks = (*self._failed_disks, path.rstrip("/"))

    def replace_disk(self, path: str) -> None:
        """Put an empty directory in the place of ``path``, and end its failure. Its locks are released."""
        self._failed_disks = tuple(one for one in self._failed_disks if one != path)
        if self.exists(path):
            self.remove_tree(path)
        self.make_dirs(path)
        self.sync_dir(parent(path))
        self.locked = {one for one in self.locked if not one.startswith(f"{path}/")}

    def _has_failed(self, path: str) -> bool:
        return any(path == one or path.startswith(f"{one}/") for one in self._failed_disks)

    def check_disk(self, path: str) -> None:
        if self._has_failed(path):
            raise OSError(5, "simulated failure of a disk", path)

    def heal(self) -> None:
        """Let everything succeed again, and remove the limit of ``capacity_bytes``."""
        self._failing_syncs = self._failing_writes = 0
        self._failed_disks = ()
        self.loses_pages = False
        self.capacity_bytes = None

    def check_sync(self, path: str) -> None:
        self.sync_count += 1
        if self._failed_disks:
            self.check_disk(path)
        if self._failing_syncs:
            self._failing_syncs -= 1
            raise OSError(5, "simulated failure of fdatasync", path)

    def check_writable(self, path: str) -> None:
        if self._failed_disks:
            self.check_disk(path)
        if self._failing_writes:
            self._failing_writes -= 1
            raise OSError(5, "simulated failure of pwrite", path)

    def used_bytes(self) -> int:
        def used(directory: _Directory) -> int:
            nodes = directory.entries.values()
            return sum(used(node) if isinstance(node, _Directory) else node.size for node in nodes)

        return used(self._root)

    def room_for(self, size: int, wanted: int) -> int:
        """Return the length (at most ``wanted``) to which a file of ``size`` bytes can grow."""
        if self.capacity_bytes is None or wanted <= size:
            return wanted
        return min(wanted, size + max(self.capacity_bytes - self.used_bytes(), 0))

    def open(self, path: str, *, create: bool = False) -> File:
        directory, name = self._place(path)
        node = directory.entries.get(name)
        if node is None:
            if not create:
                raise FileNotFoundError(2, "no such file", path)
            if self.room_for(0, 1) < 1:
                raise DiskFullError(f"no space left for {path}", hint="free space; nothing was lost")
            node = _Inode(crashable=self._crashable)
            self._change(directory, ("link", name, node))
        if isinstance(node, _Directory):
            if not create:
                raise _is_a_directory(path)
            set_aside(self, path)
            return self.open(path, create=True)
        return MemoryFile(self, node, path)

    def exists(self, path: str) -> bool:
        is_there = self._at(_parts(path)) is not None
        return is_there and not (self._failed_disks and self._has_failed(path))

    def file_size(self, path: str) -> int:
        return self._inode(path).size

    def list_dir(self, path: str) -> list[str]:
        return sorted(self._directory(path).entries)

    def make_dirs(self, path: str) -> None:
        if self._failed_disks:
            self.check_disk(path)
        directory = self._root
        reached = ""
        for part in _parts(path):
            reached += f"/{part}"
            node = directory.entries.get(part)
            if node is None:
                node = _Directory()
                self._change(directory, ("link", part, node))
            if not isinstance(node, _Directory):
                raise _is_a_file(reached)
            directory = node

    def rename(self, old: str, new: str) -> None:
        directory, old_name = self._place(old)
        new_name = _parts(new)[-1]
        if old_name not in directory.entries:
            raise FileNotFoundError(2, "no such file", old)
        if parent(old) != parent(new):  # a power loss may undo each half, unless its directory is synced
            self._change(self._place(new)[0], ("link", new_name, directory.entries[old_name]))
            self._change(directory, ("unlink", old_name, None))
            return
        if isinstance(directory.entries.get(new_name), _Directory) and isinstance(self._find(old), _Inode):
            set_aside(self, new)
        self._change(directory, ("rename", f"{old_name}/{new_name}", None))

    def unlink(self, path: str) -> None:
        if isinstance(self._find(path), _Directory):
            set_aside(self, path)
        else:
            self.remove_tree(path)

    def remove_tree(self, path: str) -> None:
        directory, name = self._place(path)
        if name not in directory.entries:
            raise FileNotFoundError(2, "no such file", path)
        self._change(directory, ("unlink", name, None))

    def sync_dir(self, path: str) -> None:
        directory = self._directory(path)
        directory.synced = dict(directory.entries)
        directory.pending.clear()

    def shortage(self, path: str) -> str | None:
        wanted = self.min_free_bytes + SHORTAGE_BYTES
        return None if self.room_for(0, wanted) == wanted else f"no space left in {path}: the disk is full"

    def space(self, path: str) -> Space:
        if self._failed_disks:
            self.check_disk(path)
        if path in self.spaces:
            return self.spaces[path]
        total_bytes = _UNLIMITED_BYTES if self.capacity_bytes is None else self.capacity_bytes
        return Space(total_bytes, max(total_bytes - self.used_bytes(), 0))

    def boot_id(self) -> str:
        return f"memory-{self.boot_count}"

    def file_id(self, path: str) -> str:
        inode = self._inode(path)
        inode.number = inode.number or next(self._numbers)
        return str(inode.number)

    def read_bytes(self, path: str) -> bytes:
        inode = self._inode(path)
        return inode.read(0, inode.size)

    def write_atomically(self, path: str, data: bytes, *, sync_name: bool = True) -> None:
        directory, name = self._place(path)
        entries = directory.entries
        if (
            not sync_name
            or self._failing_writes
            or self._failing_syncs
            or self.capacity_bytes is not None
            or name + TEMPORARY_SUFFIX in entries
            or isinstance(entries.get(name), _Directory)
        ):
            write_atomically(self, path, data, sync_name=sync_name)
            return
        # No step can fail, and the temporary file is never visible, so only the result is made.
        self.sync_count += 1
        entries[name] = _Inode(data, crashable=self._crashable)
        directory.synced = dict(entries)
        directory.pending.clear()

    def run_all(self, jobs: Sequence[Callable[[], None]]) -> list[Exception | None]:
        return [run_one(job) for job in jobs]

    def lock(self, path: str) -> MemoryLock:
        if path in self.locked:
            raise DataDirectoryError(f"{parent(path)} is in use", hint="close the other one first")
        self.open(path, create=not self.exists(path))
        self.locked.add(path)
        return MemoryLock(self, path)

    def _change(self, directory: _Directory, operation: tuple[str, str, _Inode | _Directory | None]) -> None:
        apply_name_operation(directory.entries, operation)
        if self._crashable:
            directory.pending.append(operation)

    def _find(self, path: str) -> _Inode | _Directory | None:
        return self._at(_parts(path))

    def _at(self, parts: tuple[str, ...]) -> _Inode | _Directory | None:
        node: _Inode | _Directory | None = self._root
        for part in parts:
            if type(node) is not _Directory:
                return None
            node = node.entries.get(part)
        return node

    def _place(self, path: str) -> tuple[_Directory, str]:
        """Return the directory of ``path``, and the name in it. Raises the errors of ``_directory``."""
        if self._failed_disks:
            self.check_disk(path)
        parts = _parts(path)
        directory = self._at(parts[:-1])
        return directory if type(directory) is _Directory else self._directory(parent(path)), parts[-1]

    def _inode(self, path: str) -> _Inode:
        if self._failed_disks:
            self.check_disk(path)
        node = self._find(path)
        if isinstance(node, _Directory):
            raise _is_a_directory(path)
        if node is None:
            raise FileNotFoundError(2, "no such file", path)
        return node

    def _directory(self, path: str) -> _Directory:
        if self._failed_disks:
            self.check_disk(path)
        node = self._find(path)
        if isinstance(node, _Inode):
            raise _is_a_file(path)
        if node is None:
            raise FileNotFoundError(2, "no such directory", path)
        return node


def _is_a_directory(path: str) -> WrongFileTypeError:
    return WrongFileTypeError(path=path, expected="a regular file", actual="a directory")


def _is_a_file(path: str) -> WrongFileTypeError:
    return WrongFileTypeError(path=path, expected="a directory", actual="a regular file")


@lru_cache(maxsize=4096)
def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.split("/") if part not in {"", "."})
