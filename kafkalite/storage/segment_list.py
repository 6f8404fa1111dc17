"""SegmentList: the segments of one log in order. Creates and removes their files.

``Log`` decides which offsets may be read, which batches are synced, and when a failure is final.
"""

# Tests: tests/storage/test_log.py

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from kafkalite.model import NO_TIMESTAMP
from kafkalite.records.header import CONTROL_BIT, TRANSACTIONAL_BIT, scan_producers
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import LogState
from kafkalite.storage.filesystem import FileSystem, unlink_existing
from kafkalite.storage.leader_epochs import LeaderEpochs
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.retention import RetiredPaths, SegmentSummary
from kafkalite.storage.segment import Found, Segment


class BytesEnd(NamedTuple):
    """The result of ``find_bytes``. ``end_offset`` (exclusive) is the end of a batch or of the range.

    ``size_bytes``: the size of the batches from the start of the range to ``end_offset``. ``total_bytes``:
    the size of all batches in the range.
    """

    end_offset: int
    size_bytes: int
    total_bytes: int


class SegmentList:
    """The segments of one log. Invariants: ``bases`` are their base offsets and strictly increase. Each
    segment begins where the previous one ends. The last one is the active segment."""

    __slots__ = ("_directory", "_epochs", "_fs", "_retired", "bases", "segments")

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        segments: Iterable[Segment] = (),
        epochs: LeaderEpochs | None = None,
    ) -> None:
        """``epochs`` is the log's own object, which the log changes; the segments compare their batches with
        it (R58)."""
        self._fs = fs
        self._directory = directory
        self._epochs = epochs
        self._retired = RetiredPaths()
        self.segments = list(segments)
        for segment in self.segments:
            segment.epochs = epochs
        self.bases = [segment.base_offset for segment in self.segments]

    def __len__(self) -> int:
        return len(self.segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)

    @property
    def last(self) -> Segment:
        return self.segments[-1]

    def number_of(self, offset: int) -> int:
        """Return the index of the segment that contains ``offset``. Return the last index if ``offset`` is
        above all segments, and -1 if it is below all segments."""
        return bisect_right(self.bases, offset) - 1

    def create(self, base_offset: int, config: LogConfig, state: LogState) -> Segment:
        """Create an active segment without a sync. Raises StorageExhaustedError and OSError, with the list
        unchanged."""
        segment = Segment.create(self._fs, self._directory, base_offset, config, state)
        segment.epochs = self._epochs
        self.segments.append(segment)
        self.bases.append(base_offset)
        return segment

    def read(
        self, offset: int, max_bytes: int, up_to: int, at_least_one: bool
    ) -> tuple[list[memoryview], int, int]:
        """Return (buffers, their size, next offset) of complete batches from ``offset``. See ``Log.read``."""
        number = bisect_right(self.bases, offset) - 1
        segments = self.segments
        view, next_offset = segments[number].read(offset, max_bytes, up_to, at_least_one)
        size_bytes = len(view)
        if size_bytes == 0:
            return [], 0, offset
        buffers = [view]
        number += 1
        while (
            number < len(segments)
            and size_bytes < max_bytes
            and next_offset < up_to
            and next_offset == segments[number].base_offset
        ):
            view, next_offset = segments[number].read(next_offset, max_bytes - size_bytes, up_to, False)
            if not view:
                break
            buffers.append(view)
            size_bytes += len(view)
            number += 1
        return buffers, size_bytes, next_offset

    def find_bytes(self, start_offset: int, end_offset: int, max_bytes: int) -> BytesEnd:
        """Implements ``Log.offset_for_bytes``. The caller ensures that the range is not empty and within the
        log."""
        first, last = self.number_of(start_offset), self.number_of(end_offset - 1)
        start = self.segments[first].find(start_offset)
        stop = self.segments[last].end_position(self.segments[last].find(end_offset - 1))
        # From here on, positions count from the start of the first segment of the range.
        bases = list(accumulate((one.size_bytes for one in self.segments[first:last]), initial=0))
        total_bytes = bases[-1] + stop - start.position
        if total_bytes <= max_bytes:
            return BytesEnd(end_offset, total_bytes, total_bytes)
        target = start.position + max(max_bytes, 0)
        number = bisect_right(bases, target) - 1
        segment, begin = self.segments[first + number], start
        if number:
            begin = Found(0, segment.base_offset)
        position, offset = segment.last_boundary(begin, target - bases[number], at_least_one=not number)
        size_bytes = bases[number] + position - start.position
        return BytesEnd(min(offset, end_offset), size_bytes, total_bytes)

    def find_timestamp(self, timestamp_ms: int, from_offset: int) -> tuple[int, int] | None:
        """Return (max timestamp, base offset) of the first batch whose max timestamp is at least
        ``timestamp_ms``, or None. Batches entirely below ``from_offset`` are ignored."""
        for segment in self.segments:
            if segment.next_offset > from_offset:
                found = segment.find_timestamp(timestamp_ms, from_offset)
                if found is not None:
                    return found
        return None

    def largest_timestamp_ms(self) -> int:
        for segment in self.segments:
            segment.load_indexes()
        return max((segment.max_timestamp_ms for segment in self.segments), default=NO_TIMESTAMP)

    def summaries(self) -> Iterator[SegmentSummary]:
        """Yield summaries for retention. Indexes are loaded as far as the caller iterates."""
        for segment in self.segments:
            was_in_use = segment.is_in_use
            segment.load_indexes()
            max_timestamp_ms = segment.max_timestamp_ms
            is_gap = max_timestamp_ms == NO_TIMESTAMP and segment.size_bytes > 0 and _is_gap(segment)
            if not was_in_use:
                segment.release()
            yield SegmentSummary(
                segment.base_offset, segment.next_offset, segment.size_bytes, max_timestamp_ms, is_gap
            )

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)

    def drop_behind(self, number: int) -> None:
        """Unlink every segment after index ``number``, the last one first. The names are not synced."""
        while len(self.segments) > number + 1:
            segment = self.segments.pop()
            self.bases.pop()
            unlink_existing(self._fs, map(segment.path, layout.SEGMENT_SUFFIXES))
            segment.release()

    def retire(self, count: int) -> list[Segment]:
        """Remove the ``count`` oldest segments, and return them. Their files are renamed to names with
        ``.deleted``, and kept until ``take_retired`` returns them or the next start removes them. The names
        are not synced."""
        retired = self.segments[:count]
        del self.segments[:count]
        del self.bases[:count]
        for segment in retired:
            for suffix in layout.SEGMENT_SUFFIXES:
                path = segment.path(suffix)
                if self._fs.exists(path):
                    self._fs.rename(path, path + layout.DELETED_SUFFIX)
                    self._retired.add(path + layout.DELETED_SUFFIX)
            segment.release()
        return retired

    def replace(self, old: list[Segment], new: Segment) -> None:
        """Replace adjacent segments by ``new``, which has the same offsets. Readers keep their old views."""
        number = self.segments.index(old[0])
        new.epochs = self._epochs
        self.segments[number : number + len(old)] = [new]
        self.bases[number : number + len(old)] = [new.base_offset]
        for segment in old:
            segment.release()

    def take_retired(self, now_ms: int, delay_ms: int) -> list[str]:
        """Return the files whose delay has passed, for the caller to unlink. The delay of newly retired files
        begins with this call."""
        return self._retired.due(now_ms, delay_ms)

    def reconfigure(self, config: LogConfig) -> None:
        for segment in self.segments:
            segment.reconfigure(config)

    def set_state(self, state: LogState) -> None:
        for segment in self.segments:
            segment.state = state

    def release(self) -> None:
        for segment in self.segments:
            segment.release()

    @property
    def is_at_rest(self) -> bool:
        """Whether no file is open or mapped, and none waits for its removal."""
        return not len(self._retired) and not any(segment.is_in_use for segment in self.segments)

    def release_idle(self) -> int:
        """Close files and maps unused since the last call. Return the number of segments whose files were
        closed."""
        released = 0
        for segment in self.segments:
            if segment.used:
                segment.used = False
            elif segment.is_in_use:
                segment.release()
                released += 1
        return released


def _is_gap(segment: Segment) -> bool:
    """Whether the segment has only gap batches, which compaction writes in place of removed records. A marker
    counts as a record."""
    headers = scan_producers(segment.view(), 0, segment.size_bytes)
    return all(one[1] & (CONTROL_BIT | TRANSACTIONAL_BIT) == CONTROL_BIT for one in headers)
