"""Repair a damaged log without a sound replica, for ``kl log accept-loss`` (R45).

Every intact batch stays at its offset. Gap batches, as compaction writes them, take the place of the offsets
that no intact batch has, up to the last offset that is known to have been synced. So consumers continue after
the lost offsets, and no offset is used twice. The damaged files are kept beside the new ones.

The repair blocks, and needs a directory that no broker uses. If it is interrupted, it can be repeated.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from kafkalite.errors import CorruptLogError, DataDirectoryError
from kafkalite.limits import MAX_RECORDS_PER_BATCH
from kafkalite.model import NO_BROKER_EPOCH
from kafkalite.records.gaps import build_gap
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import (
    CleanShutdown,
    Fingerprint,
    LogState,
    RecoveryPoint,
    decode_clean_shutdown,
    decode_partition,
    encode_clean_shutdown,
    encode_log_state,
)
from kafkalite.storage.damage import Damage, Intact, head_of, intact_runs
from kafkalite.storage.filesystem import Buffer, FileSystem, unlink_existing
from kafkalite.storage.inspect import damage_of
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.log_store import METADATA_POINT
from kafkalite.storage.recovery import read_log_state, restored_state
from kafkalite.storage.recovery_points import RecoveryPointsFile
from kafkalite.storage.segment import Segment


class AcceptedLoss(NamedTuple):
    """The result of one repair. ``kept``: paths of the damaged files, which can be removed by hand.
    ``damage``: the damage that the next start will find nevertheless."""

    directory: str
    log_start_offset: int
    log_end_offset: int
    lost_records: int
    kept: list[str]
    damage: Damage | None = None


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
        return result._replace(damage=damage_of(fs, directory))
    finally:
        lock.release()


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


@dataclass(eq=False, slots=True)
class _Source:
    """A segment file with batches of this log. ``base_offset`` is where its batches begin, which may differ
    from its name. ``is_proven``: an index or the recovery point names its first batch."""

    segment: Segment
    view: memoryview
    base_offset: int
    is_proven: bool
    runs: list[Intact]


class _Piece(NamedTuple):
    """Intact batches, and the file that has them."""

    run: Intact
    source: _Source

    @property
    def start_offset(self) -> int:
        return self.run.start_offset


@dataclass(slots=True)
class _Content:
    """The new content of one segment: its intact batches, and gap batches. ``is_same``: the existing file has
    the same batches."""

    base_offset: int
    parts: list[Buffer] = field(default_factory=list)
    is_same: bool = False


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
        self._end: Fingerprint | None = None

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
        start, end = state.log_start_offset, self._point.valid_end(state)
        known_end = max([start, end, *(self._segment(base, state).saved_end_offset() for base in bases)])
        self._repair_identity()
        point = self._point
        self._end = point.end if end == point.recovery_point else None
        found = [one for base in bases if (one := self._identify(self._segment(base, state))) is not None]
        skipped, sources = self._split(found, start)
        contents: list[_Content] = []
        pieces = _choose(sources, known_end)
        bounds = [base for base in bases if base not in skipped]
        at = min([start, *(one.source.base_offset for one in pieces[:1])])
        for source, group in groupby(pieces, key=lambda one: one.source):
            runs = [one.run for one in group]
            if at < source.base_offset <= runs[0].start_offset:
                at = self._fill(contents, bounds, at, source.base_offset)
            contents.append(self._content(source, runs, at))
            at = runs[-1].end_offset
        at = self._fill(contents, bounds, at, known_end)
        self._replace(contents, bounds, at)
        for one in sources:
            if not one.segment.saved_head_crc():  # the index is missing, or that of another segment
                self._drop_indexes(one.segment.path())
        self._remove_lone_indexes()
        if self._first_lost is not None:
            self._remove_derived(names, self._first_lost)
        fs.sync_dir(self._directory)
        return AcceptedLoss(self._directory, start, max(at, start), self._lost, self._kept)

    def _finish_interrupted(self) -> None:
        """Finish or undo an interrupted ``_replace``. A missing target shows that all files were written."""
        names = [one for one in self._fs.list_dir(self._directory) if one.endswith(layout.REPAIRED_SUFFIX)]
        paths = [layout.join(self._directory, one).removesuffix(layout.REPAIRED_SUFFIX) for one in names]
        existing = [path for path in paths if self._fs.exists(path)]
        if len(existing) == len(paths):
            unlink_existing(self._fs, [path + layout.REPAIRED_SUFFIX for path in paths])
            return
        for path in existing:
            self._set_aside(path.rpartition("/")[2])
        self._rename_repaired(paths)

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

    def _identify(self, segment: Segment) -> _Source | None:
        """Return the batches of a file; None if they are of another log (R42).

        Batches under the name of another segment are used only if an index or the recovery point names them.
        """
        view = segment.file.map(segment.file.size())
        base_offset, is_proven = segment.base_offset, False
        head = head_of(view)
        if segment.is_foreign():
            return None
        if head is not None:
            head_crc, named = segment.fingerprint(0).head_crc, self._named(segment)
            is_proven = head_crc in named
            if not is_proven and head.base_offset != base_offset:
                home = self._segment(head.base_offset, segment.state)
                if head_crc in self._named(home) or segment.owner in segment.head_owners():
                    base_offset, is_proven = head.base_offset, True
                elif next(intact_runs(view, 0, head.base_offset)).end_offset > head.next_offset:
                    return None  # otherwise only the base offset of the first batch is damaged
            if named and not is_proven:
                return None
        return _Source(segment, view, base_offset, is_proven, list(intact_runs(view, 0, base_offset)))

    def _named(self, segment: Segment) -> set[int]:
        """Return the CRCs that index and recovery point have recorded of the first batch, at most two."""
        is_end = self._end is not None and self._end.base_offset == segment.base_offset
        return {segment.saved_head_crc(), self._end.head_crc if self._end and is_end else 0} - {0}

    def _split(self, found: list[_Source], start: int) -> tuple[set[int], list[_Source]]:
        """Return the base offsets of the segments that the next start deletes, and the other files."""
        skipped = {
            one.segment.base_offset
            for one in found
            if any(one.base_offset < other.base_offset <= start for other in found)
            and all(run.end_offset <= start for run in one.runs)
        }
        return skipped, [one for one in found if one.segment.base_offset not in skipped]

    def _content(self, source: _Source, runs: list[Intact], at: int) -> _Content:
        """Return the content of a segment that begins at offset ``at`` and has ``runs``."""
        content = _Content(at)
        position, is_same = 0, at == source.segment.base_offset
        for run in runs:
            is_same = is_same and (run.position, run.start_offset) == (position, at)
            self._add_gap(content, at, run.start_offset, epoch=run.first_epoch)
            content.parts.append(source.view[run.position : run.end])
            position, at, self._epoch = run.end, run.end_offset, run.last_epoch
        content.is_same = is_same and not any(source.view[position:])
        return content

    def _fill(self, contents: list[_Content], bounds: list[int], at: int, end: int) -> int:
        """Put gaps into [at, end), up to the next base offset in the last segment. Return the end offset."""
        content = contents[-1] if contents else None
        for bound in [*(one for one in bounds if at <= one < end), end]:
            if bound > at:
                if content is None:
                    content = _Content(at)
                    contents.append(content)
                self._add_gap(content, at, bound)
                at = bound
            content = None
        return at

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

    def _replace(self, contents: list[_Content], bases: list[int], end_offset: int) -> None:
        """Write the new contents. ``bases``: base offsets of the existing files. Those without content are
        set aside, except an empty one at ``end_offset``.

        No file is set aside before all contents are on the disk, because one file may have the batches of
        another one's content.
        """
        changed = sorted(
            (one for one in contents if not one.is_same), key=lambda one: one.base_offset in bases
        )
        replaced: list[str] = []
        for content in changed:
            path = self._path(content.base_offset)
            if content.base_offset in bases:
                replaced.append(path)
                path += layout.REPAIRED_SUFFIX
            else:
                self._drop_indexes(path)
            self._fs.write_atomically(path, b"".join(content.parts))
        for path in replaced:
            self._set_aside(path.rpartition("/")[2])
        self._fs.sync_dir(self._directory)
        self._rename_repaired(replaced)
        used = {one.base_offset for one in contents}
        for base_offset in bases:
            path = self._path(base_offset)
            if base_offset not in used:
                if base_offset != end_offset or any(self._fs.read_bytes(path)):
                    self._set_aside(path.rpartition("/")[2])
                self._drop_indexes(path)

    def _rename_repaired(self, paths: list[str]) -> None:
        for path in paths:
            self._drop_indexes(path)  # they may name a batch that is lost
            self._fs.rename(path + layout.REPAIRED_SUFFIX, path)
        self._fs.sync_dir(self._directory)

    def _path(self, base_offset: int) -> str:
        return layout.join(self._directory, layout.segment_file_name(base_offset, layout.LOG_SUFFIX))

    def _drop_indexes(self, path: str) -> None:
        stem = path.removesuffix(layout.LOG_SUFFIX)
        unlink_existing(self._fs, (stem + layout.OFFSET_INDEX_SUFFIX, stem + layout.TIME_INDEX_SUFFIX))

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


def _choose(sources: list[_Source], known_end: int) -> list[_Piece]:
    """Return batches that do not overlap, in order of offsets.

    Proven files are preferred, then other ones, then batches at or behind the beginning of another file: such
    a batch may have a damaged base offset.
    """
    ranked: list[tuple[tuple[int, int, bool], _Piece]] = []
    bases = {one.base_offset for one in sources}
    for source in sources:
        limit = min((one for one in bases if one > source.base_offset), default=None)
        is_misplaced = source.base_offset != source.segment.base_offset
        for run in source.runs:
            rank = 0 if source.is_proven else 1
            if limit is not None and run.start_offset >= limit:
                rank = 2
            ranked.append(((rank, source.base_offset, is_misplaced), _Piece(run, source)))
    chosen: list[_Piece] = []
    for (rank, _, _), piece in sorted(ranked, key=lambda one: one[0]):
        at = bisect_right(chosen, piece.run.start_offset, key=lambda one: one.start_offset)
        if at and chosen[at - 1].run.end_offset > piece.run.start_offset:
            continue
        end = chosen[at].run.start_offset if at < len(chosen) else None
        if end is None and rank == 2:
            end = known_end
        if end is None or piece.run.end_offset <= end:
            chosen.insert(at, piece)
    return chosen


def _is_log(name: layout.SegmentFileName) -> bool:
    return name.suffix == layout.LOG_SUFFIX
