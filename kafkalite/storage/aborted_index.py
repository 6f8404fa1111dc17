"""AbortedIndex: the aborted transactions of a log, for readers of committed records.

Entries are ordered by the last offset of the transaction. The *bound* of an entry is an offset below which no
later entry begins; it limits a lookup. An entry takes about 32 bytes of memory.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final, NamedTuple

ABORTED: Final = "aborted"  #: the first word of an entry's line in a snapshot
_LINE: Final = f"{ABORTED} %d %d %d %d"


class Aborted(NamedTuple):
    """One aborted transaction. ``last_offset`` is the offset of its marker. The first offset of every later
    entry in the index is at least ``bound``."""

    producer_id: int
    first_offset: int
    last_offset: int
    bound: int


class AbortedIndex:
    """The aborted transactions of a log. Invariant: last offsets strictly increase; bounds never decrease."""

    __slots__ = ("_bounds", "_first_offsets", "_last_offsets", "_producer_ids")

    def __init__(self) -> None:
        self._producer_ids = array("q")
        self._first_offsets = array("q")
        self._last_offsets = array("q")
        self._bounds = array("q")

    def __len__(self) -> int:
        return len(self._last_offsets)

    def __iter__(self) -> Iterator[Aborted]:
        return map(Aborted._make, self._rows())

    def _rows(self) -> Iterator[tuple[int, ...]]:
        columns = (self._producer_ids, self._first_offsets, self._last_offsets, self._bounds)
        return zip(*columns, strict=True)

    def lines(self) -> Iterator[str]:
        """Yield one line per entry, for a snapshot."""
        return map(_LINE.__mod__, self._rows())

    def add_line(self, text: str) -> None:
        """Add the entry in ``text``: a line of a snapshot without its first word, ``aborted``. Raises
        ValueError if ``text`` does not consist of four integers."""
        producer_id, first_offset, last_offset, bound = map(int, text.split())
        self.add(Aborted(producer_id, first_offset, last_offset, bound))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AbortedIndex):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<AbortedIndex {list(self)}>"

    def add(self, entry: Aborted) -> None:
        """Add an aborted transaction. Call it once for each transaction, in the order of their markers."""
        producer_id, first_offset, last_offset, bound = entry
        self._producer_ids.append(producer_id)
        self._first_offsets.append(first_offset)
        self._last_offsets.append(last_offset)
        self._bounds.append(bound)

    def between(self, first: int, end: int) -> list[Aborted]:
        """Return the entries with any offset in [``first``, ``end``), ordered by first offset.

        A transaction's offsets reach from its first offset to its marker, inclusive.
        """
        found = []
        for number in range(bisect_left(self._last_offsets, first), len(self._last_offsets)):
            first_offset = self._first_offsets[number]
            if first_offset < end:
                last_offset, bound = self._last_offsets[number], self._bounds[number]
                found.append(Aborted(self._producer_ids[number], first_offset, last_offset, bound))
            if self._bounds[number] >= end:
                break
        found.sort(key=lambda one: one.first_offset)
        return found

    def delete_before(self, log_start_offset: int) -> None:
        """Remove the transactions that end below the log start."""
        count = bisect_left(self._last_offsets, log_start_offset)
        for column in (self._producer_ids, self._first_offsets, self._last_offsets, self._bounds):
            del column[:count]
