"""Filters control batches and records of aborted transactions out of fetch responses. Pure.

Brokers do not read records, so they also send batches of aborted transactions, up to the last stable offset.
A response lists the aborted transactions that overlap with it, each as a producer id and a first offset
(KIP-98). Each transaction ends at the next marker of its producer. A control batch without the transactional
bit is left over from compaction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from struct import Struct
from typing import Final

from kafkalite.protocol.messages.data import AbortedTransaction
from kafkalite.records.header import ATTRIBUTES_POSITION, CONTROL_BIT, PRODUCER_POSITION, TRANSACTIONAL_BIT

_INT64: Final = Struct(">q")

#: Both bits are in the lower of the two attribute bytes.
FLAGS_POSITION: Final = ATTRIBUTES_POSITION + 1
#: Batches without these bits are always returned.
FLAGS: Final = TRANSACTIONAL_BIT | CONTROL_BIT


class AbortedFilter:
    """Decides which batches of one response are dropped. ``drops`` must be called in offset order.

    Invariant: ``_producers`` are the producers with an aborted transaction that is open after the batch last
    passed to ``drops``.
    """

    __slots__ = ("_coming", "_producers")

    def __init__(self, aborted: Sequence[AbortedTransaction]) -> None:
        self._coming = deque(sorted(aborted, key=lambda one: one.first_offset))
        self._producers: set[int] = set()

    def drops(self, data: memoryview, start: int, flags: int, next_offset: int) -> bool:
        """Whether to drop the transactional or control batch at position ``start`` of ``data``.

        ``flags`` are the bits of FLAGS in the batch's attributes. ``next_offset`` is the offset after the
        batch.
        """
        if not self._coming and not self._producers:
            return bool(flags & CONTROL_BIT)
        (producer_id,) = _INT64.unpack_from(data, start + PRODUCER_POSITION)
        while self._coming and self._coming[0].first_offset < next_offset:
            self._producers.add(self._coming.popleft().producer_id)
        if flags & CONTROL_BIT:
            if flags & TRANSACTIONAL_BIT:  # a marker ends the producer's transaction
                self._producers.discard(producer_id)
            return True
        return producer_id in self._producers
