"""A file system that records the operations on another one, and the crash states that result from them.

The power-loss test runs real logs on a RecordingFileSystem, and recovers from every state that a power loss
at any point could have left (``crash_states``). Synced operations are on the disk. Any later operation may be
missing, because a disk writes in any order. These states are produced:

* all later operations kept, none kept, and every prefix;
* each single name operation missing, and each of the latest data operations missing;
* the last write torn at every 512-byte sector, with only its head or only its tail on the disk;
* only the data without the names, and only the names without the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from kafkalite.errors import DiskFullError
from kafkalite.storage.filesystem import Buffer, File, FileSystem, Lock, Space, run_one
from kafkalite.storage.layout import TEMPORARY_SUFFIX, parent

SECTOR_BYTES: Final = 512

_NAME_KINDS: Final = {"create", "make_dir", "rename", "unlink", "remove_tree"}
_DATA_KINDS: Final = {"write", "allocate", "truncate"}


class Operation(NamedTuple):
    """One change or sync. ``file_id`` distinguishes files that had the same path at different times.

    ``kind``: a change of a name (create, make_dir, rename, unlink, remove_tree) or of a file (write,
    allocate, truncate: ``position`` is the length), sync, sync_dir, or note, which only marks a moment.
    """

    kind: str
    path: str = ""
    file_id: int = 0
    position: int = 0
    data: bytes = b""
    new_path: str = ""
    note: Any = None


class RecordingFile:
    __slots__ = ("_file", "_file_id", "_fs", "_path")

    def __init__(self, fs: RecordingFileSystem, file: File, path: str, file_id: int) -> None:
        self._fs = fs
        self._file = file
        self._path = path
        self._file_id = file_id

    def _record(self, kind: str, position: int = 0, data: bytes = b"") -> None:
        operation = Operation(kind, self._path, self._file_id, position, data)
        self._fs.operations.append(operation)

    def write_at(self, position: int, buffer: Buffer) -> None:
        self._file.write_at(position, buffer)
        self._record("write", position, bytes(buffer))

    def read_at(self, position: int, length: int) -> bytes:
        return self._file.read_at(position, length)

    def map(self, length: int) -> memoryview:
        return self._file.map(length)

    def size(self) -> int:
        return self._file.size()

    def allocate(self, length: int) -> None:
        self._file.allocate(length)
        self._record("allocate", length)

    def truncate(self, length: int) -> None:
        self._file.truncate(length)
        self._record("truncate", length)

    def sync(self) -> None:
        self._file.sync()
        self._record("sync")

    def close(self) -> None:
        self._file.close()


class RecordingFileSystem:
    """Passes every operation to ``inner``, which starts empty, and appends it to ``operations``."""

    is_memory = False

    def __init__(self, inner: FileSystem) -> None:
        self._inner = inner
        self._file_ids: dict[str, int] = {}
        self._next_file_id = 1
        self.operations: list[Operation] = []

    def note(self, value: Any) -> None:
        """Mark a point in the record. Later crash states carry ``value``."""
        self.operations.append(Operation("note", note=value))

    def open(self, path: str, *, create: bool = False) -> File:
        existed = self._inner.exists(path)
        file = self._inner.open(path, create=create)
        if not existed or path not in self._file_ids:  # a directory was there, and is set aside
            self._file_ids[path] = self._next_file_id
            self._next_file_id += 1
            self.operations.append(Operation("create", path, self._file_ids[path]))
        return RecordingFile(self, file, path, self._file_ids[path])

    def exists(self, path: str) -> bool:
        return self._inner.exists(path)

    def file_size(self, path: str) -> int:
        return self._inner.file_size(path)

    def list_dir(self, path: str) -> list[str]:
        return self._inner.list_dir(path)

    def make_dirs(self, path: str) -> None:
        missing: list[str] = []
        while not self._inner.exists(path) and path not in {"/", "."}:
            missing.append(path)
            path = parent(path)
        for directory in reversed(missing):
            self._inner.make_dirs(directory)
            self.operations.append(Operation("make_dir", directory))

    def rename(self, old: str, new: str) -> None:
        self._inner.rename(old, new)
        self._file_ids = {
            new + path[len(old) :] if path == old or path.startswith(old + "/") else path: file_id
            for path, file_id in self._file_ids.items()
            if path != new
        }
        self.operations.append(Operation("rename", old, new_path=new))

    def unlink(self, path: str) -> None:
        self._inner.unlink(path)
        self._file_ids.pop(path, None)
        self.operations.append(Operation("unlink", path))

    def remove_tree(self, path: str) -> None:
        self._inner.remove_tree(path)
        self._file_ids = {
            name: file_id for name, file_id in self._file_ids.items() if not name.startswith(path + "/")
        }
        self.operations.append(Operation("remove_tree", path))

    def sync_dir(self, path: str) -> None:
        self._inner.sync_dir(path)
        self.operations.append(Operation("sync_dir", path))

    def shortage(self, path: str) -> str | None:
        return self._inner.shortage(path)

    def space(self, path: str) -> Space:
        return self._inner.space(path)

    def boot_id(self) -> str:
        return self._inner.boot_id()

    def file_id(self, path: str) -> str:
        return self._inner.file_id(path)

    def read_bytes(self, path: str) -> bytes:
        return self._inner.read_bytes(path)

    def write_atomically(self, path: str, data: bytes, *, sync_name: bool = True) -> None:
        temporary = path + TEMPORARY_SUFFIX
        file = self.open(temporary, create=True)
        try:
            file.truncate(0)
            file.write_at(0, data)
            file.sync()
        except (OSError, DiskFullError):
            self.unlink(temporary)
            raise
        self.rename(temporary, path)
        if sync_name:
            self.sync_dir(parent(path))

    def run_all(self, jobs: Sequence[Callable[[], None]]) -> list[Exception | None]:
        return [run_one(job) for job in jobs]

    def lock(self, path: str) -> Lock:
        return self._inner.lock(path)


class CrashState(NamedTuple):
    """A possible content of the disk after a power loss that follows operation number ``after``.

    ``number`` counts the states. ``note`` is the last note before the power loss. ``label`` names the lost
    operations.
    """

    number: int
    after: int
    label: str
    note: Any
    files: dict[str, bytes]
    directories: set[str]


class _Disk:
    """The names and contents that the syncs so far guarantee."""

    __slots__ = ("contents", "directories", "names", "pending", "version")

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.directories: set[str] = set()
        self.contents: dict[int, bytes] = {}
        self.pending: list[tuple[int, Operation]] = []
        self.version = 0

    def take(self, number: int, operation: Operation) -> None:
        """Apply the next operation of the record."""
        kind = operation.kind
        if kind == "sync":
            self._settle(lambda one: one.kind in _DATA_KINDS and one.file_id == operation.file_id)
        elif kind == "sync_dir":
            self._settle(lambda one: one.kind in _NAME_KINDS and parent(one.path) == operation.path)
        else:
            self.pending.append((number, operation))

    def _settle(self, covered: Any) -> None:
        settled = [one for _, one in self.pending if covered(one)]
        if not settled:
            return
        self.names, self.directories, self.contents = self.after(settled)
        self.pending = [(number, one) for number, one in self.pending if not covered(one)]
        self.version += 1

    def after(self, operations: Sequence[Operation]) -> tuple[dict[str, int], set[str], dict[int, bytes]]:
        """Return the names, directories and contents with these operations applied as well."""
        names, directories, contents = dict(self.names), set(self.directories), dict(self.contents)
        for operation in operations:
            if operation.kind in _DATA_KINDS:
                contents[operation.file_id] = _changed(contents.get(operation.file_id, b""), operation)
            else:
                _rename_all(names, directories, operation)
        return names, directories, contents


def _changed(data: bytes, operation: Operation) -> bytes:
    position = operation.position
    match operation.kind:
        case "write":
            head = data[:position].ljust(position, b"\0")
            return head + operation.data + data[position + len(operation.data) :]
        case "allocate":
            return data.ljust(position, b"\0")
        case _:
            return data[:position].ljust(position, b"\0")


def _rename_all(names: dict[str, int], directories: set[str], operation: Operation) -> None:
    path, new_path = operation.path, operation.new_path
    match operation.kind:
        case "create":
            names[path] = operation.file_id
        case "make_dir":
            directories.add(path)
        case "unlink":
            names.pop(path, None)
        case "remove_tree":
            directories.discard(path)
            for name in [name for name in names if name.startswith(path + "/")]:
                del names[name]
        case _:
            if path in directories:
                directories.remove(path)
                directories.add(new_path)
                for name in [name for name in names if name.startswith(path + "/")]:
                    names[new_path + name[len(path) :]] = names.pop(name)
            elif path in names:
                names[new_path] = names.pop(path)


def crash_states(operations: Sequence[Operation], *, latest: int = 6) -> Iterator[CrashState]:
    """Yield the states described above after every operation, without repeating a state with the same note.

    Files whose directory is lost are missing too. ``latest`` is the number of unsynced data operations that
    are omitted one by one; every unsynced name operation is.
    """
    disk = _Disk()
    note: Any = None
    notes = 0
    seen: set[tuple[int, int, Any]] = set()
    for number, operation in enumerate(operations):
        if operation.kind == "note":
            note = operation.note
            notes += 1
        else:
            disk.take(number, operation)
        following = operations[number + 1].kind if number + 1 < len(operations) else ""
        if operation.kind == following == "note":
            continue
        for label, key, kept in _losses(disk.pending, latest):
            if (disk.version, notes, key) in seen:
                continue
            seen.add((disk.version, notes, key))
            names, directories, contents = disk.after(kept)
            files = {
                path: contents.get(file_id, b"")
                for path, file_id in names.items()
                if parent(path) in directories
            }
            yield CrashState(len(seen), number, label, note, files, directories)


def _losses(
    pending: Sequence[tuple[int, Operation]], latest: int
) -> Iterator[tuple[str, Any, list[Operation]]]:
    """Yield (lost operations, their key, remaining operations) for the operations that no sync covers."""
    numbers = tuple(number for number, _ in pending)
    operations = [operation for _, operation in pending]
    for count in range(len(pending) + 1):
        yield f"{len(pending) - count} lost", numbers[:count], operations[:count]
    for index in range(len(pending) - 1):
        if operations[index].kind in _DATA_KINDS and index < len(pending) - latest:
            continue
        rest = numbers[:index] + numbers[index + 1 :]
        yield f"operation {numbers[index]} lost", rest, operations[:index] + operations[index + 1 :]
    for kinds, label in ((_DATA_KINDS, "names lost"), (_NAME_KINDS, "data lost")):
        kept = [(number, operation) for number, operation in pending if operation.kind in kinds]
        yield label, tuple(number for number, _ in kept), [operation for _, operation in kept]
    if operations and operations[-1].kind == "write":
        yield from _torn(numbers, operations)


def _torn(
    numbers: tuple[int, ...], operations: list[Operation]
) -> Iterator[tuple[str, Any, list[Operation]]]:
    """Yield the last write torn at each sector boundary, with only its head and with only its tail."""
    *before, last = operations
    first = -(-(last.position + 1) // SECTOR_BYTES) * SECTOR_BYTES
    for boundary in range(first, last.position + len(last.data), SECTOR_BYTES):
        cut = boundary - last.position
        head = last._replace(data=last.data[:cut])
        tail = last._replace(position=boundary, data=last.data[cut:])
        yield f"torn at {boundary}, tail lost", (numbers, "head", boundary), [*before, head]
        yield f"torn at {boundary}, head lost", (numbers, "tail", boundary), [*before, tail]
