"""Repair a damaged log without a sound replica, for ``kl log accept-loss`` (R45).

Every intact batch stays at its offset. Gap batches, as compaction writes them, take the place of the offsets
that no intact batch has, up to the last offset that is known to have been synced. So consumers continue after
the lost offsets, and no offset is used twice. The damaged files are kept beside the new ones.

The repair blocks, and needs a directory that no broker uses. If it is interrupted, it can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kafkalite.errors import CorruptLogError, DataDirectoryError
from kafkalite.limits import MAX_RECORDS_PER_BATCH
from kafkalite.model import NO_BROKER_EPOCH
from kafkalite.records.gaps import build_gap
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import (
    CleanShutdown,
    LogState,
    RecoveryPoint,
    decode_clean_shutdown,
    decode_partition,
    encode_clean_shutdown,
    encode_log_state,
)
from kafkalite.storage.damage import Intact, intact_runs
from kafkalite.storage.filesystem import FileSystem, unlink_existing
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.log_store import METADATA_POINT
from kafkalite.storage.recovery import is_own, read_log_state, restored_state
from kafkalite.storage.recovery_points import RecoveryPointsFile
from kafkalite.storage.segment import Segment


class AcceptedLoss(NamedTuple):
    """The result of one repair. ``kept``: paths of the damaged files, which can be removed by hand."""

    directory: str
    log_start_offset: int
    log_end_offset: int
    lost_records: int
    kept: list[str]


def accept_loss(fs: FileSystem, directory: str) -> AcceptedLoss:
    """Repair the log in ``directory``, whose parent is the data directory. For the directory of the metadata
    log, accept that it is an older copy.

    Raises DataDirectoryError if the data directory is in use or ``directory`` cannot be a log, OSError,
    DiskFullError.
    """
    data_directory, name = layout.parent(directory), directory.rpartition("/")[2]
    if name == METADATA_POINT:
        return _accept_older_metadata(fs, directory)
    if layout.parse_log_directory_name(name) is None:
        raise DataDirectoryError(
            f"{directory} is not the directory of a log", hint="its name is <topic id>-<partition>"
        )
    lock = fs.lock(layout.join(data_directory, layout.LOCK_FILE))
    try:
        points = RecoveryPointsFile(fs, data_directory)
        points.open()
        marker = _read_marker(fs, data_directory)
        point = points.points.get(name, RecoveryPoint())
        if marker is not None and name in marker.ends:
            point = max(point, marker.ends[name].point, key=lambda one: (one.truncations, one.recovery_point))
        if not fs.exists(directory) and point == RecoveryPoint():
            raise DataDirectoryError(
                f"{directory} does not exist, and the data directory does not list such a log"
            )
        result = _Repair(fs, directory, point).run()
        if marker is not None:  # the log differs from its entry, and the disk lacks acknowledged records
            ends = {one: end for one, end in marker.ends.items() if one != name}
            data = encode_clean_shutdown(CleanShutdown(NO_BROKER_EPOCH, ends))
            fs.write_atomically(layout.join(data_directory, layout.CLEAN_SHUTDOWN_FILE), data)
        points.write({name: None})
    finally:
        lock.release()
    return result


def _accept_older_metadata(fs: FileSystem, directory: str) -> AcceptedLoss:
    """Remove the recorded metadata offset of this node, so that it starts with the older copy in
    ``directory`` (R25)."""
    data_directory = layout.parent(directory)
    lock = fs.lock(layout.join(data_directory, layout.LOCK_FILE))
    try:
        points = RecoveryPointsFile(fs, data_directory)
        points.open()
        known_offset = points.points.get(METADATA_POINT, RecoveryPoint()).recovery_point
        points.write({METADATA_POINT: None})
    finally:
        lock.release()
    return AcceptedLoss(directory, 0, known_offset, 0, [])


def _read_marker(fs: FileSystem, data_directory: str) -> CleanShutdown | None:
    path = layout.join(data_directory, layout.CLEAN_SHUTDOWN_FILE)
    try:
        return decode_clean_shutdown(fs.read_bytes(path), path)
    except (FileNotFoundError, CorruptLogError, ValueError):
        return None


@dataclass(slots=True)
class _Content:
    """The new content of one segment: its intact batches, and gap batches. ``is_same``: the existing file has
    the same batches."""

    base_offset: int
    parts: list[bytes] = field(default_factory=list)
    is_same: bool = True


class _Repair:
    """Repairs the log in one directory."""

    def __init__(self, fs: FileSystem, directory: str, point: RecoveryPoint) -> None:
        self._fs = fs
        self._directory = directory
        self._point = point
        self._kept: list[str] = []
        self._lost = 0
        self._first_lost: int | None = None
        self._epoch = 0  # of the batch before

    def run(self) -> AcceptedLoss:
        fs = self._fs
        if not fs.exists(self._directory):
            fs.make_dirs(self._directory)
            fs.sync_dir(layout.parent(self._directory))
        self._finish_interrupted()
        for name in fs.list_dir(self._directory):
            if layout.parse_swap_file_name(name) is not None:  # the segments that it replaces are there still
                self._set_aside(name)
        names = fs.list_dir(self._directory)
        bases = [
            one.base_offset for one in map(layout.parse_segment_file_name, names) if one and _is_log(one)
        ]
        state = self._repair_state(bases)
        start, end = state.log_start_offset, state.cap(self._point.recovery_point, self._point.truncations)
        known_end = max([start, end, *(self._segment(base, state).saved_end_offset() for base in bases)])
        bases = [
            base
            for base, after in zip(bases, [*bases[1:], known_end + 1], strict=bool(bases))
            if after > start
        ]
        self._repair_identity()
        at = min([start, *bases[:1]])
        for base, limit in zip(bases, [*bases[1:], known_end], strict=bool(bases)):
            if base > at:
                self._write(self._gap_segment(at, base))
            at = self._repair_segment(self._segment(base, state), max(at, base), limit)
        if at < known_end:
            self._write(self._gap_segment(at, known_end))
            at = known_end
        self._remove_lone_indexes()
        if self._first_lost is not None:
            self._remove_derived(names, self._first_lost)
        fs.sync_dir(self._directory)
        return AcceptedLoss(self._directory, start, max(at, start), self._lost, self._kept)

    def _finish_interrupted(self) -> None:
        for name in self._fs.list_dir(self._directory):
            if name.endswith(layout.REPAIRED_SUFFIX):
                path = layout.join(self._directory, name)
                target = path.removesuffix(layout.REPAIRED_SUFFIX)
                if self._fs.exists(target):
                    self._fs.unlink(path)
                else:
                    self._fs.rename(path, target)

    def _repair_state(self, bases: list[int]) -> LogState:
        """Return the log state. If no copy of it is readable, the log starts at the first segment."""
        try:
            state, is_restored = restored_state(self._fs, self._directory, self._point)
        except (CorruptLogError, ValueError):
            state, is_restored = LogState(min(bases, default=0), 1, 0), True
        if is_restored and self._fs.exists(layout.join(self._directory, layout.LOG_STATE_FILE)):
            self._set_aside(layout.LOG_STATE_FILE)
        if not bases and state.log_start_offset < self._point.recovery_point:
            self._lost += self._point.recovery_point - state.log_start_offset
            state, is_restored = state._replace(log_start_offset=self._point.recovery_point), True
        if is_restored:
            path = layout.join(self._directory, layout.LOG_STATE_FILE)
            self._fs.write_atomically(path, encode_log_state(state, self._directory.rpartition("/")[2]))
        assert read_log_state(self._fs, self._directory) == state
        return state

    def _repair_identity(self) -> None:
        """Set an unreadable ``partition.json`` aside; the next start writes a new one. Raises
        DataDirectoryError."""
        path = layout.join(self._directory, layout.PARTITION_FILE)
        if not self._fs.exists(path):
            return
        found = decode_partition(self._fs.read_bytes(path))
        here = layout.parse_log_directory_name(self._directory.rpartition("/")[2])
        if found is None:
            self._set_aside(layout.PARTITION_FILE)
        elif here is not None and found[1:] != here:
            own = layout.log_directory_name(found.topic_id, found.partition)
            raise DataDirectoryError(
                f"{self._directory} holds the log {found.topic}-{found.partition}",
                hint=f"rename it to {own}, where it belongs, or move it away and accept the loss after that",
            )

    def _segment(self, base_offset: int, state: LogState) -> Segment:
        return Segment(
            self._fs, self._directory, base_offset, LogConfig(), state, next_offset=base_offset, size_bytes=0
        )

    def _runs(self, segment: Segment, view: memoryview, at: int) -> Iterator[Intact]:
        """Yield the runs of intact batches at or above offset ``at`` in a segment; none in a segment of
        another log (R42)."""
        if not is_own(self._fs, segment, self._point.end):
            return
        yield from intact_runs(view, 0, at)

    def _repair_segment(self, segment: Segment, at: int, limit: int) -> int:
        """Fill the gaps of one segment from offset ``at`` to ``limit`` (exclusive). Return the segment's end
        offset."""
        size = segment.file.size()
        view = segment.file.map(size)
        content = _Content(segment.base_offset)
        position = 0
        for run in self._runs(segment, view, at):
            self._add_gap(content, at, run.start_offset, epoch=run.first_epoch)
            content.is_same = content.is_same and run.position == position
            content.parts.append(bytes(view[run.position : run.end]))
            position, at, self._epoch = run.end, run.end_offset, run.last_epoch
        self._add_gap(content, at, limit)
        at = max(at, limit)
        if not content.is_same or any(view[position:]):
            name = layout.segment_file_name(segment.base_offset, layout.LOG_SUFFIX)
            segment.release()
            self._replace(name, b"".join(content.parts))
            segment.drop_saved_indexes()
        if not content.parts:
            segment.drop_saved_indexes()  # they may name a batch that is lost
        return at

    def _gap_segment(self, at: int, end: int) -> _Content:
        content = _Content(at)
        self._add_gap(content, at, end)
        return content

    def _add_gap(self, content: _Content, at: int, end: int, epoch: int | None = None) -> None:
        if at >= end:
            return
        content.is_same = False
        self._lost += end - at
        if self._first_lost is None:
            self._first_lost = at
            self._epoch = self._epoch or epoch or 0
        while at < end:
            count = min(end - at, MAX_RECORDS_PER_BATCH)
            content.parts.append(bytes(build_gap(at, count, self._epoch)))
            at += count

    def _write(self, content: _Content) -> None:
        path = layout.join(self._directory, layout.segment_file_name(content.base_offset, layout.LOG_SUFFIX))
        self._fs.write_atomically(path, b"".join(content.parts))
        stem = path.removesuffix(layout.LOG_SUFFIX)
        unlink_existing(self._fs, (stem + layout.OFFSET_INDEX_SUFFIX, stem + layout.TIME_INDEX_SUFFIX))

    def _replace(self, name: str, data: bytes) -> None:
        path = layout.join(self._directory, name)
        self._fs.write_atomically(path + layout.REPAIRED_SUFFIX, data)
        self._set_aside(name)
        self._fs.rename(path + layout.REPAIRED_SUFFIX, path)
        self._fs.sync_dir(self._directory)

    def _set_aside(self, name: str) -> None:
        path = layout.join(self._directory, name)
        number = 1
        while self._fs.exists(kept := f"{path}{layout.DAMAGED_SUFFIX}{number}"):
            number += 1
        self._fs.rename(path, kept)
        self._kept.append(kept)

    def _remove_lone_indexes(self) -> None:
        """Remove index files without a segment, because they identify a batch that is lost (R42)."""
        names = self._fs.list_dir(self._directory)
        found = {name: one for name in names if (one := layout.parse_segment_file_name(name))}
        bases = {one.base_offset for one in found.values() if _is_log(one)}
        for name, one in found.items():
            if one.base_offset not in bases:
                self._fs.unlink(layout.join(self._directory, name))

    def _remove_derived(self, names: list[str], first_lost: int) -> None:
        """Remove the leader epochs and the producer snapshots above ``first_lost``; the next start derives
        them again."""
        for name in names:
            offset = layout.parse_producers_file_name(name)
            if name == layout.LEADER_EPOCHS_FILE or (offset is not None and offset > first_lost):
                self._fs.unlink(layout.join(self._directory, name))


def _is_log(name: layout.SegmentFileName) -> bool:
    return name.suffix == layout.LOG_SUFFIX
