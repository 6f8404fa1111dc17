"""LookupLog: a compactable log that tells where a time is, and how far a number of bytes reaches.

Every answer comes from the segments' sizes and sparse indexes, and walks at most about one index interval of
batch headers, however long the log or the range asked for.
"""

from __future__ import annotations

from kafkalite.errors import CorruptLogError
from kafkalite.model import NO_TIMESTAMP
from kafkalite.storage.compactable_log import CompactableLog
from kafkalite.storage.segment_list import BytesEnd


class LookupLog(CompactableLog):
    __slots__ = ()

    def offset_for_timestamp(self, timestamp_ms: int) -> tuple[int, int] | None:
        """(max timestamp, base offset) of the first batch whose max timestamp is not below
        ``timestamp_ms``, or None. What was deleted is not found; an offset below the log start is it."""
        self._open()
        try:
            found = self._segments.find_timestamp(timestamp_ms, self.log_start_offset)
        except (CorruptLogError, OSError) as error:
            raise self._read_failed(error) from error
        return None if found is None else (found[0], max(found[1], self.log_start_offset))

    def max_timestamp(self) -> tuple[int, int] | None:
        """(largest timestamp, base offset of the first batch that has it), or None in an empty log."""
        self._open()
        try:
            largest = self._segments.largest_timestamp_ms()
        except (CorruptLogError, OSError) as error:
            raise self._read_failed(error) from error
        return None if largest == NO_TIMESTAMP else self.offset_for_timestamp(largest)

    def offset_for_bytes(self, start_offset: int, end_offset: int, max_bytes: int) -> BytesEnd:
        """How far [start_offset, end_offset) can be read with at most ``max_bytes`` of batches.

        A batch counts whole when any offset of it is in the range; the first is taken however large. What is
        below the log start, or at the log end and above, has no bytes. Raises LogOfflineError when damage
        is met.
        """
        self._open()
        start, end = max(start_offset, self.log_start_offset), min(end_offset, self.log_end_offset)
        if start >= end:
            return BytesEnd(end_offset, 0, 0)
        try:
            found = self._segments.find_bytes(start, end, max_bytes)
        except (CorruptLogError, OSError) as error:
            raise self._read_failed(error) from error
        return found._replace(end_offset=end_offset) if found.end_offset == end else found
