"""Fetched batches and their records. Pure."""

# Tests: tests/client/test_consumer.py

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from operator import length_hint
from typing import TYPE_CHECKING

from kafkalite.client.consumer.decoding import Decode
from kafkalite.errors import RecordError, SerializationError
from kafkalite.model import Record, TopicPartition
from kafkalite.records.batch import RecordBatch

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True, slots=True)
class FetchedBatch:
    """A fetched batch. Records below ``from_offset``, which precede the consumer's position, are skipped."""

    topic: str
    partition: int
    batch: RecordBatch
    from_offset: int

    def __len__(self) -> int:
        """The number of records from ``from_offset`` on."""
        header = self.batch.header
        return header.record_count - max(0, self.from_offset - header.base_offset)

    def records(self) -> list[Record]:
        """Return the records from ``from_offset`` on.

        Raises RecordError with the partition, the offset, and ``next_offset``, the offset after the batch.
        """
        try:
            return self.batch.records(self.topic, self.partition, from_offset=self.from_offset)
        except RecordError as error:
            raise self._unreadable(error) from error

    def to_arrow(self) -> pyarrow.RecordBatch:
        """Return the records as columns offset, timestamp, key, value, headers, without copying values.

        Raises the errors of ``records``, and MissingExtraError without pyarrow.
        """
        skipped = max(0, self.from_offset - self.batch.header.base_offset)
        try:
            return self.batch.to_arrow().slice(skipped)
        except RecordError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: RecordError) -> RecordError:
        tp = TopicPartition(self.topic, self.partition)
        return unreadable(error, tp, self.from_offset, self.batch.header.next_offset)


def unreadable(error: RecordError, tp: TopicPartition, offset: int, next_offset: int) -> RecordError:
    """Return a copy of ``error`` that names the unreadable batch and the offset to seek to after it."""
    failed = type(error)(
        f"{tp}: the batch at offset {offset} can't be read: {error.message}",
        hint=error.hint
        or f"seek() to offset {next_offset} skips it; or restore the partition from a replica",
    )
    failed.topic_partition, failed.offset, failed.next_offset = tp, offset, next_offset
    return failed


class RecordCursor:
    """Iterates over the records of one batch. Several loops may share it; each record is returned once."""

    __slots__ = ("batch", "failure", "iterator", "next_offset", "records")

    def __init__(self, batch: FetchedBatch, decode: Decode | None = None) -> None:
        self.batch = batch
        self.records = batch.records()
        self.failure: SerializationError | None = None  #: why the record after ``records`` can't be decoded
        if decode is not None:
            self._decode(decode)
        self.iterator: Iterator[Record] = iter(self.records)
        self.next_offset = batch.batch.header.next_offset

    def _decode(self, decode: Decode) -> None:
        encoded, self.records = self.records, []
        try:
            for record in encoded:
                self.records.append(decode(record))
        except SerializationError as error:
            self.failure = error

    @property
    def has_more(self) -> bool:
        return self.remaining > 0 or self.failure is not None

    @property
    def remaining(self) -> int:
        return length_hint(self.iterator)

    @property
    def position(self) -> int:
        """The offset of the next record, even if it can't be decoded; ``next_offset`` if there is none."""
        remaining = length_hint(self.iterator)
        if remaining:
            return self.records[-remaining].offset
        if self.failure is not None and self.failure.offset is not None:
            return self.failure.offset
        return self.next_offset

    def take(self, count: int) -> list[Record]:
        return list(islice(self.iterator, count))

    def detach(self) -> None:
        """End every loop over ``iterator``, and keep the remaining records for a new ``iterator``."""
        self.records = list(self.iterator)
        self.iterator = iter(self.records)

    def drop(self) -> None:
        """End every loop over ``iterator`` and drop the remaining records."""
        self.failure = None
        deque(self.iterator, maxlen=0)
