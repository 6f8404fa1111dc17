"""Opening the log of a directory: after an orderly stop, and after any other end.

After an orderly stop the marker says where the log ends, and nothing is read (``open_clean``).

After any other end (``recover``) some of what was written since the last sync is there and some is not,
page by page, in any order; the same holds for file names. What is *proven* to have been synced is all
below the recovery point of the last checkpoint, and all below the end of an intact index block, since
both are written only after a sync; a truncation since then caps both. So (R24):

* segments wholly below the proven end are taken as they are;
* the rest is read, from the last trusted index entry on, and every batch must have its CRC and its offset;
* a bad batch, a gap or an early end **below** the proven end is damage: CorruptLogError, nothing is touched;
* **at or above** it, it is the torn tail: cut there, whatever stands behind, with one log event;
* zeros behind the last batch are space allocated ahead: cut without a word;
* everything kept is synced before the log is used, so that the next recovery can't find less.

Recovery interrupted at any point leaves a state from which recovery finds the same log.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kafkalite.errors import CorruptBatchError, CorruptLogError
from kafkalite.records.header import HEADER_BYTES, BatchHeader, check, parse_header, total_length
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import (
    CleanEnd,
    LogState,
    RecoveryPoint,
    decode_leader_epochs,
    decode_log_state,
)
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.leader_epochs import LeaderEpochs
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.segment import Segment

logger = logging.getLogger(__name__)

_ZERO_BLOCK: Final = bytes(1 << 20)


@dataclass(slots=True)
class OpenedLog:
    """A log's parts as found. ``segments`` may be empty; else the last one is active."""

    segments: list[Segment]
    state: LogState
    log_end_offset: int
    epochs: LeaderEpochs
    epochs_saved: bool


class _Stop(NamedTuple):
    """Where the intact batches of a segment end, and why; ``problem`` None: nothing but zeros follow."""

    position: int
    offset: int
    problem: str | None


def open_clean(fs: FileSystem, directory: str, config: LogConfig, end: CleanEnd) -> OpenedLog:
    """Open after an orderly stop: lists the directory, opens no segment. Raises CorruptLogError."""
    state = read_log_state(fs, directory)
    bases = _segment_bases(fs, directory)
    path = layout.join(directory, layout.segment_file_name(end.log_end_offset, layout.LOG_SUFFIX))
    if (bases[-1] if bases else 0) > end.log_end_offset or (not bases and end != (end[1], end[1])):
        raise CorruptLogError(
            path=path,
            position=0,
            expected=f"segments of a log with offsets [{end.log_start_offset}, {end.log_end_offset})",
            actual=f"base offsets {bases[:1]} to {bases[-1:]}",
        )
    while len(bases) > 1 and bases[1] <= state.log_start_offset:
        _remove_segment(fs, directory, bases.pop(0))
    segments = [
        _closed_segment(fs, directory, config, state, base, next_offset)
        for base, next_offset in zip(bases, [*bases[1:], end.log_end_offset], strict=True)
    ]
    epochs, saved = _epochs_below(fs, directory, state, segments, end.log_end_offset)
    epochs.truncate_from_end(end.log_end_offset)
    epochs.truncate_from_start(state.log_start_offset)
    return OpenedLog(segments, state, end.log_end_offset, epochs, saved)


def recover(fs: FileSystem, directory: str, config: LogConfig, point: RecoveryPoint) -> OpenedLog:
    """Open after a crash. Raises CorruptLogError for damage, with the files as they were; OSError."""
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
    """One run over one directory. Plans first (reads only), then changes."""

    __slots__ = (
        "_bases",
        "_config",
        "_cut",
        "_directory",
        "_epochs",
        "_fs",
        "_offset",
        "_point",
        "_proven",
        "_segments",
        "_state",
    )

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
        self._segments: list[Segment] = []
        self._offset = state.log_start_offset
        self._epochs = LeaderEpochs()
        self._cut: dict[str, object] | None = None

    def run(self) -> OpenedLog:
        fs, directory, start = self._fs, self._directory, self._state.log_start_offset
        found = _segment_bases(fs, directory)
        first_kept = max(bisect_right(found, start) - 1, 0)
        self._bases = found[first_kept:]
        first_read = max(bisect_right(self._bases, self._proven) - 1, 0)
        saved = self._read_segments(first_read)
        if self._offset < start:  # everything left was deleted, and what was to follow is not there
            self._refuse_below_proven(self._offset, "the log to reach its start offset", "its end")
            self._segments.clear()
            self._offset = start
        changed = self._apply(found)
        self._epochs.truncate_from_end(self._offset)
        self._epochs.truncate_from_start(start)
        self._sync(changed)
        return OpenedLog(self._segments, self._state, self._offset, self._epochs, saved)

    # --- reading ---------------------------------------------------------------------------------------

    def _read_segments(self, first_read: int) -> bool:
        """Fill ``_segments`` up to the end of the intact log. Returns whether the saved epochs served."""
        bases, state = self._bases, self._state
        for base, next_offset in zip(bases[:first_read], bases[1:], strict=False):
            segment = _closed_segment(self._fs, self._directory, self._config, state, base, next_offset)
            self._segments.append(segment)
        candidates = [self._open_segment(base) for base in bases[first_read:]]
        self._proven = max([self._proven, *(segment.saved_end_offset() for segment in candidates)])
        self._offset = bases[first_read] if first_read else state.log_start_offset
        if candidates and not first_read:
            self._offset = min(candidates[0].base_offset, state.log_start_offset)
            if candidates[0].base_offset > state.log_start_offset:
                self._offset = state.log_start_offset
        saved = True
        for number, segment in enumerate(candidates):
            if segment.base_offset != self._offset:
                self._stop_at_gap(segment, candidates[number:])
                break
            resume = self._take_saved_indexes(segment)
            if number == 0:
                epochs_from = self._segments
                self._epochs, saved = self._saved_epochs(segment, resume, epochs_from)
            stop = self._read_batches(segment, *resume)
            self._segments.append(segment)
            self._offset = stop.offset
            if stop.problem is not None:
                self._stop_at_tear(segment, stop, candidates[number + 1 :])
                break
        if self._cut is None:
            self._refuse_below_proven(self._offset, f"batches up to offset {self._proven}", "the log's end")
        return saved

    def _open_segment(self, base_offset: int) -> Segment:
        return Segment(
            self._fs,
            self._directory,
            base_offset,
            self._config,
            self._state,
            next_offset=base_offset,
            size_bytes=0,
        )

    def _take_saved_indexes(self, segment: Segment) -> tuple[int, int]:
        """(position, offset) from which ``segment`` must be read: a batch start that is proven."""
        end_offset, _ = segment.take_saved_indexes(self._proven)
        index = segment.offset_index
        length = segment.file.size()
        if end_offset > segment.base_offset and index.last_position >= length:
            raise segment.damaged(length, f"batches up to offset {end_offset}", "the end of the file")
        return index.last_position, segment.base_offset + index.last_relative_offset

    def _saved_epochs(
        self, segment: Segment, resume: tuple[int, int], before: Sequence[Segment]
    ) -> tuple[LeaderEpochs, bool]:
        """The epochs of the batches that are not read: all that start below the first one that is."""
        _, offset = resume
        epochs, saved = _epochs_below(self._fs, self._directory, self._state, [*before, segment], offset)
        return epochs, saved

    def _read_batches(self, segment: Segment, position: int, offset: int) -> _Stop:
        """Check and index the batches of ``segment`` from ``position`` on."""
        length = segment.file.size()
        segment.allocated_bytes = segment.size_bytes = length
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
        segment.size_bytes, segment.next_offset = position, offset
        if problem is None and not _only_zeros(segment, position, length):
            problem = "bytes that are no batch"
        return _Stop(position, offset, problem)

    def _checked(self, view: memoryview, position: int, offset: int) -> BatchHeader | None:
        """The header of the intact batch at ``position``; None when twelve zeros stand there."""
        left = len(view) - position
        if left < HEADER_BYTES:
            if not any(view[position:]):
                return None
            raise CorruptBatchError(f"{left} bytes, less than a header")
        length = total_length(view, position)
        if length == 0:
            return None
        if length > left:
            raise CorruptBatchError(f"a batch of {length} bytes where {left} are left")
        header = check(view[position : position + length])
        if header.base_offset != offset:
            raise CorruptBatchError(f"base offset {header.base_offset}")
        if header.leader_epoch < self._epochs.latest_epoch:
            raise CorruptBatchError(
                f"leader epoch {header.leader_epoch} behind {self._epochs.latest_epoch}"
            )
        return header

    # --- judging ---------------------------------------------------------------------------------------

    def _stop_at_tear(self, segment: Segment, stop: _Stop, behind: Sequence[Segment]) -> None:
        if stop.offset < self._proven:
            raise segment.damaged(stop.position, f"an intact batch with offset {stop.offset}", str(stop.problem))
        self._note_cut(segment, stop.position, str(stop.problem), behind)

    def _stop_at_gap(self, segment: Segment, behind: Sequence[Segment]) -> None:
        if self._offset < self._proven:
            raise segment.damaged(
                0, f"a segment that starts with offset {self._offset}", f"one that starts with {segment.base_offset}"
            )
        last = self._segments[-1] if self._segments else segment
        position = last.size_bytes if self._segments else 0
        self._note_cut(last, position, f"the next segment starts with {segment.base_offset}", behind)

    def _refuse_below_proven(self, offset: int, expected: str, actual: str) -> None:
        if offset >= self._proven:
            return
        name = layout.segment_file_name(offset, layout.LOG_SUFFIX)
        last = self._segments[-1] if self._segments else None
        path = last.path() if last is not None else layout.join(self._directory, name)
        position = last.size_bytes if last is not None else 0
        raise CorruptLogError(path=path, position=position, expected=expected, actual=f"{actual} at {offset}")

    def _note_cut(self, segment: Segment, position: int, problem: str, behind: Sequence[Segment]) -> None:
        length = segment.file.size() if segment in self._segments else 0
        self._cut = {
            "path": segment.path(),
            "position": position,
            "offset": self._offset,
            "bytes": max(length - position, 0),
            "segments_removed": len(behind),
            "problem": repr(problem),
        }

    # --- changing --------------------------------------------------------------------------------------

    def _apply(self, found: Sequence[int]) -> bool:
        """Make the files say what was found. Returns whether a name was removed."""
        if self._cut is not None:
            fields = " ".join(f"{name}={value}" for name, value in self._cut.items())
            logger.warning("event=torn_tail_cut %s", fields)
        kept = {segment.base_offset for segment in self._segments}
        changed = False
        for base_offset in reversed(found):
            if base_offset not in kept:
                _remove_segment(self._fs, self._directory, base_offset)
                changed = True
        for name in self._fs.list_dir(self._directory):
            parsed = layout.parse_segment_file_name(name)
            orphan = parsed is not None and parsed.base_offset not in kept
            if orphan or layout.is_leftover(name):
                self._fs.unlink(layout.join(self._directory, name))
                changed = True
        return changed

    def _sync(self, changed: bool) -> None:
        """Cut the files to their contents, and sync what might not have been."""
        moved = self._offset > self._point.recovery_point or self._cut is not None
        for segment in self._segments:
            if not segment.indexes_loaded:
                continue  # not read: proven, and left as it is
            cut = segment.allocated_bytes != segment.size_bytes
            segment.close_for_append()
            if cut or moved:
                segment.file.sync()
            segment.release()
        if changed or moved:
            self._fs.sync_dir(self._directory)


def _segment_bases(fs: FileSystem, directory: str) -> list[int]:
    """Base offsets of the segments, ascending."""
    parsed = map(layout.parse_segment_file_name, fs.list_dir(directory))
    return [name.base_offset for name in parsed if name is not None and name.suffix == layout.LOG_SUFFIX]


def _closed_segment(
    fs: FileSystem, directory: str, config: LogConfig, state: LogState, base_offset: int, next_offset: int
) -> Segment:
    path = layout.join(directory, layout.segment_file_name(base_offset, layout.LOG_SUFFIX))
    size_bytes = fs.file_size(path)
    return Segment(
        fs, directory, base_offset, config, state, next_offset=next_offset, size_bytes=size_bytes
    )


def _remove_segment(fs: FileSystem, directory: str, base_offset: int) -> None:
    for suffix in reversed(layout.SEGMENT_SUFFIXES):  # the batches last: without them indexes are orphans
        path = layout.join(directory, layout.segment_file_name(base_offset, suffix))
        if fs.exists(path):
            fs.unlink(path)


def _epochs_below(
    fs: FileSystem, directory: str, state: LogState, segments: Sequence[Segment], end_offset: int
) -> tuple[LeaderEpochs, bool]:
    """(the epochs of batches below ``end_offset``, whether the checkpoint served).

    The checkpoint is only a hint (R5). It is synced before any batch of a new epoch counts as synced, so
    it is complete wherever it is intact; where it is missing or damaged, the headers are walked.
    """
    path = layout.join(directory, layout.LEADER_EPOCHS_FILE)
    try:
        entries, truncations = decode_leader_epochs(fs.read_bytes(path), path)
    except FileNotFoundError:
        pass
    except (CorruptLogError, ValueError) as error:
        logger.warning("event=leader_epochs_rebuilt path=%s error=%r", path, str(error))
    else:
        epochs = LeaderEpochs(entries)
        epochs.truncate_from_end(min(end_offset, state.cap(end_offset, truncations)))
        return epochs, True
    return _walk_epochs(segments, end_offset), False


def _walk_epochs(segments: Sequence[Segment], end_offset: int) -> LeaderEpochs:
    """The epochs as the batch headers below ``end_offset`` tell them."""
    epochs = LeaderEpochs()
    for segment in segments:
        position, offset = 0, segment.base_offset
        while offset < end_offset and position + HEADER_BYTES <= segment.file.size():
            if segment.size_bytes == 0:
                segment.allocated_bytes = segment.size_bytes = segment.file.size()
            try:
                header = parse_header(segment.view(), position)
            except CorruptBatchError as error:
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
