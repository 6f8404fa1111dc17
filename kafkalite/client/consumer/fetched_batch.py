"""A batch as a consumer has it, and its records on their way to the user. Pure."""

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
    """A batch as it was fetched. Records below ``from_offset`` (inclusive) were not asked for."""

    topic: str
    partition: int
    batch: RecordBatch
    from_offset: int

    def __len__(self) -> int:
        """How many records from ``from_offset`` on."""
        header = self.batch.header
        return header.record_count - max(0, self.from_offset - header.base_offset)

    def records(self) -> list[Record]:
        """The records from ``from_offset`` on. Raises CorruptBatchError."""
        return self.batch.records(self.topic, self.partition, from_offset=self.from_offset)

    def to_arrow(self) -> pyarrow.RecordBatch:
        """The same as columns offset, timestamp, key, value, headers, values not copied."""
        skipped = max(0, self.from_offset - self.batch.header.base_offset)
        return self.batch.to_arrow().slice(skipped)


class RecordCursor:
    """The records of one batch on their way to the user; several may take from it, each record goes once."""

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
        """The offset of the next record to come out, or that after the batch."""
        remaining = length_hint(self.iterator)
        return self.records[-remaining].offset if remaining else self.next_offset

    def take(self, count: int) -> list[Record]:
        return list(islice(self.iterator, count))

    def detach(self) -> None:
        """End every loop over ``iterator``; the records left are kept for ``iterator`` anew."""
        self.records = list(self.iterator)
        self.iterator = iter(self.records)

    def drop(self) -> None:
        """End every loop over ``iterator``; the records left are gone."""
        deque(self.iterator, maxlen=0)
