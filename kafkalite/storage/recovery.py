"""Opening the log of a directory: after an orderly stop, and after a crash.

After an orderly stop the marker has the log's range, and no batch is read (``open_clean``).

After a crash (``recover``) any subset of the pages and file names written since the last sync may be on
the disk. All offsets below the recovery point of the last checkpoint, and below the end of an intact
index block, are *proven* to have been synced, since both are written only after a sync; a later
truncation caps both. So (R24):

* segments wholly below the proven end are not read;
* the rest is read, from the last trusted index entry on, and every batch must have its CRC and its offset;
* a bad batch, a gap or an early end **below** the proven end is damage: CorruptLogError, nothing is changed;
* **at or above** it, it is a torn tail: everything from there on is removed, with one log event;
* zeros behind the last batch are space allocated ahead, and stay;
* all that remains is synced before the log is used, so that the next recovery cannot find less.

If recovery is interrupted at any point, the next one finds the same log.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from kafkalite.errors import CorruptBatchError, CorruptLogError
from kafkalite.log_fields import Fields
from kafkalite.records.header import HEADER_BYTES, BatchHeader, check, parse_header, total_length
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import (
    CleanEnd,
    LogState,
    RecoveryPoint,
    decode_leader_epochs,
    decode_log_state,
    decode_producers,
    encode_leader_epochs,
)
from kafkalite.storage.compaction_swap import finish_swaps
from kafkalite.storage.filesystem import FileSystem, unlink_existing
from kafkalite.storage.index_block import OFFSET_ENTRY_BYTES, OFFSET_MAGIC, Block, last_block
from kafkalite.storage.leader_epochs import EpochEntry, LeaderEpochs
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.segment import Segment

logger = logging.getLogger(__name__)

#: The number of bytes at the end of an index file that are searched for its last block.
_LAST_BLOCK_BYTES: Final = 4096

_ZERO_BLOCK: Final = bytes(1 << 20)


@dataclass(slots=True)
class OpenedLog:
    """The parts of a log as found. ``segments`` may be empty; otherwise the last one is active."""

    segments: list[Segment]
    state: LogState
    log_end_offset: int
    epochs: LeaderEpochs
    epochs_saved: bool
    producers_offsets: list[int] | None
    """Of the snapshots found; None if the log never had a batch, so that it has no producers."""
    unsynced: RecoverySync | None = None
    """The syncs that must run before the log is used (R24)."""


@dataclass(slots=True)
class RecoverySync:
    """The syncs that a recovery requires. ``run`` blocks; those of many logs may run concurrently."""

    fs: FileSystem
    directory: str
    paths: list[str]
    #: Path and content of the leader-epochs file, if it must be written.
    epochs_file: tuple[str, bytes] | None
    are_names_unsynced: bool

    def run(self) -> None:
        """Sync the files. After an OSError or DiskFullError the log must not be used: data may be lost."""
        if self.epochs_file is not None:  # before the batches count as synced
            self.fs.write_atomically(*self.epochs_file, sync_name=False)
        for path in self.paths:
            file = self.fs.open(path)
            file.sync()
            file.close()
        if self.are_names_unsynced:
            self.fs.sync_dir(self.directory)


class _Stop(NamedTuple):
    """The end of a segment's intact batches, and the ``problem`` found there; None if only zeros follow."""

    position: int
    offset: int
    problem: str | None


def open_clean(fs: FileSystem, directory: str, config: LogConfig, end: CleanEnd) -> OpenedLog:
    """Open after an orderly stop: lists the directory, reads no batch. Raises CorruptLogError."""
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
    saved = _saved_epochs(fs, directory, state)
    epochs = LeaderEpochs(saved or _walk_epochs(segments, log_end_offset).entries())
    epochs.truncate_from_end(log_end_offset)
    epochs.truncate_from_start(start)
    offsets = _producers_offsets(names)
    return OpenedLog(
        segments,
        state,
        log_end_offset,
        epochs,
        epochs_saved=epochs.entries() == saved,
        producers_offsets=offsets if segments or offsets else None,
    )


def recover(fs: FileSystem, directory: str, config: LogConfig, point: RecoveryPoint) -> OpenedLog:
    """Open after a crash. Raises CorruptLogError for damage, with the files unchanged; OSError.

    Nothing is synced yet: ``unsynced`` of the result must run before the log is used.
    """
    state = read_log_state(fs, directory)
    return _Recovery(fs, directory, config, state, point).run()


def read_log_state(fs: FileSystem, directory: str) -> LogState:
    path = layout.join(directory, layout.LOG_STATE_FILE)
    try:
        data = fs.read_bytes(path)
    except FileNotFoundError:
        return LogState()
    return decode_log_state(data, path)


class _Recovery:
    """The recovery of one directory. First it reads and plans, then it changes files."""

    def __init__(
        self, fs: FileSystem, directory: str, config: LogConfig, state: LogState, point: RecoveryPoint
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._config = config
        self._state = state
        self._point = point
        self._proven = state.cap(point.recovery_point, point.truncations)
        self._bases: list[int] = []
        self._indexed: set[int] = set()  # bases of the segments that have an index file
        self._segments: list[Segment] = []
        self._read: list[Segment] = []  # the segments that were read: those above the proven end
        self._offset = state.log_start_offset
        self._epochs = LeaderEpochs()
        self._cut: Fields | None = None

    def run(self) -> OpenedLog:
        start = self._state.log_start_offset
        names = finish_swaps(self._fs, self._directory, self._fs.list_dir(self._directory))
        found = _segment_bases(names)
        self._indexed = _index_bases(names)
        self._bases = found[max(bisect_right(found, start) - 1, 0) :]
        saved = _saved_epochs(self._fs, self._directory, self._state)
        self._read_segments(saved)
        if self._offset < start:  # the rest had been deleted; the following batches were never synced
            self._segments.clear()
            self._read.clear()
            self._offset = start
        changed = self._apply(names, found)
        offsets, dropped = self._take_producers(names)
        self._epochs.truncate_from_end(self._offset)
        self._epochs.truncate_from_start(start)
        unsynced = self._cut_files(saved, changed or dropped)
        return OpenedLog(
            self._segments,
            self._state,
            self._offset,
            self._epochs,
            epochs_saved=True,
            producers_offsets=offsets if self._segments or offsets else None,
            unsynced=unsynced,
        )

    # --- reading ---------------------------------------------------------------------------------------

    def _read_segments(self, saved_epochs: list[EpochEntry] | None) -> None:
        """Fill ``_segments`` and ``_epochs`` up to the end of the intact log."""
        bases, start = self._bases, self._state.log_start_offset
        first = max(bisect_right(bases, self._proven) - 1, 0)
        candidates = {base: self._open_segment(base) for base in bases[first:]}
        indexed = [one for one in candidates.values() if one.base_offset in self._indexed]
        self._proven = max([self._proven, *(one.saved_end_offset() for one in indexed)])
        first = max(bisect_right(bases, self._proven) - 1, 0)
        for base, next_offset in pairwise(bases[: first + 1]):
            segment = _closed_segment(self._fs, self._directory, self._config, self._state, base, next_offset)
            self._check_end(segment)
            self._segments.append(segment)
        self._offset = min(bases[0], start) if bases else start
        if bases and bases[0] > start and first:
            raise candidates[bases[first]].damaged(
                0, f"a segment with offset {start}", f"none below {bases[0]}"
            )
        if first:
            self._offset = bases[first]
        for number in range(first, len(bases)):
            segment = candidates[bases[number]]
            if segment.base_offset != self._offset:
                self._stop_at_gap(segment, len(bases) - number)
                return
            position, offset = self._resume(segment)
            if number == first:
                self._take_epochs(saved_epochs, segment, offset)
            stop = self._read_batches(segment, position, offset)
            self._segments.append(segment)
            self._read.append(segment)
            self._offset = stop.offset
            if stop.problem is not None:
                self._stop_at_tear(segment, stop, len(bases) - number - 1)
                return
        self._refuse_early_end()

    def _check_end(self, segment: Segment) -> None:
        """Check, with one small read, that a closed segment ends where the next one begins.

        If the last index block does not show that, the indexes are loaded. Raises CorruptLogError.
        """
        block = None
        if segment.base_offset in self._indexed:
            block = _last_index_block(self._fs, segment.path(layout.OFFSET_INDEX_SUFFIX))
        if block is not None and self._state.cap(block.end_offset, block.truncations) == segment.next_offset:
            if block.end_position == segment.size_bytes:
                return
            if block.end_position > segment.size_bytes:
                raise segment.damaged(
                    segment.size_bytes, f"batches up to offset {segment.next_offset}", "the end of the file"
                )
        segment.load_indexes()
        segment.release()

    def _open_segment(self, base: int) -> Segment:
        return Segment(
            self._fs, self._directory, base, self._config, self._state, next_offset=base, size_bytes=0
        )

    def _resume(self, segment: Segment) -> tuple[int, int]:
        """Return the (position, offset) from which ``segment`` must be read: its last proven index entry."""
        if segment.base_offset not in self._indexed:
            return 0, segment.base_offset
        end_offset, _ = segment.take_saved_indexes(self._proven)
        index = segment.offset_index
        length = segment.file.size()
        if end_offset > segment.base_offset and index.last_position >= length:
            raise segment.damaged(length, f"batches up to offset {end_offset}", "the end of the file")
        return index.last_position, segment.base_offset + index.last_relative_offset

    def _take_epochs(self, saved: list[EpochEntry] | None, segment: Segment, offset: int) -> None:
        """Set ``_epochs`` to those of all batches below ``offset``, which are not read."""
        self._epochs = LeaderEpochs(saved) if saved else _walk_epochs([*self._segments, segment], offset)
        self._epochs.truncate_from_end(offset)

    def _read_batches(self, segment: Segment, position: int, offset: int) -> _Stop:
        """Check and index the batches of ``segment`` from ``position`` on."""
        length = segment.size_bytes = segment.file.size()
        view = segment.view()
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
        """Return the header of the intact batch at ``position``; None if twelve zero bytes are there."""
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
        return header

    # --- judging ---------------------------------------------------------------------------------------

    def _stop_at_tear(self, segment: Segment, stop: _Stop, segments_behind: int) -> None:
        if stop.offset < self._proven:
            raise segment.damaged(
                stop.position, f"an intact batch with offset {stop.offset}", str(stop.problem)
            )
        self._note_cut(segment, segments_behind, str(stop.problem))

    def _stop_at_gap(self, segment: Segment, segments_behind: int) -> None:
        expected, actual = f"a segment with base offset {self._offset}", f"base offset {segment.base_offset}"
        if self._offset < self._proven:
            raise segment.damaged(0, expected, actual)
        self._note_cut(self._segments[-1] if self._segments else segment, segments_behind, actual)

    def _refuse_early_end(self) -> None:
        if self._offset >= self._proven:
            return
        last = self._segments[-1] if self._segments else self._open_segment(self._offset)
        raise last.damaged(
            last.size_bytes, f"batches up to offset {self._proven}", f"the end at {self._offset}"
        )

    def _note_cut(self, segment: Segment, segments_behind: int, problem: str) -> None:
        self._cut = Fields(
            path=segment.path(),
            position=segment.size_bytes,
            offset=self._offset,
            bytes=segment.allocated_bytes - segment.size_bytes,
            segments_removed=segments_behind,
            problem=problem,
        )

    # --- changing --------------------------------------------------------------------------------------

    def _apply(self, names: Sequence[str], found: Sequence[int]) -> bool:
        """Remove the files that are not part of the log. Returns whether any were removed."""
        if self._cut is not None:
            logger.warning("torn tail cut %s", self._cut)
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
        """Return the offsets of the valid snapshots, and whether others were removed. An invalid one would
        become valid again once the log has grown past its offset."""
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
            return True  # nothing to compare with; it is checked when it is read
        try:
            _, truncations = decode_producers(self._fs.read_bytes(path), path)
        except (CorruptLogError, ValueError):
            return False
        return self._state.cap(offset, truncations) == offset

    def _cut_files(self, saved: list[EpochEntry] | None, changed: bool) -> RecoverySync | None:
        """Cut the files to their contents. Returns the syncs of all that was not proven to be synced.

        The active segment keeps its zeros for the next batches: releasing them can take milliseconds.
        """
        unproven: list[str] = []
        for segment in self._read:
            if segment.next_offset > self._proven:
                unproven.append(segment.path())
            if self._cut is not None or segment is not self._read[-1]:
                segment.close_for_append()
            segment.release()
        if self._cut is not None and self._read and self._read[-1].path() not in unproven:
            unproven.append(self._read[-1].path())
        entries = self._epochs.entries()
        epochs = None
        if entries != (saved or []):
            path = layout.join(self._directory, layout.LEADER_EPOCHS_FILE)
            epochs = (path, encode_leader_epochs(entries, self._state.truncations))
        # The file name of a segment that begins at or above the proven end may not be durable.
        is_new = bool(self._read) and self._read[-1].base_offset >= self._proven
        names_too = changed or is_new or epochs is not None or self._cut is not None
        if unproven or names_too:
            return RecoverySync(self._fs, self._directory, unproven, epochs, names_too)
        return None


def _segment_bases(names: Sequence[str]) -> list[int]:
    """Return the base offsets of the segments, ascending."""
    parsed = map(layout.parse_segment_file_name, names)
    return sorted(name.base_offset for name in parsed if name and name.suffix == layout.LOG_SUFFIX)


def _index_bases(names: Sequence[str]) -> set[int]:
    parsed = map(layout.parse_segment_file_name, names)
    return {name.base_offset for name in parsed if name and name.suffix != layout.LOG_SUFFIX}


def _last_index_block(fs: FileSystem, path: str) -> Block | None:
    """Return the last block of an index file if it is small and intact."""
    try:
        file = fs.open(path)
    except FileNotFoundError:
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
    suffixes = reversed(layout.SEGMENT_SUFFIXES)  # the batches last: a start removes lone indexes
    names = (layout.segment_file_name(base_offset, suffix) for suffix in suffixes)
    unlink_existing(fs, (layout.join(directory, name) for name in names))


def _saved_epochs(fs: FileSystem, directory: str, state: LogState) -> list[EpochEntry] | None:
    """Return the entries of the checkpoint, or None if it is missing, damaged or empty.

    The checkpoint is only a hint (R5). It is synced before any batch of a new epoch counts as synced,
    so an intact checkpoint has every epoch that began below the proven end.
    """
    path = layout.join(directory, layout.LEADER_EPOCHS_FILE)
    try:
        content = fs.read_bytes(path)
    except FileNotFoundError:
        return None
    if not content.strip(b"\0"):
        return None  # the first checkpoint is not synced: a power loss may leave only its name, or zeros
    try:
        entries, truncations = decode_leader_epochs(content, path)
    except (CorruptLogError, ValueError) as error:
        logger.warning("leader epochs rebuilt %s", Fields(path=path, error=error))
        return None
    return [entry for entry in entries if state.cap(entry.start_offset + 1, truncations) > entry.start_offset]


def _walk_epochs(segments: Sequence[Segment], end_offset: int) -> LeaderEpochs:
    """Return the epochs of the batch headers below ``end_offset``."""
    epochs = LeaderEpochs()
    for segment in segments:
        size_bytes = segment.size_bytes
        length = segment.size_bytes = segment.file.size()
        view = segment.view()
        segment.size_bytes = size_bytes  # as found: the file may be longer, by zeros allocated ahead
        position, offset = 0, segment.base_offset
        while offset < end_offset and position + HEADER_BYTES <= length:
            try:
                header = parse_header(view, position)
            except CorruptBatchError as error:
                if not any(view[position : position + HEADER_BYTES]):
                    break
                raise segment.damaged(position, f"a batch with offset {offset}", error.message) from error
            if header.leader_epoch > epochs.latest_epoch:
                epochs.assign(header.leader_epoch, header.base_offset)
            position += header.length_bytes
            offset = header.next_offset
        segment.release()
    return epochs


def _only_zeros(segment: Segment, position: int, end: int) -> bool:
    while position < end:
        part = segment.file.read_at(position, min(end - position, len(_ZERO_BLOCK)))
        if part != _ZERO_BLOCK[: len(part)]:
            return False
        position += len(part)
    return True
