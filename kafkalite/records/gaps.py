"""Gap batches, which replace removed records in a compacted log.

A log has no missing offsets: each batch begins where the previous one ends, and any other offset means
damage. So compaction replaces removed records with a columnar batch that gives the number of removed offsets.
It is flagged as control, so that consumers skip it, but not as transactional, which distinguishes it from a
marker. It has no producer and no timestamp, and its columns are nil. 66 bytes replace up to a million
offsets. A gap keeps the leader epoch of the batches that it replaces, so the epochs of a log can still be
derived from its batches.
"""

# Tests: tests/storage/test_compaction.py

from __future__ import annotations

from typing import Final

from kafkalite.records.columns import ARRAY_OF_4, NIL
from kafkalite.records.header import (
    CONTROL_BIT,
    HEADER_BYTES,
    TRANSACTIONAL_BIT,
    BatchHeader,
    check,
    pack_control_header,
    seal,
    total_length,
)

_BODY: Final = ARRAY_OF_4 + NIL * 4
GAP_BYTES: Final = HEADER_BYTES + len(_BODY)


def build_gap(base_offset: int, count: int, leader_epoch: int) -> bytearray:
    """Return the batch that replaces ``count`` removed offsets, at most MAX_RECORDS_PER_BATCH."""
    header = pack_control_header(base_offset, GAP_BYTES, 0, count=count, leader_epoch=leader_epoch)
    batch = bytearray().join((header, _BODY))
    seal(batch)
    return batch


def is_gap(header: BatchHeader) -> bool:
    """Whether the batch of ``header`` replaces removed records: it is control but not transactional."""
    return header.attributes & (CONTROL_BIT | TRANSACTIONAL_BIT) == CONTROL_BIT


def joined_at(batches: memoryview, offset: int) -> memoryview:
    """Return ``batches`` from ``offset`` on if the first batch is a gap that begins before ``offset``.

    A leader's gap may begin before the end of a follower's log. If the first batch is not such a gap, return
    ``batches`` unchanged; the log refuses them unless they begin at its end. Raises CorruptBatchError for a
    damaged first batch.
    """
    length = total_length(batches)
    if not length or length > len(batches):
        return batches
    header = check(batches[:length])
    if not is_gap(header) or not header.base_offset < offset < header.next_offset:
        return batches
    gap = build_gap(offset, header.next_offset - offset, header.leader_epoch)
    return memoryview(b"".join((gap, batches[length:])))
