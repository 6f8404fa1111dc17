"""Creates disks in memory with given files, and lists the files of a disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kafkalite.errors import WrongFileTypeError
from kafkalite.storage.layout import parent
from kafkalite.storage.memory_filesystem import MemoryFileSystem


def disk_with_files(
    files: Mapping[str, bytes], directories: Iterable[str] = (), *, crashable: bool = True
) -> MemoryFileSystem:
    """Return a disk with the files {path: content}, all synced."""
    disk = MemoryFileSystem(crashable=crashable)
    disk.boot_count += 1  # the disk was in another computer before
    synced = dict.fromkeys(directories)
    for path in synced:
        disk.make_dirs(path)
    for path, content in files.items():
        disk.make_dirs(parent(path))
        file = disk.open(path, create=True)
        file.write_at(0, content)
        file.sync()
        synced[parent(path)] = None
    for path in list(synced):
        while path not in {"", "/"}:
            synced[path] = None
            path = parent(path)
    for path in ("/", *synced):
        disk.sync_dir(path)
    return disk


def tree_of(disk: MemoryFileSystem, directory: str = "/") -> dict[str, bytes]:
    """Return {path: content} of all files."""
    found: dict[str, bytes] = {}
    for name in disk.list_dir(directory):
        path = f"{directory.rstrip('/')}/{name}"
        try:
            found |= tree_of(disk, path)
        except WrongFileTypeError:  # it is a file
            found[path] = disk.read_bytes(path)
    return found
