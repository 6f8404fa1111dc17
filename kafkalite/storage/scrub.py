"""Checks segments, also those that no client reads, to find damage while another replica is intact (R53).

A check reads the file of one segment in parts. Each part may run in any thread: the check has its own file
descriptor and changes nothing of the segment. ``Log.finish_scrub`` decides whether the found damage counts.
"""

# Tests: tests/storage/test_scrub.py

from __future__ import annotations

from typing import Final, NamedTuple

from kafkalite.errors import CorruptBatchError
from kafkalite.limits import KIB
from kafkalite.records.header import HEADER_BYTES, LENGTH_OVERHEAD_BYTES, check, stored_crc, total_length
from kafkalite.storage.damage import intact_runs
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.leader_epochs import LeaderEpochs
from kafkalite.storage.segment import Segment

#: The number of bytes to read at once. Checking them takes about 0.1 ms.
CHUNK_BYTES: Final = 256 * KIB


class Finding(NamedTuple):
    """The damage of a segment. ``sound_end_offset`` is exclusive. ``records_in_doubt`` is the number of
    offsets of this segment, at or above ``sound_end_offset``, that no intact batch contains."""

    cause: str
    sound_end_offset: int
    records_in_doubt: int


class SegmentScrub:
    """A check of the batches that a segment has when the check begins: CRCs, contiguous offsets, leader
    epochs (R58) and the identity of the first batch (R42). Later batches are not checked."""

    def __init__(self, fs: FileSystem, segment: Segment, truncations: int) -> None:
        """``truncations`` is the log's present truncation count. Raises OSError, StorageExhaustedError."""
        self.segment = segment
        self.truncations = truncations
        self.end_offset = segment.next_offset  #: exclusive
        self.finding: Finding | None = None
        self._epochs = LeaderEpochs() if segment.epochs is None else segment.epochs.copy()
        self._end_position = segment.size_bytes
        self._file = fs.open(segment.path())
        self._position = 0
        self._offset = segment.base_offset

    @property
    def is_complete(self) -> bool:
        """Whether every batch was checked, or damage was found."""
        return self.finding is not None or self._position >= self._end_position

    def run(self) -> int:
        """Check the next batches, about CHUNK_BYTES in total. Return the number of bytes that were found
        intact. Raises OSError."""
        position = self._position
        try:
            self._check_chunk()
        except CorruptBatchError as error:
            self.finding = self._examine(error.message)
        return self._position - position

    def _check_chunk(self) -> None:
        view = memoryview(self._read(CHUNK_BYTES))
        if self._position == 0:
            head_crc = self.segment.saved_head_crc()
            if head_crc and len(view) >= HEADER_BYTES and stored_crc(view) != head_crc:
                raise CorruptBatchError("another first batch than its index names")
        at = 0
        while at < len(view):
            is_first = at == 0
            if not is_first and len(view) - at < LENGTH_OVERHEAD_BYTES:
                break
            length = total_length(view, at)
            if is_first and length > len(view):
                view = memoryview(self._read(length))
            elif length > len(view) - at:
                break  # the next chunk begins here
            header = check(view[at : at + length])
            if header.base_offset != self._offset:
                raise CorruptBatchError(f"base offset {header.base_offset}")
            self._epochs.check(header.leader_epoch, header.last_offset)
            at += length
            self._position += length
            self._offset = header.next_offset
        if self._position >= self._end_position and self._offset != self.end_offset:
            raise CorruptBatchError(f"the end at offset {self._offset}")

    def _read(self, length: int) -> bytes:
        """Return up to ``length`` bytes at the current position of the check. Raises CorruptBatchError if
        there are none."""
        data = self._file.read_at(self._position, min(length, self._end_position - self._position))
        if not data:
            raise CorruptBatchError("the end of the file")
        return data

    def _examine(self, problem: str) -> Finding:
        """Return the damage at the present position, which ``problem`` describes. Reads the rest of the
        segment."""
        view = self._file.map(min(self._end_position, self._file.size()))
        intact = sum(
            run.end_offset - run.start_offset for run in intact_runs(view, self._position, self._offset)
        )
        expected = f"an intact batch with offset {self._offset}"
        cause = self.segment.damaged(self._position, expected, problem).message
        return Finding(cause, self._offset, max(self.end_offset - self._offset - intact, 0))
