"""The metadata log on one node's disk: a write-ahead journal and the snapshot it starts from.

::

    metadata.snapshot   one frame:   ["kafkalite-metadata-snapshot", 1, offset, [record, …]]
    metadata.log        first frame: ["kafkalite-metadata-log", 1, base_offset]
                        then frames: [[offset, [record, …]], …]     the entries of one sync

    frame = u32 length | u32 crc32c | msgpack            big-endian; the checksum is of the msgpack bytes

A frame is written and synced before the next is begun. So at most the last frame can be torn, by a crash
before it was acknowledged: it is cut off. A bad frame with a whole one behind it had been synced: that is
damage, and nobody may guess what it held (R24, R25).

The snapshot replaces its predecessor atomically; then an empty journal replaces the old one. A crash in
between leaves a journal whose first entries are in the snapshot already; reading skips them.

Blocking and not thread-safe: one writer, in one thread at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from kafkalite.errors import CorruptLogError, DataDirectoryError, DiskFullError, LogOfflineError, StorageError
from kafkalite.log_fields import Fields
from kafkalite.metadata import record_codec
from kafkalite.metadata.records import MetadataRecord
from kafkalite.raft.frames import HEADER_BYTES, frame, next_whole_frame, payload_at
from kafkalite.raft.raft_journal import RAFT_LOG_FILE
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.layout import join, parent

LOG_FILE: Final = "metadata.log"
SNAPSHOT_FILE: Final = "metadata.snapshot"

_LOG_FORMAT: Final = "kafkalite-metadata-log"
_SNAPSHOT_FORMAT: Final = "kafkalite-metadata-snapshot"
_VERSION: Final = 1
_REPAIR_HINT: Final = "restore the directory from a backup; nothing was changed"

Entry = tuple[int, Sequence[MetadataRecord]]
"""(offset, records)"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What ``Journal.open`` found: the snapshot (offset 0 and no records without one), and what follows."""

    snapshot_offset: int
    snapshot_records: list[MetadataRecord]
    entries: list[Entry]


class Journal:
    """The two files of one directory. Invariant: every entry up to ``last_offset`` is synced."""

    def __init__(self, filesystem: FileSystem, directory: str) -> None:
        self._filesystem = filesystem
        self._directory = directory
        self._path = join(directory, LOG_FILE)
        self._snapshot_path = join(directory, SNAPSHOT_FILE)
        self.last_offset = 0
        self.size_bytes = 0  #: of the journal: where the next frame goes
        self.snapshot_bytes = 0

    def open(self) -> Recovered:
        """Read both files, cut a torn tail, be ready to append.

        Raises CorruptLogError for damage, StorageError for files of another version, DataDirectoryError for
        a directory that belongs to a quorum of several.
        """
        filesystem = self._filesystem
        if filesystem.exists(join(self._directory, RAFT_LOG_FILE)):
            raise DataDirectoryError(
                f"{self._directory} holds the metadata of a node of a cluster: {RAFT_LOG_FILE}",
                hint="set controller.quorum.voters as it was, or use another data directory",
            )
        if not filesystem.exists(self._path):
            if filesystem.exists(self._snapshot_path):
                raise StorageError(f"{self._path} is missing beside {SNAPSHOT_FILE}", hint=_REPAIR_HINT)
            filesystem.make_dirs(self._directory)
            filesystem.sync_dir(parent(self._directory))
            filesystem.write_atomically(self._path, _log_header(0))
        snapshot_offset, snapshot_records = self._read_snapshot()
        data = filesystem.read_bytes(self._path)
        self._file = filesystem.open(self._path)
        entries = self._read_entries(data, snapshot_offset)
        self.last_offset = entries[-1][0] if entries else snapshot_offset
        return Recovered(snapshot_offset, snapshot_records, entries)

    def _read_snapshot(self) -> tuple[int, list[MetadataRecord]]:
        path = self._snapshot_path
        if not self._filesystem.exists(path):
            return 0, []
        data = self._filesystem.read_bytes(path)
        payload = payload_at(data, 0)
        if payload is None or HEADER_BYTES + len(payload) != len(data):
            raise CorruptLogError(
                path=path, position=0, expected="one whole frame", actual="another", hint=_REPAIR_HINT
            )
        match _unpack(path, 0, payload):
            case [format_name, version, int(offset), records] if _is_known(
                path, format_name, version, _SNAPSHOT_FORMAT
            ):
                self.snapshot_bytes = len(data)
                return offset, _records(path, 0, records)
        raise _wrong_shape(path, 0)

    def _read_entries(self, data: bytes, snapshot_offset: int) -> list[Entry]:
        """The entries above the snapshot; cuts a torn tail and sets ``size_bytes``."""
        position = self._read_header(data, snapshot_offset)
        entries: list[Entry] = []
        last_offset: int | None = None
        while position < len(data):
            payload = payload_at(data, position)
            if payload is None:
                self._cut_tail(data, position)
                break
            for offset, records in self._entries_of(payload, position):
                if last_offset is not None and offset <= last_offset:
                    raise self._damaged(position, f"an offset above {last_offset}", str(offset))
                last_offset = offset
                if offset > snapshot_offset:
                    entries.append((offset, records))
            position += HEADER_BYTES + len(payload)
        self.size_bytes = position
        return entries

    def _read_header(self, data: bytes, snapshot_offset: int) -> int:
        """The position of the first frame of entries."""
        payload = payload_at(data, 0)
        if payload is None:
            raise self._damaged(0, "a whole header", "none")
        match _unpack(self._path, 0, payload):
            case [format_name, version, int(base_offset)] if _is_known(
                self._path, format_name, version, _LOG_FORMAT
            ):
                if base_offset > snapshot_offset:
                    expected = f"a snapshot at offset {base_offset} or above beside it"
                    raise self._damaged(0, expected, f"one at {snapshot_offset}")
                return HEADER_BYTES + len(payload)
        raise _wrong_shape(self._path, 0)

    def _entries_of(self, payload: bytes, position: int) -> list[Entry]:
        groups = _unpack(self._path, position, payload)
        if not isinstance(groups, list):
            raise _wrong_shape(self._path, position)
        entries: list[Entry] = []
        for group in groups:
            match group:
                case [int(offset), records]:
                    entries.append((offset, _records(self._path, position, records)))
                case _:
                    raise _wrong_shape(self._path, position)
        return entries

    def _cut_tail(self, data: bytes, position: int) -> None:
        """Cut off what a crash left half-written. Raises CorruptLogError if it was written whole once."""
        later = next_whole_frame(data, position + 1)
        if later is not None:
            raise self._damaged(
                position, f"a whole frame, since the one at {later} was written after it", "a bad checksum"
            )
        self._file.truncate(position)
        self._file.sync()
        _log.warning(
            "torn tail of the metadata log cut %s",
            Fields(path=self._path, position=position, cut_bytes=len(data) - position),
        )

    def _damaged(self, position: int, expected: str, actual: str) -> CorruptLogError:
        return CorruptLogError(
            path=self._path, position=position, expected=expected, actual=actual, hint=_REPAIR_HINT
        )

    def append(self, entries: Sequence[Entry]) -> None:
        """Write entries, at least one, and sync them: durable on return, all or none of them.

        Raises DiskFullError, with nothing written; LogOfflineError when the disk failed and the outcome
        can't be known: then the journal must not be used any more (R26).
        """
        payload = [
            [offset, [record_codec.to_array(record) for record in records]] for offset, records in entries
        ]
        framed = frame(payload)
        try:
            self._file.write_at(self.size_bytes, framed)
        except DiskFullError:
            self._undo_write()
            raise
        except OSError as error:
            raise self._offline("written", error) from error
        try:
            self._file.sync()
        except (OSError, StorageError) as error:
            raise self._offline("synced", error) from error
        self.size_bytes += len(framed)
        self.last_offset = entries[-1][0]

    def _undo_write(self) -> None:
        try:
            self._file.truncate(self.size_bytes)
        except OSError as error:
            raise self._offline("truncated", error) from error

    def _offline(self, verb: str, error: Exception) -> LogOfflineError:
        return LogOfflineError(
            f"the metadata log {self._path} could not be {verb}: {error}",
            hint="see to the disk, then start the node again",
        )

    def write_snapshot(self, offset: int, records: Iterable[MetadataRecord]) -> None:
        """Store the state at ``last_offset`` and begin an empty journal after it.

        Raises DiskFullError, with the journal as usable as before; LogOfflineError as ``append``.
        """
        assert offset == self.last_offset, f"a snapshot at {offset} of a journal at {self.last_offset}"
        snapshot = frame(
            [_SNAPSHOT_FORMAT, _VERSION, offset, [record_codec.to_array(record) for record in records]]
        )
        header = _log_header(offset)
        try:
            self._filesystem.write_atomically(self._snapshot_path, snapshot)
            self.snapshot_bytes = len(snapshot)
            self._filesystem.write_atomically(self._path, header)
            self._file.close()
            self._file = self._filesystem.open(self._path)
        except OSError as error:
            raise self._offline("replaced", error) from error
        self.size_bytes = len(header)

    def close(self) -> None:
        self._file.close()


def _log_header(base_offset: int) -> bytes:
    return frame([_LOG_FORMAT, _VERSION, base_offset])


def _unpack(path: str, position: int, payload: bytes) -> Any:
    try:
        return msgpack.unpackb(payload)
    except (ValueError, msgpack.UnpackException) as error:
        raise _wrong_shape(path, position) from error


def _records(path: str, position: int, arrays: Any) -> list[MetadataRecord]:
    try:
        return record_codec.from_arrays(arrays)
    except StorageError as error:
        raise StorageError(f"{path} at position {position}: {error.message}", hint=error.hint) from error


def _is_known(path: str, format_name: Any, version: Any, expected: str) -> bool:
    """Whether the file is of the expected format. Raises StorageError for a version of it not known here."""
    if format_name == expected and version != _VERSION:
        raise StorageError(
            f"{path} has format version {version}, and this program reads version {_VERSION}",
            hint="a newer kafkalite wrote it; start that version again",
        )
    return bool(format_name == expected)


def _wrong_shape(path: str, position: int) -> CorruptLogError:
    return CorruptLogError(
        path=path,
        position=position,
        expected="metadata of this format",
        actual="something else with a good checksum",
        hint=_REPAIR_HINT,
    )
