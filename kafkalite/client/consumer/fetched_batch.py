"""Fetched batches and their records. Pure."""

# Tests: tests/client/test_consumer.py

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from operator import length_hint
from typing import TYPE_CHECKING

from kafkalite.model import Record
from kafkalite.records.batch import RecordBatch

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True, slots=True)
class FetchedBatch:
    """A batch as fetched. Records below ``from_offset`` (inclusive) were not requested."""

    topic: str
    partition: int
    batch: RecordBatch
    from_offset: int

    def __len__(self) -> int:
        """The number of records from ``from_offset`` on."""
        header = self.batch.header
        return header.record_count - max(0, self.from_offset - header.base_offset)

    def records(self) -> list[Record]:
        """Return the records from ``from_offset`` on. Raises CorruptBatchError."""
        return self.batch.records(self.topic, self.partition, from_offset=self.from_offset)

    def to_arrow(self) -> pyarrow.RecordBatch:
        """Return the records as columns offset, timestamp, key, value, headers, without copying values."""
        skipped = max(0, self.from_offset - self.batch.header.base_offset)
        return self.batch.to_arrow().slice(skipped)


class RecordCursor:
    """The records of one batch. Several loops may take from it; each record is returned once."""

    __slots__ = ("batch", "iterator", "next_offset", "records")

    def __init__(self, batch: FetchedBatch) -> None:
        self.batch = batch
        self.records = batch.records()
        self.iterator: Iterator[Record] = iter(self.records)
        self.next_offset = batch.batch.header.next_offset

    @property
    def remaining(self) -> int:
        return length_hint(self.iterator)

    @property
    def position(self) -> int:
        """The offset of the next record, or the offset after the batch."""
        remaining = length_hint(self.iterator)
        return self.records[-remaining].offset if remaining else self.next_offset

    def take(self, count: int) -> list[Record]:
        return list(islice(self.iterator, count))

    def detach(self) -> None:
        """End every loop over ``iterator``, and keep the remaining records for a new ``iterator``."""
        self.records = list(self.iterator)
        self.iterator = iter(self.records)

    def drop(self) -> None:
        """End every loop over ``iterator`` and drop the remaining records."""
        deque(self.iterator, maxlen=0)
