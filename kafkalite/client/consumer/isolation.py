"""What of an answer to a fetch no consumer may see: control batches, and aborted transactions. Pure.

A broker reads no records, so it sends batches of aborted transactions too, up to the last stable offset, and
lists the aborted transactions that reach into the answer by their first offset (KIP-98). Each goes on to its
producer's next marker. A control batch without the transactional bit is what compaction left of records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from struct import Struct
from typing import Final

from kafkalite.protocol.messages.data import AbortedTransaction
from kafkalite.records.header import ATTRIBUTES_POSITION, CONTROL_BIT, PRODUCER_POSITION, TRANSACTIONAL_BIT

_INT64: Final = Struct(">q")

#: Of the two bytes of attributes the lower one has both bits.
FLAGS_POSITION: Final = ATTRIBUTES_POSITION + 1
#: A batch with none of these is everybody's to see.
FLAGS: Final = TRANSACTIONAL_BIT | CONTROL_BIT


class AbortedFilter:
    """Which batches of one answer to drop, asked in the order of the log.

    Invariant: ``_producers`` are those with an aborted transaction that began before the end of the last
    batch asked for, and had not ended by then.
    """

    __slots__ = ("_coming", "_producers")

    def __init__(self, aborted: Sequence[AbortedTransaction]) -> None:
        self._coming = deque(sorted(aborted, key=lambda one: one.first_offset))
        self._producers: set[int] = set()

    def drops(self, data: memoryview, start: int, flags: int, next_offset: int) -> bool:
        """Whether to drop the transactional or control batch at ``start``, which ends at ``next_offset``."""
        if not self._coming and not self._producers:
            return bool(flags & CONTROL_BIT)
        (producer_id,) = _INT64.unpack_from(data, start + PRODUCER_POSITION)
        while self._coming and self._coming[0].first_offset < next_offset:
            self._producers.add(self._coming.popleft().producer_id)
        if flags & CONTROL_BIT:
            if flags & TRANSACTIONAL_BIT:  # the marker: an abort, if it is of one of these
                self._producers.discard(producer_id)
            return True
        return producer_id in self._producers
