"""The state that a voter's log begins with: stored whole, sent in pieces, checked before it is believed.

::

    raft.snapshot   one frame:  ["kafkalite-raft-snapshot", 1, previous, last, offset, records]
    previous, last  [command, index, term]: the last two entries that the state holds
    offset          of the last entry that took effect: entries that were void have none
    records         the msgpack bytes of the state's metadata records

A new one replaces the old one atomically, and only then is the log compacted. What a leader sends is the
file as it is. The store has the methods that the Raft library calls of its own serializer, except those that
take snapshots: the node does that.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgpack

from kafkalite.errors import CorruptLogError, LogOfflineError, StorageError
from kafkalite.raft.frames import HEADER_BYTES, frame, payload_at
from kafkalite.raft.raft_messages import Entry
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.layout import join

RAFT_SNAPSHOT_FILE: Final = "raft.snapshot"

_FORMAT: Final = "kafkalite-raft-snapshot"
_VERSION: Final = 1
_MAX_RECEIVED_BYTES: Final = 1 << 30


class Snapshot(NamedTuple):
    previous: Entry
    last: Entry
    offset: int
    records: bytes

    @property
    def last_index(self) -> int:
        """Of the last entry that the state holds."""
        return self.last[1]


class SnapshotStore:
    """Used on the Raft loop only. Invariant: ``current`` is what the file holds."""

    def __init__(self, filesystem: FileSystem, directory: str, *, chunk_bytes: int) -> None:
        self.current: Snapshot | None = None
        self.size_bytes = 0
        self._filesystem = filesystem
        self._path = join(directory, RAFT_SNAPSHOT_FILE)
        self._chunk_bytes = chunk_bytes
        self._sending: dict[Any, tuple[bytes, int]] = {}  # node → file, position
        self._receiving: bytearray | None = None
        self._received: Snapshot | None = None

    @property
    def exists(self) -> bool:
        return self._filesystem.exists(self._path)

    def open(self) -> None:
        """Read the file, if there is one. Raises CorruptLogError, StorageError."""
        if self.exists:
            data = self._filesystem.read_bytes(self._path)
            self.current = self._parse(data)
            self.size_bytes = len(data)

    def store(self, snapshot: Snapshot) -> None:
        """Durable on return. Raises LogOfflineError."""
        previous, last, offset, records = snapshot
        self._write(frame([_FORMAT, _VERSION, previous, last, offset, records]))
        self.current = snapshot

    def _write(self, data: bytes) -> None:
        try:
            self._filesystem.write_atomically(self._path, data)
        except (OSError, StorageError) as error:
            raise LogOfflineError(
                f"the snapshot {self._path} could not be written: {error}",
                hint="see to the disk, then start the node again",
            ) from error
        self.size_bytes = len(data)
        self._sending.clear()

    def _parse(self, data: bytes) -> Snapshot:
        payload = payload_at(data, 0)
        if payload is None or HEADER_BYTES + len(payload) != len(data):
            raise self._damaged("one whole frame", "another")
        try:
            value = msgpack.unpackb(payload, use_list=False)
        except (ValueError, msgpack.UnpackException) as error:
            raise self._damaged("msgpack", str(error)) from error
        match value:
            case (format_name, int(version), *_) if format_name == _FORMAT and version != _VERSION:
                raise StorageError(
                    f"{self._path} has format version {version}, and this program reads version {_VERSION}",
                    hint="a newer kafkalite wrote it; start that version again",
                )
            case (
                format_name,
                _,
                (bytes(), int(), int()) as previous,
                (bytes(), int(), int()) as last,
                int(offset),
                bytes(records),
            ) if format_name == _FORMAT and previous[1] + 1 == last[1]:
                return Snapshot(previous, last, offset, records)
        raise self._damaged("a snapshot of this format", "something else with a good checksum")

    def _damaged(self, expected: str, actual: str) -> CorruptLogError:
        return CorruptLogError(
            path=self._path,
            position=0,
            expected=expected,
            actual=actual,
            hint="restore the file, or give the node an empty metadata directory and --rejoin",
        )

    def receive(self, data: bytes, *, is_first: bool, is_last: bool) -> Snapshot | None:
        """The leader's snapshot, once its last piece has come and the whole is good. Not stored yet."""
        if is_first:
            self._receiving = bytearray()
        if self._receiving is None or len(self._receiving) + len(data) > _MAX_RECEIVED_BYTES:
            self._receiving = None
            return None
        self._receiving += data
        if not is_last:
            return None
        whole, self._receiving = bytes(self._receiving), None
        try:
            return self._parse(whole)
        except StorageError:
            return None  # a piece was lost, or another's came between: the leader sends it again

    # --- what the library calls (its names) --------------------------------------------------------------

    def getTransmissionData(self, node: Any) -> tuple[bytes, bool, bool] | None:  # noqa: N802
        """The next piece for ``node``: (bytes, first, last)."""
        if node not in self._sending:
            if self.current is None:
                return None
            self._sending[node] = (self._filesystem.read_bytes(self._path), 0)
        data, position = self._sending[node]
        end = position + self._chunk_bytes
        if end < len(data):
            self._sending[node] = (data, end)
        else:
            del self._sending[node]
        return data[position:end], position == 0, end >= len(data)

    def cancelTransmisstion(self, node: Any) -> None:  # noqa: N802
        self._sending.pop(node, None)

    def checkSerializing(self) -> tuple[int, None]:  # noqa: N802
        return 0, None  # "not serializing": when to take a snapshot is not the library's to say
