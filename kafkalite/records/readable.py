"""Refuses batches that no reader could unpack, before they are appended (S22).

The broker checks the layout that every reader relies on, from a few bytes of the batch: the kind of body, the
lengths of its columns, and the size that compressed bytes declare. It looks at the records only for their
timestamps, and only if these could leave the range: the differences are 64 bits wide, or the base is not an
ordinary time. So a column may still be wrong inside: its offsets may decrease, its headers may not be
msgpack, and compressed columns may contain anything. Reading such a batch costs no more than its size, and a
consumer can skip it.

A batch has at least one byte for each record that it declares. Otherwise 66 bytes of four empty columns would
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
    """Raise an error if no reader could unpack ``batch``, whose ``header`` has been checked.

    Raises UnsupportedForMessageFormatError (Kafka's rows), BatchTooLargeError (it declares more than
    MAX_DECOMPRESSED_BYTES), CorruptBatchError (the columns do not fit the record count or the batch, or a
    timestamp is below NO_TIMESTAMP or above 64 bits).
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
    """Return the layout of ``count`` values or timestamps as builders write them.

    The items are:

    - a function that unpacks a column's head (its bytes up to the first offset), its last offset, the type
      byte of its data, and the next two bytes;
    - the head that every such column has;
    - the position of the data in the column;
    - the first bytes of a column of timestamps.
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
