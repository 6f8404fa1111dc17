"""Loads the state of a new coordinator by replaying the log of its partition, one slice at a time (R36)."""

from __future__ import annotations

import asyncio
from itertools import repeat
from struct import Struct
from typing import Any, Final

from kafkalite.broker.coordination.shard import Shard
from kafkalite.coordinator_types import Instant, StateRecord
from kafkalite.errors import CorruptBatchError, LogOfflineError, StorageError
from kafkalite.records.batch import RecordBatch
from kafkalite.records.checksum import crc32c
from kafkalite.records.header import ATTRIBUTES_POSITION, COLUMNAR, HEADER_BYTES, LENGTH_OVERHEAD_BYTES
from kafkalite.records.single import read_single
from kafkalite.replication.partition import Partition

#: The size of a slice. One iteration of the loop replays one slice, in about 10 ms.
SLICE_BYTES: Final = 128 * 1024

# Most batches commit one offset: one uncompressed record without a transaction. They are recognized by these
# header fields: batch length, CRC, attributes, last offset delta.
_HEAD: Final = Struct(">8xi5xIhi")


async def load(shard: Shard) -> int:
    """Replay the log up to its end, then let the shard serve. Return the number of records that were read.

    Records above the high watermark are included: a leader never removes them, and responses wait until they
    are committed. Returns early if the shard is closed meanwhile. Raises LogOfflineError for a damaged log,
    the errors of reading it, and the errors of the machine for records that it cannot decode.
    """
    partition = shard.partition
    refuse_damaged(partition)
    offset = partition.log_start_offset
    record_count = 0
    while not shard.is_closed:
        if offset >= partition.log_end_offset:
            shard.finish_loading()
            break
        found = partition.read_for_replica(max(offset, partition.log_start_offset), SLICE_BYTES)
        if found.next_offset <= offset:
            end = partition.log_end_offset
            raise StorageError(f"{partition} has nothing at {offset}, below its end {end}")
        now = shard.now()
        for buffer in found.buffers:
            record_count += replay_batches(shard.machine, buffer, now)
        offset = found.next_offset
        await asyncio.sleep(0)
    return record_count


def refuse_damaged(partition: Partition) -> None:
    """Raise LogOfflineError if the log is damaged, because its readable part is not the whole state (R44)."""
    damage = partition.damage
    if damage is not None:
        raise LogOfflineError(f"the log of {partition} is damaged: {damage.summary}", hint=damage.hint)


def replay_batches(machine: Any, buffer: memoryview, now: Instant) -> int:
    """Replay the transaction markers and the records with a key in the batches of ``buffer``.

    Return the number of records, including those without a key but not the markers.
    """
    record_count, position = 0, 0
    replay, new_record, unpack_head = machine.replay, tuple.__new__, _HEAD.unpack_from
    data = bytes(buffer)
    while position < len(data):
        if len(data) - position < HEADER_BYTES:
            raise CorruptBatchError(f"no complete record batch at position {position} of {len(data)} bytes")
        length_bytes, crc, attributes, last_offset_delta = unpack_head(data, position)
        end = position + LENGTH_OVERHEAD_BYTES + length_bytes
        if attributes == COLUMNAR and last_offset_delta == 0 and end <= len(data):
            row = read_single(data, position + HEADER_BYTES, end)
            if row is not None and crc == crc32c(data[position + ATTRIBUTES_POSITION : end]):
                replay(new_record(StateRecord, row), now)
                record_count += 1
                position = end
                continue
        batch = RecordBatch(buffer[position:end])
        position = end
        header = batch.header
        if header.is_control:
            if header.is_transactional:  # otherwise the batch fills a gap left by compaction
                from kafkalite.records.control import parse_marker

                machine.end_transaction(header.producer_id, is_commit=parse_marker(batch.buffer).is_commit)
            continue
        columns = batch.columns()
        record_count += header.record_count
        if columns.keys is None:
            continue
        rows = zip(columns.keys, columns.values, strict=True)
        records = map(tuple.__new__, repeat(StateRecord), rows)
        if header.is_transactional:
            producer_id = header.producer_id
            for record in records:
                if record.key is not None:
                    replay(record, now, producer_id=producer_id)
        else:
            for record in records:
                if record.key is not None:
                    replay(record, now)
    return record_count
