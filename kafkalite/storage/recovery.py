"""Opens the log of a directory, after an orderly stop or after a crash.

After an orderly stop the marker has the log's range, and no batch is read (``open_clean``), if the files
match the marker (``is_as_left``).

Otherwise (``recover``) any subset of the pages and file names written since the last sync may be on the disk.
All offsets below the recovery point of the last checkpoint, and below the end of an intact index block, are
*proven* to have been synced, since both are written only after a sync; a later truncation caps both. Both
have fingerprints, which show whether a segment is the one that was synced. An index stores the CRC of its
segment's first batch as soon as that batch is appended, so a segment that was never synced can be checked too
(R42). So (R24):

* the batches of segments wholly below the proven end are not checked, but the fingerprints are;
* the rest is read, from the last trusted index entry on, and every batch must have its CRC and its offset;
* the leader epoch of each of these batches must be the one that the leader-epochs file has for its offset,
  since the CRC does not cover it (R58);
* a bad batch, a gap or an early end **below** the proven end is damage;
* **above** the proven end, the same is a torn tail if the system may have lost unsynced bytes, because it may
  have lost any part of them: everything from there on is moved to files beside the log, and one event is
  logged;
* if only the process ended, all that it wrote is there, except the rest of the last batch. So a bad batch is
  damage if an intact batch follows it, in the segment or in a later one, or if the bad batch was written
  completely; only a batch whose end is missing, or a copy of an earlier batch, is a torn tail;
* zeros after the last batch are space allocated ahead, and stay;
* all that remains is synced before the log is used, so that the next recovery cannot find less.

A damaged log is opened read-only up to its sound end. None of its files is changed, except that interrupted
swaps are finished or refused first, and that unusable index files of intact segments may be removed. If
recovery is interrupted at any point, the next one finds the same log.
"""

# Long because reading, judging and changing share the findings in one directory.

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple, TypeVar

from kafkalite.errors import CorruptBatchError, CorruptLogError, DataDirectoryError, WrongFileTypeError
from kafkalite.log_fields import Fields
from kafkalite.model import NO_OFFSET
from kafkalite.records.header import HEADER_BYTES, BatchHeader, check, parse_header, total_length
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import (
    CleanEnd,
    LogState,
    PartitionIdentity,
    RecoveryPoint,
    SavedEpochs,
    decode_leader_epochs,
    decode_log_state,
    decode_partition,
    decode_producers,
    encode_leader_epochs,
    encode_log_state,
    encode_partition,
)
from kafkalite.storage.compaction_swap import finish_swaps, swap_problem
from kafkalite.storage.damage import (
    ACCEPT_COMMAND,
    Damage,
    batch_at,
    batch_placed_at,
    find_batch,
    head_of,
    intact_runs,
    is_complete,
    is_copy,
    repair_hint,
)
from kafkalite.storage.filesystem import FileSystem, unlink_existing
from kafkalite.storage.index_block import OFFSET_ENTRY_BYTES, OFFSET_MAGIC, Block, last_block
from kafkalite.storage.leader_epochs import LeaderEpochs
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.segment import Segment

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: The number of bytes at the end of an index file in which its last block is searched.
_LAST_BLOCK_BYTES: Final = 4096

_ZERO_BLOCK: Final = bytes(1 << 20)


@dataclass(slots=True)
class OpenedLog:
    """The parts of an opened log. If ``segments`` is not empty, its last segment is the active one."""

    segments: list[Segment]
    state: LogState
    log_end_offset: int
    epochs: LeaderEpochs
    epochs_saved: bool
    producers_offsets: list[int] | None
    """Offsets of the snapshots found, or None if the log never had a batch and so has no producers."""
    unsynced: RecoverySync | None = None
    """The syncs that must run before the log is used (R24)."""
    damage: Damage | None = None
    """Set for a damaged log: the other fields describe its sound part."""
    torn_records: int = 0
    """The sum of the record counts in the headers of a torn tail. None of these records is known to be
    acknowledged."""
    torn_files: tuple[str, ...] = ()
    """Paths of the torn tails that are kept beside the log."""


@dataclass(slots=True)
class RecoverySync:
    """The syncs that a recovery requires. ``run`` blocks. The syncs of several logs may run concurrently."""

    fs: FileSystem
    directory: str
    paths: list[str]
    #: Path and content of the leader-epochs file, or None if it need not be written.
    epochs_file: tuple[str, bytes] | None
    are_names_unsynced: bool

    def run(self) -> None:
        """Write the leader-epochs file if necessary, and sync all files. After an error the log must not be
        used: data may be lost."""
        if self.epochs_file is not None:  # written before the batches count as synced
            self.fs.write_atomically(*self.epochs_file, sync_name=False)
        for path in self.paths:
            file = self.fs.open(path)
            file.sync()
            file.close()
        if self.are_names_unsynced:
            self.fs.sync_dir(self.directory)


#: Files with torn tails that are kept beside a log; older ones are removed.
MAX_TORN_FILES: Final = 4


class _Cut(NamedTuple):
    """A torn tail: the bytes of ``segment`` from ``position`` on, and the later segments.

    ``records`` is the sum of the record counts in the batch headers of ``segment`` from ``position`` to the
    first invalid header; at least 1.
    """

    segment: Segment
    position: int
    segments_behind: int
    problem: str
    records: int


class _Stop(NamedTuple):
    """Where the intact batches of a segment end. ``problem`` describes the damage there; None if nothing or
    only zeros follow."""

    position: int
    offset: int
    problem: str | None


def open_clean(fs: FileSystem, directory: str, config: LogConfig, end: CleanEnd) -> OpenedLog:
    """Open a log after an orderly stop. No batch is read, except the header of the last one, or all headers
    if the leader-epochs file cannot be used. Raises CorruptLogError, ValueError, OSError."""
    state = read_log_state(fs, directory)
    names = finish_swaps(fs, directory, fs.list_dir(directory))
    bases = _segment_bases(names)
    start, log_end_offset = state.log_start_offset, end.log_end_offset
    first, last = (bases[0], bases[-1]) if bases else (log_end_offset, log_end_offset)
    if first > start or last > log_end_offset:
        raise CorruptLogError(
            path=layout.join(directory, layout.segment_file_name(start, layout.LOG_SUFFIX)),
            position=0,
            expected=f"segments of a log with offsets [{start}, {log_end_offset})",
            actual=f"segments from {first} to {last}",
        )
    _remove_leftovers(fs, directory, names)
    while len(bases) > 1 and bases[1] <= start:
        _remove_segment(fs, directory, bases.pop(0))
    segments = [
        _closed_segment(fs, directory, config, state, base, next_offset)
        for base, next_offset in zip(bases, [*bases[1:], log_end_offset], strict=bool(bases))
    ]
    saved = read_epochs(fs, directory, state)
    if segments and end.end is not None and saved is not None:
        last_header = segments[-1].header_at(end.end.position)
        if _is_newer(last_header, saved) and _has_newer_end(segments, log_end_offset, saved):
            _log_older(directory)
            saved = None
    epochs = LeaderEpochs(saved.entries) if saved else _walk_epochs(segments, log_end_offset)
    epochs.truncate_from_end(log_end_offset)
    epochs.truncate_from_start(start)
    offsets = _producers_offsets(names)
    return OpenedLog(
        segments,
        state,
        log_end_offset,
        epochs,
        epochs_saved=saved is not None and saved.is_ahead and epochs.entries() == saved.entries,
        producers_offsets=offsets if segments or offsets else None,
    )


def is_as_left(
    fs: FileSystem, directory: str, config: LogConfig, end: CleanEnd, identity: PartitionIdentity | None
) -> bool:
    """Whether the files are those that an orderly stop left, by the number of segments, their total size and
    their fingerprints.

    No batch is read, only the CRC fields of each segment's first and last batch (R42). If the marker has no
    number of segments, because an earlier version of the program wrote it, the segments are not compared.
    """
    try:
        state = read_log_state(fs, directory)
        if state.is_older_than(end.point) or _identity_problem(fs, directory, identity) is not None:
            return False
        names = fs.list_dir(directory)
        bases = _segment_bases(names)
        paths = [layout.join(directory, layout.segment_file_name(base, layout.LOG_SUFFIX)) for base in bases]
        if end.segment_count < 0 or any(map(layout.parse_swap_file_name, names)):
            return end.segment_count < 0
        if (len(bases), sum(map(fs.file_size, paths))) != (end.segment_count, end.size_bytes):
            return False
        for base, next_offset in pairwise(bases):
            segment = _closed_segment(fs, directory, config, state, base, next_offset)
            block = _last_index_block(fs, segment.path(layout.OFFSET_INDEX_SUFFIX))
            is_known = block is not None and block.end_position == segment.size_bytes
            if block is None or not is_known or block.owner != segment.owner or not segment.has(block):
                return False
        if end.end is not None:
            last = _closed_segment(fs, directory, config, state, bases[-1], end.log_end_offset)
            return last.base_offset == end.end.base_offset and last.fingerprint(end.end.position) == end.end
    except (CorruptLogError, OSError, ValueError):
        return False
    return True


def recover(
    fs: FileSystem,
    directory: str,
    config: LogConfig,
    point: RecoveryPoint,
    identity: PartitionIdentity | None = None,
    may_lack_unsynced: bool = False,
) -> OpenedLog:
    """Open a log after a crash. A damaged log is opened up to its sound end.

    ``identity`` is compared with ``partition.json`` unless it is None. ``may_lack_unsynced``: the system may
    have lost unsynced bytes; False if only the process ended. The batches are not synced yet: run
    ``unsynced`` of the result before the log is used.

    Raises CorruptLogError or ValueError if the log state is damaged and the recovery point has no copy of it;
    CorruptLogError if a swap file that is needed is damaged; OSError.
    """
    begin = partial(_Recovery, fs, directory, config, point, identity, may_lack_unsynced)
    return _with_valid_epochs(begin, _Recovery.run)


def diagnose(
    fs: FileSystem,
    directory: str,
    config: LogConfig,
    point: RecoveryPoint,
    identity: PartitionIdentity | None,
    may_lack_unsynced: bool,
) -> Damage | None:
    """Return the damage that ``recover`` would find with the same arguments, or None. Raises the same errors.

    The caller passes a file system that ignores changes.
    """
    begin = partial(_Recovery, fs, directory, config, point, identity, may_lack_unsynced)
    return _with_valid_epochs(begin, _Recovery.diagnose)


def _with_valid_epochs(begin: Callable[..., _Recovery], work: Callable[[_Recovery], T]) -> T:
    """Return the result of ``work`` on a recovery that ``begin`` creates. If the leader-epochs file turns out
    to be an older version, repeat with a recovery that ignores the file."""
    try:
        return work(begin())
    except _OlderEpochsError:
        return work(begin(has_epochs=False))


def read_log_state(fs: FileSystem, directory: str) -> LogState:
    path = layout.join(directory, layout.LOG_STATE_FILE)
    try:
        data = fs.read_bytes(path)
    except FileNotFoundError:
        return LogState()
    return decode_log_state(data, path)


def restored_state(fs: FileSystem, directory: str, point: RecoveryPoint) -> tuple[LogState, bool]:
    """Return (the log's state, whether it was restored from its copy in the recovery point).

    Raises CorruptLogError or ValueError if the file is damaged and there is no recovery point; OSError.
    """
    try:
        state = read_log_state(fs, directory)
    except (CorruptLogError, ValueError) as error:
        if point == RecoveryPoint():
            raise
        problem = str(error)
    else:
        if not state.is_older_than(point):
            return state, False
        problem = f"the file has {state}"
    logger.warning("log state restored %s", Fields(directory=directory, problem=problem))
    # The copy lacks the end of the last truncation, so files from before that truncation are not used at all.
    return LogState(point.log_start_offset, point.truncations, 0), True


def _identity_problem(fs: FileSystem, directory: str, identity: PartitionIdentity | None) -> str | None:
    """Return why ``partition.json`` does not prove that the directory holds the log ``identity``, or None."""
    if identity is None:
        return None
    path = layout.join(directory, layout.PARTITION_FILE)
    try:
        found = decode_partition(fs.read_bytes(path))
    except FileNotFoundError:
        return f"{path} is missing"
    except WrongFileTypeError as error:
        return error.message
    if found is None:
        return f"{path} cannot be read"
    if found != identity:
        return f"{path} is of {found.topic}-{found.partition} with topic id {found.topic_id}"
    return None


def foreign_owner(fs: FileSystem, directory: str, own: tuple[str, int] | None) -> DataDirectoryError | None:
    """If ``partition.json`` in ``directory`` names another log than ``own``, (topic id, partition), return an
    error that states where the log belongs. Return None if the file names ``own``, if it is missing or
    malformed, or if ``own`` is None."""
    try:
        found = decode_partition(fs.read_bytes(layout.join(directory, layout.PARTITION_FILE)))
    except (FileNotFoundError, WrongFileTypeError):
        return None
    if found is None or own is None or found[1:] == own:
        return None
    home = layout.join(layout.parent(directory), layout.log_directory_name(found.topic_id, found.partition))
    return DataDirectoryError(
        f"{directory} holds the log {found.topic}-{found.partition}",
        hint=f"stop the broker and rename it to {home}; or move it away, and accept the loss with"
        f" '{ACCEPT_COMMAND} {directory}'",
    )


class _OlderEpochsError(Exception):
    """Raised while the batches are read if the leader-epochs file is out of date: two adjacent batches have
    epochs above the last one in the file."""


class _Recovery:
    """The recovery of one directory: reads the log, finds damage or a torn tail, then changes files."""

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        config: LogConfig,
        point: RecoveryPoint,
        identity: PartitionIdentity | None,
        may_lack_unsynced: bool,
        *,
        has_epochs: bool = True,
    ) -> None:
        """If ``has_epochs`` is False, the leader-epochs file is not used."""
        self._may_lack_unsynced = may_lack_unsynced
        self._has_epochs = has_epochs
        self._names = fs.list_dir(directory)
        self._saved: SavedEpochs | None = None
        self._known_epochs = LeaderEpochs()  # the content of the leader-epochs file
        self._fs = fs
        self._directory = directory
        self._config = config
        self._state, self._is_restored = restored_state(fs, directory, point)
        self._point = point
        self._identity = identity
        self._proven = point.valid_end(self._state)
        #: The fingerprint of the recovery point; None if a truncation has made it invalid.
        self._end = point.end if self._proven == point.recovery_point else None
        self._is_identified = False  # the segment with this fingerprint was found
        self._is_foreign = False  # the files are those of another log
        self._written_end = 0  # the end offset of a damaged last batch that was written completely
        self._is_end_unknown = False  # it is unknown how many records the log had
        self._bases: list[int] = []
        self._number = 0  # the index in ``_bases`` of the segment that is being examined
        self._indexed: set[int] = set()  # bases of the segments that have an index file
        self._partly_indexed: list[Segment] = []  # segments whose index files must be written again
        self._segments: list[Segment] = []
        self._read: list[Segment] = []  # the segments that were read: those above the proven end
        self._offset = self._state.log_start_offset
        self._epochs = LeaderEpochs()
        self._cut: _Cut | None = None
        self._missing: list[Segment] = []  # segments of which only the index is there
        self._surplus: list[Segment] = []  # closed segments with nonzero bytes after their last batch

    def run(self) -> OpenedLog:
        start = self._state.log_start_offset
        names = finish_swaps(self._fs, self._directory, self._names)
        found, damaged = self._read_all(names)
        if damaged is not None:
            return damaged
        # Only batches below the log start are left: they were deleted, and later ones were never synced.
        if self._offset < start:
            self._segments.clear()
            self._read.clear()
            self._offset = start
        torn_files = self._keep_torn(names)
        changed = self._apply(names, found)
        offsets, dropped = self._take_producers(names)
        self._epochs.truncate_from_end(self._offset)
        self._epochs.truncate_from_start(start)
        unsynced = self._cut_files(changed or dropped)
        is_written = unsynced is not None and unsynced.epochs_file is not None
        return OpenedLog(
            self._segments,
            self._state,
            self._offset,
            self._epochs,
            epochs_saved=is_written or self._saved is None or self._saved.is_ahead,
            producers_offsets=offsets if self._segments or offsets else None,
            unsynced=unsynced,
            torn_records=len(self._missing) if self._cut is None else self._cut.records,
            torn_files=torn_files,
        )

    # --- reading ---------------------------------------------------------------------------------------

    def _read_segments(self) -> None:
        """Fill ``_segments`` and ``_epochs`` up to the end of the intact log. Raises CorruptLogError."""
        bases, start = self._bases, self._state.log_start_offset
        first = max(bisect_right(bases, self._proven) - 1, 0)
        candidates = {base: self._open_segment(base) for base in bases[first:]}
        # An index without its segment proves that the segment was there.
        lone_bases = [one for one in self._indexed if one not in bases and one >= max([start, *bases])]
        lone = [self._open_segment(base) for base in lone_bases]
        indexed = [*lone, *(one for one in candidates.values() if one.base_offset in self._indexed)]
        self._proven = max([self._proven, *(one.saved_end_offset() for one in indexed)])
        first = max(bisect_right(bases, self._proven) - 1, 0)
        self._offset = min(bases[0], start) if bases else start
        if bases and bases[0] > start and first:
            raise candidates[bases[first]].damaged(
                0, f"a segment with offset {start}", f"none below {bases[0]}"
            )
        for base, next_offset in pairwise(bases[: first + 1]):
            segment = _closed_segment(self._fs, self._directory, self._config, self._state, base, next_offset)
            self._check_fingerprint(segment)
            self._check_end(segment)
            self._segments.append(segment)
            self._number += 1
            self._offset = next_offset
        for number in range(first, len(bases)):
            self._number = number
            segment = candidates[bases[number]]
            if segment.base_offset != self._offset:
                self._stop_at_gap(segment, len(bases) - number)
                return
            self._check_fingerprint(segment)
            self._check_head(segment)
            position, offset = self._resume(segment)
            if number == first:
                self._take_epochs(segment, offset)
            stop = self._read_batches(segment, position, offset)
            self._segments.append(segment)
            self._read.append(segment)
            self._offset = stop.offset
            if stop.problem is not None:
                self._stop_at_tear(segment, stop, len(bases) - number - 1)
                return
        self._refuse_early_end()
        self._missing = [one for one in lone if one.saved_head_crc()]
        if self._missing and not self._may_lack_unsynced:
            self._is_end_unknown = True
            raise self._missing[0].damaged(0, "the segment of the index", "no file")

    def _check_head(self, segment: Segment) -> None:
        """Check that the first batch of a segment has the CRC that is stored in the segment's index (R42).

        The index stores the CRC before the batch is synced: if the system has lost unsynced bytes, the
        segment may lack the batch, but it never has another one instead.
        """
        if segment.is_foreign():
            raise segment.damaged(0, "the first batch of this log", "one that the index of another log names")
        head_crc = segment.saved_head_crc()
        if not head_crc or segment.fingerprint(0).head_crc == head_crc:
            return
        if not self._may_lack_unsynced or head_of(segment.file.map(segment.file.size())) is not None:
            self._is_end_unknown = True
            raise segment.damaged(0, "the first batch that its index names", "another one, or none")

    def _check_fingerprint(self, segment: Segment) -> None:
        """Check that the segment of the recovery point is the segment that was synced (R42).

        Another fingerprint is accepted if the segment is closed and the log is compacted: a later compaction
        may have replaced the segment.
        """
        end = self._end
        if end is None or segment.base_offset != end.base_offset:
            return
        if segment.fingerprint(end.position) == end:
            self._is_identified = True
        elif not self._may_be_compacted(segment):
            raise segment.damaged(
                end.position, f"the batch that ends at offset {self._point.recovery_point}", "another one"
            )

    def _may_be_compacted(self, segment: Segment) -> bool:
        """Whether a compaction may have replaced the segment since the recovery point."""
        return self._config.is_compacted and segment.base_offset != self._bases[-1]

    def _is_own(self, segment: Segment) -> bool:
        """Whether a segment is of this log: its first batch has the CRC that is stored in the recovery point
        or in the segment's index (R42).

        Also True if the first batch is damaged or no CRC is stored. False in any case if the index belongs to
        another log.
        """
        end, head_crc = self._end, segment.saved_head_crc()
        is_at_end = end is not None and end.base_offset == segment.base_offset
        if end is not None and is_at_end and not self._may_be_compacted(segment):
            head_crc = end.head_crc
        if segment.is_foreign():
            return False
        if not head_crc or segment.fingerprint(0).head_crc == head_crc:
            return True
        return head_of(segment.file.map(segment.file.size())) is None

    def _check_end(self, segment: Segment) -> None:
        """Check that a closed segment ends where the next one begins, by one small read.

        If the last index block does not prove that, load the indexes. Raises CorruptLogError.
        """
        block = None
        if segment.base_offset in self._indexed:
            block = _last_index_block(self._fs, segment.path(layout.OFFSET_INDEX_SUFFIX))
        if block is not None and block.owner != segment.owner:
            block = None
        if block is not None and not segment.has(block):
            if segment.saved_head_crc():
                raise segment.damaged(0, "the batches that its index names", "others")
            block = None  # the index is that of another segment
        if block is not None and self._state.cap(block.end_offset, block.truncations) == segment.next_offset:
            if block.end_position == segment.size_bytes:
                return
            if block.end_position > segment.size_bytes:
                raise segment.damaged(
                    segment.size_bytes, f"batches up to offset {segment.next_offset}", "the end of the file"
                )
        if block is not None and block.tail_crc and block.end_position == segment.size_bytes:
            expected = f"batches up to offset {segment.next_offset}"
            raise segment.damaged(segment.size_bytes, expected, f"the end at {block.end_offset}")
        self._check_head(segment)
        segment.load_indexes()
        if segment.file.read_at(segment.size_bytes, segment.allocated_bytes - segment.size_bytes).strip(
            b"\0"
        ):
            self._surplus.append(segment)
        segment.release()

    def _open_segment(self, base: int) -> Segment:
        return Segment(
            self._fs, self._directory, base, self._config, self._state, next_offset=base, size_bytes=0
        )

    def _resume(self, segment: Segment) -> tuple[int, int]:
        """Return (position, offset) of the last index entry that is proven to be synced. ``segment`` must be
        read from there on."""
        if segment.base_offset not in self._indexed:
            return 0, segment.base_offset
        end_offset, is_whole = segment.take_saved_indexes(self._proven)
        if not is_whole:
            self._partly_indexed.append(segment)
        index = segment.offset_index
        length = segment.file.size()
        if end_offset > segment.base_offset and index.last_position >= length:
            raise segment.damaged(length, f"batches up to offset {end_offset}", "the end of the file")
        return index.last_position, segment.base_offset + index.last_relative_offset

    def _take_epochs(self, segment: Segment, offset: int) -> None:
        """Set ``_epochs`` to the epochs of all batches below ``offset``: those in the leader-epochs file if
        it is valid, otherwise those in the batch headers."""
        if self._saved:
            self._epochs = self._known_epochs.copy()
        else:
            self._epochs = _walk_epochs([*self._segments, segment], offset)
        self._epochs.truncate_from_end(offset)

    def _read_batches(self, segment: Segment, position: int, offset: int) -> _Stop:
        """Check and index the batches of ``segment`` from ``position`` on. Return where they end and why."""
        length = segment.size_bytes = segment.file.size()
        view = segment.view()
        segment.note_verified(position)
        problem: str | None = None
        while position < length:
            try:
                header = self._checked(view, position, offset)
            except CorruptBatchError as error:
                problem = error.message
                break
            if header is None:
                break
            segment.note_batch(position, offset, header.max_timestamp_ms)
            if header.leader_epoch > self._epochs.latest_epoch:
                self._epochs.assign(header.leader_epoch, offset)
            position += header.length_bytes
            offset = header.next_offset
        segment.size_bytes, segment.next_offset, segment.indexes_loaded = position, offset, True
        if problem is None and not _only_zeros(segment, position, length):
            problem = "bytes that are not a batch"
        return _Stop(position, offset, problem)

    def _checked(self, view: memoryview, position: int, offset: int) -> BatchHeader | None:
        """Return the header of the intact batch at ``position``, or None if zeros are there instead. Raises
        CorruptBatchError if the batch is damaged, does not have ``offset``, or has a wrong leader epoch."""
        left = len(view) - position
        if left < HEADER_BYTES:
            if not any(view[position:]):
                return None
            raise CorruptBatchError(f"{left} bytes, less than a header")
        length = total_length(view, position)
        if length == 0:
            return None
        if length > left:
            raise CorruptBatchError(f"a batch of {length} bytes, but only {left} bytes are left")
        header = check(view[position : position + length])
        if header.base_offset != offset:
            raise CorruptBatchError(f"base offset {header.base_offset}")
        if header.leader_epoch < self._epochs.latest_epoch:
            raise CorruptBatchError(f"leader epoch {header.leader_epoch} behind {self._epochs.latest_epoch}")
        if not _is_newer(header, self._saved) or not self._may_begin_epochs(header):
            self._check_epoch(view, position, header)
        return header

    def _may_begin_epochs(self, header: BatchHeader) -> bool:
        """Whether the leader-epochs file may lack the epoch of a batch (R58).

        The file is written before the first batch of an epoch, but not synced before, so a power loss may
        leave an older version. Earlier versions of the program wrote the file only with the sync after that
        batch.
        """
        is_ahead = self._saved is not None and self._saved.is_ahead and not self._may_lack_unsynced
        return header.last_offset >= self._proven and not is_ahead

    def _check_epoch(self, view: memoryview, position: int, header: BatchHeader) -> None:
        """Raise CorruptBatchError if the leader epoch of a batch differs from the epoch that is recorded for
        its offset (R58).

        Raise _OlderEpochsError if this batch and the next one have later epochs than the leader-epochs file.
        """
        if _is_newer(header, self._saved):
            behind = batch_at(view, position + header.length_bytes, header.next_offset)
            if behind is not None and behind.leader_epoch >= header.leader_epoch:
                raise _OlderEpochsError
        self._known_epochs.check(header.leader_epoch, header.last_offset)

    # --- judging ---------------------------------------------------------------------------------------

    def _stop_at_tear(self, segment: Segment, stop: _Stop, segments_behind: int) -> None:
        """Record the bytes from ``stop`` on as a torn tail. Raises CorruptLogError if they are damage."""
        expected = f"an intact batch with offset {stop.offset}"
        if stop.offset < self._proven:
            raise segment.damaged(stop.position, expected, str(stop.problem))
        if not self._is_cut_expected(stop.offset):
            view = segment.file.map(segment.file.size())
            behind = find_batch(view, stop.position + 1, stop.offset)
            if behind is not None:
                actual = f"{stop.problem}, with the intact batch {behind.header.base_offset} behind it"
                raise segment.damaged(stop.position, expected, actual)
            self._refuse_later_batches(self._number + 1, segment, stop.position, expected, stop.problem)
            placed = batch_placed_at(view, stop.position, stop.offset)
            is_whole = placed is not None or is_complete(view, stop.position)
            if is_whole and not is_copy(view, stop.position):
                if placed is not None:
                    self._written_end = placed.next_offset
                raise segment.damaged(stop.position, expected, f"{stop.problem}, of which no byte is missing")
        self._note_cut(segment, segments_behind, str(stop.problem))

    def _stop_at_gap(self, segment: Segment, segments_behind: int) -> None:
        expected, actual = f"a segment with base offset {self._offset}", f"base offset {segment.base_offset}"
        if self._offset < self._proven:
            raise segment.damaged(0, expected, actual)
        before = self._segments[-1] if self._segments else segment
        if not self._is_cut_expected(self._offset):
            self._refuse_later_batches(self._number, before, before.size_bytes, expected, actual)
        self._note_cut(before, segments_behind, actual)

    def _is_cut_expected(self, offset: int) -> bool:
        """Whether intact batches may follow a bad batch at ``offset`` although the log is not damaged:
        unsynced bytes were lost, or a truncation to that offset, or of the whole log, was interrupted."""
        truncated_to = self._state.truncated_to if self._state.truncations else NO_OFFSET
        is_reset = truncated_to == 0 and not self._segments
        return self._may_lack_unsynced or truncated_to == offset or is_reset

    def _refuse_later_batches(
        self, first: int, segment: Segment, position: int, expected: str, problem: str | None
    ) -> None:
        """Raise CorruptLogError if a later segment has an intact batch, because the bad bytes at ``position``
        of ``segment`` are then no torn tail. ``first`` is the index of the next segment in ``_bases``;
        ``expected`` and ``problem`` describe the bad bytes in the error."""
        for base_offset in self._bases[first:]:
            later = self._open_segment(base_offset)
            view = later.file.map(later.file.size())
            found = find_batch(view, 0, self._offset)
            later.release()
            if found is not None:
                actual = f"{problem}, with the intact segment {base_offset} behind it"
                raise segment.damaged(position, expected, actual)

    def _refuse_early_end(self) -> None:
        if self._offset >= self._proven:
            return
        last = self._segments[-1] if self._segments else self._open_segment(self._offset)
        raise last.damaged(
            last.size_bytes, f"batches up to offset {self._proven}", f"the end at {self._offset}"
        )

    def _check_identity(self) -> None:
        """Check that ``partition.json`` names the log that should be in this directory (R42).

        If the file is wrong or unreadable, raise CorruptLogError, except in three cases, in which the file is
        written again:

        * The segment with the fingerprint of the recovery point was found. Then the directory is the right
          one, because recovery points are stored by directory name.
        * The log has no batch.
        * The recovery point is 0, and the file names no other log.
        """
        problem = _identity_problem(self._fs, self._directory, self._identity)
        if problem is None or self._identity is None:
            return
        if not self._is_identified and any(one.size_bytes for one in self._segments) and self._was_synced:
            self._is_foreign = True
            path = layout.join(self._directory, layout.PARTITION_FILE)
            raise CorruptLogError(
                path=path, position=0, expected=f"the identity {self._identity}", actual=problem
            )
        logger.warning("identity of a log restored %s", Fields(directory=self._directory, problem=problem))
        path = layout.join(self._directory, layout.PARTITION_FILE)
        self._fs.write_atomically(path, encode_partition(*self._identity))

    @property
    def _was_synced(self) -> bool:
        """Whether a wrong ``partition.json`` is damage: it was synced, or it names another log."""
        return self._foreign_owner() is not None or self._point.recovery_point > 0

    def _foreign_owner(self) -> DataDirectoryError | None:
        """Return the error of ``foreign_owner``, or None if the segment with the fingerprint of the recovery
        point was found."""
        own = None if self._is_identified or self._identity is None else self._identity[1:]
        return foreign_owner(self._fs, self._directory, own)

    def _note_cut(self, segment: Segment, segments_behind: int, problem: str) -> None:
        position, end = segment.size_bytes, segment.file.size()
        view = segment.file.map(end)
        self._cut = _Cut(segment, position, segments_behind, problem, _records_at(view, position))

    # --- damage ----------------------------------------------------------------------------------------

    def _open_damaged(self, error: CorruptLogError, names: Sequence[str]) -> OpenedLog:
        """Return the sound part of a damaged log: the segments before the damaged segment, and the intact
        batches at the start of the damaged segment.

        Changes no file.
        """
        number, start = self._number, self._state.log_start_offset
        self._bases[number:] = filter(self._is_file, self._bases[number:])
        bases = self._bases
        position = 0
        cause, hint = error.message, repair_hint(self._directory)
        foreign = self._foreign_owner()
        if foreign is not None:
            self._is_foreign = True
            cause, hint = foreign.message, foreign.hint
        named = layout.parse_segment_file_name(layout.name_of(error.path))
        if named is not None and named.base_offset in bases[: len(self._segments)]:
            at = bases.index(named.base_offset)
            # The batches of this segment were not read, so it may be damaged anywhere.
            if self._segments[at] not in self._read:
                number = at
                del self._segments[at:]
        if self._is_foreign:
            self._segments.clear()
        end_offset = self._segments[-1].next_offset if self._segments else start
        if len(self._segments) > number:  # the damaged segment was read up to the damage
            position = self._segments[number].size_bytes
        elif number < len(bases) and not self._is_foreign and bases[number] <= end_offset:
            segment = self._open_segment(bases[number])
            if self._is_own(segment):
                position, end_offset, _ = self._read_batches(segment, 0, segment.base_offset)
                self._segments.append(segment)
        if end_offset <= start:
            end_offset = start
            self._segments.clear()
        damage = Damage(
            cause,
            end_offset,
            None if self._is_end_unknown else self._records_in_doubt(number, position, end_offset),
            hint,
        )
        for one in self._segments:
            one.release()
        try:
            known = self._known_epochs
            self._epochs = known.copy() if self._saved else _walk_epochs(self._segments, end_offset)
        except CorruptLogError:  # a batch that was not read before is damaged
            self._epochs = LeaderEpochs()
        self._epochs.truncate_from_end(end_offset)
        self._epochs.truncate_from_start(start)
        offsets = [one for one in _producers_offsets(names) if one <= end_offset]
        return OpenedLog(
            self._segments,
            self._state,
            end_offset,
            self._epochs,
            epochs_saved=True,
            producers_offsets=offsets if self._segments else None,
            damage=damage,
        )

    def _is_file(self, base: int) -> bool:
        """Whether the path of the segment is a regular file. Something else there, such as a directory,
        counts as a missing segment."""
        try:
            self._fs.open(self._open_segment(base).path()).close()
        except WrongFileTypeError:
            return False
        return True

    def _records_in_doubt(self, number: int, position: int, end_offset: int) -> int:
        """Return how many offsets at or above ``end_offset`` are known to have been written but are in no
        intact batch.

        Only the damaged segment, whose index in ``_bases`` is ``number``, and the last segment are read;
        those in between count as intact.
        """
        known, intact = max(self._proven, self._written_end, end_offset), 0
        if self._is_foreign:
            return known - end_offset
        for index in range(number, len(self._bases)):
            segment = self._open_segment(self._bases[index])
            view = segment.file.map(segment.file.size())
            from_offset = max(end_offset, segment.base_offset)
            if number < index < len(self._bases) - 1:
                intact += self._bases[index + 1] - from_offset
            elif index > number or self._is_own(segment):
                for run in intact_runs(view, position if index == number else 0, from_offset):
                    intact += run.end_offset - run.start_offset
                    known = max(known, run.end_offset)
            segment.release()
        return max(known - end_offset - intact, 0)

    # --- changing --------------------------------------------------------------------------------------

    def diagnose(self) -> Damage | None:
        """Return the damage that ``run`` would find, without changing anything. Return None if there is none,
        or if an interrupted swap must be completed first. Raises CorruptLogError for a damaged swap file
        that is needed."""
        names = self._names
        for name in names:
            is_swap = layout.parse_swap_file_name(name) is not None
            if is_swap and swap_problem(self._fs, self._directory, name, names) is None:
                return None  # the next start completes the swap first
        _, damaged = self._read_all(names)
        return None if damaged is None else damaged.damage

    def _read_all(self, names: Sequence[str]) -> tuple[list[int], OpenedLog | None]:
        """Read the log. Returns (base offsets of its segments, the sound part if the log is damaged or else
        None)."""
        found = _segment_bases(names)
        self._indexed = _index_bases(names)
        self._bases = found[max(bisect_right(found, self._state.log_start_offset) - 1, 0) :]
        if self._has_epochs:
            self._saved = read_epochs(self._fs, self._directory, self._state)
        else:
            _log_older(self._directory)
        self._known_epochs = LeaderEpochs(self._saved.entries if self._saved else ())
        try:
            self._read_segments()
            self._check_identity()
        except CorruptLogError as error:
            return found, self._open_damaged(error, names)
        return found, None

    def _keep_torn(self, names: Sequence[str]) -> tuple[str, ...]:
        """Durably copy to files beside the log the bytes that recovery cuts off: a torn tail, and bytes after
        the last batch of a closed segment. The latter are then cut off.

        Returns the paths of all such files, including those of earlier recoveries. At most MAX_TORN_FILES are
        kept. Zeros at the end are not copied.
        """
        kept = sorted(filter(None, map(layout.parse_torn_file_name, names)), key=lambda one: one.number)

        def keep(segment: Segment, position: int, offset: int) -> None:
            data = segment.file.read_at(position, segment.file.size() - position).rstrip(b"\0")
            if data:
                one = layout.TornFileName(offset, kept[-1].number + 1 if kept else 1)
                self._fs.write_atomically(layout.join(self._directory, layout.torn_file_name(*one)), data)
                kept.append(one)

        for segment in self._surplus:
            keep(segment, segment.size_bytes, segment.next_offset)
            logger.warning(
                "bytes behind a closed segment cut %s",
                Fields(
                    path=segment.path(),
                    position=segment.size_bytes,
                    bytes=segment.allocated_bytes - segment.size_bytes,
                ),
            )
            segment.close_for_append()
            segment.release()
        cut = self._cut
        if cut is not None:
            keep(cut.segment, cut.position, self._offset)
            for base in self._bases[self._bases.index(cut.segment.base_offset) + 1 :]:
                keep(self._open_segment(base), 0, base)
            logger.warning(
                "torn tail cut %s",
                Fields(
                    path=cut.segment.path(),
                    position=cut.position,
                    offset=self._offset,
                    bytes=cut.segment.file.size() - cut.position,
                    segments_removed=cut.segments_behind,
                    records_in_doubt=cut.records,
                    problem=cut.problem,
                ),
            )
        for missing in self._missing:
            fields = Fields(path=missing.path(), offset=self._offset, problem="only its index is there")
            logger.warning("torn tail without its segment %s", fields)
        paths = [layout.join(self._directory, layout.torn_file_name(*one)) for one in kept]
        for path in paths[:-MAX_TORN_FILES]:
            self._fs.unlink(path)
        return tuple(paths[-MAX_TORN_FILES:])

    def _apply(self, names: Sequence[str], found: Sequence[int]) -> bool:
        """Remove the files that are not part of the log, and write a restored log state. Returns whether any
        file was removed."""
        if self._is_restored:
            path = layout.join(self._directory, layout.LOG_STATE_FILE)
            data = encode_log_state(self._state, layout.name_of(self._directory))
            self._fs.write_atomically(path, data)
        kept = {segment.base_offset for segment in self._segments}
        for base_offset in reversed(found):
            if base_offset not in kept:
                _remove_segment(self._fs, self._directory, base_offset)
        orphans = [
            name
            for name, parsed in zip(names, map(layout.parse_segment_file_name, names), strict=True)
            if parsed is not None and parsed.base_offset not in kept and parsed.base_offset not in found
        ]
        for name in orphans:
            self._fs.unlink(layout.join(self._directory, name))
        leftovers = _remove_leftovers(self._fs, self._directory, names)
        return leftovers or bool(orphans) or len(kept) != len(found)

    def _take_producers(self, names: Sequence[str]) -> tuple[list[int], bool]:
        """Remove the invalid producer snapshots. Returns (offsets of the valid ones, whether any was
        removed).

        If an invalid snapshot stayed, it would appear valid again when the log has grown past its offset.
        """
        kept: list[int] = []
        offsets = _producers_offsets(names)
        for offset in offsets:
            path = layout.join(self._directory, layout.producers_file_name(offset))
            if offset <= self._offset and self._holds(path, offset):
                kept.append(offset)
            else:
                self._fs.unlink(path)
        return kept, len(kept) != len(offsets)

    def _holds(self, path: str, offset: int) -> bool:
        if self._state.truncations == 0:
            return True  # no truncation can have invalidated it; its CRC is checked when it is read
        try:
            _, truncations = decode_producers(self._fs.read_bytes(path), path)
        except (CorruptLogError, ValueError):
            return False
        return self._state.cap(offset, truncations) == offset

    def _cut_files(self, changed: bool) -> RecoverySync | None:
        """Truncate the files to their contents. Return the syncs of everything that is not proven to be
        synced, or None if all of it is. ``changed``: recovery has removed a file.

        Without a torn tail, the active segment keeps the zeros after its batches, because releasing them can
        take milliseconds.
        """
        unproven: list[str] = []
        for segment in self._partly_indexed:
            segment.drop_saved_indexes()
        for segment in self._read:
            if segment.next_offset > self._proven:
                unproven.append(segment.path())
            if self._cut is not None or segment is not self._read[-1]:
                segment.close_for_append()
            if not segment.size_bytes and segment.base_offset in self._indexed:
                segment.drop_saved_indexes()  # they name a batch that is lost
                changed = True
            segment.release()
        if self._cut is not None and self._read and self._read[-1].path() not in unproven:
            unproven.append(self._read[-1].path())
        entries = self._epochs.entries()
        epochs = None
        if entries != (self._saved.entries if self._saved else []):
            path = layout.join(self._directory, layout.LEADER_EPOCHS_FILE)
            name = layout.name_of(self._directory)
            epochs = (path, encode_leader_epochs(entries, self._state.truncations, name))
        # The file name of a segment that begins at or above the proven end may not be durable.
        is_new = bool(self._read) and self._read[-1].base_offset >= self._proven
        names_too = changed or is_new or epochs is not None or self._cut is not None
        if unproven or names_too:
            return RecoverySync(self._fs, self._directory, unproven, epochs, names_too)
        return None


def _segment_bases(names: Sequence[str]) -> list[int]:
    """Return the base offsets of the segments whose files are among ``names``, in ascending order."""
    parsed = map(layout.parse_segment_file_name, names)
    return sorted(name.base_offset for name in parsed if name and name.suffix == layout.LOG_SUFFIX)


def _index_bases(names: Sequence[str]) -> set[int]:
    parsed = map(layout.parse_segment_file_name, names)
    return {name.base_offset for name in parsed if name and name.suffix != layout.LOG_SUFFIX}


def _last_index_block(fs: FileSystem, path: str) -> Block | None:
    """Return the last block of an offset index file. Return None if there is no block, or the last one is
    damaged or longer than _LAST_BLOCK_BYTES."""
    try:
        file = fs.open(path)
    except (FileNotFoundError, WrongFileTypeError):
        return None
    start = max(file.size() - _LAST_BLOCK_BYTES, 0)
    tail = file.read_at(start, _LAST_BLOCK_BYTES)
    file.close()
    return last_block(OFFSET_MAGIC, tail, OFFSET_ENTRY_BYTES)


def _producers_offsets(names: Sequence[str]) -> list[int]:
    return sorted(offset for offset in map(layout.parse_producers_file_name, names) if offset is not None)


def _remove_leftovers(fs: FileSystem, directory: str, names: Sequence[str]) -> bool:
    leftovers = [name for name in names if layout.is_leftover(name)]
    for name in leftovers:
        fs.unlink(layout.join(directory, name))
    return bool(leftovers)


def _closed_segment(
    fs: FileSystem, directory: str, config: LogConfig, state: LogState, base_offset: int, next_offset: int
) -> Segment:
    path = layout.join(directory, layout.segment_file_name(base_offset, layout.LOG_SUFFIX))
    size_bytes = fs.file_size(path)
    return Segment(fs, directory, base_offset, config, state, next_offset=next_offset, size_bytes=size_bytes)


def _remove_segment(fs: FileSystem, directory: str, base_offset: int) -> None:
    suffixes = reversed(layout.SEGMENT_SUFFIXES)  # batches last, because a start removes lone indexes
    names = (layout.segment_file_name(base_offset, suffix) for suffix in suffixes)
    unlink_existing(fs, (layout.join(directory, name) for name in names))


def read_epochs(fs: FileSystem, directory: str, state: LogState) -> SavedEpochs | None:
    """Return the part of the leader-epochs file that is valid for a log with ``state``, or None if the file
    is missing, damaged or without a valid entry.

    The last entries may have no batch; the caller removes them (R5).
    """
    path = layout.join(directory, layout.LEADER_EPOCHS_FILE)
    try:
        content = fs.read_bytes(path)
        if not content.strip(b"\0"):
            return None  # a version that was not synced: a power loss may leave only its name, or zeros
        saved = decode_leader_epochs(content, path).after(state)
    except FileNotFoundError:
        return None
    except (CorruptLogError, ValueError) as error:
        logger.warning("leader epochs rebuilt %s", Fields(path=path, error=error))
        return None
    return saved if saved.entries else None


def _log_older(directory: str) -> None:
    """Log that the leader-epochs file is an older version, which is not used."""
    path = layout.join(directory, layout.LEADER_EPOCHS_FILE)
    logger.warning("leader epochs rebuilt %s", Fields(path=path, error="the batches have later epochs"))


def _is_newer(header: BatchHeader, saved: SavedEpochs | None) -> bool:
    """Whether the leader epoch of a batch is above the last one in the leader-epochs file."""
    return saved is not None and header.leader_epoch > saved.entries[-1].leader_epoch


def _has_newer_end(segments: Sequence[Segment], end_offset: int, saved: SavedEpochs) -> bool:
    """Whether the last two batches have epochs above the last one in the leader-epochs file, so that the file
    is an older version. A single such batch counts as damaged (R58)."""
    last_two = deque(_headers(segments, end_offset), 2)
    return len(last_two) == 2 and all(_is_newer(header, saved) for header in last_two)


def _walk_epochs(segments: Sequence[Segment], end_offset: int) -> LeaderEpochs:
    """Return the leader epochs in the batch headers below ``end_offset``. Raises CorruptLogError."""
    epochs = LeaderEpochs()
    for header in _headers(segments, end_offset):
        if header.leader_epoch > epochs.latest_epoch:
            epochs.assign(header.leader_epoch, header.base_offset)
    return epochs


def _headers(segments: Sequence[Segment], end_offset: int) -> Iterator[BatchHeader]:
    """Yield the batch headers below ``end_offset``. Raises CorruptLogError."""
    for segment in segments:
        size_bytes = segment.size_bytes
        length = segment.size_bytes = segment.file.size()
        view = segment.view()
        segment.size_bytes = size_bytes  # restored: the file may be longer because of zeros allocated ahead
        position, offset = 0, segment.base_offset
        while offset < end_offset and position + HEADER_BYTES <= length:
            try:
                header = parse_header(view, position)
            except CorruptBatchError as error:
                if not any(view[position : position + HEADER_BYTES]):
                    break
                raise segment.damaged(position, f"a batch with offset {offset}", error.message) from error
            if header.base_offset != offset:
                raise segment.damaged(
                    position, f"a batch with offset {offset}", f"base offset {header.base_offset}"
                )
            yield header
            position += header.length_bytes
            offset = header.next_offset
        segment.release()


def _records_at(view: memoryview, position: int) -> int:
    """Return the sum of the record counts in the batch headers from ``position`` to the first invalid header,
    but at least 1."""
    count = 0
    while position < len(view):
        try:
            header = parse_header(view, position)
        except CorruptBatchError:
            break
        count += header.record_count
        position += header.length_bytes
    return max(count, 1)


def _only_zeros(segment: Segment, position: int, end: int) -> bool:
    while position < end:
        part = segment.file.read_at(position, min(end - position, len(_ZERO_BLOCK)))
        if part != _ZERO_BLOCK[: len(part)]:
            return False
        position += len(part)
    return True
