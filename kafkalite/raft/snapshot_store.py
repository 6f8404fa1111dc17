"""The snapshot of a metadata log: stored in one file, sent in chunks, and verified before use.

::

    raft.snapshot   one frame:  ["kafkalite-raft-snapshot", 1, previous, last, offset, records]
    previous, last  [command, index, term]: the last two entries that the snapshot covers
    offset          the offset of the last entry that took effect; void entries have none
    records         the msgpack bytes of the metadata records that make the state

The array has a seventh element if a log entry has changed the voters (R93, ``voter_set``)::

    voters          [offset, [[node, directory, address], …]]: the voter set in force after ``last``

A new snapshot replaces the old one atomically, and the log is compacted only afterwards. A leader sends the
bytes of the file. ``SnapshotStore`` replaces pysyncobj's serializer. Of the serializer's methods, it has only
those that the library still calls, because ``RaftNode`` takes the snapshots, and the adapter installs those
of a leader.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from kafkalite.errors import LogOfflineError, RemoteProtocolError, StorageError, StorageExhaustedError
from kafkalite.limits import KIB
from kafkalite.raft.entries import Entry
from kafkalite.raft.frames import check_version, corrupt, frame, read_single_frame
from kafkalite.raft.voter_set import VoterSet, parsed_voters
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.layout import join

SNAPSHOT_FILE: Final = "raft.snapshot"

_FORMAT: Final = "kafkalite-raft-snapshot"
_VERSION: Final = 1
_MAX_RECEIVED_BYTES: Final = 1 << 30


class Snapshot(NamedTuple):
    previous: Entry
    last: Entry
    offset: int
    records: bytes
    voters: VoterSet | None = None  #: None: those of the first format

    @property
    def last_index(self) -> int:
        """The index of the last entry that the snapshot covers."""
        return self.last[1]


def parse_snapshot(data: bytes, path: str) -> Snapshot:
    """Return the snapshot in the content of a file. Raises CorruptLogError, StorageError."""
    value = read_single_frame(data, path)
    check_version(value, path, _FORMAT, _VERSION)
    match value[2:]:
        case [
            [bytes(), int(), int()] as previous,
            [bytes(), int(), int()] as last,
            int(offset),
            bytes(records),
            *rest,
        ] if previous[1] + 1 == last[1]:
            return Snapshot((*previous,), (*last,), offset, records, _voter_set(rest, path))
    raise corrupt(path, 0, "a snapshot of this format", "something else with a good checksum")


def _voter_set(rest: list[Any], path: str) -> VoterSet | None:
    match rest:
        case []:
            return None
        case [[int(index), voters]]:
            try:
                return VoterSet(index, parsed_voters(voters))
            except RemoteProtocolError as error:
                raise corrupt(path, 0, "a list of voters", error.message) from error
    raise corrupt(path, 0, "a snapshot of this format", f"{len(rest)} further values")


def _encoded(snapshot: Snapshot) -> list[Any]:
    previous, last, offset, records, voters = snapshot
    value = [_FORMAT, _VERSION, previous, last, offset, records]
    if voters is not None:
        value.append([voters.offset, [[node, *key] for node, key in voters.voters.items()]])
    return value


class SnapshotStore:
    """Stores one snapshot. Use it in one thread at a time. Invariant after ``open``: ``current`` is the
    content of the file, or None without a file."""

    def __init__(self, filesystem: FileSystem, directory: str, *, chunk_bytes: int = 256 * KIB) -> None:
        self.current: Snapshot | None = None
        self.size_bytes = 0
        self._filesystem = filesystem
        self._path = join(directory, SNAPSHOT_FILE)
        self._chunk_bytes = chunk_bytes
        self._sending: dict[Any, tuple[bytes, int]] = {}  # {node: (file content, position)}
        self._receiving: bytearray | None = None

    @property
    def exists(self) -> bool:
        return self._filesystem.exists(self._path)

    def open(self) -> None:
        """Read the file if it exists. Raises CorruptLogError, StorageError."""
        if self.exists:
            data = self._filesystem.read_bytes(self._path)
            self.current = parse_snapshot(data, self._path)
            self.size_bytes = len(data)

    def store(self, snapshot: Snapshot) -> None:
        """Store the snapshot durably. Raises StorageExhaustedError (nothing changed), LogOfflineError."""
        data = frame(_encoded(snapshot))
        try:
            self._filesystem.write_atomically(self._path, data)
        except StorageExhaustedError:
            raise
        except (OSError, StorageError) as error:
            raise LogOfflineError(
                f"the snapshot {self._path} could not be written: {error}",
                hint="check the disk, then start the node again",
            ) from error
        self.current = snapshot
        self.size_bytes = len(data)
        self._sending.clear()

    def receive(self, data: bytes, *, is_first: bool, is_last: bool) -> Snapshot | None:
        """Add a chunk of a leader's snapshot. After the last chunk, return the snapshot, which is not stored
        yet. Return None after any earlier chunk, or if the chunks do not form a whole snapshot."""
        if is_first:
            self._receiving = bytearray()
        if self._receiving is None or len(self._receiving) + len(data) > _MAX_RECEIVED_BYTES:
            self._receiving = None
            return None
        self._receiving += data
        if not is_last:
            return None
        received, self._receiving = bytes(self._receiving), None
        try:
            return parse_snapshot(received, self._path)
        except StorageError:
            return None  # a chunk was lost or belongs to another snapshot; the leader sends it again

    def getTransmissionData(self, node: Any) -> tuple[bytes, bool, bool] | None:  # noqa: N802
        """Return the next chunk for ``node`` as (bytes, is first, is last), or None without a snapshot."""
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
        return 0, None  # never serializing, because RaftNode decides when to take snapshots
