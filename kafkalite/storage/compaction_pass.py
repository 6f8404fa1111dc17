"""One compaction pass over the closed segments of one log, in steps.

``CompactionPass.steps`` is a generator. It yields jobs that wait for the disk, which may run in any thread,
one after the other. Between two jobs it computes for a few milliseconds at most, in the log's thread. Appends
and reads continue, because closed segments do not change. ``SwapWork`` documents the restrictions during a
swap.

Segments are swapped in the order of their offsets, so that a tombstone is never removed before the records
that it deletes. A pass that ends early because of a crash or a truncation leaves a partly compacted log,
which is valid.
"""

# Tests: tests/storage/test_compaction.py

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kafkalite.errors import CorruptBatchError
from kafkalite.limits import KIB, MAX_SEGMENT_BYTES, MIB
from kafkalite.records.header import scan, total_length
from kafkalite.storage import layout
from kafkalite.storage.compaction import Facts, Horizons, LatestOffsets, Remembered, Rewriter, Survey, Written
from kafkalite.storage.compaction_swap import SegmentDigest, SwapWork
from kafkalite.storage.filesystem import Buffer, File, FileSystem, unlink_existing
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.segment import Segment

#: The number of bytes to read at once. Processing them blocks the event loop for a few milliseconds.
CHUNK_BYTES: Final = 64 * KIB
#: The number of bytes to read at once if only headers are processed, which takes much less time.
SURVEY_CHUNK_BYTES: Final = 256 * KIB
_WRITE_BYTES: Final = 512 * KIB
#: The number of bytes to sync at once. It is limited because producers wait for the syncing threads.
_SYNC_BYTES: Final = 8 * MIB

Job = Callable[[], bytes | None]
Steps = Generator[Job | SwapWork, bytes | None, None]


@dataclass(slots=True, eq=False)
class CompactionPass:
    """One pass. ``compacted_to`` (exclusive) is the end of the compacted offsets; it is valid if
    ``is_complete``.

    ``is_given_up``: the pass ended because a swap was not done: the log was truncated, closed or taken
    offline, or segments of the pass were deleted. ``has_more``: not all keys fitted in memory, so another
    pass should follow at once.
    """

    fs: FileSystem
    directory: str
    config: LogConfig
    segments: Sequence[Segment]  #: the log's first segments, closed and synced
    compacted_before: int  #: the end (exclusive) of the previous passes
    horizons: Horizons
    remembered: Remembered  #: at first from the previous pass; at the end for the next pass
    is_known: Callable[[int], bool]
    max_keys: int
    truncations: int
    removed_records: int = 0
    has_more: bool = False
    is_complete: bool = False
    is_given_up: bool = False
    surveyed_to: int = field(init=False)
    compacted_to: int = field(init=False)
    bytes_before: int = field(init=False)
    bytes_after: int = field(init=False)
    _temporary_paths: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.surveyed_to = self.segments[-1].next_offset
        self.compacted_to = self.compacted_before
        self.bytes_before = self.bytes_after = sum(segment.size_bytes for segment in self.segments)

    def steps(self) -> Steps:
        """Yield the jobs of the pass. When the generator ends or is closed, temporary files are removed.

        Raises CorruptLogError if a segment is damaged; OSError, StorageExhaustedError.
        """
        try:
            yield from self._run()
        finally:
            unlink_existing(self.fs, self._temporary_paths)

    def _run(self) -> Steps:
        survey = Survey()
        for segment in self.segments:
            yield from self._each_chunk(segment, SURVEY_CHUNK_BYTES, survey.take)
        facts = survey.finish(self.surveyed_to, self.is_known)
        end_offset = facts.end_offset
        if end_offset <= self.compacted_before:
            self.is_complete = True
            return
        latest = LatestOffsets(self.max_keys, self.remembered)
        for segment in self.segments:
            if segment.next_offset > self.compacted_before and segment.base_offset < end_offset:
                yield from self._each_chunk(segment, CHUNK_BYTES, partial(self._note_keys, latest, facts))
        if latest.is_full and latest.end_offset < end_offset:
            end_offset = latest.end_offset
            self.has_more = True
        rewriter = Rewriter(facts, latest, end_offset, self.horizons, self.remembered)
        for group in self._groups():
            if group[0].base_offset >= end_offset:
                break
            yield from self._rewrite(group, rewriter)
            if self.is_given_up:
                return
            self.removed_records = rewriter.removed_records
        self.compacted_to = end_offset
        self.remembered = rewriter.remembered
        self.is_complete = True

    def _note_keys(self, latest: LatestOffsets, facts: Facts, chunk: memoryview) -> None:
        for position, base_offset, _, _, length in scan(chunk, 0, len(chunk)):
            if latest.is_full or base_offset >= facts.end_offset:
                return
            if base_offset >= self.compacted_before:
                latest.take(chunk[position : position + length], facts)

    def _each_chunk(
        self,
        segment: Segment,
        chunk_bytes: int,
        take: Callable[[memoryview], None],
        write: Callable[[], Job | None] = lambda: None,
    ) -> Steps:
        """Pass all batches of ``segment`` to ``take`` in chunks. After each chunk, yield the job that
        ``write`` returns, if any."""
        file, position, want, offset = segment.file, 0, chunk_bytes, segment.base_offset
        while position < segment.size_bytes:
            data = yield partial(file.read_at, position, min(want, segment.size_bytes - position))
            assert data is not None
            chunk = memoryview(data)
            end = 0
            want = chunk_bytes
            try:
                for start, base_offset, last_delta, _, length in scan(chunk, 0, len(chunk)):
                    if base_offset != offset:  # the CRC does not cover the base offset
                        raise CorruptBatchError(f"base offset {base_offset} where {offset} is next")
                    end = start + length
                    offset += last_delta + 1
                if end:
                    take(chunk[:end])
                elif offset == segment.next_offset:
                    return  # only zeros follow: space allocated ahead, which reappeared after a power loss
                elif len(chunk) == segment.size_bytes - position or total_length(chunk) <= len(chunk):
                    raise CorruptBatchError("bytes that are not a batch")
                else:
                    want = total_length(chunk)  # one batch is larger than a chunk
            except CorruptBatchError as error:
                raise segment.damaged(position, "intact batches", error.message) from error
            position += end
            job = write()
            if job is not None:
                yield job

    def _groups(self) -> list[list[Segment]]:
        """Return groups of adjacent segments. Each group is rewritten as one segment."""
        groups: list[list[Segment]] = []
        size_bytes = 0
        for segment in self.segments:
            size_bytes += segment.size_bytes
            if (
                not groups
                or size_bytes > self.config.segment_bytes
                or segment.next_offset - groups[-1][0].base_offset > MAX_SEGMENT_BYTES
            ):
                groups.append([])
                size_bytes = segment.size_bytes
            groups[-1].append(segment)
        return groups

    def _rewrite(self, group: Sequence[Segment], rewriter: Rewriter) -> Steps:
        """Write the remaining batches of ``group`` as one new segment, which replaces the group. If the group
        is a single segment that would not change, keep that segment."""
        first, last = group[0], group[-1]
        new = Segment(
            self.fs,
            self.directory,
            first.base_offset,
            self.config,
            first.state,
            next_offset=first.base_offset,
            size_bytes=0,
        )
        path = new.path() + layout.TEMPORARY_SUFFIX
        file = self.fs.open(path, create=True)
        self._temporary_paths.append(path)
        file.truncate(0)
        rewriter.has_changed = False
        output = _Output(new, file)
        replaced = SegmentDigest(layout.name_of(self.directory))

        def take(chunk: memoryview) -> None:
            for position, base_offset, _, _, length in scan(chunk, 0, len(chunk)):
                batch = chunk[position : position + length]
                if base_offset < first.next_offset:
                    replaced.take(batch)
                output.put(rewriter.take(batch))

        for segment in group:
            yield from self._each_chunk(segment, CHUNK_BYTES, take, output.due)
        output.put(rewriter.flush())
        size_bytes = sum(segment.size_bytes for segment in group)
        if len(group) == 1 and not rewriter.has_changed and output.end == size_bytes:
            return  # nothing was removed
        if output.next_offset != last.next_offset:  # another thread truncated the segment during the pass
            raise last.damaged(last.size_bytes, f"batches up to {last.next_offset}", f"{output.next_offset}")
        rest = output.rest()
        if rest is not None:
            yield rest
        yield file.sync
        new.take_file(file, output.end, output.next_offset)
        name = layout.swap_file_name(
            first.base_offset, output.next_offset, replaced.value, output.digest.value
        )
        swap = SwapWork(self.fs, self.directory, list(group), new, path, name, self.truncations)
        yield swap
        if not swap.is_done:
            self.is_given_up = True
            return
        self.bytes_after += output.end - size_bytes


class _Output:
    """Collects the batches of a new segment and writes them. ``end`` and ``next_offset`` are exclusive."""

    __slots__ = ("_file", "_parts", "_parts_bytes", "_segment", "_written", "digest", "next_offset")

    def __init__(self, segment: Segment, file: File) -> None:
        self._segment = segment
        self._file = file
        self._parts: list[Buffer] = []
        self._parts_bytes = 0
        self._written = 0
        self.next_offset = segment.base_offset
        self.digest = SegmentDigest()

    @property
    def end(self) -> int:
        return self._written + self._parts_bytes

    def put(self, batches: Sequence[Written]) -> None:
        for data, base_offset, next_offset, max_timestamp_ms in batches:
            assert base_offset == self.next_offset, f"a batch at {base_offset}, not {self.next_offset}"
            self._segment.note_batch(self.end, base_offset, max_timestamp_ms)
            self.digest.take(data)
            self._parts.append(data)
            self._parts_bytes += len(data)
            self.next_offset = next_offset

    def due(self) -> Job | None:
        """Return a job that writes the collected batches if they are large enough, else None."""
        return self.rest() if self._parts_bytes >= _WRITE_BYTES else None

    def rest(self) -> Job | None:
        """Return a job that writes all collected batches, or None if there are none."""
        if not self._parts:
            return None
        job = partial(self._write, self._written, b"".join(self._parts))
        self._written += self._parts_bytes
        self._parts.clear()
        self._parts_bytes = 0
        return job

    def _write(self, position: int, data: bytes) -> None:
        self._file.write_at(position, data)
        if position // _SYNC_BYTES != (position + len(data)) // _SYNC_BYTES:
            self._file.sync()
