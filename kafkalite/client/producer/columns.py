"""Splits columns of records into batches: by partition, then by size. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from kafkalite.client.producer.pending_batch import BATCH_OVERHEAD_BYTES, RECORD_OVERHEAD_BYTES, record_size
from kafkalite.errors import RecordError, RecordTooLargeError
from kafkalite.model import Headers

Item = bytes | None


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """Records as columns. All columns that are sequences must have the same length (see ``check``)."""

    values: Sequence[Item]
    keys: Sequence[Item] | None
    timestamps_ms: int | Sequence[int]
    headers: Sequence[Headers] | None

    def __len__(self) -> int:
        return len(self.values)

    def check(self) -> None:
        """Raise RecordError if the columns differ in length."""
        count = len(self.values)
        for name, column in (
            ("keys", self.keys),
            ("timestamps", self.timestamps_ms),
            ("headers", self.headers),
        ):
            if column is not None and not isinstance(column, int) and len(column) != count:
                raise RecordError(
                    f"{len(column)} {name} for {count} values", hint="give one per value, or none"
                )

    def part(self, start: int, stop: int) -> RecordColumns:
        """Return the records from ``start`` (inclusive) to ``stop`` (exclusive)."""
        return self._each(lambda column: column[start:stop])

    def pick(self, indexes: Sequence[int]) -> RecordColumns:
        """Return the records at ``indexes``, in this order."""
        return self._each(lambda column: [column[index] for index in indexes])

    def _each(self, select: Callable[[Any], Any]) -> RecordColumns:
        def selected(column: Any) -> Any:
            return column if column is None or isinstance(column, int) else select(column)

        return RecordColumns(*map(selected, (self.values, self.keys, self.timestamps_ms, self.headers)))


def split_by_partition(columns: RecordColumns, partitions: Sequence[int]) -> list[tuple[int, RecordColumns]]:
    """Return (partition, records) pairs, sorted by partition. ``partitions`` has one entry per record."""
    present = sorted(set(partitions))
    if len(present) == 1:
        return [(present[0], columns)]
    indexes: dict[int, list[int]] = {partition: [] for partition in present}
    for index, partition in enumerate(partitions):
        indexes[partition].append(index)
    return [(partition, columns.pick(indexes[partition])) for partition in present]


def split_by_size(columns: RecordColumns, limit_bytes: int, limit_records: int) -> Iterator[RecordColumns]:
    """Yield the records in parts of at most ``limit_records`` records and ``limit_bytes`` uncompressed bytes.

    Raises RecordTooLargeError before the first part if a single record exceeds the limit.
    """
    count = len(columns)
    if columns.headers is None:
        total = _total_bytes(columns.values) + _total_bytes(columns.keys) + count * RECORD_OVERHEAD_BYTES
        if total + BATCH_OVERHEAD_BYTES <= limit_bytes and count <= limit_records:
            yield columns
            return
    sizes = _record_sizes(columns)
    room = limit_bytes - BATCH_OVERHEAD_BYTES
    largest = max(sizes)
    if largest > room:
        raise RecordTooLargeError(
            f"record {sizes.index(largest)} has {largest} bytes; max.request.size is {limit_bytes}",
            hint="raise max.request.size, and the topic's max.message.bytes with it",
        )
    ends = list(accumulate(sizes))
    start = taken = 0
    while start < count:
        stop = min(bisect_right(ends, taken + room, start), start + limit_records)
        yield columns.part(start, stop)
        start, taken = stop, ends[stop - 1]


def _total_bytes(column: Sequence[Item] | None) -> int:
    if column is None:
        return 0
    try:
        return sum(map(len, column))  # type: ignore[arg-type]
    except TypeError:  # some values are None
        return sum(len(item) for item in column if item is not None)


def _record_sizes(columns: RecordColumns) -> list[int]:
    count = len(columns)
    keys = columns.keys if columns.keys is not None else [None] * count
    headers = columns.headers if columns.headers is not None else [()] * count
    return [record_size(*record) for record in zip(columns.values, keys, headers, strict=True)]
