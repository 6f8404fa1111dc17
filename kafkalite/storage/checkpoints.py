"""Encodes and decodes the small files of a data directory.

Except for ``node.json`` and ``partition.json``, they are lines of text that end with their CRC-32C, so that
people can read them and damage is detected::

    kafkalite log-state 1
    log 0af10af10af10af10af10af10af10af1-0
    log_start_offset 100
    truncations 2
    truncated_to 340
    crc32c 8fdb1002

A file with a wrong CRC counts as damaged, not as missing (R25).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from kafkalite.errors import CorruptLogError, DamagedIdentityError, DataDirectoryError
from kafkalite.model import NO_OFFSET
from kafkalite.records.checksum import crc32c
from kafkalite.storage import layout
from kafkalite.storage.leader_epochs import EpochEntry
from kafkalite.storage.producer_state import ProducerStates

VERSION: Final = 1
FORMAT_VERSION: Final = 1
"""The version of the data directory as a whole, in ``node.json``."""
_LEADER_EPOCHS_VERSION: Final = 2
_PRODUCERS_VERSION: Final = 2

_LOG_STATE: Final = "log-state"
_LEADER_EPOCHS: Final = "leader-epochs"
_RECOVERY_POINTS: Final = "recovery-points"
_CLEAN_SHUTDOWN: Final = "clean-shutdown"
_PRODUCERS: Final = "producers"
_COMPACTION: Final = "compaction"
START_COUNT: Final = "start-count"
START_FILE: Final = "start-file"
_LOG_DIRS: Final = "log-dirs"
LOG_DIR_STARTS: Final = "log-dir-starts"

#: The last line of a block of lines.
_BLOCK_END: Final = re.compile(rb"crc32c [0-9a-f]{8}\n")


class LogState(NamedTuple):
    """The durable state of a log, apart from its batches.

    ``truncations`` counts the truncations that removed a batch, and the resets. Another file of the log with
    a lower count was written before the last of them, and is valid only for offsets below ``truncated_to``.
    """

    log_start_offset: int = 0
    truncations: int = 0
    truncated_to: int = NO_OFFSET

    def is_older_than(self, point: RecoveryPoint) -> bool:
        """Whether this state is older than the log's state at the time when ``point`` was written."""
        return self.truncations < point.truncations or self.log_start_offset < point.log_start_offset

    def cap(self, end_offset: int, truncations: int) -> int:
        """Return the offset, at most ``end_offset``, below which a file with the truncation count
        ``truncations`` is valid."""
        return end_offset if truncations >= self.truncations else min(end_offset, self.truncated_to)


class Fingerprint(NamedTuple):
    """The CRC fields of a segment's first and last batch, which identify the segment and its end.

    ``position`` is the last batch's position in the file. A segment of another log has another first batch. A
    segment that was cut, zeroed or replaced by an older version has another last batch, or none (R42).
    """

    base_offset: int
    head_crc: int
    position: int
    tail_crc: int


class RecoveryPoint(NamedTuple):
    """The offset below which all of a log was synced when the point was written (R24).

    ``end`` identifies the active segment and the batch that ends at the recovery point. It is None if the
    active segment had no batch, or if the position of that batch was unknown.
    """

    recovery_point: int = 0
    truncations: int = 0
    log_start_offset: int = 0
    end: Fingerprint | None = None

    def age(self) -> tuple[int, int]:
        """Return a key that orders the points of one log by the time when they were written."""
        return self.truncations, self.recovery_point

    def valid_end(self, state: LogState) -> int:
        """Return the offset below which the point still holds for a log with ``state``.

        A state records only the latest truncation. A point from before the last two truncations therefore
        proves nothing: the earlier truncation may have removed more.
        """
        if self.truncations < state.truncations - 1:
            return 0
        return state.cap(self.recovery_point, self.truncations)


class CompactionPoints(NamedTuple):
    """How far a log is compacted. ``compacted_to`` is exclusive.

    ``passes``: (offset up to which the pass compacted, wall clock time in milliseconds), oldest first. A pass
    may be omitted; its offsets then count as compacted by the next recorded pass.
    """

    truncations: int = 0
    compacted_to: int = 0
    passes: tuple[tuple[int, int], ...] = ()

    def after(self, state: LogState) -> CompactionPoints:
        """Return the points that are still valid for a log with ``state``."""
        if state.truncations == self.truncations:
            return self
        is_next = state.truncations == self.truncations + 1
        if not is_next or state.truncated_to < self.compacted_to:
            return CompactionPoints(state.truncations)
        return self._replace(truncations=state.truncations)


class CleanEnd(NamedTuple):
    """The range of a log at an orderly stop, when all of it is synced. ``log_end_offset`` is exclusive.

    ``segment_count`` and ``size_bytes`` are totals over all segments; -1 if unknown. ``end`` identifies the
    last segment; None if that segment has no batch or does not exist.
    """

    log_start_offset: int
    log_end_offset: int
    truncations: int = 0
    segment_count: int = -1
    size_bytes: int = -1
    end: Fingerprint | None = None

    @property
    def point(self) -> RecoveryPoint:
        """The recovery point at the end of the log, all of which was synced."""
        return RecoveryPoint(self.log_end_offset, self.truncations, self.log_start_offset, self.end)


class CleanShutdown(NamedTuple):
    """The marker of an orderly stop: the broker epoch of the process (R21), and, by directory name, the range
    of each log that was closed with everything synced."""

    broker_epoch: int
    ends: dict[str, CleanEnd]


class SavedEpochs(NamedTuple):
    """The content of a leader-epochs file.

    ``is_ahead``: the file was written before the first batch of its last epoch. So it has the epochs of all
    batches, unless the system lost unsynced bytes (R58). False for files of format version 1, which were
    written with the next sync after that batch.
    """

    entries: list[EpochEntry]
    truncations: int
    is_ahead: bool = True

    def after(self, state: LogState) -> SavedEpochs:
        """Return the part that is still valid for a log with ``state``."""
        if state.truncations <= self.truncations:
            return self
        entries = [one for one in self.entries if one.start_offset < state.truncated_to]
        return self._replace(entries=entries, is_ahead=False)


class NodeIdentity(NamedTuple):
    cluster_id: str
    node_id: int
    directory_id: str


class KnownDirectory(NamedTuple):
    """A further data directory that a node has used. ``starts`` is the number of the node's starts in which
    it was used, the last one included."""

    directory_id: str
    starts: int
    path: str  #: at the last of these starts


def encode_log_dirs(directories: Iterable[KnownDirectory]) -> bytes:
    return encode_lines(_LOG_DIRS, (f"{one.directory_id} {one.starts} {one.path}" for one in directories))


def decode_log_dirs(data: bytes, path: str) -> list[KnownDirectory]:
    """Raises CorruptLogError, ValueError."""
    fields = (line.split(" ", 2) for line in decode_lines(_LOG_DIRS, data, path))
    return [KnownDirectory(directory_id, int(starts), place) for directory_id, starts, place in fields]


def encode_lines(kind: str, lines: Iterable[str], version: int = VERSION) -> bytes:
    body = "\n".join((f"kafkalite {kind} {version}", *lines, "")).encode()
    return body + b"crc32c %08x\n" % crc32c(body)


def decode_lines(kind: str, data: bytes, path: str, version: int = VERSION) -> list[str]:
    """Return the lines between the first line and the CRC. Raises CorruptLogError unless the first line names
    ``kind`` and ``version``, and the CRC is correct."""
    cut = data.rfind(b"crc32c ")
    body, tail = data[: max(cut, 0)], data[max(cut, 0) :]
    expected = b"crc32c %08x\n" % crc32c(body)
    if tail != expected:
        raise CorruptLogError(
            path=path, position=len(body), expected=repr(expected.decode()), actual=repr(tail[:32])
        )
    lines = body.decode().splitlines()
    head = f"kafkalite {kind} {version}"
    if not lines or lines[0] != head:
        raise CorruptLogError(path=path, position=0, expected=repr(head), actual=repr(lines[:1]))
    return lines[1:]


def _field(line: str, name: str, path: str) -> int:
    key, _, value = line.partition(" ")
    if key != name:
        raise CorruptLogError(path=path, position=0, expected=name, actual=repr(line))
    return int(value)


def encode_log_state(state: LogState, log: str) -> bytes:
    """Return the content of a log-state file. ``log`` is the name of the log's directory."""
    fields = state._asdict()
    return encode_lines(_LOG_STATE, (f"log {log}", *(f"{name} {value}" for name, value in fields.items())))


def _without_owner(lines: list[str], path: str) -> list[str]:
    """Return ``lines`` without the line ``log <directory name>``, which comes first in files of newer
    versions. Raises CorruptLogError if that name is not the name of the file's directory."""
    if not lines or not lines[0].startswith("log "):
        return lines
    owner, name = lines[0], path.split("/")[-2:-1]
    if name and owner != f"log {name[0]}":
        raise CorruptLogError(path=path, position=0, expected=f"a file of {name[0]}", actual=owner)
    return lines[1:]


def decode_log_state(data: bytes, path: str) -> LogState:
    """Return the state. Raises CorruptLogError, also for the state of a log in another directory (R42), and
    ValueError."""
    lines = _without_owner(decode_lines(_LOG_STATE, data, path), path)
    pairs = zip(lines, LogState._fields, strict=True)
    return LogState(*(_field(line, name, path) for line, name in pairs))


def encode_leader_epochs(entries: Iterable[EpochEntry], truncations: int, log: str) -> bytes:
    """Return the content of a leader-epochs file. ``log`` is the name of the log's directory."""
    lines = (f"{entry.leader_epoch} {entry.start_offset}" for entry in entries)
    head = (f"log {log}", f"truncations {truncations}")
    return encode_lines(_LEADER_EPOCHS, (*head, *lines), _LEADER_EPOCHS_VERSION)


def decode_leader_epochs(data: bytes, path: str) -> SavedEpochs:
    """Return the content of a leader-epochs file. Raises CorruptLogError, also for the file of a log in
    another directory (R42), and ValueError."""
    is_ahead = not data.startswith(f"kafkalite {_LEADER_EPOCHS} {VERSION}\n".encode())
    version = _LEADER_EPOCHS_VERSION if is_ahead else VERSION
    head, *lines = _without_owner(decode_lines(_LEADER_EPOCHS, data, path, version), path)
    pairs = (line.split() for line in lines)
    entries = [EpochEntry(int(epoch), int(start)) for epoch, start in pairs]
    return SavedEpochs(entries, _field(head, "truncations", path), is_ahead)


def encode_producers(states: ProducerStates, truncations: int, path: str) -> bytes:
    """Return the content of a snapshot file. The snapshot's offset and the name of its log are taken from
    ``path``."""
    log = layout.name_of(layout.parent(path))
    head = (f"log {log}", f"offset {_snapshot_offset(path)}", f"truncations {truncations}")
    return encode_lines(_PRODUCERS, (*head, *states.lines()), _PRODUCERS_VERSION)


def decode_producers(data: bytes, path: str) -> tuple[ProducerStates, int]:
    """Return (states, truncation count). Raises CorruptLogError, also for a snapshot of a log in another
    directory or at another offset (R42), and ValueError. In format version 1, snapshots name neither log nor
    offset."""
    if data.startswith(f"kafkalite {_PRODUCERS} {VERSION}\n".encode()):
        head, *lines = decode_lines(_PRODUCERS, data, path)
    else:
        offset, head, *lines = _without_owner(decode_lines(_PRODUCERS, data, path, _PRODUCERS_VERSION), path)
        if _field(offset, "offset", path) != _snapshot_offset(path):
            expected = f"a snapshot at offset {_snapshot_offset(path)}"
            raise CorruptLogError(path=path, position=0, expected=expected, actual=offset)
    return ProducerStates.from_lines(lines), _field(head, "truncations", path)


def _snapshot_offset(path: str) -> int | None:
    return layout.parse_producers_file_name(layout.name_of(path))


def encode_compaction(points: CompactionPoints) -> bytes:
    head = (f"truncations {points.truncations}", f"compacted_to {points.compacted_to}")
    return encode_lines(_COMPACTION, (*head, *(f"{offset} {wall_ms}" for offset, wall_ms in points.passes)))


def decode_compaction(data: bytes, path: str) -> CompactionPoints:
    """Return the compaction points. Raises CorruptLogError, ValueError."""
    first, second, *lines = decode_lines(_COMPACTION, data, path)
    rows = (line.split() for line in lines)
    passes = tuple((int(offset), int(wall_ms)) for offset, wall_ms in rows)
    return CompactionPoints(_field(first, "truncations", path), _field(second, "compacted_to", path), passes)


def encode_recovery_points(points: Mapping[str, RecoveryPoint | None]) -> bytes:
    """Return a block of ``recovery-points`` that sets the point of each log in ``points``. None removes the
    point of the log."""
    return encode_lines(_RECOVERY_POINTS, (_point_line(name, point) for name, point in points.items()))


def _point_line(name: str, point: RecoveryPoint | None) -> str:
    if point is None:
        return f"{name} removed"
    return _line(name, *point[:-1], *(point.end or ()))


def _line(*values: object) -> str:
    return " ".join(map(str, values))


class RecoveryPoints(NamedTuple):
    """The content of a ``recovery-points`` file. ``size_bytes`` is the end of its last intact block.

    ``problem`` describes damage: an unreadable block before an intact one, or a file without an intact block.
    None if there is no damage. The points of unreadable blocks are missing.
    """

    points: dict[str, RecoveryPoint]
    size_bytes: int
    problem: str | None = None


def decode_recovery_points(data: bytes) -> RecoveryPoints:
    """Read every intact block. If several blocks have a point of the same log, the last of them counts.

    Unreadable bytes after the last intact block are a torn append, and are ignored.
    """
    points: dict[str, RecoveryPoint] = {}
    position = size_bytes = 0
    unreadable: str | None = None if data else "the file is empty"
    problem: str | None = None
    while position < len(data):
        match = _BLOCK_END.search(data, position)
        end = match.end() if match else len(data)
        try:
            lines = decode_lines(_RECOVERY_POINTS, data[position:end], _RECOVERY_POINTS)
            points.update(_changes(lines, points))
        except (CorruptLogError, ValueError) as error:
            unreadable = unreadable or str(error)
        else:
            problem, size_bytes = unreadable, end
        position = end
    return RecoveryPoints(points, size_bytes, problem if size_bytes else unreadable)


def _changes(lines: Iterable[str], points: dict[str, RecoveryPoint]) -> dict[str, RecoveryPoint]:
    found: dict[str, RecoveryPoint] = {}
    for name, *values in map(str.split, lines):
        if values == ["removed"]:
            found.pop(name, None)
            points.pop(name, None)
        else:
            point, truncations, log_start_offset, *end = (*map(int, values), *[0] * (3 - len(values)))
            found[name] = RecoveryPoint(point, truncations, log_start_offset, _fingerprint(end))
    return found


def _fingerprint(values: list[int]) -> Fingerprint | None:
    return Fingerprint(*values) if values else None


def encode_clean_shutdown(marker: CleanShutdown) -> bytes:
    lines = (_line(name, *end[:-1], *(end.end or ())) for name, end in marker.ends.items())
    return encode_lines(_CLEAN_SHUTDOWN, (f"broker_epoch {marker.broker_epoch}", *lines))


def decode_clean_shutdown(data: bytes, path: str) -> CleanShutdown:
    """Return the marker. Raises CorruptLogError, ValueError."""
    head, *lines = decode_lines(_CLEAN_SHUTDOWN, data, path)
    ends: dict[str, CleanEnd] = {}
    for name, *values in map(str.split, lines):
        start, log_end, *rest = map(int, values)
        truncations, count, size_bytes, *end = rest or (0, -1, -1)
        ends[name] = CleanEnd(start, log_end, truncations, count, size_bytes, _fingerprint(end))
    return CleanShutdown(_field(head, "broker_epoch", path), ends)


def encode_node(identity: NodeIdentity) -> bytes:
    # json.dumps with an indent uses the encoder in Python, which is half of the time to format a directory.
    fields = {"format_version": FORMAT_VERSION, **identity._asdict(), "crc32c": _identity_crc(identity)}
    lines = json.dumps(fields, separators=(",\n  ", ": "))[1:-1]
    return f"{{\n  {lines}\n}}\n".encode()


def _identity_crc(identity: NodeIdentity) -> str:
    text = "\n".join(map(str, identity))
    return f"{crc32c(text.encode()):08x}"


def decode_node(data: bytes, path: str) -> NodeIdentity:
    """Return the node's identity. Raises DamagedIdentityError; DataDirectoryError for another format version.

    The CRC is checked if the file has one. Earlier versions of the program wrote none.
    """
    try:
        fields = json.loads(data)
    except ValueError:
        problem = f"it begins with {data[:40]!r}, which is not JSON" if data else "it is empty"
        raise _damaged_node(path, problem) from None
    if not isinstance(fields, dict):
        raise _damaged_node(path, f"it is {str(fields)[:40]}, not a JSON object")
    names = ("format_version", *NodeIdentity._fields)
    if missing := [name for name in names if name not in fields]:
        raise _damaged_node(path, f"it has no {', '.join(missing)}")
    version, node_id = fields["format_version"], fields["node_id"]
    if type(node_id) is not int:
        raise _damaged_node(path, f"its node_id is {str(node_id)[:40]!r}, not a whole number")
    identity = NodeIdentity(str(fields["cluster_id"]), node_id, str(fields["directory_id"]))
    if version != FORMAT_VERSION:
        raise DataDirectoryError(
            f"{path} has format version {str(version)[:40]}; this program supports {FORMAT_VERSION}",
            hint="use the version of kafkalite that wrote it",
        )
    if fields.get("crc32c", _identity_crc(identity)) != _identity_crc(identity):
        raise _damaged_node(path, "its ids do not match its crc32c")
    return identity


def restore_hint(path: str) -> str:
    """Return advice for the operator of a node whose ``node.json``, at ``path``, is lost or damaged."""
    command = f"kl server format --restore --data {layout.parent(path)} --cluster-id ID --node-id N"
    return f"restore {layout.NODE_FILE} from a backup; for a node without peers, '{command}' writes it again"


def _damaged_node(path: str, problem: str) -> DamagedIdentityError:
    return DamagedIdentityError(f"{path} is damaged: {problem}", hint=restore_hint(path))


def encode_partition(topic: str, topic_id: str, partition: int, replica_epoch: int = 0) -> bytes:
    """Return the content of ``partition.json``. ``replica_epoch`` is above 0 if a reassignment has added the
    replica (R62)."""
    fields: dict[str, str | int] = {"topic": topic, "topic_id": topic_id, "partition": partition}
    if replica_epoch:
        fields["replica_epoch"] = replica_epoch
    return json.dumps(fields).encode() + b"\n"


class PartitionIdentity(NamedTuple):
    topic: str
    topic_id: str
    partition: int


def decode_partition(data: bytes) -> PartitionIdentity | None:
    """Return the log's identity from the content of ``partition.json``, or None if the content is
    malformed."""
    try:
        fields = json.loads(data)
        identity = PartitionIdentity(fields["topic"], fields["topic_id"], fields["partition"])
    except (ValueError, KeyError, TypeError):
        return None
    return identity if [type(value) for value in identity] == [str, str, int] else None


def decode_replica_epoch(data: bytes) -> int:
    """Return the replica epoch from the content of ``partition.json``; 0 if it has none or is malformed."""
    try:
        epoch = json.loads(data).get("replica_epoch", 0)
    except (ValueError, AttributeError):
        return 0
    return epoch if type(epoch) is int else 0
