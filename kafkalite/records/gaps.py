"""Gap batches, which take the place of removed records in a compacted log.

A log's offsets are dense: each batch begins where the one before ends, and any other offset is damage.
So compaction does not leave holes. It replaces them with a columnar batch that gives the number of
removed offsets: flagged as control, so that consumers skip it, but not as transactional, which
distinguishes it from a marker; without producer and timestamp; its columns are nil. 66 bytes replace up
to a million offsets. A gap keeps the leader epoch of the batches it replaces, so the epochs of a log
still follow from its batches.
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
    """Whether the batch of ``header`` replaces removed records. A marker is also transactional."""
    return header.attributes & (CONTROL_BIT | TRANSACTIONAL_BIT) == CONTROL_BIT


def joined_at(batches: memoryview, offset: int) -> memoryview:
    """Return ``batches`` from ``offset`` on if the first of them is a gap that begins before it.

    A leader's gap may begin before the end of a follower's log. If the first batch is anything else,
    the batches are returned unchanged, for the log to refuse. Raises CorruptBatchError for a damaged
    first batch.
    """
    length = total_length(batches)
    if not length or length > len(batches):
        return batches
    header = check(batches[:length])
    if not is_gap(header) or not header.base_offset < offset < header.next_offset:
        return batches
    gap = build_gap(offset, header.next_offset - offset, header.leader_epoch)
    return memoryview(b"".join((gap, batches[length:])))
