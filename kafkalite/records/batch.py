"""Reads record batches: as a view over the bytes, as lists of column values, as records, or as Arrow.

All bytes are checked before they are used. Invalid bytes raise CorruptBatchError or BatchTooLargeError, and a
body of Kafka's rows raises RecordError. A body that would unpack to more than ``MAX_DECOMPRESSED_BYTES`` is
refused. Except for headers, checks are made per column, not per record. Figures:
``python -m benchmarks records``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

from kafkalite.errors import CorruptBatchError, RecordError
from kafkalite.limits import MAX_DECOMPRESSED_BYTES
from kafkalite.model import Headers, Record, TimestampType
from kafkalite.records.columns import BodyView, decode_headers, decode_timestamps, view_body
from kafkalite.records.compression import decompress
from kafkalite.records.header import (
    HEADER_BYTES,
    BatchHeader,
    Buffer,
    Codec,
    check,
    check_length,
    total_length,
)

if TYPE_CHECKING:
    import pyarrow


@dataclass(slots=True)
class Columns:
    """The records of one batch, column by column. Item i of each column belongs to record i.

    If ``timestamps`` is a number of milliseconds, all records have this timestamp. If ``keys`` is None, no
    record has a key; if ``headers`` is None, no record has headers.
    """

    offsets: range
    timestamps: int | list[int]
    keys: list[bytes | None] | None
    values: list[bytes | None]
    headers: list[Headers] | None


class RecordBatch:
    """One batch as a view of its bytes. The bytes must not change, and are not copied before they are read.

    Raises CorruptBatchError if the header is invalid, if ``buffer`` is not exactly one batch, or if its
    CRC-32C is wrong. ``check_crc`` may be False for bytes that were already checked.
    """

    __slots__ = ("_body", "_buffer", "header")

    def __init__(self, buffer: Buffer, *, check_crc: bool = True) -> None:
        self.header: BatchHeader = check(buffer) if check_crc else check_length(buffer)
        self._buffer = memoryview(buffer)
        self._body: BodyView | None = None

    @classmethod
    def checked(cls, header: BatchHeader, buffer: memoryview) -> RecordBatch:
        """Return ``buffer`` as a batch without checking it again. ``header`` is the result of
        ``check(buffer)``."""
        batch = cls.__new__(cls)
        batch.header = header
        batch._buffer = buffer
        batch._body = None
        return batch

    def __repr__(self) -> str:
        header = self.header
        offsets = f"{header.base_offset}..{header.last_offset}"
        return f"<RecordBatch {offsets} {header.codec}, {len(self._buffer)} bytes>"

    def __len__(self) -> int:
        return self.header.record_count

    def __iter__(self) -> Iterator[Record]:
        """Iterate over the records, with topic "" and partition -1, because a batch contains neither."""
        return iter(self.records("", -1))

    @property
    def size_bytes(self) -> int:
        """The size of the batch as stored, including its header."""
        return len(self._buffer)

    @property
    def buffer(self) -> memoryview:
        """The bytes of the whole batch."""
        return self._buffer

    def columns(self) -> Columns:
        """Return every column as Python objects.

        Raises CorruptBatchError and BatchTooLargeError for invalid bytes, and RecordError if the body has
        Kafka's rows or its codec needs cramjam and it is not installed.
        """
        header, body = self.header, self.view()
        count = header.record_count
        return Columns(
            range(header.base_offset, header.next_offset),
            self._timestamps(body),
            None if body.keys is None else body.keys.decode(),
            [None] * count if body.values is None else body.values.decode(),
            None if body.headers is None else decode_headers(body.headers, count),
        )

    def keys(self) -> list[bytes | None] | None:
        """Return only the keys. None means that no record has a key. Raises the same errors as
        ``columns``."""
        body = self.view()
        return None if body.keys is None else body.keys.decode()

    def records(self, topic: str, partition: int, *, from_offset: int | None = None) -> list[Record]:
        """Return the records at or after ``from_offset`` (default: all). Raises the errors of ``columns``."""
        columns = self.columns()
        offsets: Sequence[int] = columns.offsets
        skipped = 0 if from_offset is None else max(from_offset - self.header.base_offset, 0)
        fields: list[Any] = [offsets, columns.timestamps, columns.keys, columns.values, columns.headers]
        if skipped:
            fields = [field[skipped:] if isinstance(field, list | range) else field for field in fields]
        offsets, timestamps, keys, values, headers = fields
        rows = zip(
            repeat(topic),
            repeat(partition),
            offsets,
            repeat(timestamps) if isinstance(timestamps, int) else timestamps,
            repeat(self.header.timestamp_type),
            repeat(None) if keys is None else keys,
            values,
            repeat(()) if headers is None else headers,
            strict=False,  # the constants repeat without end
        )
        return _make_records(rows)

    def to_arrow(self, columns: Sequence[str] | None = None) -> pyarrow.RecordBatch:
        """Return the columns offset, timestamp (ms, UTC), key, value and headers, or only the named columns.

        Null keys and values, and the headers of records without headers, are null. Keys and values stay in
        this batch's buffer (or in the buffer to which it was unpacked), which lives as long as the result.
        Raises the errors of ``columns()``, RecordError for an unknown name, and MissingExtraError without
        pyarrow.
        """
        from kafkalite.records import arrow

        return arrow.record_batch(self.header, self.view(), columns)

    def _timestamps(self, body: BodyView) -> int | list[int]:
        header = self.header
        if header.timestamp_type is TimestampType.LOG_APPEND_TIME:
            return header.max_timestamp_ms  # KIP-32: the same for every record
        if body.timestamp_deltas is None:
            return header.base_timestamp_ms
        return decode_timestamps(body.timestamp_deltas, header.record_count, header.base_timestamp_ms)

    def view(self) -> BodyView:
        """Return the unpacked body with its columns located. The result is kept for the next call.

        Raises the errors of ``columns``.
        """
        if self._body is None:
            header = self.header
            if not header.is_columnar:
                raise RecordError(
                    f"record batch at offset {header.base_offset} has Kafka's rows, not columns",
                    hint="it was written by a client of Kafka's protocol; this version does not read it",
                )
            body = self._buffer[HEADER_BYTES:]
            if header.codec is not Codec.NONE:
                body = memoryview(decompress(header.codec, body, MAX_DECOMPRESSED_BYTES))
            try:
                self._body = view_body(body, header.record_count)
            except CorruptBatchError as error:
                message = f"record batch at offset {header.base_offset}: {error.message}"
                raise CorruptBatchError(message) from error
        return self._body


def _make_records(rows: Iterator[tuple[Any, ...]]) -> list[Record]:
    """Return a Record for each row: ``map(Record._make, rows)`` without a Python call for each row.

    The garbage collector is paused: after every few hundred new tuples it would search all of them for
    cycles, find none, and double the time. It is paused only if it was enabled, and enabled again at once, so
    two threads cannot leave it disabled.
    """
    make = partial(map, tuple.__new__, repeat(Record))
    if not gc.isenabled():
        return list(make(rows))
    gc.disable()
    try:
        return list(make(rows))
    finally:
        gc.enable()


def iter_batches(buffer: Buffer, *, check_crc: bool = True) -> Iterator[RecordBatch]:
    """Yield the consecutive batches in ``buffer``. Raises CorruptBatchError at an invalid batch."""
    view = memoryview(buffer)
    position = 0
    while position < len(view):
        length_bytes = total_length(view, position)
        if not length_bytes or length_bytes > len(view) - position:
            raise CorruptBatchError(f"no complete record batch at position {position} of {len(view)} bytes")
        yield RecordBatch(view[position : position + length_bytes], check_crc=check_crc)
        position += length_bytes
