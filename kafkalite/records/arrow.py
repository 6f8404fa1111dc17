"""Converts record batches to and from Arrow. Import this module and ``arrow_keys`` lazily: they need pyarrow.

To Arrow, the bytes of keys and values and their validity bitmaps are not copied. Offsets (4 bytes per record)
are copied, because Arrow needs them aligned in memory, and the columns of a msgpack body are not aligned.
From Arrow, the buffers of an array of type binary or string are used without a copy if possible. The chunks
of an array of at most MAX_PAYLOAD_BYTES are combined first.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Final

from kafkalite.errors import CorruptBatchError, MissingExtraError, RecordError
from kafkalite.limits import MAX_HEADERS_PER_RECORD, MAX_PAYLOAD_BYTES
from kafkalite.model import NO_TIMESTAMP, Headers, TimestampType
from kafkalite.records.columns import (
    MAX_NARROW_DELTA_MS,
    BinaryColumn,
    BinaryView,
    BodyView,
    bin_parts,
    decode_headers,
    is_ordinary,
)
from kafkalite.records.header import BatchHeader, Buffer

try:
    import pyarrow as pa
    import pyarrow.compute as pc
except ModuleNotFoundError as error:
    raise MissingExtraError("Arrow data", "pyarrow", "arrow") from error

HEADERS_TYPE: Final = pa.list_(pa.struct([pa.field("name", pa.string()), pa.field("value", pa.binary())]))
TIMESTAMP_TYPE: Final = pa.timestamp("ms", tz="UTC")
SCHEMA: Final = pa.schema(
    [
        pa.field("offset", pa.int64()),
        pa.field("timestamp", TIMESTAMP_TYPE),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", HEADERS_TYPE),
    ]
)


def is_array(values: object) -> bool:
    return isinstance(values, pa.Array | pa.ChunkedArray)


def binary_columns(values: Any) -> list[tuple[int, BinaryColumn | None]]:
    """Return (count, column) of each chunk of an Arrow array of bytes or text.

    Empty chunks are left out. A column is None if all its values are null. Raises RecordError for another
    object and for values of another type.
    """
    if not is_array(values):
        raise RecordError(f"{type(values).__name__} is not an Arrow array", hint="use extend() for lists")
    chunks = [values]
    if isinstance(values, pa.ChunkedArray):
        chunks = values.chunks
        if len(chunks) > 1 and values.nbytes <= MAX_PAYLOAD_BYTES:
            chunks = [
                values.combine_chunks()
            ]  # an extra copy, but much faster than joining offsets in Python
    return [(len(chunk), _binary_column(chunk)) for chunk in chunks if len(chunk)]


def _binary_column(array: Any) -> BinaryColumn | None:
    if array.null_count == len(array):
        return None
    try:
        array.validate(full=True)  # an invalid array would become an unreadable batch
        if array.type not in (pa.binary(), pa.string()):
            array = array.cast(pa.binary())
    except pa.ArrowException as error:
        raise RecordError(f"an Arrow array of {array.type} cannot be keys or values: {error}") from error
    count = len(array)
    validity, offsets, data = array.buffers()
    ends = memoryview(offsets)[4 * array.offset : 4 * (array.offset + count + 1)]
    first, end = struct.unpack_from("=i", ends)[0], struct.unpack_from("=i", ends, 4 * count)[0]
    if first:
        absolute = pa.Array.from_buffers(pa.int32(), count + 1, [None, pa.py_buffer(ends)])
        ends = memoryview(pc.subtract(absolute, pa.scalar(first, pa.int32())).buffers()[1])
        ends = ends[: 4 * (count + 1)]
    present = memoryview(data)[first:end] if data is not None else memoryview(b"")
    return BinaryColumn(count, ends, (present,), end - first, _validity(array, validity))


def _validity(array: Any, bitmap: Any) -> memoryview | None:
    if not array.null_count:
        return None
    size_bytes = (len(array) + 7) // 8
    if array.offset % 8:
        # The first bit is not at the beginning of a byte: let Arrow shift the bitmap.
        return memoryview(pc.is_valid(array).buffers()[1])[:size_bytes]
    first = array.offset // 8
    return memoryview(bitmap)[first : first + size_bytes]


def timestamps(values: Any) -> tuple[memoryview, int, int]:
    """Return (int64 milliseconds, minimum, maximum) of a non-empty array of integers or timestamps.

    Raises RecordError for nulls and for an array that Arrow cannot convert to int64.
    """
    if values.null_count:
        raise RecordError("a timestamp is null", hint="fill nulls with -1, which means none")
    try:
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        if pa.types.is_timestamp(values.type):
            unit = pa.timestamp("ms", tz=values.type.tz)
            values = pc.cast(values, options=pc.CastOptions(unit, allow_time_truncate=True))
        numbers = values.cast(pa.int64())
    except pa.ArrowException as error:
        raise RecordError(f"an Arrow array of {values.type} cannot be timestamps: {error}") from error
    bounds = pc.min_max(numbers)
    view = memoryview(numbers.buffers()[1])[8 * numbers.offset : 8 * (numbers.offset + len(numbers))]
    return view.cast("B").cast("q"), bounds["min"].as_py(), bounds["max"].as_py()


def timestamp_parts(timestamps_ms: memoryview, base_timestamp_ms: int, widest_delta_ms: int) -> list[Buffer]:
    """Return the pieces of the timestamp column, as ``columns.timestamp_parts`` does."""
    numbers = pa.Array.from_buffers(pa.int64(), len(timestamps_ms), [None, pa.py_buffer(timestamps_ms)])
    try:
        deltas = pc.subtract_checked(numbers, pa.scalar(base_timestamp_ms, pa.int64()))
    except pa.ArrowException as error:
        raise RecordError(f"the timestamps are too far apart for one batch: {error}") from error
    size_bytes = 8 * len(deltas)
    if widest_delta_ms <= MAX_NARROW_DELTA_MS:
        deltas, size_bytes = deltas.cast(pa.int32()), 4 * len(deltas)
    return bin_parts(memoryview(deltas.buffers()[1])[:size_bytes])


def header_lists(values: Any) -> list[Headers] | None:
    """Return each record's headers from an Arrow array of lists of (name, value), or of maps.

    A null list counts as empty. Returns None if no record has headers. Raises RecordError for an array that
    cannot be converted, for a null name, and above MAX_HEADERS_PER_RECORD.
    """
    if not is_array(values):
        raise RecordError(f"{type(values).__name__} is not an Arrow array", hint="use extend() for lists")
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if values.null_count == len(values):
        return None
    try:
        values.validate(full=True)
        if pa.types.is_map(values.type):
            pair = pa.struct([("key", values.type.key_type), ("value", values.type.item_type)])
            values = values.cast(pa.list_(pair))
        lengths = pc.list_value_length(values).fill_null(0).to_pylist()
        pairs = values.flatten()
        names, contents = pairs.flatten()
        if names.null_count:
            raise RecordError("a header, or its name, is null")
        rows = list(
            zip(names.cast(pa.string()).to_pylist(), contents.cast(pa.binary()).to_pylist(), strict=True)
        )
    except (pa.ArrowException, AttributeError, TypeError, ValueError) as error:
        raise RecordError(
            f"an Arrow array of {values.type} cannot be headers: {error}",
            hint="they are list<struct<name: string, value: binary>>",
        ) from error
    if max(lengths) > MAX_HEADERS_PER_RECORD:
        raise RecordError(f"a record has at most {MAX_HEADERS_PER_RECORD} headers, one has {max(lengths)}")
    if not rows:
        return None
    ends = list(accumulate(lengths, initial=0))
    return [tuple(rows[start:end]) for start, end in pairwise(ends)]


def record_batch(header: BatchHeader, body: BodyView, columns: Sequence[str] | None) -> pa.RecordBatch:
    """Return the named columns (None: all of them) as an Arrow batch. A record without headers has null
    headers.

    Raises CorruptBatchError for inconsistent columns, and RecordError for an unknown name.
    """
    count = header.record_count
    makers: dict[str, Callable[[], pa.Array]] = {
        "offset": lambda: pc.add(_count_up(count), pa.scalar(header.base_offset, pa.int64())),
        "timestamp": lambda: _timestamp_array(header, body.timestamp_deltas),
        "key": lambda: _binary_array(body.keys, count),
        "value": lambda: _binary_array(body.values, count),
        "headers": lambda: _headers_array(body.headers, count),
    }
    names = SCHEMA.names if columns is None else columns
    unknown = [name for name in names if name not in makers]
    if unknown:
        raise RecordError(f"no column {', '.join(unknown)}; there are {', '.join(makers)}")
    schema = SCHEMA if columns is None else pa.schema([SCHEMA.field(name) for name in names])
    try:
        return pa.RecordBatch.from_arrays([makers[name]() for name in names], schema=schema)
    except pa.ArrowException as error:
        raise CorruptBatchError(f"the columns of the batch are inconsistent: {error}") from error


def _count_up(count: int) -> pa.Array:
    """Return the numbers from 0 to ``count`` (exclusive)."""
    return _counted(max(1 << (count - 1).bit_length(), 1024))[:count]


@lru_cache(maxsize=4)
def _counted(count: int) -> pa.Array:
    return pa.array(range(count), pa.int64())


def _timestamp_array(header: BatchHeader, deltas: memoryview | None) -> pa.Array:
    count, common_ms = header.record_count, header.base_timestamp_ms
    if header.timestamp_type is TimestampType.LOG_APPEND_TIME:
        deltas, common_ms = None, header.max_timestamp_ms  # KIP-32
    if deltas is None:
        # Five times as fast as pa.repeat.
        repeated = common_ms.to_bytes(8, sys.byteorder, signed=True) * count
        return pa.Array.from_buffers(TIMESTAMP_TYPE, count, [None, pa.py_buffer(repeated)])
    is_narrow = len(deltas) == 4 * count
    width = pa.int32() if is_narrow else pa.int64()
    array = pa.Array.from_buffers(width, count, [None, pa.py_buffer(bytes(deltas))])
    base_ms = pa.scalar(common_ms, pa.int64())
    if is_narrow and is_ordinary(common_ms):
        return pc.add(array, base_ms).view(TIMESTAMP_TYPE)
    timestamps_ms = pc.add_checked(array, base_ms)
    if pc.min(timestamps_ms).as_py() < NO_TIMESTAMP:
        raise CorruptBatchError(f"timestamps down to {pc.min(timestamps_ms)} ms")
    return timestamps_ms.view(TIMESTAMP_TYPE)


def _binary_array(column: BinaryView | None, count: int) -> pa.Array:
    if column is None:
        return pa.nulls(count, pa.binary())
    buffers = [
        None if column.validity is None else pa.py_buffer(column.validity),
        pa.py_buffer(bytes(column.offsets)),
        pa.py_buffer(column.data),
    ]
    array = pa.Array.from_buffers(pa.binary(), count, buffers)
    array.validate(full=True)  # checks every offset, in C++
    return array


def _headers_array(column: memoryview | None, count: int) -> pa.Array:
    if column is None:
        return pa.nulls(count, HEADERS_TYPE)
    rows = [
        [{"name": name, "value": value} for name, value in record_headers] if record_headers else None
        for record_headers in decode_headers(column, count)
    ]
    return pa.array(rows, HEADERS_TYPE)
