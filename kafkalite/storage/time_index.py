"""The sparse time index of one segment: largest timestamp so far -> base offset of the batch that has it.

If the largest timestamp has grown since the last entry, an entry is added whenever the offset index gets one,
and at the end of the segment. A lookup finds the first entry at or above the requested timestamp. The first
batch whose largest timestamp is at or above the requested one is then the batch of this entry, or an earlier
batch *within the same interval of the offset index*. So less than one interval must be scanned.

Pure: arrays of numbers, no file.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from typing import Final

from kafkalite.model import NO_TIMESTAMP
from kafkalite.storage.index_block import TIME_ENTRY_BYTES

_ENTRY: Final = struct.Struct(">qI")
assert _ENTRY.size == TIME_ENTRY_BYTES


class TimeIndex:
    """The time index of one segment. Invariant: the arrays of timestamps and of relative offsets have equal
    length, and both strictly increase."""

    __slots__ = ("relative_offsets", "timestamps")

    def __init__(self) -> None:
        self.timestamps = array("q")
        self.relative_offsets = array("I")

    def __len__(self) -> int:
        return len(self.timestamps)

    @property
    def last_timestamp_ms(self) -> int:
        return self.timestamps[-1] if self.timestamps else NO_TIMESTAMP

    @property
    def last_relative_offset(self) -> int:
        return self.relative_offsets[-1] if self.relative_offsets else 0

    def maybe_append(self, timestamp_ms: int, relative_offset: int) -> None:
        """Add the largest timestamp so far, if it has grown since the last entry."""
        if timestamp_ms > self.last_timestamp_ms:
            self.timestamps.append(timestamp_ms)
            self.relative_offsets.append(relative_offset)

    def first_not_below(self, timestamp_ms: int) -> int | None:
        """Return the relative offset of the first entry at or above ``timestamp_ms``, or None."""
        index = bisect_left(self.timestamps, timestamp_ms)
        return self.relative_offsets[index] if index < len(self.timestamps) else None

    def truncate_to_offset(self, relative_offset: int) -> None:
        """Remove the entries of batches whose base offset is at or above ``relative_offset``."""
        index = bisect_left(self.relative_offsets, relative_offset)
        del self.timestamps[index:]
        del self.relative_offsets[index:]

    def count_below_offset(self, relative_offset: int) -> int:
        """Return the number of entries of batches whose base offset is below ``relative_offset``."""
        return bisect_left(self.relative_offsets, relative_offset)

    def entries(self, start: int, end: int) -> bytes:
        """Return the entries with indexes [``start``, ``end``), encoded as in a file."""
        pairs = zip(self.timestamps[start:end], self.relative_offsets[start:end], strict=True)
        return b"".join(_ENTRY.pack(timestamp, offset) for timestamp, offset in pairs)

    def extend(self, entries: bytes) -> bool:
        """Append the entries of a file. Change nothing and return False if they do not continue the index."""
        timestamps, offsets = array("q"), array("I")
        last_timestamp, last_offset = self.last_timestamp_ms, -1
        if self.relative_offsets:
            last_offset = self.last_relative_offset
        for timestamp, offset in _ENTRY.iter_unpack(entries):
            if timestamp <= last_timestamp or offset <= last_offset:
                return False
            timestamps.append(timestamp)
            offsets.append(offset)
            last_timestamp, last_offset = timestamp, offset
        self.timestamps += timestamps
        self.relative_offsets += offsets
        return True
