"""Repairs a damaged log without a sound replica, for ``kl log accept-loss`` (R45).

Intact batches stay at their offsets. Gap batches, as compaction writes them, fill the offsets that no intact
batch has, up to the last offset that is known to have been written. So consumers continue after the lost
offsets. A batch of which only the leader epoch is damaged gets the recorded epoch back (R58). A transaction
whose marker is lost gets an abort marker at a lost offset (``storage.lost_markers``). The damaged files are
kept beside the new ones.

The repair blocks, and needs a directory that no broker uses. If it is interrupted, it can be repeated.
"""

# Long because judging batches, files and epochs is one decision about the content of one directory.

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, takewhile
from operator import ne
from typing import NamedTuple, cast

from kafkalite.errors import CorruptLogError, DataDirectoryError, WrongFileTypeError
from kafkalite.limits import MAX_RECORDS_PER_BATCH
from kafkalite.model import NO_BROKER_EPOCH, NO_EPOCH
from kafkalite.records.gaps import build_gap
from kafkalite.records.header import BatchHeader, parse_header, stamp
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import (
    CleanShutdown,
    Fingerprint,
    LogState,
    RecoveryPoint,
    SavedEpochs,
    decode_partition,
    encode_clean_shutdown,
    encode_log_state,
)
from kafkalite.storage.compaction_swap import finish_swaps, swap_problem
from kafkalite.storage.damage import (
    Damage,
    Intact,
    batch_placed_at,
    find_batch,
    head_of,
    intact_runs,
    is_copy,
    misplaced_runs,
)
from kafkalite.storage.filesystem import Buffer, FileSystem, damaged_name, set_aside, unlink_existing
from kafkalite.storage.inspect import (
    DryRun,
    LastSession,
    damage_of,
    read_last_session,
    read_marker,
    unopenable_files,
    was_compacted,
)
from kafkalite.storage.leader_epochs import LeaderEpochs
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.lost_markers import Outcomes, TransactionRange, find_lost_markers
from kafkalite.storage.recovery import foreign_owner, read_epochs, read_log_state, restored_state
from kafkalite.storage.recovery_points import RecoveryPointsFile
from kafkalite.storage.segment import Segment


class AcceptedLoss(NamedTuple):
    """The result of the repair of one log.

    ``log_start_offset`` (inclusive) and ``log_end_offset`` (exclusive) bound the repaired log.
    ``lost_records`` is the number of offsets whose records are lost. ``kept``: paths of the damaged files,
    which can be removed by hand. ``damage``: damage that the repair has left and that the next start will
    find, or None. ``corrected_batches``: the number of batches whose leader epoch was restored (R58); their
    records are not lost. ``unknown_transactions``: transactions whose marker is among the lost records;
    the repair has aborted them. ``open_transactions``: transactions that have no marker in the repaired log
    and are still open there. ``unused``: the segment files that have intact batches, of which none is in the
    repaired log.
    """

    directory: str
    log_start_offset: int
    log_end_offset: int
    lost_records: int
    kept: list[str]
    damage: Damage | None = None
    corrected_batches: int = 0
    unknown_transactions: Sequence[TransactionRange] = ()
    open_transactions: Sequence[TransactionRange] = ()
    unused: Sequence[str] = ()


def accept_loss(fs: FileSystem, directory: str, leader_epoch: int | None = None) -> AcceptedLoss:
    """Repair the log in ``directory``, whose parent is the data directory.

    ``leader_epoch`` is the latest leader epoch that a batch of the log can have, None if unknown. If a batch
    has a later epoch, the repair corrects the epoch and keeps the records.

    Raises DataDirectoryError if the data directory is in use; if ``directory`` does not have the name of a
    log, belongs to another log, or neither exists nor has a recovery point; or if one of its files cannot be
    opened. Also raises OSError, StorageExhaustedError.
    """
    data_directory, name = layout.parent(directory), layout.name_of(directory)
    if layout.parse_log_directory_name(name) is None:
        raise DataDirectoryError(
            f"{directory} is not the directory of a log", hint="its name is <topic id>-<partition>"
        )
    lock = fs.lock(layout.join(data_directory, layout.LOCK_FILE))
    try:
        points = RecoveryPointsFile(fs, data_directory)
        points.open()
        marker = read_marker(fs, data_directory)
        session = LastSession(points.points, {} if marker is None else marker.ends, False)
        point = session.point_of(name)
        if not fs.exists(directory) and point == RecoveryPoint() and name not in points.points:
            raise DataDirectoryError(
                f"{directory} does not exist, and the data directory does not list such a log"
            )
        result = _Repair(fs, directory, point, leader_epoch).run()
        # The repaired log differs from its entry in the marker. A broker epoch in the marker would claim that
        # this disk has every acknowledged record.
        if marker is not None:
            ends = {one: end for one, end in marker.ends.items() if one != name}
            data = encode_clean_shutdown(CleanShutdown(NO_BROKER_EPOCH, ends))
            fs.write_atomically(layout.join(data_directory, layout.CLEAN_SHUTDOWN_FILE), data)
        points.write({name: None})
        return result._replace(damage=damage_of(fs, directory))
    finally:
        lock.release()


def expected_loss(fs: FileSystem, directory: str, leader_epoch: int | None = None) -> AcceptedLoss:
    """Return the result that ``accept_loss`` with the same arguments would return, except ``kept`` and
    ``damage``.

    The log in ``directory``, which must exist, is not changed. The data directory may be in use. Raises
    DataDirectoryError if the directory holds another log or one of its files cannot be opened; OSError.
    """
    point = read_last_session(fs, layout.parent(directory)).point_of(layout.name_of(directory))
    repair = _Repair(cast(FileSystem, DryRun(fs)), directory, point, leader_epoch)
    return repair.result(repair.plan())


@dataclass(eq=False, slots=True)
class _Source:
    """A segment file with batches of this log. ``base_offset``: the offset at which its batches begin, which
    may differ from the offset in the file's name. ``is_proven``: a CRC that an index or the recovery point
    has recorded proves that the file belongs to the log."""

    segment: Segment
    view: memoryview
    base_offset: int
    is_proven: bool
    runs: list[Intact]


class _Piece(NamedTuple):
    """Adjacent intact batches, and the file that contains them."""

    run: Intact
    source: _Source

    @property
    def start_offset(self) -> int:
        return self.run.start_offset


@dataclass(slots=True)
class _Content:
    """The new content of one segment: intact batches, gap batches and abort markers. ``is_same``: the
    existing file has the same content, apart from zeros at its end."""

    base_offset: int
    parts: list[Buffer] = field(default_factory=list)
    is_same: bool = False


class _Plan(NamedTuple):
    """The new content of a log. ``names`` are the names of its files before the repair. ``bounds`` are the
    base offsets of its segment files, without those that the next start deletes. ``end_offset`` is the
    exclusive end of ``contents``."""

    names: list[str]
    bounds: list[int]
    sources: list[_Source]
    contents: list[_Content]
    outcomes: Outcomes
    unused: list[str]
    log_start_offset: int
    end_offset: int


class _Repair:
    def __init__(
        self, fs: FileSystem, directory: str, point: RecoveryPoint, leader_epoch: int | None
    ) -> None:
        self._fs = fs
        self._leader_epoch = leader_epoch
        self._directory = directory
        self._point = point
        self._kept: list[str] = []
        self._lost = 0
        self._first_lost: int | None = None
        self._epoch = 0  # the leader epoch of the previous batch, for gap batches
        #: By base offset of the file: (position of a batch, its correct leader epoch), in order of positions.
        self._corrections: dict[int, list[tuple[int, int]]] = {}
        self._end: Fingerprint | None = None
        self._markers: dict[int, bytearray] = {}  # by lost offset: the marker to write there

    def run(self) -> AcceptedLoss:
        fs = self._fs
        self._make_directory()
        plan = self.plan()
        self._replace(plan.contents, plan.bounds, plan.end_offset)
        for one in plan.sources:
            if not one.segment.saved_head_crc():  # the index is missing, or belongs to another segment
                self._drop_indexes(one.segment.path())
        self._remove_lone_indexes()
        if self._first_lost is not None:
            self._remove_derived(plan.names, self._first_lost)
        fs.sync_dir(self._directory)
        return self.result(plan)

    def _make_directory(self) -> None:
        """Make the log's directory if it is missing. A file in its place is renamed to a ``.damaged-``
        name."""
        try:
            self._fs.list_dir(self._directory)
        except WrongFileTypeError:
            self._kept.append(set_aside(self._fs, self._directory))
        except FileNotFoundError:
            pass
        else:
            return
        self._fs.make_dirs(self._directory)
        self._fs.sync_dir(layout.parent(self._directory))

    def plan(self) -> _Plan:
        """Finish or undo an interrupted repair, finish interrupted swaps, repair the small files of the log,
        and return the log's new content."""
        fs = self._fs
        self._set_wrong_types_aside()
        self._finish_interrupted()
        names = fs.list_dir(self._directory)
        for name in names:
            if layout.parse_swap_file_name(name) is not None and not self._may_complete(name, names):
                self._set_aside(name)
        names = finish_swaps(fs, self._directory, fs.list_dir(self._directory))
        bases = _bases(names)
        state = self._repair_state(bases)
        start = state.log_start_offset
        self._repair_identity()
        skipped, sources, known_end = self._find(bases, state)
        contents: list[_Content] = []
        pieces = _choose(sources, known_end)
        outcomes = _outcomes(pieces)
        self._markers = outcomes.markers
        self._correct_epochs(pieces, state)
        bounds = [base for base in bases if base not in skipped]
        at = min([start, *(one.source.base_offset for one in pieces[:1])])
        for source, group in groupby(pieces, key=lambda one: one.source):
            runs = [one.run for one in group]
            if at < source.base_offset <= runs[0].start_offset:
                at = self._fill(contents, bounds, at, source.base_offset)
            contents.append(self._content(source, runs, at))
            at = runs[-1].end_offset
        at = self._fill(contents, bounds, at, known_end)
        used = {one.source.segment.base_offset for one in pieces}
        unused = [self._path(base) for base in bounds if base not in used]
        unused = [path for path in unused if find_batch(memoryview(fs.read_bytes(path)), 0, 0) is not None]
        return _Plan(names, bounds, sources, contents, outcomes, unused, start, at)

    def result(self, plan: _Plan) -> AcceptedLoss:
        """Return the result of ``run``, which carries out ``plan``."""
        return AcceptedLoss(
            self._directory,
            plan.log_start_offset,
            max(plan.end_offset, plan.log_start_offset),
            self._lost,
            self._kept,
            corrected_batches=sum(map(len, self._corrections.values())),
            unknown_transactions=plan.outcomes.unknown,
            open_transactions=plan.outcomes.open,
            unused=plan.unused,
        )

    def _may_complete(self, name: str, names: list[str]) -> bool:
        """Whether the swap of the file ``name`` can be completed: ``swap_problem`` finds no problem."""
        try:
            return swap_problem(self._fs, self._directory, name, names) is None
        except CorruptLogError:
            return False

    def _find(self, bases: list[int], state: LogState) -> tuple[set[int], list[_Source], int]:
        """Return (base offsets of the segments to skip, the other segment files of this log, the end of the
        offsets that are known to have been written). ``bases`` are the base offsets in the names of the
        files."""
        start, end = state.log_start_offset, self._point.valid_end(state)
        known_end = max([start, end, *(self._segment(base, state).saved_end_offset() for base in bases)])
        point = self._point
        self._end = point.end if end == point.recovery_point else None
        ordered = sorted(bases)
        if self._end is not None and self._end.base_offset in ordered[:-1]:
            # A compaction may have replaced the closed segment since then.
            self._end = None if was_compacted(self._fs, self._directory) else self._end
        limits = zip(ordered, [*ordered[1:], known_end], strict=False)
        identified = (self._identify(self._segment(base, state), end) for base, end in limits)
        found = [one for one in identified if one is not None]
        skipped, sources = self._split(found, start)
        return skipped, sources, max(known_end, _written_end(sources))

    def _finish_interrupted(self) -> None:
        """Finish or undo a ``_replace`` that a crash interrupted.

        ``_replace`` writes all ``.repaired`` files before it renames the first damaged file. If the damaged
        file beside each of them still exists, the ``.repaired`` files may be incomplete and are removed.
        Otherwise they replace the damaged files.
        """
        names = [one for one in self._fs.list_dir(self._directory) if one.endswith(layout.REPAIRED_SUFFIX)]
        paths = [layout.join(self._directory, one).removesuffix(layout.REPAIRED_SUFFIX) for one in names]
        existing = [path for path in paths if self._fs.exists(path)]
        if len(existing) == len(paths):
            unlink_existing(self._fs, [path + layout.REPAIRED_SUFFIX for path in paths])
            return
        for path in existing:
            self._set_aside(layout.name_of(path))
        self._rename_repaired(paths)

    def _repair_state(self, bases: list[int]) -> LogState:
        """Return the log state, and write it again if its file is damaged or older than the recovery point.
        If the file is damaged and there is no recovery point, the log starts at the first segment. A log
        without segments starts at or above the recovery point."""
        state, is_restored = self._usable_state(bases)
        if is_restored and self._fs.exists(layout.join(self._directory, layout.LOG_STATE_FILE)):
            self._set_aside(layout.LOG_STATE_FILE)
        if not bases and state.log_start_offset < self._point.recovery_point:
            self._lost += self._point.recovery_point - state.log_start_offset
            state, is_restored = state._replace(log_start_offset=self._point.recovery_point), True
        if is_restored:
            path = layout.join(self._directory, layout.LOG_STATE_FILE)
            self._fs.write_atomically(path, encode_log_state(state, layout.name_of(self._directory)))
        assert read_log_state(self._fs, self._directory) == state
        return state

    def _usable_state(self, bases: list[int]) -> tuple[LogState, bool]:
        """Return (the log's state, whether its file must be written again)."""
        try:
            return restored_state(self._fs, self._directory, self._point)
        except (CorruptLogError, ValueError):
            return LogState(min(bases, default=0), 1, 0), True

    def _repair_identity(self) -> None:
        """Set an unreadable ``partition.json`` aside; the next start writes a new one. Raises
        DataDirectoryError if the file names another log."""
        own = layout.parse_log_directory_name(layout.name_of(self._directory))
        foreign = foreign_owner(self._fs, self._directory, own)
        if foreign is not None:
            raise foreign
        path = layout.join(self._directory, layout.PARTITION_FILE)
        if self._fs.exists(path) and decode_partition(self._fs.read_bytes(path)) is None:
            self._set_aside(layout.PARTITION_FILE)

    def _segment(self, base_offset: int, state: LogState) -> Segment:
        return Segment(
            self._fs, self._directory, base_offset, LogConfig(), state, next_offset=base_offset, size_bytes=0
        )

    def _identify(self, segment: Segment, end_offset: int) -> _Source | None:
        """Return a segment file with its intact batches, or None if the file belongs to another log (R42).

        ``end_offset`` is the offset at which the file should end. If the first batch has another offset than
        the file's name, its own offset is used only if a CRC that an index or the recovery point has recorded
        proves it. If another batch is in the place of the recorded first batch, the file is used only if it
        contains the recorded first or last batch at another position.
        """
        view = segment.file.map(segment.file.size())
        base_offset, is_proven = segment.base_offset, False
        head = head_of(view)
        if segment.is_foreign():
            return None
        runs = _runs(view, base_offset, end_offset)
        if head is not None:
            head_crc, named = segment.fingerprint(0).head_crc, self._named(segment)
            is_proven = head_crc in named
            if named and not is_proven and self._has_own_batch(segment, view, runs):
                runs = list(_without_other_heads(view, runs, base_offset, named))
                is_proven = True
            if not is_proven and head.base_offset != base_offset:
                home = self._segment(head.base_offset, segment.state)
                if head_crc in self._named(home) or segment.owner in segment.head_owners():
                    base_offset, is_proven = head.base_offset, True
                    runs = _runs(view, base_offset, end_offset)
                elif next(intact_runs(view, 0, head.base_offset)).end_offset > head.next_offset:
                    return None  # a single batch may be this log's, with a damaged base offset
            if named and not is_proven:
                return None
        return _Source(segment, view, base_offset, is_proven, runs)

    def _has_own_batch(self, segment: Segment, view: memoryview, runs: list[Intact]) -> bool:
        """Whether the file contains, at any position, a first or last batch of the segment that an index or
        the recovery point has recorded. If so, the file belongs to the segment although its first batch is
        another one."""
        heads = {(crc, segment.base_offset) for crc in self._named(segment)}
        tails = segment.saved_tails()
        if self._end is not None and self._end.base_offset == segment.base_offset:
            tails.add((self._end.tail_crc, self._point.recovery_point))
        return any(
            (header.crc, header.base_offset) in heads or (header.crc, header.next_offset) in tails
            for run in runs
            for _, header in _batches(view, run)
        )

    def _named(self, segment: Segment) -> set[int]:
        """Return the CRCs that the segment's index and the recovery point have recorded of its first
        batch."""
        is_end = self._end is not None and self._end.base_offset == segment.base_offset
        return {segment.saved_head_crc(), self._end.head_crc if self._end and is_end else 0} - {0}

    def _correct_epochs(self, pieces: list[_Piece], state: LogState) -> None:
        """Record a correction for each batch whose leader epoch is not the one that ``right_epochs`` returns
        (R58). If a latest leader epoch was given, remove the leader-epochs file."""
        own, last_offsets = array("q"), array("q")  # a log may have millions of batches
        for run, source in pieces:
            for _, header in _batches(source.view, run):
                own.append(header.leader_epoch)
                last_offsets.append(header.last_offset)
        saved = read_epochs(self._fs, self._directory, state)
        if self._leader_epoch is not None:
            own, saved = _without_later(own, saved, self._leader_epoch)
            unlink_existing(self._fs, [layout.join(self._directory, layout.LEADER_EPOCHS_FILE)])
        right = iter(right_epochs(own, last_offsets, saved))
        for run, source in pieces:
            for position, header in _batches(source.view, run):
                epoch = next(right)
                if epoch != header.leader_epoch:
                    self._corrections.setdefault(source.segment.base_offset, []).append((position, epoch))
        for found in self._corrections.values():
            found.sort()

    def _split(self, found: list[_Source], start: int) -> tuple[set[int], list[_Source]]:
        """Return (base offsets of the segments that the next start deletes because they end at or below
        ``start``, the other files)."""
        skipped = {
            one.segment.base_offset
            for one in found
            if any(one.base_offset < other.base_offset <= start for other in found)
            and all(run.end_offset <= start for run in one.runs)
        }
        return skipped, [one for one in found if one.segment.base_offset not in skipped]

    def _content(self, source: _Source, runs: list[Intact], at: int) -> _Content:
        """Return the new content of a segment that begins at offset ``at``: ``runs``, and gap batches between
        them."""
        content = _Content(at)
        position, is_same = 0, at == source.segment.base_offset
        for run in runs:
            batches = self._corrected(source, run)
            is_same = is_same and (run.position, run.start_offset) == (position, at)
            is_same = is_same and not isinstance(batches, bytearray)
            self._add_gap(content, at, run.start_offset, epoch=parse_header(batches).leader_epoch)
            content.parts.append(batches)
            self._epoch = parse_header(batches, run.last_position - run.position).leader_epoch
            position, at = run.end, run.end_offset
        content.is_same = is_same and not any(source.view[position:])
        return content

    def _corrected(self, source: _Source, run: Intact) -> Buffer:
        """Return the batches of ``run``, as a copy if the leader epoch of any of them is corrected."""
        view, base_offset = source.view[run.position : run.end], source.segment.base_offset
        corrections = self._corrections.get(base_offset, [])
        found = corrections[bisect_left(corrections, (run.position,)) : bisect_left(corrections, (run.end,))]
        if not found:
            return view
        batches = bytearray(view)
        for position, epoch in found:
            at = position - run.position
            header = parse_header(batches, at)
            stamp(memoryview(batches)[at:], base_offset=header.base_offset, leader_epoch=epoch)
        return batches

    def _fill(self, contents: list[_Content], bounds: list[int], at: int, end: int) -> int:
        """Fill the offsets [``at``, ``end``) with gap batches, and return the end of the last one.

        The gaps are added to the last of ``contents``. At each offset of ``bounds`` in the range, a new item
        of ``contents`` begins.
        """
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
        for offset in sorted(one for one in self._markers if at <= one < end):
            self._add_gap_batches(content, at, offset)
            marker = self._markers[offset]
            stamp(marker, base_offset=offset, leader_epoch=self._epoch)
            content.parts.append(marker)
            at = offset + 1
        self._add_gap_batches(content, at, end)

    def _add_gap_batches(self, content: _Content, at: int, end: int) -> None:
        while at < end:
            count = min(end - at, MAX_RECORDS_PER_BATCH)
            content.parts.append(bytes(build_gap(at, count, self._epoch)))
            at += count

    def _replace(self, contents: list[_Content], bases: list[int], end_offset: int) -> None:
        """Write the changed contents. ``bases``: base offsets of the existing files. Files without a new
        content are set aside, except a file at ``end_offset`` that is empty or has only zeros.

        No file is set aside before all contents are on the disk, because a file may have the batches of
        another file's new content.
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
            self._set_aside(layout.name_of(path))
        self._fs.sync_dir(self._directory)
        self._rename_repaired(replaced)
        used = {one.base_offset for one in contents}
        for base_offset in bases:
            path = self._path(base_offset)
            if base_offset not in used:
                if base_offset != end_offset or any(self._fs.read_bytes(path)):
                    self._set_aside(layout.name_of(path))
                self._drop_indexes(path)

    def _rename_repaired(self, paths: list[str]) -> None:
        for path in paths:
            self._drop_indexes(path)  # they may have the CRC of a lost batch
            self._fs.rename(path + layout.REPAIRED_SUFFIX, path)
        self._fs.sync_dir(self._directory)

    def _path(self, base_offset: int) -> str:
        return layout.join(self._directory, layout.segment_file_name(base_offset, layout.LOG_SUFFIX))

    def _drop_indexes(self, path: str) -> None:
        stem = path.removesuffix(layout.LOG_SUFFIX)
        unlink_existing(self._fs, (stem + layout.OFFSET_INDEX_SUFFIX, stem + layout.TIME_INDEX_SUFFIX))

    def _set_wrong_types_aside(self) -> None:
        """Set aside everything that is in the place of a file but is not a regular file, except in the place
        of the log state. The file then counts as missing. Raises DataDirectoryError if a file cannot be
        opened, because it may have intact records."""
        for path, error in unopenable_files(self._fs, self._directory):
            if not isinstance(error, WrongFileTypeError):
                raise DataDirectoryError(
                    f"{path} cannot be opened: {error.strerror}", hint="let this user read it, and try again"
                )
            if layout.name_of(path) != layout.LOG_STATE_FILE:  # ``_repair_state`` restores it from a copy
                self._set_aside(layout.name_of(path))

    def _set_aside(self, name: str) -> None:
        path = layout.join(self._directory, name)
        kept = damaged_name(self._fs, path)
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
        """Remove the leader-epochs file, and the producer snapshots above ``first_lost``.

        Their content can be derived from the batches of the log."""
        for name in names:
            offset = layout.parse_producers_file_name(name)
            if name == layout.LEADER_EPOCHS_FILE or (offset is not None and offset > first_lost):
                self._fs.unlink(layout.join(self._directory, name))


def _runs(view: memoryview, base_offset: int, end_offset: int) -> list[Intact]:
    """Return the runs of intact batches of a file that begins at ``base_offset`` and should end at
    ``end_offset``."""
    runs = list(intact_runs(view, 0, base_offset))
    return runs + misplaced_runs(view, base_offset, runs, end_offset)


def _without_other_heads(
    view: memoryview, runs: list[Intact], base_offset: int, named: set[int]
) -> Iterator[Intact]:
    """Yield ``runs`` without the batch at ``base_offset`` if its CRC is not in ``named``, because the batch
    then belongs to another log."""
    for run in runs:
        header = parse_header(view, run.position)
        if run.start_offset != base_offset or header.crc in named:
            yield run
        elif run.end_offset > header.next_offset:
            yield run._replace(position=run.position + header.length_bytes, start_offset=header.next_offset)


def _batches(view: memoryview, run: Intact) -> Iterator[tuple[int, BatchHeader]]:
    """Yield the position and the header of each batch of ``run``."""
    position = run.position
    while position < run.end:
        header = parse_header(view, position)
        yield position, header
        position += header.length_bytes


def _written_end(sources: list[_Source]) -> int:
    """Return the end offset of the last batch if only its base offset is damaged, else 0."""
    if not (sources and sources[-1].runs):
        return 0
    view, runs = sources[-1].view, sources[-1].runs
    _, end, _, end_offset, _ = max(runs, key=lambda run: run.end_offset)
    placed = batch_placed_at(view, end, end_offset)
    is_other = any(run.position == end for run in runs) or is_copy(view, end)
    return 0 if placed is None or is_other else placed.next_offset


def _outcomes(pieces: list[_Piece]) -> Outcomes:
    """Return the transactions without a marker in a log that consists of ``pieces``."""
    return find_lost_markers(
        (source.view, position, header)
        for run, source in pieces
        for position, header in _batches(source.view, run)
    )


def _without_later(
    own: array[int], saved: SavedEpochs | None, leader_epoch: int
) -> tuple[array[int], SavedEpochs | None]:
    """Return ``own``, the epochs of batches, and ``saved``, both without epochs above ``leader_epoch``.

    In ``own``, a later epoch is replaced by the epoch of the batch before it. ``saved`` may have later epochs
    because the file was rebuilt from these batches.
    """
    known, before = array("q"), next((one for one in own if one <= leader_epoch), leader_epoch)
    for epoch in own:
        before = epoch if epoch <= leader_epoch else before
        known.append(before)
    if saved is not None:
        entries = [one for one in saved.entries if one.leader_epoch <= leader_epoch]
        saved = saved._replace(entries=entries) if entries else None
    return known, saved


def right_epochs(own: Sequence[int], last_offsets: Sequence[int], saved: SavedEpochs | None) -> list[int]:
    """Return the correct leader epoch of each batch of a log (R58). ``own`` are the epochs that the batches
    have, ``last_offsets`` their last offsets, and ``saved`` is the content of the leader-epochs file, if any.

    The correct epochs are those in the file. If the file may be older than the last batches, later epochs of
    these batches are kept. Without a file, either the batches with a lower epoch than an earlier batch are
    changed, or those with a higher epoch than a later batch: whichever changes fewer.
    """
    if saved is None:
        rising = list(accumulate(own, max))
        falling = list(accumulate(reversed(own), min))[::-1]
        return min(rising, falling, key=lambda one: sum(map(ne, one, own)))
    recorded = LeaderEpochs(saved.entries)
    newer = len(list(takewhile(lambda epoch: epoch > recorded.latest_epoch, reversed(own))))
    kept = newer if newer > 1 or not saved.is_ahead else 0
    right = [recorded.epoch_at(offset) for offset in last_offsets[: len(own) - kept]] + [NO_EPOCH] * kept
    return [mine if one == NO_EPOCH else one for mine, one in zip(own, right, strict=True)]


def _choose(sources: list[_Source], known_end: int) -> list[_Piece]:
    """Return the pieces to use: in order of offsets, without overlaps.

    If pieces overlap, a piece of a proven file is preferred. A piece that begins at or above the base offset
    of the next file may have a damaged base offset. It is used only if no other piece has its offsets, and as
    the last piece only if it ends at or below ``known_end``.
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


def _bases(names: list[str]) -> list[int]:
    """Return the base offsets in the names of segment files."""
    return [one.base_offset for one in map(layout.parse_segment_file_name, names) if one and _is_log(one)]


def _is_log(name: layout.SegmentFileName) -> bool:
    return name.suffix == layout.LOG_SUFFIX
