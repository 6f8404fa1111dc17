"""Checks I3 and I6 for logs that each replica compacts independently, by record, since batches differ.

Compaction may remove a record, but must not replace or move one. ``Coordination`` checks, when the cluster is
at rest, that no current record was removed: a coordinator's state equals a replay of every replica's log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kafkalite.errors import KafkaliteError
from kafkalite.model import TopicPartition
from kafkalite.records.batch import RecordBatch
from kafkalite.records.header import BatchHeader, parse_header, total_length
from kafkalite.testing.sim.simulation import Violation

READ_BYTES = 1 << 20


class Told(NamedTuple):
    """One record that was read from a replica's log."""

    offset: int
    leader_epoch: int
    content: int  #: a hash of key and value


class CompactedLogs:
    """The records that were found in any replica of the compacted partitions."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Any, int, int], int] = {}
        self._committed: dict[tuple[Any, int], Told] = {}

    def check(self, where: str, key: Any, batch: RecordBatch) -> list[Told]:
        """Check I3. Return the batch's records. Raises Violation."""
        header = batch.header
        if header.is_control:  # a marker, or an empty batch that compaction left
            return []
        columns = batch.columns()
        keys = columns.keys or [None] * header.record_count
        found: list[Told] = []
        for number, record in enumerate(zip(keys, columns.values, strict=True)):
            told = Told(header.base_offset + number, header.leader_epoch, hash(record))
            if self._seen.setdefault((key, *told[:2]), told.content) != told.content:
                raise Violation(
                    "I3",
                    f"{where}: offset {told.offset} of epoch {told.leader_epoch} is another record than"
                    " elsewhere",
                )
            found.append(told)
        return found

    def check_committed(self, where: str, key: Any, told: Told) -> None:
        """Check I6 for a record below a high watermark. Raises Violation."""
        known = self._committed.setdefault((key, told.offset), told)
        if known != told:
            raise Violation(
                "I6",
                f"{where}: offset {told.offset} is of epoch {told.leader_epoch}, and another record of epoch"
                f" {known.leader_epoch} was committed there",
            )


def read_buffers(log: Any, start: int, end: int) -> Iterator[tuple[memoryview, int]]:
    """Yield (buffer, position) of each batch in [start, end). Ends early at unreadable data."""
    offset = start
    while offset < end:
        try:
            chunk = log.read(offset, max_bytes=READ_BYTES, up_to=end)
        except KafkaliteError:
            return
        if not chunk.size_bytes:
            return
        for buffer in chunk.buffers:
            position = 0
            while position < len(buffer):
                yield buffer, position
                position += total_length(buffer, position)
        offset = chunk.next_offset


def read_headers(log: Any, start: int, end: int) -> Iterator[BatchHeader]:
    """Yield the headers of all batches in [start, end)."""
    for buffer, position in read_buffers(log, start, end):
        yield parse_header(buffer, position)


def read_batches(log: Any, start: int, end: int) -> Iterator[RecordBatch]:
    """Yield all batches in [start, end)."""
    for buffer, position in read_buffers(log, start, end):
        yield RecordBatch(buffer[position : position + total_length(buffer, position)])


def replayed(machine: Any, hosted: Any, now: Any) -> Any:
    """Return ``machine`` after a replay of the whole log of ``hosted``."""
    from kafkalite.broker.coordination.loader import replay_batches

    log = hosted.partition.log
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        chunk = log.read(offset, max_bytes=READ_BYTES, up_to=log.log_end_offset)
        assert chunk.next_offset > offset, f"{TopicPartition(*hosted.key)} has nothing at {offset}"
        for buffer in chunk.buffers:
            replay_batches(machine, buffer, now)
        offset = chunk.next_offset
    machine.on_loaded(now)
    return machine
