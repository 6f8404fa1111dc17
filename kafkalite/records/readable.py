"""Checks that readers can locate the columns of a batch, before the batch is appended (S22).

The broker checks the kind of body. In an uncompressed body, it also checks the lengths of the columns and the
timestamps. In a compressed body, it checks only the first bytes and the declared size. So columns may still
be invalid inside: offsets may decrease, headers may not be msgpack, and compressed columns may contain
anything. A consumer raises an error for such a batch, and can skip it.

A batch is refused if it declares more records than bytes: those of the header and the body, or of a
compressed body, the most that it can unpack to. Otherwise 66 bytes, a header and four empty columns, would
become a million records at each reader.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from struct import Struct
from typing import Any, Final

from kafkalite.errors import CorruptBatchError, UnsupportedForMessageFormatError
from kafkalite.limits import MAX_DECOMPRESSED_BYTES
from kafkalite.records.columns import (
    ARRAY_OF_3,
    ARRAY_OF_4,
    NIL,
    bin_header,
    check_header_count,
    decode_timestamps,
    is_ordinary,
    view_body,
)
from kafkalite.records.compression import unpacked_bound
from kafkalite.records.header import (
    CODEC_MASK,
    COLUMN_CODEC_SHIFT,
    COLUMNAR,
    HEADER_BYTES,
    BatchHeader,
    Codec,
)

_NIL, _ARRAY_OF_4 = NIL[0], ARRAY_OF_4[0]
_BIN_8, _BIN_16, _BIN_32 = 0xC4, 0xC5, 0xC6
_UINT32: Final = Struct(">I").unpack_from
_COLUMNS_POSITION: Final = HEADER_BYTES + 1
_CODECS: Final = CODEC_MASK | CODEC_MASK << COLUMN_CODEC_SHIFT


def check_readable(batch: memoryview, header: BatchHeader) -> None:
    """Raise an error if readers cannot locate the columns of ``batch``, whose ``header`` has been checked.

    Raises UnsupportedForMessageFormatError if the body has Kafka's rows, and BatchTooLargeError if a
    compressed body declares more than MAX_DECOMPRESSED_BYTES. Raises CorruptBatchError if the columns do not
    fit the record count or the batch, if the unpacked batch has fewer bytes than records, if an uncompressed
    timestamp is below NO_TIMESTAMP or above 2**63 - 1, or if a compressed body does not begin as its codec
    requires or declares an impossible size.
    """
    # Most batches have values, perhaps keys and timestamps, and neither nulls nor headers. For them this does
    # the checks of ``view_body`` at a fifth of its cost.
    try:
        if header.attributes & _CODECS == COLUMNAR and batch[HEADER_BYTES] == _ARRAY_OF_4:
            unpack_column, head, data_position, timestamps = _layout(header.record_count)
            position, columns = _COLUMNS_POSITION, 2
            if batch[position] == _NIL:
                position += 1
            elif batch[position : position + len(timestamps)] == timestamps:
                start, position = (
                    position + len(timestamps),
                    position + len(timestamps) + 4 * header.record_count,
                )
                if not is_ordinary(header.base_timestamp_ms):
                    decode_timestamps(batch[start:position], header.record_count, header.base_timestamp_ms)
            if batch[position] == _NIL:  # no keys
                position, columns = position + 1, 1
            while columns:
                found, last, kind, high, low = unpack_column(batch, position)
                position += data_position
                if kind == _BIN_8:
                    length, position = high, position + 2
                elif kind == _BIN_16:
                    length, position = high << 8 | low, position + 3
                elif kind == _BIN_32:
                    length, position = _UINT32(batch, position + 1)[0], position + 5
                else:
                    break
                position += length
                if found != head or length != last or batch[position] != _NIL:
                    break
                position, columns = position + 1, columns - 1
            else:
                if batch[position] == _NIL and position + 1 == len(batch):
                    return
    except (IndexError, struct.error):
        pass
    _check_any(batch, header)


@lru_cache(maxsize=1024)
def _layout(count: int) -> tuple[Any, bytes, int, bytes]:
    """Return the layout of columns with ``count`` records.

    The items are:

    - a function that unpacks, from a column of keys or values, the head (all bytes before the second offset),
      the last offset, the type byte of the data, and the next two bytes;
    - the head that every such column has;
    - the position of the type byte of the data in the column;
    - the first bytes of a timestamp column with differences of 4 bytes.
    """
    head = ARRAY_OF_3 + bin_header(4 * (count + 1)) + bytes(4)
    unpack_column = Struct(f"<{len(head)}s{4 * (count - 1)}xiBBB").unpack_from
    return unpack_column, head, len(head) + 4 * count, bin_header(4 * count)


def _check_any(batch: memoryview, header: BatchHeader) -> None:
    """Do the checks of ``check_readable`` for a batch of any layout."""
    if not header.is_columnar:
        raise UnsupportedForMessageFormatError(
            f"the batch has Kafka's rows (attributes {header.attributes:#06x}); consumers read columns only"
        )
    body, count = batch[HEADER_BYTES:], header.record_count
    if header.codec is Codec.NONE:
        view = view_body(body, count)
        if view.headers is not None:
            check_header_count(view.headers, count)
        if view.timestamp_deltas is not None:
            decode_timestamps(view.timestamp_deltas, count, header.base_timestamp_ms)
        body_bytes = len(body)
    else:
        body_bytes = unpacked_bound(header.codec, body, MAX_DECOMPRESSED_BYTES)
    if count > HEADER_BYTES + body_bytes:
        raise CorruptBatchError(f"a batch declares {count} records in a body of at most {body_bytes} bytes")
