"""Splits columns of records into batches: by partition, then by size. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from kafkalite.client.producer.pending_batch import BATCH_OVERHEAD_BYTES, RECORD_OVERHEAD_BYTES, record_size
from kafkalite.errors import RecordError, RecordTooLargeError
from kafkalite.model import RecordHeaders
from kafkalite.records.builder import own_bytes
from kafkalite.records.columns import checked_headers

Item = bytes | None


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """Records as columns. All columns that are sequences must have the same length (see ``check``)."""

    values: Sequence[Item]
    keys: Sequence[Item] | None
    timestamps_ms: int | Sequence[int]
    headers: Sequence[RecordHeaders] | None

    def __len__(self) -> int:
        return len(self.values)

    def check(self) -> None:
        """Raise RecordError if the columns differ in length, or if one has no length, is a str, bytes or a
        mapping."""
        columns: dict[str, Any] = {"values": self.values}
        if self.keys is not None:
            columns["keys"] = self.keys
        if not isinstance(self.timestamps_ms, int):
            columns["timestamps"] = self.timestamps_ms
        if self.headers is not None:
            columns["headers"] = self.headers
        for name, column in columns.items():
            if not hasattr(column, "__len__") or isinstance(column, str | bytes | bytearray | Mapping):
                kind = type(column).__name__
                one = "one " if isinstance(column, str | bytes | bytearray) else ""
                raise RecordError(
                    f"the {name} are {one}{kind}, but must be a sequence, such as a list of bytes",
                    hint=f"put it into a list: [{column[:20]!r}]" if one else "",
                )
            count = len(self.values)
            if len(column) != count:
                raise RecordError(
                    f"{len(column)} {name} for {count} values", hint="give one per value, or none"
                )

    def check_items(self) -> None:
        """Raise RecordError for the first key, value or header of a wrong type. This reads every record."""
        for name, column in (("key", self.keys), ("value", self.values)):
            for item in column or ():
                own_bytes(item, name)
        for headers in self.headers or ():
            checked_headers(headers)

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
        wrong = next((item for item in column if item is not None and not hasattr(item, "__len__")), None)
        if wrong is not None:
            raise RecordError(
                f"a key or value is {type(wrong).__name__}, but must be bytes or None",
                hint="encode it first, for example str(number).encode()",
            ) from None
        return sum(len(item) for item in column if item is not None)


def _record_sizes(columns: RecordColumns) -> list[int]:
    count = len(columns)
    keys = columns.keys if columns.keys is not None else [None] * count
    headers = [()] * count if columns.headers is None else [item or () for item in columns.headers]
    return [record_size(*record) for record in zip(columns.values, keys, headers, strict=True)]
