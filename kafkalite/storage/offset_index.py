"""The sparse offset index of one segment: relative offset -> position.

An entry is added for each batch whose position is at least ``index.interval.bytes`` above that of the
previous entry. The start of the segment counts as an entry but is not stored. So a lookup scans the headers
of less than one interval.

Pure: arrays of numbers, no file. The limits of segments ensure that the numbers fit in 32 bits.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from typing import Final

from kafkalite.storage.index_block import OFFSET_ENTRY_BYTES

_SWAP: Final = sys.byteorder == "little"
assert array("I").itemsize == 4


class OffsetIndex:
    """The offset index of one segment. Invariant: the arrays of relative offsets and of positions have equal
    length, and both strictly increase."""

    __slots__ = ("positions", "relative_offsets")

    def __init__(self) -> None:
        self.relative_offsets = array("I")
        self.positions = array("I")

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def last_position(self) -> int:
        """The position of the last entry. If there is none: 0, the start of the segment."""
        return self.positions[-1] if self.positions else 0

    @property
    def last_relative_offset(self) -> int:
        """The relative offset of the last entry, or 0 if there is none."""
        return self.relative_offsets[-1] if self.relative_offsets else 0

    def append(self, relative_offset: int, position: int) -> None:
        """Add an entry for the batch at ``position``. Offset and position must exceed those of all earlier
        entries."""
        assert position > self.last_position and (
            not self.relative_offsets or relative_offset > self.relative_offsets[-1]
        )
        self.relative_offsets.append(relative_offset)
        self.positions.append(position)

    def entry_before_offset(self, relative_offset: int) -> tuple[int, int]:
        """Return (position, relative offset) of the last entry at or below ``relative_offset``, or (0, 0) if
        there is none."""
        index = bisect_right(self.relative_offsets, relative_offset)
        return (self.positions[index - 1], self.relative_offsets[index - 1]) if index else (0, 0)

    def entry_before_position(self, position: int) -> tuple[int, int]:
        """Return (position, relative offset) of the last entry at or below ``position``, or (0, 0) if there
        is none."""
        index = bisect_right(self.positions, position)
        return (self.positions[index - 1], self.relative_offsets[index - 1]) if index else (0, 0)

    def truncate_to_position(self, position: int) -> None:
        """Remove the entries of batches that start at or above ``position``."""
        index = bisect_left(self.positions, position)
        del self.relative_offsets[index:]
        del self.positions[index:]

    def count_up_to_position(self, position: int) -> int:
        """Return the number of entries of batches that start at or below ``position``."""
        return bisect_right(self.positions, position)

    def entries(self, start: int, end: int) -> bytes:
        """Return the entries with indexes [``start``, ``end``), encoded as in a file."""
        pairs = array("I", [0]) * (2 * (end - start))
        pairs[0::2] = self.relative_offsets[start:end]
        pairs[1::2] = self.positions[start:end]
        if _SWAP:
            pairs.byteswap()
        return pairs.tobytes()

    def extend(self, entries: bytes) -> bool:
        """Append the entries of a file. Change nothing and return False if they do not continue the index."""
        assert len(entries) % OFFSET_ENTRY_BYTES == 0
        pairs = array("I")
        pairs.frombytes(entries)
        if _SWAP:
            pairs.byteswap()
        offsets, positions = pairs[0::2], pairs[1::2]
        if not positions:
            return True
        last_offset = self.relative_offsets[-1] if self.relative_offsets else -1
        if offsets[0] <= last_offset or positions[0] <= self.last_position:
            return False
        if not (_strictly_increasing(offsets) and _strictly_increasing(positions)):
            return False
        self.relative_offsets += offsets
        self.positions += positions
        return True


def _strictly_increasing(numbers: array[int]) -> bool:
    return all(map(int.__lt__, numbers, numbers[1:]))
