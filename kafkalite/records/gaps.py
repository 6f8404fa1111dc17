"""Gap batches, which replace removed or lost records in a log.

A log has no missing offsets: each batch begins where the previous one ends, and any other offset means
damage. So compaction replaces removed records with a columnar batch that gives the number of removed offsets.
It is flagged as control, so that consumers skip it, but not as transactional, which distinguishes it from a
marker. It has no producer and no timestamp, and its columns are nil. 66 bytes replace up to a million
offsets. Compaction gives a gap the leader epoch of the batches that the gap replaces, so the epochs of a log
can still be derived from its batches. ``storage.accept_loss`` puts gaps in the place of lost records.

If a producer's state refers to a batch of which records are removed, the first gap that replaces some of
them describes that batch, so that the state can still be derived from the log (R27). The description takes
the place of the gap's last column.
"""

# Tests: tests/storage/test_compaction.py

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from kafkalite.records.columns import ARRAY_OF_4, NIL
from kafkalite.records.header import (
    CONTROL_BIT,
    HEADER_BYTES,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Buffer,
    check,
    pack_control_header,
    seal,
    total_length,
)

_BODY: Final = ARRAY_OF_4 + NIL * 4
GAP_BYTES: Final = HEADER_BYTES + len(_BODY)
# The fields of ReplacedBatch, behind the head of a msgpack binary.
_REPLACED: Final = struct.Struct(">qhiqqqI")
_REPLACED_HEAD: Final = bytes((0xC4, _REPLACED.size))
_REPLACED_POSITION: Final = GAP_BYTES - len(NIL) + len(_REPLACED_HEAD)
DESCRIBED_GAP_BYTES: Final = _REPLACED_POSITION + _REPLACED.size


class ReplacedBatch(NamedTuple):
    """Describes a batch of an idempotent producer from which compaction has removed records.

    Both offsets are inclusive. ``crc`` is the checksum of the batch before compaction.
    """

    producer_id: int
    epoch: int
    first_sequence: int
    base_offset: int
    last_offset: int
    max_timestamp_ms: int
    crc: int

    @classmethod
    def of(cls, header: BatchHeader) -> ReplacedBatch:
        """Return the description of the stored batch with this header."""
        producer = (header.producer_id, header.producer_epoch, header.base_sequence)
        return cls(*producer, header.base_offset, header.last_offset, header.max_timestamp_ms, header.crc)


def build_gap(
    base_offset: int, count: int, leader_epoch: int, replaced: ReplacedBatch | None = None
) -> bytearray:
    """Return the batch that replaces ``count`` offsets from ``base_offset`` on.

    ``count`` is at most MAX_RECORDS_PER_BATCH. If ``replaced`` is not None, the gap contains this
    description.
    """
    body = _BODY if replaced is None else _BODY[:-1] + _REPLACED_HEAD + _REPLACED.pack(*replaced)
    size_bytes = HEADER_BYTES + len(body)
    header = pack_control_header(base_offset, size_bytes, 0, count=count, leader_epoch=leader_epoch)
    batch = bytearray().join((header, body))
    seal(batch)
    return batch


def replaced_by(buffer: Buffer, position: int, attributes: int) -> ReplacedBatch | None:
    """Return the description in the gap at ``position``. Return None if the batch with these ``attributes``
    is not a gap, or if the gap has no description."""
    if attributes & (CONTROL_BIT | TRANSACTIONAL_BIT) != CONTROL_BIT:
        return None
    if total_length(buffer, position) != DESCRIBED_GAP_BYTES:
        return None
    return ReplacedBatch(*_REPLACED.unpack_from(buffer, position + _REPLACED_POSITION))


def is_gap(header: BatchHeader) -> bool:
    """Whether the batch of ``header`` is a gap: it is flagged as control but not as transactional."""
    return header.attributes & (CONTROL_BIT | TRANSACTIONAL_BIT) == CONTROL_BIT


def joined_at(batches: memoryview, offset: int) -> memoryview:
    """If the first batch is a gap that begins before ``offset`` and ends after it, return ``batches`` with
    that gap shortened to begin at ``offset``. Otherwise return ``batches`` unchanged.

    ``offset`` is the end of a follower's log. A gap from the leader may begin before it, but the log refuses
    batches that do not begin at its end. Raises CorruptBatchError if the first batch is complete and damaged,
    or if its length is missing or invalid.
    """
    length = total_length(batches)
    if not length or length > len(batches):
        return batches
    header = check(batches[:length])
    if not is_gap(header) or not header.base_offset < offset < header.next_offset:
        return batches
    replaced = replaced_by(batches, 0, header.attributes)
    gap = build_gap(offset, header.next_offset - offset, header.leader_epoch, replaced)
    return memoryview(b"".join((gap, batches[length:])))
