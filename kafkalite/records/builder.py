"""Builds record batches: one record at a time, from lists, or from Arrow.

``build_batch`` converts lists to a batch in one call. ``RecordBatchBuilder`` gathers records that arrive in
pieces: single records wait in plain lists, whole columns are joined at once and kept as chunks, and ``build``
joins all of them into one writable buffer with header and CRC.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kafkalite.errors import BatchTooLargeError, RecordError
from kafkalite.limits import MAX_DECOMPRESSED_BYTES, MAX_PAYLOAD_BYTES, MAX_RECORDS_PER_BATCH
from kafkalite.model import (
    NO_EPOCH,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    Headers,
    RecordHeaders,
    TimestampType,
)
from kafkalite.records.columns import (
    ARRAY_OF_4,
    NIL,
    BinaryColumn,
    binary_column,
    binary_parts,
    checked_headers,
    concatenate,
    header_parts,
    null_column,
    timestamp_parts,
)
from kafkalite.records.compression import check_level, compress
from kafkalite.records.header import (
    COLUMN_CODEC_SHIFT,
    COLUMNAR,
    HEADER,
    HEADER_BYTES,
    LENGTH_OVERHEAD_BYTES,
    MAGIC,
    MAX_INT64,
    TIMESTAMP_TYPE_BIT,
    TRANSACTIONAL_BIT,
    Buffer,
    Codec,
    seal,
)

if TYPE_CHECKING:
    import pyarrow

#: The size of a record without its key and value: an offset for each of them, and a timestamp.
_RECORD_OVERHEAD_BYTES: Final = 4 + 4 + 4
#: The size of the header and of msgpack's bytes around the columns.
_BATCH_OVERHEAD_BYTES: Final = HEADER_BYTES + 40


class _Timestamps(NamedTuple):
    """Timestamps, with the lowest and the highest of them. If ``values`` is None, all are equal. The items of
    a memoryview are int64."""

    values: list[int] | memoryview | None
    lowest_ms: int
    highest_ms: int


@dataclass(slots=True)
class _Chunk:
    """Records that were added together. ``headers`` has one item per record, or is None."""

    count: int
    timestamps: _Timestamps
    keys: BinaryColumn | None
    values: BinaryColumn | None
    headers: Sequence[Headers] | None

    @property
    def size_bytes(self) -> int:
        columns = [column.data_bytes for column in (self.keys, self.values) if column is not None]
        headers = sum(map(_headers_bytes, self.headers)) if self.headers else 0
        return sum(columns) + headers + self.count * _RECORD_OVERHEAD_BYTES


class RecordBatchBuilder:
    """Gathers records and builds a batch of them.

    ``level`` is the compression level; None means the codec's default. Raises ConfigError for an invalid
    level. If a method that adds records raises an error, the builder is unchanged. ``build`` changes nothing,
    so it may be called again, for example with another sequence.

    Invariant: ``_keys`` and ``_headers`` are at most as long as ``_values``. Items missing at their ends are
    null.
    """

    __slots__ = (
        "_chunks",
        "_chunks_bytes",
        "_chunks_count",
        "_codec",
        "_headers",
        "_keys",
        "_level",
        "_single_bytes",
        "_timestamp_type",
        "_timestamps",
        "_values",
    )

    def __init__(
        self,
        *,
        codec: Codec = Codec.NONE,
        level: int | None = None,
        timestamp_type: TimestampType = TimestampType.CREATE_TIME,
    ) -> None:
        check_level(codec, level)
        self._codec = codec
        self._level = level
        self._timestamp_type = timestamp_type
        self.clear()

    def __repr__(self) -> str:
        return f"<RecordBatchBuilder {self._codec}, {self.record_count} records, {self.size_bytes} bytes>"

    def __len__(self) -> int:
        return self._chunks_count + len(self._values)

    @property
    def record_count(self) -> int:
        return self._chunks_count + len(self._values)

    @property
    def size_bytes(self) -> int:
        """The approximate uncompressed size of the batch in bytes."""
        singles_bytes = self._single_bytes + len(self._values) * _RECORD_OVERHEAD_BYTES
        return _BATCH_OVERHEAD_BYTES + self._chunks_bytes + singles_bytes

    def clear(self) -> None:
        """Remove all records. Codec, level and timestamp type do not change."""
        self._chunks: list[_Chunk] = []
        self._chunks_bytes = 0
        self._chunks_count = 0
        self._clear_singles()

    def _clear_singles(self) -> None:
        self._values: list[bytes | None] = []
        self._keys: list[bytes | None] = []
        self._timestamps: list[int] = []
        self._headers: list[Headers] = []
        self._single_bytes = 0

    def append(
        self,
        value: bytes | None,
        key: bytes | None = None,
        timestamp_ms: int = NO_TIMESTAMP,
        headers: RecordHeaders = (),
    ) -> None:
        """Add one record. Raises RecordError for an invalid value, key, timestamp or header."""
        # The most common record, bytes without key and headers, takes the shortest path.
        if type(value) is bytes:
            value_bytes = len(value)
        else:
            value = own_bytes(value)
            value_bytes = len(value) if value is not None else 0
        if type(timestamp_ms) is not int or not NO_TIMESTAMP <= timestamp_ms <= MAX_INT64:
            raise _bad_timestamp(timestamp_ms)
        if key is not None:
            if type(key) is not bytes:
                key = bytes(own_bytes(key) or b"")
            value_bytes += len(key)
        if headers:
            self._append_headers(checked_headers(headers))
        if key is not None:
            keys = self._keys
            if len(keys) != len(self._values):
                keys.extend(repeat(None, len(self._values) - len(keys)))
            keys.append(key)
        self._single_bytes += value_bytes
        self._values.append(value)
        self._timestamps.append(timestamp_ms)

    def _append_headers(self, headers: Headers) -> None:
        self._headers.extend(repeat((), len(self._values) - len(self._headers)))
        self._headers.append(headers)
        self._single_bytes += _headers_bytes(headers)

    def extend(
        self,
        values: Iterable[bytes | None],
        keys: Iterable[bytes | None] | None = None,
        timestamps_ms: int | Iterable[int] = NO_TIMESTAMP,
        headers: Iterable[RecordHeaders] | None = None,
    ) -> None:
        """Add many records: one item of each iterable per record, or one timestamp for all records.

        Raises RecordError if the lengths differ or an item is invalid, and BatchTooLargeError above
        MAX_RECORDS_PER_BATCH records. If an item of ``timestamps_ms`` is a number but not a whole one, only
        ``build`` raises RecordError.
        """
        chunk = _chunk(values, keys, timestamps_ms, headers)
        if chunk is not None:
            self._push(chunk)

    def extend_arrow(
        self,
        values: pyarrow.Array | pyarrow.ChunkedArray,
        keys: pyarrow.Array | pyarrow.ChunkedArray | None = None,
        timestamps_ms: int | pyarrow.Array | pyarrow.ChunkedArray | Iterable[int] = NO_TIMESTAMP,
        headers: pyarrow.Array | pyarrow.ChunkedArray | None = None,
    ) -> None:
        """Add records from Arrow arrays. Keys and values are binary or string, including large, view and
        fixed-size types.

        The buffers of the arrays must not change before ``build`` is called, because they may be used without
        a copy until then. Timestamps may also be an Arrow array: integers are milliseconds, and timestamps of
        any unit are converted. Headers are lists of structs of a name and a value, or maps; a null list means
        no headers. Raises RecordError for arrays that cannot be converted, null timestamps, null header
        names, and differing lengths. Raises BatchTooLargeError above MAX_RECORDS_PER_BATCH records.
        """
        from kafkalite.records import arrow

        value_columns = arrow.binary_columns(values)
        count = sum(count for count, _ in value_columns)
        key_columns = [(count, None)] if keys is None else arrow.binary_columns(keys)
        key_count = sum(count for count, _ in key_columns)
        key_column = _same_count("keys", concatenate(key_columns), key_count, count)
        if isinstance(timestamps_ms, int) or not arrow.is_array(timestamps_ms):
            timestamps = _checked_timestamps(timestamps_ms, count)
        else:
            timestamps = _arrow_timestamps(timestamps_ms, count)
        header_list = None
        if headers is not None:
            header_list = arrow.header_lists(headers)
            _same_count("headers", None, len(headers), count)
        if count:
            self._push(_Chunk(count, timestamps, key_column, concatenate(value_columns), header_list))

    def _push(self, chunk: _Chunk) -> None:
        if self.record_count + chunk.count > MAX_RECORDS_PER_BATCH:
            raise _too_many_records(self.record_count + chunk.count)
        singles = self._singles()
        if singles is not None:
            self._keep(singles)
            self._clear_singles()
        self._keep(chunk)

    def _keep(self, chunk: _Chunk) -> None:
        self._chunks.append(chunk)
        self._chunks_bytes += chunk.size_bytes
        self._chunks_count += chunk.count

    def _singles(self) -> _Chunk | None:
        """Return the records that were added one at a time since the last chunk, or None."""
        count = len(self._values)
        if not count:
            return None
        keys = None
        if self._keys:
            keys = binary_column([*self._keys, *repeat(None, count - len(self._keys))])
        headers = None
        if self._headers:
            headers = [*self._headers, *repeat((), count - len(self._headers))]
        timestamps = _bounded(self._timestamps)
        return _Chunk(count, timestamps, keys, binary_column(self._values), headers)

    def build(
        self,
        *,
        base_offset: int = 0,
        producer_id: int = NO_PRODUCER_ID,
        producer_epoch: int = NO_PRODUCER_EPOCH,
        base_sequence: int = NO_SEQUENCE,
        leader_epoch: int = NO_EPOCH,
        transactional: bool = False,
    ) -> bytearray:
        """Return the batch of all records so far, in a new buffer that a leader may stamp in place.

        ``transactional`` means that the batch is part of the producer's open transaction. Raises RecordError
        if there is no record, if a timestamp is not a whole number, if the timestamps are too far apart, or
        if the codec needs cramjam and it is not installed. Raises BatchTooLargeError if the batch exceeds a
        limit.
        """
        singles = self._singles()
        chunks = self._chunks if singles is None else [*self._chunks, singles]
        if not chunks:
            raise RecordError("a batch needs at least one record")
        return _build(
            _merge(chunks),
            codec=self._codec,
            level=self._level,
            timestamp_type=self._timestamp_type,
            producer=(producer_id, producer_epoch, base_sequence),
            base_offset=base_offset,
            leader_epoch=leader_epoch,
            transactional=transactional,
        )


def build_batch(
    values: Iterable[bytes | None],
    keys: Iterable[bytes | None] | None = None,
    timestamps_ms: int | Iterable[int] = NO_TIMESTAMP,
    headers: Iterable[RecordHeaders] | None = None,
    codec: Codec = Codec.NONE,
    *,
    level: int | None = None,
    timestamp_type: TimestampType = TimestampType.CREATE_TIME,
    base_offset: int = 0,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_sequence: int = NO_SEQUENCE,
    leader_epoch: int = NO_EPOCH,
    is_sealed: bool = True,
    transactional: bool = False,
) -> bytearray:
    """Build one batch from whole columns.

    Arguments and errors are those of ``RecordBatchBuilder``, its ``extend`` and its ``build``. If
    ``is_sealed`` is False, the CRC is 0, and the caller must write it (``stamp_producer`` or ``seal``).
    """
    chunk = _chunk(values, keys, timestamps_ms, headers)
    if chunk is None:
        raise RecordError("a batch needs at least one record")
    return _build(
        chunk,
        codec=codec,
        level=level,
        timestamp_type=timestamp_type,
        producer=(producer_id, producer_epoch, base_sequence),
        base_offset=base_offset,
        leader_epoch=leader_epoch,
        is_sealed=is_sealed,
        transactional=transactional,
    )


def _chunk(
    values: Iterable[Any], keys: Iterable[Any] | None, timestamps_ms: int | Iterable[int], headers: Any
) -> _Chunk | None:
    """Return the checked chunk of these columns, or None if there is no record."""
    value_list = values if isinstance(values, list | tuple) else list(values)
    count = len(value_list)
    key_column = None
    if keys is not None:
        key_list = keys if isinstance(keys, list | tuple) else list(keys)
        key_column = _same_count("keys", binary_column(key_list), len(key_list), count)
    header_list = None
    if headers is not None:
        header_list = [checked_headers(record_headers) for record_headers in headers]
        _same_count("headers", None, len(header_list), count)
    timestamps = _checked_timestamps(timestamps_ms, count)
    if not count:
        return None
    return _Chunk(count, timestamps, key_column, binary_column(value_list), header_list)


def _same_count(name: str, column: BinaryColumn | None, actual: int, expected: int) -> BinaryColumn | None:
    if actual != expected:
        raise RecordError(f"{actual} {name} for {expected} values", hint="give one per value, or none at all")
    return column


def _checked_timestamps(timestamps_ms: int | Iterable[int], count: int) -> _Timestamps:
    """Return ``timestamps_ms`` with their bounds. Raises RecordError if an iterable has other than ``count``
    items, or if a timestamp is no number or is out of range."""
    try:
        if isinstance(timestamps_ms, int):
            timestamps = _Timestamps(None, timestamps_ms, timestamps_ms)
        else:
            values = list(timestamps_ms)
            _same_count("timestamps", None, len(values), count)
            timestamps = _bounded(values) if values else _Timestamps(None, NO_TIMESTAMP, NO_TIMESTAMP)
        if timestamps.lowest_ms < NO_TIMESTAMP:
            raise _bad_timestamp(timestamps.lowest_ms)
        if timestamps.highest_ms > MAX_INT64:
            raise _bad_timestamp(timestamps.highest_ms)
    except TypeError as error:
        raise RecordError(f"timestamps must be whole numbers of milliseconds: {error}") from error
    return timestamps


def _arrow_timestamps(array: Any, count: int) -> _Timestamps:
    """Return the timestamps of an Arrow array as ``_checked_timestamps`` does, without making a list."""
    from kafkalite.records import arrow

    _same_count("timestamps", None, len(array), count)
    if not count:
        return _Timestamps(None, NO_TIMESTAMP, NO_TIMESTAMP)
    values, lowest_ms, highest_ms = arrow.timestamps(array)
    if lowest_ms < NO_TIMESTAMP:
        raise _bad_timestamp(lowest_ms)
    return _Timestamps(None if lowest_ms == highest_ms else values, lowest_ms, highest_ms)


def _bounded(values: list[int]) -> _Timestamps:
    """Return ``values`` with their bounds. There must be at least one value."""
    lowest_ms, highest_ms = min(values), max(values)
    if lowest_ms == highest_ms and type(lowest_ms) is int:
        return _Timestamps(None, lowest_ms, highest_ms)
    return _Timestamps(values, lowest_ms, highest_ms)


def _merge(chunks: list[_Chunk]) -> _Chunk:
    """Join all chunks. A single chunk is returned unchanged."""
    if len(chunks) == 1:
        return chunks[0]
    timestamps: list[int] = []
    headers: list[Headers] = []
    for chunk in chunks:
        common = repeat(chunk.timestamps.lowest_ms, chunk.count)
        timestamps.extend(common if chunk.timestamps.values is None else chunk.timestamps.values)
        headers.extend(repeat((), chunk.count) if chunk.headers is None else chunk.headers)
    return _Chunk(
        len(timestamps),
        _bounded(timestamps),
        concatenate([(chunk.count, chunk.keys) for chunk in chunks]),
        concatenate([(chunk.count, chunk.values) for chunk in chunks]),
        headers,
    )


def _build(
    chunk: _Chunk,
    *,
    codec: Codec,
    level: int | None,
    timestamp_type: TimestampType,
    producer: tuple[int, int, int],
    base_offset: int,
    leader_epoch: int,
    is_sealed: bool = True,
    transactional: bool = False,
) -> bytearray:
    """Join header and body into the final buffer. If ``is_sealed``, write the CRC."""
    if chunk.count > MAX_RECORDS_PER_BATCH:
        raise _too_many_records(chunk.count)
    timestamps, lowest_ms, highest_ms = chunk.timestamps
    base_timestamp_ms = lowest_ms if timestamps is None else timestamps[0]
    body: list[Buffer] = [
        ARRAY_OF_4,
        *_timestamp_parts(timestamps, base_timestamp_ms, highest_ms - lowest_ms),
        *binary_parts(chunk.keys),
        *binary_parts(chunk.values),
        *header_parts(chunk.headers),
    ]
    body_bytes = sum(map(len, body))
    if body_bytes + HEADER_BYTES < chunk.count:  # four empty columns: brokers refuse them (S22)
        body[-2:] = (*binary_parts(null_column(chunk.count)), NIL)
        body_bytes = sum(map(len, body))
    if body_bytes > MAX_PAYLOAD_BYTES - HEADER_BYTES:
        raise BatchTooLargeError(f"a batch of {body_bytes} bytes is above the limit of {MAX_PAYLOAD_BYTES}")
    if codec is not Codec.NONE and body_bytes > MAX_DECOMPRESSED_BYTES:
        codec = Codec.NONE  # readers refuse to unpack more
    if codec is not Codec.NONE:
        body = [compress(codec, b"".join(body), level)]
        body_bytes = len(body[0])
    attributes = COLUMNAR | codec << COLUMN_CODEC_SHIFT
    if timestamp_type is TimestampType.LOG_APPEND_TIME:
        attributes |= TIMESTAMP_TYPE_BIT
    if transactional:
        attributes |= TRANSACTIONAL_BIT
    header = HEADER.pack(
        base_offset,
        HEADER_BYTES + body_bytes - LENGTH_OVERHEAD_BYTES,
        leader_epoch,
        MAGIC,
        0,
        attributes,
        chunk.count - 1,
        base_timestamp_ms,
        highest_ms,
        *producer,
        chunk.count,
    )
    batch = bytearray().join((header, *body))
    if is_sealed:
        seal(batch)
    return batch


def _timestamp_parts(
    timestamps: list[int] | memoryview | None, base_timestamp_ms: int, widest_delta_ms: int
) -> list[Buffer]:
    if timestamps is None:
        return [NIL]
    if isinstance(timestamps, memoryview):
        from kafkalite.records import arrow

        return arrow.timestamp_parts(timestamps, base_timestamp_ms, widest_delta_ms)
    return timestamp_parts(timestamps, base_timestamp_ms, widest_delta_ms)


def own_bytes(value: Any, what: str = "key or value") -> bytes | None:
    """Return ``value`` as bytes that the caller cannot change, or None for None. Raises RecordError for other
    types; ``what`` names the value in the message."""
    if value is None or type(value) is bytes:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise RecordError(
        f"the {what} of a record must be bytes or None, not {type(value).__name__}",
        hint="encode it first, for example text.encode() or json.dumps(it).encode()",
    )


def _headers_bytes(headers: Headers) -> int:
    """Return the approximate size of ``headers`` in bytes."""
    return sum(len(name) + len(value or b"") + 8 for name, value in headers)


def _bad_timestamp(timestamp_ms: object) -> RecordError:
    return RecordError(
        f"timestamp {timestamp_ms!r} is not a whole number of milliseconds from -1 to 2**63 - 1"
    )


def _too_many_records(count: int) -> BatchTooLargeError:
    return BatchTooLargeError(f"{count} records in one batch; the limit is {MAX_RECORDS_PER_BATCH}")
