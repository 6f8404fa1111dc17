"""Splits the rows of a task, as Arrow columns, by topic and partition, and keeps their order.

There is no loop over single records. Keys are hashed by column, rows are sorted stably by partition, and the
end of a batch is found by binary search in Arrow's offsets of the columns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from kafkalite.errors import RecordError, RecordTooLargeError
from kafkalite.records.arrow_keys import partitions_of_keys
from kafkalite.records.partitioners import partition_for_key
from sparkbridge.sink.schema import SinkColumns

#: The maximum size of a batch without its records, in bytes: the header and the lengths of its columns.
BATCH_BYTES: Final = 160
#: The maximum size of a record header without its name and value, in bytes.
HEADER_BYTES: Final = 12
NO_PARTITION: Final = -1  # for records without a key, until the partition of their batch is chosen

_LARGE: Final = {pa.large_binary(): pa.binary(), pa.large_string(): pa.string()}
_HEADERS: Final = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))


class Records(NamedTuple):
    """Records as Arrow columns of equal length. An absent column is None. ``timestamps`` are int64 ms."""

    values: Any
    keys: Any = None
    timestamps: Any = None
    headers: Any = None

    @property
    def row_count(self) -> int:
        return len(self.values)

    def slice(self, start: int, count: int) -> Records:
        return Records(*(None if one is None else one.slice(start, count) for one in self))

    def take(self, indices: Any) -> Records:
        return Records(*(None if one is None else one.take(indices) for one in self))

    def copy(self) -> Records:
        """Return a copy in new memory. A slice would keep the memory of its whole array in use."""
        return Records(*(None if one is None else pa.concat_arrays(_arrays(one)) for one in self))


def _arrays(column: Any) -> list[Any]:
    return column.chunks if isinstance(column, pa.ChunkedArray) else [column]


def joined(parts: Sequence[Records]) -> Records:
    """Join the parts into one, whose columns are chunked if there are several parts.

    Either all or none of the parts must have timestamps.
    """
    if len(parts) == 1:
        return parts[0]
    return Records(*(_chunked(arrays, parts) for arrays in zip(*parts, strict=True)))


def _chunked(arrays: Sequence[Any], parts: Sequence[Records]) -> Any:
    """Join one column of ``parts``. ``arrays`` has its array in each part, or None if the part lacks it.

    Nulls replace a missing array. Returns None if all parts lack the column.
    """
    kind = next((array.type for array in arrays if array is not None), None)
    if kind is None:
        return None
    return pa.chunked_array(
        [
            pa.nulls(part.row_count, kind) if array is None else array
            for array, part in zip(arrays, parts, strict=True)
        ],
        kind,
    )


class PartitionSlice(NamedTuple):
    """Records for one partition. NO_PARTITION means that the sender may choose the partition."""

    topic: str
    partition: int
    records: Records


class Splitter:
    """Splits Arrow batches by topic and partition. ``partition_count`` returns a topic's partition count.

    ``keyless(topic)`` returns the partition for rows with neither a key nor a partition, if another row of
    the topic in the same Arrow batch has a key or a partition. If none has, all rows get NO_PARTITION. The
    partitioners random and hash choose a partition for every row, and in a topic with one partition, every
    row gets partition 0.
    """

    def __init__(
        self,
        columns: SinkColumns,
        topic: str | None,
        partitioner: str,
        partition_count: Callable[[str], int],
        keyless: Callable[[str], int],
    ) -> None:
        self._columns = columns
        self._topic = topic
        self._partitioner = partitioner
        self._partition_count = partition_count
        self._keyless = keyless

    def split(self, batch: Any, now_ms: int) -> Iterator[PartitionSlice]:
        """Split ``batch``, a pyarrow.RecordBatch. Null timestamps become ``now_ms``. Raises RecordError."""
        if not batch.num_rows:
            return
        records = _records(batch, self._columns, now_ms)
        partitions = None
        if self._columns.partition is not None:
            partitions = batch.column(self._columns.partition)
            if partitions.null_count == len(partitions):
                partitions = None
        if self._topic is not None:
            yield from self._of_topic(self._topic, records, partitions)
            return
        assert self._columns.topic is not None, "the schema was checked"
        for topic, rows in _by_topic(batch.column(self._columns.topic)):
            if rows is None:
                yield from self._of_topic(topic, records, partitions)
            else:
                own = None if partitions is None else partitions.take(rows)
                yield from self._of_topic(topic, records.take(rows), own)

    def _of_topic(self, topic: str, records: Records, given: Any) -> Iterator[PartitionSlice]:
        count = self._partition_count(topic)
        partitions = self._partitions(topic, records, count, given)
        if count == 1:
            yield PartitionSlice(topic, 0, records)
        elif partitions is None:
            yield PartitionSlice(topic, NO_PARTITION, records)
        else:
            for partition, moved in by_partition(records, partitions):
                yield PartitionSlice(topic, partition, moved)

    def _partitions(self, topic: str, records: Records, count: int, given: Any) -> Any:
        """Return an int32 array of the records' partitions, or None if the sender may choose for all.

        ``count`` is the number of partitions of ``topic``. ``given`` is the column of the partitions that the
        rows ask for, or None.
        """
        if given is not None:
            _check_given(topic, given, count)
            if not given.null_count:
                return given
        chosen = self._by_key(topic, records, count)
        if given is None:
            return chosen
        if chosen is None:
            chosen = pa.scalar(self._keyless(topic), pa.int32())
        return pc.coalesce(given, chosen)

    def _by_key(self, topic: str, records: Records, count: int) -> Any:
        if self._partitioner == "random":
            chosen = pc.floor(pc.multiply(pc.random(records.row_count), float(count)))
            return chosen.cast(pa.int32())
        keys = records.keys
        if keys is None or keys.null_count == len(keys):
            return None if self._partitioner != "hash" else pa.repeat(_hashed_null(count), records.row_count)
        partitions = partitions_of_keys(keys, count)
        if keys.null_count:
            otherwise = _hashed_null(count)
            if self._partitioner != "hash":
                otherwise = pa.scalar(self._keyless(topic), pa.int32())
            partitions = pc.coalesce(partitions, otherwise)
        return partitions


def _hashed_null(count: int) -> Any:
    return pa.scalar(partition_for_key(b"", count), pa.int32())


def _check_given(topic: str, given: Any, count: int) -> None:
    bounds = pc.min_max(given)
    lowest, highest = bounds["min"].as_py(), bounds["max"].as_py()
    if lowest < 0 or highest >= count:
        wrong = lowest if lowest < 0 else highest
        raise RecordError(
            f"a row has partition {wrong}, but topic {topic!r} has partitions 0 to {count - 1}",
            hint="leave column 'partition' null to let the key decide",
        )


def by_partition(records: Records, partitions: Any) -> Iterator[tuple[int, Records]]:
    """Yield (partition, records in input order), sorted by partition. ``partitions`` must have no nulls."""
    counts = sorted((one["values"].as_py(), one["counts"].as_py()) for one in pc.value_counts(partitions))
    if len(counts) == 1:
        yield counts[0][0], records
        return
    moved = records.take(pc.array_sort_indices(partitions))  # a stable sort
    start = 0
    for partition, count in counts:
        yield partition, moved.slice(start, count)
        start += count


def _by_topic(topics: Any) -> Iterator[tuple[str, Any]]:
    """Yield each topic with the indices of its rows (None: all). Raises RecordError for a null topic."""
    if topics.null_count:
        raise RecordError(
            "a row has no topic: column 'topic' is null in it",
            hint='fill it, or use .option("topic", "name"), which overrides the column',
        )
    encoded = topics.dictionary_encode()
    names = encoded.dictionary.to_pylist()
    if len(names) == 1:
        yield names[0], None
        return
    for index, name in enumerate(names):
        yield name, pc.indices_nonzero(pc.equal(encoded.indices, pa.scalar(index, pa.int32())))


def _records(batch: Any, columns: SinkColumns, now_ms: int) -> Records:
    def column(index: int | None) -> Any:
        return None if index is None else _small(batch.column(index))

    def unless_null(array: Any) -> Any:
        return None if array is None or array.null_count == len(array) else array

    keys, headers = unless_null(column(columns.key)), unless_null(column(columns.headers))
    timestamps = column(columns.timestamp)
    if timestamps is not None:
        timestamps = _milliseconds(timestamps, now_ms)
    return Records(column(columns.value), keys, timestamps, headers)


def _small(array: Any) -> Any:
    """Convert the large types, which Spark sends with useLargeVarTypes, to types with 32-bit offsets."""
    is_list = pa.types.is_list(array.type) or pa.types.is_large_list(array.type)
    kind = _HEADERS if is_list else _LARGE.get(array.type, array.type)
    return array if array.type.equals(kind) else array.cast(kind)


def _milliseconds(timestamps: Any, now_ms: int) -> Any:
    """Return the timestamps in int64 milliseconds since 1970 (UTC), rounded down; ``now_ms`` replaces nulls.

    Raises RecordError for a timestamp before 1970.
    """
    micros = timestamps.cast(pa.timestamp("us", tz=timestamps.type.tz)).cast(pa.int64())
    lowest = pc.min(micros).as_py()
    if lowest is not None and lowest < 0:
        raise RecordError(
            "a row has a timestamp before 1970, which a record can't have",
            hint="leave column 'timestamp' null to use the time of writing",
        )
    millis = pc.divide(micros, pa.scalar(1000, pa.int64()))
    return millis.fill_null(now_ms) if millis.null_count else millis


def record_overhead(columns: SinkColumns) -> int:
    """Return an upper bound, in bytes, of a record's size in a batch without its key, value and headers.

    The bound includes array offsets, the timestamp and the length of the header list, but no validity bits. A
    column counts even for a record with null in it, because other records of the batch may have a value.
    """
    sizes = ((columns.key, 4), (columns.timestamp, 8), (columns.headers, 5))
    return 4 + sum(size for index, size in sizes if index is not None)


class Sizes:
    """Computes an upper bound of the size of records in a batch, from the offsets of their columns."""

    def __init__(self, records: Records, overhead: int) -> None:
        self._overhead = overhead
        self._count = records.row_count
        self._columns = [_offsets(one) for one in (records.values, records.keys) if one is not None]
        self._lists = None
        if records.headers is not None:
            self._lists = _offsets(records.headers)
            content = records.headers.values
            self._headers = [_offsets(content.field(0)), _offsets(content.field(1))]

    def between(self, start: int, end: int) -> int:
        """Return the bound for the records from ``start`` (inclusive) to ``end`` (exclusive), in bytes."""
        total = (end - start) * self._overhead + (end - start + 3) // 4
        for offsets in self._columns:
            total += offsets[end] - offsets[start]
        if self._lists is not None:
            first, last = self._lists[start], self._lists[end]
            total += (last - first) * HEADER_BYTES
            for offsets in self._headers:
                total += offsets[last] - offsets[first]
        return total

    def end(self, start: int, limit_bytes: int, limit_records: int) -> int:
        """Return the exclusive end of the largest batch within the limits; ``start`` if no record fits."""
        most = min(self._count, start + limit_records)
        if self.between(start, most) <= limit_bytes:
            return most
        return start + bisect_right(
            range(start, most), limit_bytes, key=lambda index: self.between(start, index + 1)
        )


def cut(
    records: Records, limit_bytes: int, limit_records: int, overhead: int
) -> Iterator[tuple[Records, int]]:
    """Yield pieces of ``records`` within the limits, each with the bound of its size (see ``Sizes``).

    Raises RecordTooLargeError for a record larger than ``limit_bytes``.
    """
    sizes = Sizes(records, overhead)
    start = 0
    while start < records.row_count:
        end = sizes.end(start, limit_bytes, limit_records)
        if end == start:
            size_bytes = sizes.between(start, start + 1)
            needed = size_bytes + BATCH_BYTES
            raise RecordTooLargeError(
                f"a row makes a record of {size_bytes} bytes; the limit of a batch is {limit_bytes}",
                hint="set the topic's max.message.bytes and the option kafka.max.request.size to "
                f"{needed} or more, and kafka.buffer.memory if that is less",
            )
        yield records.slice(start, end - start), sizes.between(start, end)
        start = end


def _offsets(array: Any) -> memoryview:
    """Return the count + 1 offsets of a binary, string or list array, as int32 items."""
    raw = memoryview(array.buffers()[1]) if array.buffers()[1] is not None else memoryview(bytes(4))
    if not len(raw):
        raw = memoryview(bytes(4))
    return raw.cast("B").cast("i")[array.offset : array.offset + len(array) + 1]
