"""The body of a batch: four columns, from Python lists to bytes and back.

The body is a msgpack array of four columns. Integers inside the columns are little-endian, as in Arrow::

    [ timestamps, keys, values, headers ]

    timestamps  nil: every record has the base timestamp. Or bin: the signed difference of each record to
                the base timestamp, 4 or 8 bytes wide (the length of the bin determines which)
    keys        nil: every key is null. Or [offsets, data, validity]
                    offsets   bin, count + 1 int32: record i has data[offsets[i]:offsets[i + 1]].
                              The first is 0, the last is len(data), and they never decrease
                    data      bin, the bytes of all keys, joined
                    validity  nil: no key is null. Or bin, (count + 7) // 8 bytes: bit i, from the lowest
                              bit of the first byte, is 0 if the key of record i is null
    values      as keys
    headers     nil: no record has headers. Or an array with one array of [name, value] pairs per record;
                the name is str, the value bin or nil

Only headers are decoded by msgpack. The rest consists of three kinds of item (nil, bin and array) that are
decoded by hand, so that a reader locates each column in the batch and uses it there without a copy.

Most functions for keys, values and timestamps process whole columns in C loops (map, accumulate, struct),
because a loop per record in Python would cost more than everything else. Figures:
``python -m benchmarks records``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from itertools import accumulate, islice, repeat
from operator import is_not, sub
from typing import Any, Final

import msgpack

from kafkalite.errors import BatchTooLargeError, CorruptBatchError, RecordError
from kafkalite.limits import MAX_HEADERS_PER_RECORD
from kafkalite.model import NO_TIMESTAMP, Headers
from kafkalite.records.header import MAX_INT64, Buffer

# The first bytes of the msgpack items that a body may contain outside its headers.
NIL: Final = b"\xc0"
ARRAY_OF_3: Final = b"\x93"
ARRAY_OF_4: Final = b"\x94"
_NIL, _ARRAY_OF_3, _ARRAY_OF_4 = NIL[0], ARRAY_OF_3[0], ARRAY_OF_4[0]
_BIN_8, _BIN_16, _BIN_32 = 0xC4, 0xC5, 0xC6
_BIN_LENGTHS: Final = {
    _BIN_8: struct.Struct(">B"),
    _BIN_16: struct.Struct(">H"),
    _BIN_32: struct.Struct(">I"),
}
_FIX_ARRAY, _ARRAY_16, _ARRAY_32 = 0x90, 0xDC, 0xDD

_INT32: Final = struct.Struct("<i")
_MAX_INT32: Final = 2**31 - 1
MAX_NARROW_DELTA_MS: Final = _MAX_INT32  #: a timestamp up to this difference from the base takes 4 bytes

#: Outside these bounds, the general method is as fast, or an entry is too large for the cache, which holds 16
#: entries of at most 512 KiB.
_MIN_UNIFORM_COUNT: Final = 16
_MAX_UNIFORM_COUNT: Final = 1 << 16
_UNIFORM_CHUNK: Final = 1024

_TO_DIGITS: Final = bytes.maketrans(b"\x00\x01", b"01")


# --- building ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class BinaryColumn:
    """Keys or values to be written into a body, in Arrow's binary layout.

    Invariants: ``offsets`` is count + 1 little-endian int32, which begin with 0, never decrease, and end with
    ``data_bytes``. The buffers in ``data`` have ``data_bytes`` together. ``validity`` is None or
    (count + 7) // 8 bytes.
    """

    count: int
    offsets: Buffer
    data: tuple[Buffer, ...]
    data_bytes: int
    validity: Buffer | None

    @property
    def size_bytes(self) -> int:
        return len(self.offsets) + self.data_bytes + (len(self.validity) if self.validity else 0)


def binary_column(values: Sequence[Any]) -> BinaryColumn | None:
    """Return the column of ``values``, each bytes-like or None. Return None if all are None.

    Raises RecordError for another type, and BatchTooLargeError above 2 GiB.
    """
    try:
        lengths = list(map(len, values))
    except TypeError:
        return _nullable_column(values)
    return _column(lengths, values, None)


def _nullable_column(values: Sequence[Any]) -> BinaryColumn | None:
    present = [value for value in values if value is not None]
    if not present:
        return None
    try:
        lengths = [0 if value is None else len(value) for value in values]
    except TypeError as error:
        raise _wrong_type(present) from error
    return _column(lengths, present, pack_validity(map(is_not, values, repeat(None))))


def _column(lengths: list[int], present: Sequence[Any], validity: bytes | None) -> BinaryColumn:
    try:
        data = b"".join(present)
    except TypeError as error:
        raise _wrong_type(present) from error
    if len(data) > _MAX_INT32:
        raise BatchTooLargeError(f"a column of {len(data)} bytes; offsets in a batch have 32 bits")
    count = len(lengths)
    if count >= _MIN_UNIFORM_COUNT and lengths.count(lengths[0]) == count:
        if len(data) != lengths[0] * count:
            raise _wrong_type(present)
        offsets = uniform_offsets(lengths[0], count)
    else:
        ends = list(accumulate(lengths, initial=0))
        if len(data) != ends[-1]:
            raise _wrong_type(present)
        offsets = struct.pack(f"<{count + 1}i", *ends)
    return BinaryColumn(count, offsets, (data,), len(data), validity)


def _wrong_type(values: Sequence[Any]) -> RecordError:
    """Return the error for the first value that is not bytes, a bytearray or a memoryview with items of one
    byte. If there is none, the error states that a value changed."""
    for value in values:
        if not isinstance(value, bytes | bytearray) and not (
            isinstance(value, memoryview) and value.itemsize == 1
        ):
            return RecordError(
                f"a key or value is {type(value).__name__}, but must be bytes or None",
                hint="encode it first, for example text.encode()",
            )
    return RecordError("a key or value changed its length while it was read")


def pack_validity(flags: Iterable[bool]) -> bytes:
    """Return Arrow's bitmap of ``flags``. Flag i is bit i, counted from the lowest bit of the first byte."""
    digits = bytes(flags).translate(_TO_DIGITS)
    return int(digits[::-1], 2).to_bytes((len(digits) + 7) // 8, "little")


def concatenate(columns: Sequence[tuple[int, BinaryColumn | None]]) -> BinaryColumn | None:
    """Join (count, column) pairs into one column. A pair without a column stands for ``count`` nulls.

    Returns None if no pair has a column. Raises BatchTooLargeError above 2 GiB.
    """
    present = [column for _, column in columns if column is not None]
    if not present:
        return None
    if len(columns) == 1:
        return present[0]
    ends = [0]
    data: list[Buffer] = []
    flags: list[str] = []
    for count, column in columns:
        base = ends[-1]
        if column is None:
            ends.extend(repeat(base, count))
            flags.append("0" * count)
            continue
        shifted = map(base.__add__, struct.unpack(f"<{count + 1}i", column.offsets))
        ends.extend(islice(shifted, 1, None))
        data.extend(column.data)
        flags.append("1" * count if column.validity is None else validity_digits(column.validity, count))
    count = len(ends) - 1
    if ends[-1] > _MAX_INT32:
        raise BatchTooLargeError(f"a column of {ends[-1]} bytes; offsets in a batch have 32 bits")
    digits = "".join(flags)
    validity = None
    if "0" in digits:
        validity = int(digits[::-1], 2).to_bytes((count + 7) // 8, "little")
    return BinaryColumn(count, struct.pack(f"<{count + 1}i", *ends), tuple(data), ends[-1], validity)


def null_column(count: int) -> BinaryColumn:
    """Return a column of ``count`` nulls with explicit offsets. A batch whose columns are all encoded as nil
    may have fewer bytes than records, which brokers refuse (S22)."""
    return BinaryColumn(count, uniform_offsets(0, count), (), 0, bytes((count + 7) // 8))


def uniform_offsets(length: int, count: int) -> bytes:
    """Return the offsets of ``count`` values of the same length."""
    if count > _MAX_UNIFORM_COUNT:
        return struct.pack(f"<{count + 1}i", *accumulate(repeat(length, count), initial=0))
    return _many_uniform_offsets(length, count)[: 4 * (count + 1)]


def _many_uniform_offsets(length: int, count: int) -> bytes:
    """Return the offsets of at least ``count`` values of ``length`` bytes. The caller takes as many as it
    needs from the start."""
    return _uniform_offsets(length, 1 << count.bit_length())


@lru_cache(maxsize=16)
def _uniform_offsets(length: int, capacity: int) -> bytes:
    """Return the offsets 0, ``length``, 2 * ``length`` and so on: ``capacity`` + 1 of them, or fewer if the
    next one would not fit in 32 bits."""
    if length:
        capacity = min(capacity, _MAX_INT32 // length)
        return struct.pack(f"<{capacity + 1}i", *range(0, length * capacity + 1, length))
    return bytes(4 * (capacity + 1))


def binary_parts(column: BinaryColumn | None) -> list[Buffer]:
    """Return the pieces of one column of the body, to be joined."""
    if column is None:
        return [NIL]
    parts: list[Buffer] = [ARRAY_OF_3, bin_header(len(column.offsets)), column.offsets]
    parts.append(bin_header(column.data_bytes))
    parts.extend(column.data)
    if column.validity is None:
        parts.append(NIL)
    else:
        parts += (bin_header(len(column.validity)), column.validity)
    return parts


def bin_header(length: int) -> bytes:
    """Return the first bytes of a msgpack bin of ``length`` bytes."""
    if length < 1 << 8:
        return bytes((_BIN_8, length))
    if length < 1 << 16:
        return struct.pack(">BH", _BIN_16, length)
    return struct.pack(">BI", _BIN_32, length)


def timestamp_parts(timestamps: Sequence[int], base_timestamp_ms: int, widest_delta_ms: int) -> list[Buffer]:
    """Return the pieces of the timestamp column. No timestamp may be farther than ``widest_delta_ms`` from
    the base.

    Raises RecordError for a timestamp that is not a whole number, or whose difference to the base does not
    fit in 64 bits.
    """
    kind = "i" if widest_delta_ms <= MAX_NARROW_DELTA_MS else "q"
    deltas = map(sub, timestamps, repeat(base_timestamp_ms))
    try:
        packed = struct.pack(f"<{len(timestamps)}{kind}", *deltas)
    except struct.error as error:
        raise RecordError("a timestamp is not a whole number of milliseconds") from error
    return bin_parts(packed)


def bin_parts(packed: Buffer) -> list[Buffer]:
    """Return the pieces of one msgpack bin with the bytes ``packed``."""
    return [bin_header(len(packed)), packed]


def header_parts(headers: Sequence[Any] | None) -> list[Buffer]:
    """Return the pieces of the header column. A record without headers has None or an empty item."""
    if headers is None or not any(headers):
        return [NIL]
    return [msgpack.packb([record_headers or () for record_headers in headers], use_bin_type=True)]


def checked_headers(headers: Any) -> Headers:
    """Return one record's headers as a tuple of (name, bytes or None). Values that are text become UTF-8.

    Raises RecordError for other types, for text with a lone surrogate, and above MAX_HEADERS_PER_RECORD.
    """
    checked: list[tuple[str, bytes | None]] = []
    try:
        for pair in headers or ():
            if isinstance(pair, str):  # one of two characters would be taken for a name and a value
                raise TypeError(f"{pair!r} is a str")
            name, value = pair
            if not isinstance(name, str):
                raise RecordError(f"a header's name is {type(name).__name__}, but must be str")
            if isinstance(value, str):
                value = value.encode()
            if value is not None and not isinstance(value, bytes):
                raise RecordError(f"header {name!r} is {type(value).__name__}, not bytes, str or None")
            name.encode()
            checked.append((name, value))
    except (TypeError, ValueError) as error:
        raise RecordError(
            f"headers must be pairs of a name and a value: {error}", hint='for example [("source", b"web")]'
        ) from error
    if len(checked) > MAX_HEADERS_PER_RECORD:
        raise RecordError(f"a record has at most {MAX_HEADERS_PER_RECORD} headers, this one {len(checked)}")
    return tuple(checked)


# --- reading -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class BinaryView:
    """Keys or values inside a body. Only sizes and the first and last offset have been checked."""

    count: int
    offsets: memoryview
    data: memoryview
    validity: memoryview | None

    def decode(self) -> list[bytes | None]:
        """Return the values, each bytes or None. Raises CorruptBatchError if an offset decreases."""
        values: list[Any] | None = self._decode_uniform()
        if values is None:
            offsets = struct.unpack(f"<{self.count + 1}i", self.offsets)
            lengths = list(map(sub, islice(offsets, 1, None), offsets))
            if min(lengths) < 0:
                raise CorruptBatchError("a column's offsets go backwards")
            # One read per value, each continuing at the end of the last one, is the fastest way to slice.
            values = list(map(BytesIO(self.data).read, lengths))
        if self.validity is not None:
            digits = validity_digits(self.validity, self.count)
            values = [value if digit == "1" else None for value, digit in zip(values, digits, strict=True)]
        return values

    def _decode_uniform(self) -> list[bytes] | None:
        """Return the values if there are 16 to 65,536 and all have the same length; otherwise return None."""
        count = self.count
        length, remainder = divmod(len(self.data), count)
        if remainder or not _MIN_UNIFORM_COUNT <= count <= _MAX_UNIFORM_COUNT:
            return None
        if _INT32.unpack_from(self.offsets, 4)[0] != length:
            return None
        if not _many_uniform_offsets(length, count).startswith(self.offsets):
            return None
        values: list[bytes] = []
        whole = count - count % _UNIFORM_CHUNK
        if whole:
            chunk = _fixed_size_values(length, _UNIFORM_CHUNK)
            for first in range(0, whole, _UNIFORM_CHUNK):
                values.extend(chunk.unpack_from(self.data, first * length))
        if whole < count:
            values.extend(_fixed_size_values(length, count - whole).unpack_from(self.data, whole * length))
        return values


@lru_cache(maxsize=32)
def _fixed_size_values(length: int, count: int) -> struct.Struct:
    return struct.Struct(f"{length}s" * count)


def validity_digits(validity: Buffer, count: int) -> str:
    """Return Arrow's bitmap as text, "1" for each value and "0" for each null."""
    bits = int.from_bytes(validity, "little") | 1 << 8 * len(validity)
    return bin(bits)[:2:-1][:count]


@dataclass(slots=True)
class BodyView:
    """The located columns of a body. A column that is nil in the body is None. If ``headers`` is not None, it
    is the rest of the body, which msgpack decodes."""

    count: int
    timestamp_deltas: memoryview | None
    keys: BinaryView | None
    values: BinaryView | None
    headers: memoryview | None


def view_body(body: memoryview, count: int) -> BodyView:
    """Locate the columns of ``count`` records. Raises CorruptBatchError if the lengths of the timestamp, key
    or value columns do not fit ``count`` or the body. The headers are not checked."""
    if _first_byte(body, 0) != _ARRAY_OF_4:
        raise CorruptBatchError("the body of the batch is not an array of four columns")
    deltas, position = _take_bin(body, 1)
    if deltas is not None and len(deltas) not in (4 * count, 8 * count):
        raise CorruptBatchError(f"{len(deltas)} bytes of timestamps do not fit {count} records")
    keys, position = _take_binary(body, position, count)
    values, position = _take_binary(body, position, count)
    if _first_byte(body, position) != _NIL:
        return BodyView(count, deltas, keys, values, body[position:])
    if len(body) != position + 1:
        raise CorruptBatchError(f"{len(body) - position - 1} bytes follow the last column of the batch")
    return BodyView(count, deltas, keys, values, None)


def _first_byte(body: memoryview, position: int) -> int:
    """Return the type byte at ``position``; -1 at the end."""
    return body[position] if position < len(body) else -1


def _take_binary(body: memoryview, position: int, count: int) -> tuple[BinaryView | None, int]:
    kind = _first_byte(body, position)
    if kind == _NIL:
        return None, position + 1
    if kind != _ARRAY_OF_3:
        raise CorruptBatchError(f"no column of keys or values at position {position} of the body")
    offsets, position = _take_bin(body, position + 1)
    data, position = _take_bin(body, position)
    validity, position = _take_bin(body, position)
    if offsets is None or data is None:
        raise CorruptBatchError("a column of keys or values lacks its offsets or its data")
    if len(offsets) != 4 * (count + 1):
        raise CorruptBatchError(f"{len(offsets)} bytes of offsets do not fit {count} records")
    if _INT32.unpack_from(offsets)[0] != 0 or _INT32.unpack_from(offsets, 4 * count)[0] != len(data):
        raise CorruptBatchError(f"a column's offsets do not run from 0 to {len(data)}")
    if validity is not None and len(validity) != (count + 7) // 8:
        raise CorruptBatchError(f"{len(validity)} bytes of validity do not fit {count} records")
    return BinaryView(count, offsets, data, validity), position


def _take_bin(body: memoryview, position: int) -> tuple[memoryview | None, int]:
    """Return (bin or None for nil, position after it). Raises CorruptBatchError."""
    kind = _first_byte(body, position)
    if kind == _NIL:
        return None, position + 1
    try:
        length_field = _BIN_LENGTHS[kind]
        (length,) = length_field.unpack_from(body, position + 1)
    except (KeyError, struct.error) as error:
        raise CorruptBatchError(f"no binary column at position {position} of the body") from error
    start = position + 1 + length_field.size
    end = start + length
    if end > len(body):
        raise CorruptBatchError(f"a column of {length} bytes at position {position} is cut off")
    return body[start:end], end


def decode_timestamps(deltas: memoryview, count: int, base_timestamp_ms: int) -> list[int]:
    """Return the timestamps in milliseconds. Raises CorruptBatchError unless all are valid."""
    is_narrow = len(deltas) == 4 * count
    kind = "i" if is_narrow else "q"
    timestamps = list(map(base_timestamp_ms.__add__, struct.unpack(f"<{count}{kind}", deltas)))
    if not (is_narrow and is_ordinary(base_timestamp_ms)) and (
        min(timestamps) < NO_TIMESTAMP or max(timestamps) > MAX_INT64
    ):
        raise CorruptBatchError(f"timestamps from {min(timestamps)} to {max(timestamps)} ms")
    return timestamps


def is_ordinary(base_timestamp_ms: int) -> bool:
    """Return True only if the base timestamp plus any signed 32-bit difference is a valid timestamp. Returns
    True for every base after January 1970, except near the 64-bit limit."""
    return _MAX_INT32 < base_timestamp_ms < MAX_INT64 - _MAX_INT32


def decode_headers(column: memoryview, count: int) -> list[Headers]:
    """Return each record's headers, () for a record without headers. Raises CorruptBatchError.

    msgpack allocates an array before it reads the items, so a false length could exhaust the memory. The
    length of the outer array is therefore read by hand and compared with ``count``. The lengths of the inner
    arrays are limited.
    """
    position = check_header_count(column, count)
    unpacker = msgpack.Unpacker(
        max_buffer_size=len(column), max_array_len=MAX_HEADERS_PER_RECORD, max_map_len=0, max_ext_len=0
    )
    unpacker.feed(column[position:])
    try:
        headers = [_record_headers(item) for item in islice(unpacker, count)]
    except (ValueError, RecursionError) as error:
        raise CorruptBatchError(f"the headers of the batch cannot be read: {error}") from error
    if len(headers) != count or unpacker.tell() != len(column) - position:
        raise CorruptBatchError(f"headers of {len(headers)} records in a batch of {count}")
    return headers


def check_header_count(column: memoryview, count: int) -> int:
    """Return the position in ``column`` at which the first record's headers begin. Raises CorruptBatchError
    unless the column has ``count`` items."""
    length, position = _array_length(column)
    if length != count:
        raise CorruptBatchError(f"headers of {length} records in a batch of {count}")
    return position


def _array_length(column: memoryview) -> tuple[int, int]:
    """Return (length of the array that begins ``column``, position of its first item)."""
    kind = _first_byte(column, 0)
    if kind & 0xF0 == _FIX_ARRAY:
        return kind & 0x0F, 1
    if kind == _ARRAY_16 and len(column) >= 3:
        return int.from_bytes(column[1:3], "big"), 3
    if kind == _ARRAY_32 and len(column) >= 5:
        return int.from_bytes(column[1:5], "big"), 5
    raise CorruptBatchError("the headers of the batch are not an array")


def _record_headers(item: Any) -> Headers:
    if not item and isinstance(item, list):
        return ()
    if not isinstance(item, list):
        raise CorruptBatchError("the headers of a record are not an array")
    for pair in item:
        if not (
            isinstance(pair, list)
            and len(pair) == 2
            and isinstance(pair[0], str)
            and (pair[1] is None or isinstance(pair[1], bytes))
        ):
            raise CorruptBatchError("a header is not a name and a value")
    return tuple(map(tuple, item))
