"""Reads the metadata files that single nodes wrote before they used the format of ``journal``.

::

    metadata.snapshot   one frame:   ["kafkalite-metadata-snapshot", 1, offset, [record, …]]
    metadata.log        first frame: ["kafkalite-metadata-log", 1, base_offset]
                        then frames: [[offset, [record, …]], …]     the entries of one sync

A new snapshot was written before an empty log replaced the former log. After a crash in between, the entries
of the log are also in the snapshot. ``MetadataLog.open`` converts the files.
"""

from __future__ import annotations

from typing import Any, Final

from kafkalite.errors import StorageError
from kafkalite.metadata import record_codec
from kafkalite.metadata.delta import Delta
from kafkalite.metadata.image import EMPTY
from kafkalite.metadata.records import MetadataRecord
from kafkalite.raft.frames import REPAIR_HINT, check_version, corrupt, read_frames, read_single_frame
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.layout import join

LOG_FILE: Final = "metadata.log"
SNAPSHOT_FILE: Final = "metadata.snapshot"

_LOG_FORMAT: Final = "kafkalite-metadata-log"
_SNAPSHOT_FORMAT: Final = "kafkalite-metadata-snapshot"
_VERSION: Final = 1


def exists(filesystem: FileSystem, directory: str) -> bool:
    """Whether the directory contains a metadata file of an older version."""
    return any(filesystem.exists(join(directory, name)) for name in (LOG_FILE, SNAPSHOT_FILE))


def read(filesystem: FileSystem, directory: str) -> tuple[int, bytes]:
    """Return the last offset (0 if nothing is stored), and the encoded records of the state at that offset.

    A torn tail was never acknowledged and is ignored. Raises CorruptLogError, StorageError.
    """
    path = join(directory, LOG_FILE)
    if not filesystem.exists(path):
        raise StorageError(f"{path} is missing beside {SNAPSHOT_FILE}", hint=REPAIR_HINT)
    snapshot_offset, records = _read_snapshot(filesystem, join(directory, SNAPSHOT_FILE))
    ((_, header), *frames), _ = read_frames(filesystem.read_bytes(path), path)
    check_version(header, path, _LOG_FORMAT, _VERSION)
    if header[2] > snapshot_offset:
        expected = f"a snapshot at offset {header[2]} or above beside it"
        raise corrupt(path, 0, expected, f"one at {snapshot_offset}")
    last_offset = snapshot_offset
    for position, entries in frames:
        for entry in entries:
            match entry:
                case [int(offset), values]:
                    if offset > last_offset:
                        records += _records(path, position, values)
                        last_offset = offset
                case _:
                    raise corrupt(path, position, "an entry", str(entry)[:80])
    image = Delta(EMPTY).replay_all(records).apply(last_offset)
    return last_offset, record_codec.to_bytes(image.to_records())


def remove(filesystem: FileSystem, directory: str) -> None:
    """Remove the metadata files of the older version if they exist. The caller must have stored their
    contents durably."""
    names = [name for name in (LOG_FILE, SNAPSHOT_FILE) if filesystem.exists(join(directory, name))]
    for name in names:
        filesystem.unlink(join(directory, name))
    if names:
        filesystem.sync_dir(directory)


def _read_snapshot(filesystem: FileSystem, path: str) -> tuple[int, list[MetadataRecord]]:
    if not filesystem.exists(path):
        return 0, []
    value = read_single_frame(filesystem.read_bytes(path), path)
    check_version(value, path, _SNAPSHOT_FORMAT, _VERSION)
    return value[2], _records(path, 0, value[3])


def _records(path: str, position: int, arrays: Any) -> list[MetadataRecord]:
    try:
        return record_codec.from_arrays(arrays)
    except StorageError as error:
        raise StorageError(f"{path} at position {position}: {error.message}", hint=error.hint) from error
