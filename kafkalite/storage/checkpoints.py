"""The content of the small files of a data directory. Each file is replaced atomically as a whole.

All but ``node.json`` and ``partition.json`` are lines of text that end with their own CRC-32C, so that
people can read them and damage is detected::

    kafkalite log-state 1
    log_start_offset 100
    truncations 2
    truncated_to 340
    crc32c 5d3c9a01

A file that exists but fails its CRC is damage, and is never treated as missing (R25).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from kafkalite.errors import CorruptLogError, DataDirectoryError
from kafkalite.model import NO_OFFSET
from kafkalite.records.checksum import crc32c
from kafkalite.storage.leader_epochs import EpochEntry
from kafkalite.storage.producer_state import ProducerStates

VERSION: Final = 1
FORMAT_VERSION: Final = 1
"""The version of the whole data directory, in ``node.json``."""

_LOG_STATE: Final = "log-state"
_LEADER_EPOCHS: Final = "leader-epochs"
_RECOVERY_POINTS: Final = "recovery-points"
_CLEAN_SHUTDOWN: Final = "clean-shutdown"
_PRODUCERS: Final = "producers"
_COMPACTION: Final = "compaction"


class LogState(NamedTuple):
    """The durable state of a log beside its batches.

    ``truncations`` counts the truncations that removed a batch. Any other file with a lower count was
    written before the last truncation and is valid only below ``truncated_to`` (exclusive).
    """

    log_start_offset: int = 0
    truncations: int = 0
    truncated_to: int = NO_OFFSET

    def cap(self, end_offset: int, truncations: int) -> int:
        """Return ``end_offset`` of a file with this count, capped to its part that is still valid."""
        return end_offset if truncations >= self.truncations else min(end_offset, self.truncated_to)


class RecoveryPoint(NamedTuple):
    """``recovery_point`` is exclusive. All below it was synced when it was written (R24)."""

    recovery_point: int = 0
    truncations: int = 0


class CompactionPoints(NamedTuple):
    """How far a log was compacted. Offsets are exclusive.

    ``passes``: (compacted up to, wall-clock time in milliseconds), both ascending. A pass soon after
    another may be left out; its range then counts as compacted later.
    """

    truncations: int = 0
    compacted_to: int = 0
    passes: tuple[tuple[int, int], ...] = ()

    def after(self, state: LogState) -> CompactionPoints:
        """Return the points that are still valid for a log of ``state``, below any truncation."""
        if state.truncations == self.truncations:
            return self
        is_next = state.truncations == self.truncations + 1
        if not is_next or state.truncated_to < self.compacted_to:
            return CompactionPoints(state.truncations)
        return self._replace(truncations=state.truncations)


class CleanEnd(NamedTuple):
    """The range of a log at an orderly stop, when all of it is synced. ``log_end_offset`` is exclusive."""

    log_start_offset: int
    log_end_offset: int


class CleanShutdown(NamedTuple):
    """The marker of an orderly stop: the broker epoch of the session (R21), and the range of every log."""

    broker_epoch: int
    ends: dict[str, CleanEnd]


class NodeIdentity(NamedTuple):
    cluster_id: str
    node_id: int
    directory_id: str


def encode_lines(kind: str, lines: Iterable[str]) -> bytes:
    body = "\n".join((f"kafkalite {kind} {VERSION}", *lines, "")).encode()
    return body + b"crc32c %08x\n" % crc32c(body)


def decode_lines(kind: str, data: bytes, path: str) -> list[str]:
    """Return the lines between head and CRC. Raises CorruptLogError."""
    cut = data.rfind(b"crc32c ")
    body, tail = data[: max(cut, 0)], data[max(cut, 0) :]
    expected = b"crc32c %08x\n" % crc32c(body)
    if tail != expected:
        raise CorruptLogError(
            path=path, position=len(body), expected=repr(expected.decode()), actual=repr(tail[:32])
        )
    lines = body.decode().splitlines()
    head = f"kafkalite {kind} {VERSION}"
    if not lines or lines[0] != head:
        raise CorruptLogError(path=path, position=0, expected=repr(head), actual=repr(lines[:1]))
    return lines[1:]


def _field(line: str, name: str, path: str) -> int:
    key, _, value = line.partition(" ")
    if key != name:
        raise CorruptLogError(path=path, position=0, expected=name, actual=repr(line))
    return int(value)


def encode_log_state(state: LogState) -> bytes:
    fields = state._asdict()
    return encode_lines(_LOG_STATE, (f"{name} {value}" for name, value in fields.items()))


def decode_log_state(data: bytes, path: str) -> LogState:
    lines = decode_lines(_LOG_STATE, data, path)
    pairs = zip(lines, LogState._fields, strict=True)
    return LogState(*(_field(line, name, path) for line, name in pairs))


def encode_leader_epochs(entries: Iterable[EpochEntry], truncations: int) -> bytes:
    lines = (f"{entry.leader_epoch} {entry.start_offset}" for entry in entries)
    return encode_lines(_LEADER_EPOCHS, (f"truncations {truncations}", *lines))


def decode_leader_epochs(data: bytes, path: str) -> tuple[list[EpochEntry], int]:
    """Return (entries, truncations). Raises CorruptLogError, ValueError."""
    head, *lines = decode_lines(_LEADER_EPOCHS, data, path)
    pairs = (line.split() for line in lines)
    return [EpochEntry(int(epoch), int(start)) for epoch, start in pairs], _field(head, "truncations", path)


def encode_producers(states: ProducerStates, truncations: int) -> bytes:
    return encode_lines(_PRODUCERS, (f"truncations {truncations}", *states.lines()))


def decode_producers(data: bytes, path: str) -> tuple[ProducerStates, int]:
    """Return (states, truncations). Raises CorruptLogError, ValueError."""
    head, *lines = decode_lines(_PRODUCERS, data, path)
    return ProducerStates.from_lines(lines), _field(head, "truncations", path)


def encode_compaction(points: CompactionPoints) -> bytes:
    head = (f"truncations {points.truncations}", f"compacted_to {points.compacted_to}")
    return encode_lines(_COMPACTION, (*head, *(f"{offset} {wall_ms}" for offset, wall_ms in points.passes)))


def decode_compaction(data: bytes, path: str) -> CompactionPoints:
    """Return the compaction points. Raises CorruptLogError, ValueError."""
    first, second, *lines = decode_lines(_COMPACTION, data, path)
    rows = (line.split() for line in lines)
    passes = tuple((int(offset), int(wall_ms)) for offset, wall_ms in rows)
    return CompactionPoints(_field(first, "truncations", path), _field(second, "compacted_to", path), passes)


def encode_recovery_points(points: Mapping[str, RecoveryPoint]) -> bytes:
    items = points.items()
    lines = (f"{name} {point.recovery_point} {point.truncations}" for name, point in items)
    return encode_lines(_RECOVERY_POINTS, lines)


def decode_recovery_points(data: bytes, path: str) -> dict[str, RecoveryPoint]:
    rows = (line.split() for line in decode_lines(_RECOVERY_POINTS, data, path))
    return {name: RecoveryPoint(int(point), int(truncations)) for name, point, truncations in rows}


def encode_clean_shutdown(marker: CleanShutdown) -> bytes:
    lines = (f"{name} {end.log_start_offset} {end.log_end_offset}" for name, end in marker.ends.items())
    return encode_lines(_CLEAN_SHUTDOWN, (f"broker_epoch {marker.broker_epoch}", *lines))


def decode_clean_shutdown(data: bytes, path: str) -> CleanShutdown:
    head, *lines = decode_lines(_CLEAN_SHUTDOWN, data, path)
    rows = (line.split() for line in lines)
    ends = {name: CleanEnd(int(start), int(end)) for name, start, end in rows}
    return CleanShutdown(_field(head, "broker_epoch", path), ends)


def encode_node(identity: NodeIdentity) -> bytes:
    return json.dumps({"format_version": FORMAT_VERSION, **identity._asdict()}, indent=2).encode() + b"\n"


def decode_node(data: bytes, path: str) -> NodeIdentity:
    """Return the node's identity. Raises DataDirectoryError unless the format version matches."""
    try:
        fields = json.loads(data)
        version = fields["format_version"]
        identity = NodeIdentity(
            str(fields["cluster_id"]), int(fields["node_id"]), str(fields["directory_id"])
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataDirectoryError(
            f"{path} cannot be read: {error!r}", hint="restore it; the data directory was not touched"
        ) from error
    if version != FORMAT_VERSION:
        raise DataDirectoryError(
            f"{path} has format version {version!r}; this program supports {FORMAT_VERSION}",
            hint="use the version of kafkalite that wrote it",
        )
    return identity


def encode_partition(topic: str, topic_id: str, partition: int) -> bytes:
    return json.dumps({"topic": topic, "topic_id": topic_id, "partition": partition}).encode() + b"\n"


def decode_partition_topic(data: bytes) -> str | None:
    """Return the topic's name in a ``partition.json``, or None: the file is for people and may be torn."""
    try:
        topic = json.loads(data)["topic"]
    except (ValueError, KeyError, TypeError):
        return None
    return topic if isinstance(topic, str) else None
