"""Builds ``pyarrow.RecordBatch`` in Spark's schema from fetched batches. Only requested columns are built.

If a batch fills a RecordBatch by itself, its values and keys are not copied. Small batches are joined column
by column with one copy, because the JVM's cost is per RecordBatch rather than per row. Constant columns
(topic, partition, timestampType) are slices of cached arrays. Only headers are processed record by record.

Timestamps are converted from Kafka's milliseconds to Spark's microseconds, as in Spark's connector. A record
without a timestamp gets -1 ms. With log append time, every record gets the timestamp of the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from kafkalite.errors import CorruptBatchError, RecordError
from kafkalite.model import NO_TIMESTAMP, Headers, TimestampType
from kafkalite.records.batch import RecordBatch
from kafkalite.records.columns import BinaryView, BodyView, decode_headers
from kafkalite.records.header import HEADER_BYTES, BatchHeader
from sparkbridge.errors import SourceSchemaError

_INT32: Final = pa.int32()
_INT64: Final = pa.int64()
_MICROSECONDS: Final = pa.timestamp("us", tz="UTC")
_THOUSAND: Final = pa.scalar(1000, _INT64)
_INT64_BYTES: Final = 8


class Piece(NamedTuple):
    """The records of one batch with indexes ``first`` to ``first + row_count`` (exclusive)."""

    header: BatchHeader
    body: BodyView
    first: int
    row_count: int

    @property
    def is_whole(self) -> bool:
        return self.row_count == self.header.record_count

    @property
    def base_offset(self) -> int:
        return self.header.base_offset + self.first


Pieces = Sequence[Piece]
Maker = Callable[[Pieces, int], pa.Array]


class SparkBatchBuilder:
    """Gathers Kafka batches of one partition in log order and makes one Arrow RecordBatch from them.

    Until ``build``, it refers to the buffers that hold the received batches.
    """

    def __init__(self, schema: pa.Schema, topic: str, partition: int) -> None:
        self.row_count = 0
        self.size_bytes = 0  #: the size of the gathered batches, decompressed
        self._schema = schema
        self._pieces: list[Piece] = []
        where = f"{topic}-{partition}"
        self._makers = [_maker(field, where, topic, partition) for field in schema]

    def add(self, batch: RecordBatch, start: int, end: int) -> None:
        """Add the batch's records with offsets from ``start`` (inclusive) to ``end`` (exclusive), if any.

        Raises CorruptBatchError, BatchTooLargeError, RecordError.
        """
        header = batch.header
        first = max(start - header.base_offset, 0)
        count = min(end - header.base_offset, header.record_count) - first
        if count > 0:
            body = batch.view()
            self._pieces.append(Piece(header, body, first, count))
            self.row_count += count
            self.size_bytes += HEADER_BYTES + _size_bytes(body)

    def build(self) -> pa.RecordBatch:
        """Return the gathered records, and start again without records.

        Raises CorruptBatchError, SourceSchemaError, RecordError.
        """
        pieces, count = self._pieces, self.row_count
        self._pieces, self.row_count, self.size_bytes = [], 0, 0
        return pa.RecordBatch.from_arrays([make(pieces, count) for make in self._makers], schema=self._schema)


def _size_bytes(body: BodyView) -> int:
    columns = (body.keys, body.values)
    data_bytes = sum(len(column.data) + len(column.offsets) for column in columns if column is not None)
    return data_bytes + (len(body.headers) if body.headers is not None else 0)


def _maker(field: pa.Field, where: str, topic: str, partition: int) -> Maker:
    """Return the function that makes the column ``field`` (of a checked type). ``where`` is for errors."""
    match field.name:
        case "key":
            return lambda pieces, count: _binary(pieces, count, field, where, [p.body.keys for p in pieces])
        case "value":
            return lambda pieces, count: _binary(pieces, count, field, where, [p.body.values for p in pieces])
        case "topic":
            return lambda _, count: _repeated_text(topic, _capacity(count))[:count]
        case "partition":
            return lambda _, count: _repeated_int(partition, _capacity(count))[:count]
        case "offset":
            return _offsets
        case "timestamp":
            return lambda pieces, count: _timestamps(pieces, where)
        case "timestampType":
            return _timestamp_types
        case "headers":
            return lambda pieces, count: _headers(pieces, count, field.type, where)
    raise SourceSchemaError(f"the source has no column {field.name!r}")


def _binary(
    pieces: Pieces, count: int, field: pa.Field, where: str, views: Sequence[BinaryView | None]
) -> pa.Array:
    if all(view is None for view in views):
        return pa.nulls(count, field.type)
    arrays = [_binary_array(view, piece, field, where) for view, piece in zip(views, pieces, strict=True)]
    # Arrow ensures that the offsets of the joined column ascend only if each array's offsets begin at 0 and
    # end at the length of its data.
    joined = _joined(arrays)
    try:
        joined.validate(full=True)  # checks all offsets, and that text is valid UTF-8, in C++
    except pa.ArrowException:
        _raise_first_problem(arrays, pieces, field, where)
        raise
    return joined


def _binary_array(view: BinaryView | None, piece: Piece, field: pa.Field, where: str) -> pa.Array:
    """Return the rows of ``piece`` in ``view`` as an array.

    Raises CorruptBatchError for invalid offsets, unless ``piece`` is whole: then the caller must check them.
    ``where`` names the partition in the error.
    """
    if view is None:
        return pa.nulls(piece.row_count, field.type)
    buffers = [
        None if view.validity is None else pa.py_buffer(view.validity),
        pa.py_buffer(bytes(view.offsets)),  # a copy, because Arrow needs aligned offsets
        pa.py_buffer(view.data),
    ]
    array = pa.Array.from_buffers(field.type, view.count, buffers)
    if piece.is_whole:
        return array
    # Slicing uses the offsets, and unchecked offsets could point anywhere in memory.
    _check_offsets(array, piece.header.base_offset, field.name, where)
    return array[piece.first : piece.first + piece.row_count]


def _check_offsets(array: pa.Array, base_offset: int, name: str, where: str) -> None:
    try:
        array.view(pa.binary()).validate(full=True)
    except pa.ArrowException as error:
        message = f"{where}@{base_offset}: the column {name} is inconsistent: {error}"
        raise CorruptBatchError(message) from error


def _raise_first_problem(arrays: list[pa.Array], pieces: Pieces, field: pa.Field, where: str) -> None:
    for array, piece in zip(arrays, pieces, strict=True):
        _check_offsets(array, piece.header.base_offset, field.name, where)
        for index in range(len(array)):
            try:
                array[index : index + 1].validate(full=True)
            except pa.ArrowException as error:
                raise SourceSchemaError(
                    f"{where}@{piece.base_offset + index}: the {field.name} is not text (UTF-8)",
                    hint=f"ask for '{field.name} binary' in the schema, and decode it in the query",
                ) from error


def _offsets(pieces: Pieces, count: int) -> pa.Array:
    runs: list[tuple[int, int]] = []  # (first offset, count) of each run of consecutive offsets
    for piece in pieces:
        base = piece.base_offset
        if runs and sum(runs[-1]) == base:
            runs[-1] = (runs[-1][0], runs[-1][1] + piece.row_count)
        else:
            runs.append((base, piece.row_count))
    counted = _counted(_capacity(count))
    return _joined([pc.add(counted[:length], pa.scalar(base, _INT64)) for base, length in runs])


def _timestamps(pieces: Pieces, where: str) -> pa.Array:
    arrays: list[pa.Array] = []
    # The timestamps of batches whose records all have the same timestamp, which are nearly all batches.
    common = bytearray()
    for piece in pieces:
        deltas, common_ms = piece.body.timestamp_deltas, piece.header.base_timestamp_ms
        if piece.header.timestamp_type is TimestampType.LOG_APPEND_TIME:
            deltas, common_ms = None, piece.header.max_timestamp_ms  # KIP-32: the timestamp of every record
        if deltas is None:
            common += common_ms.to_bytes(_INT64_BYTES, sys.byteorder, signed=True) * piece.row_count
            continue
        if common:
            arrays.append(_int64_array(bytes(common)))
            common.clear()
        arrays.append(_times_of(piece, deltas, common_ms, where))
    if common:
        arrays.append(_int64_array(bytes(common)))
    timestamps_ms = _joined(arrays)
    try:
        microseconds = pc.multiply_checked(timestamps_ms, _THOUSAND)
    except pa.ArrowException as error:
        at = f"{where}@{pieces[0].base_offset} to {pieces[-1].header.last_offset}"
        raise RecordError(
            f"{at}: a time of {pc.max(timestamps_ms).as_py()} ms is beyond Spark's timestamps",
            hint="leave the column timestamp out of the schema",
        ) from error
    return microseconds.view(_MICROSECONDS)


def _times_of(piece: Piece, deltas: memoryview, base_ms: int, where: str) -> pa.Array:
    count = piece.header.record_count
    width = _INT32 if len(deltas) == 4 * count else _INT64
    array = pa.Array.from_buffers(width, count, [None, pa.py_buffer(bytes(deltas))]).cast(_INT64)
    try:
        times_ms = pc.add_checked(array, pa.scalar(base_ms, _INT64))
        earliest_ms = pc.min(times_ms).as_py()
    except pa.ArrowException as error:
        raise CorruptBatchError(f"{where}@{piece.header.base_offset}: timestamps: {error}") from error
    if earliest_ms < NO_TIMESTAMP:
        raise CorruptBatchError(f"{where}@{piece.header.base_offset}: timestamps down to {earliest_ms} ms")
    return times_ms if piece.is_whole else times_ms[piece.first : piece.first + piece.row_count]


def _timestamp_types(pieces: Pieces, count: int) -> pa.Array:
    kinds = [piece.header.timestamp_type for piece in pieces]
    if kinds.count(kinds[0]) == len(kinds):
        return _repeated_int(int(kinds[0]), _capacity(count))[:count]
    return _joined(
        [
            _repeated_int(int(kind), _capacity(piece.row_count))[: piece.row_count]
            for kind, piece in zip(kinds, pieces, strict=True)
        ]
    )


def _joined(arrays: list[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _int64_array(data: bytes) -> pa.Array:
    return pa.Array.from_buffers(_INT64, len(data) // _INT64_BYTES, [None, pa.py_buffer(data)])


def _capacity(count: int) -> int:
    """Return the smallest power of two that is at least ``count``: the size of a cached array."""
    return 1 << (count - 1).bit_length() if count else 1


@lru_cache(maxsize=4)
def _counted(count: int) -> pa.Array:
    return pa.array(range(count), _INT64)


@lru_cache(maxsize=8)
def _repeated_int(number: int, count: int) -> pa.Array:
    data = number.to_bytes(4, sys.byteorder, signed=True) * count
    return pa.Array.from_buffers(_INT32, count, [None, pa.py_buffer(data)])


@lru_cache(maxsize=8)
def _repeated_text(text: str, count: int) -> pa.Array:
    return pa.array([text] * count, pa.string())


def _headers(pieces: Pieces, count: int, kind: pa.DataType, where: str) -> pa.Array:
    """Return the column of headers. It is null for records without headers, as in Spark's connector."""
    if all(piece.body.headers is None for piece in pieces):
        return pa.nulls(count, kind)
    rows: list[Headers] = []
    for piece in pieces:
        if piece.body.headers is None:
            rows.extend([()] * piece.row_count)
            continue
        try:
            decoded = decode_headers(piece.body.headers, piece.header.record_count)
        except CorruptBatchError as error:
            raise CorruptBatchError(f"{where}@{piece.header.base_offset}: {error.message}") from error
        rows.extend(decoded[piece.first : piece.first + piece.row_count])
    is_map = pa.types.is_map(kind)
    if is_map:
        # Keep the last header of each name.
        rows = [tuple(dict(row).items()) if len(row) > 1 else row for row in rows]
    ends = list(accumulate(map(len, rows), initial=0))
    starts: list[Any] = [start if row else None for start, row in zip(ends, rows, strict=False)]
    offsets = pa.array([*starts, ends[-1]], _INT32)
    pairs = list(chain.from_iterable(rows))
    names = pa.array([name for name, _ in pairs], pa.string())
    values = pa.array([value for _, value in pairs], pa.binary())
    if is_map:
        return pa.MapArray.from_arrays(offsets, names, values, type=kind)
    structs = pa.StructArray.from_arrays([names, values], fields=list(kind.value_type))
    return pa.ListArray.from_arrays(offsets, structs, type=kind)
