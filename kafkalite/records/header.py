"""The fixed header of a record batch: parse, check, stamp, scan. Records are not decoded here.

Kafka's record-batch-v2 header, big-endian, 61 bytes::

    position  bytes  field
           0      8  base offset                 stamped by the leader; not covered by the CRC
           8      4  batch length                of everything after this field, so the total is 12 more
          12      4  partition leader epoch      stamped by the leader; not covered by the CRC
          16      1  magic                       2
          17      4  CRC-32C                     of everything from position 21 to the end
          21      2  attributes
          23      4  last offset delta           record count - 1
          27      8  base timestamp              milliseconds
          35      8  max timestamp               milliseconds
          43      8  producer id                 -1: not idempotent
          51      2  producer epoch
          53      4  base sequence
          57      4  record count

    attributes, by bit:
        0-2   Kafka's codec of the rows that follow; or 7 if columns follow
        3     timestamp type: 0 create time, 1 log append time (then every record has the max timestamp)
        4     transactional
        5     control
        8-10  the codec of the columns: 0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd

No codec of Kafka has the number 7, so Kafka's clients fail on columns instead of misreading them. They would
silently ignore an unknown attribute bit.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from kafkalite.errors import ConfigError, CorruptBatchError
from kafkalite.limits import MAX_RECORDS_PER_BATCH, RECORD_BATCH_HEADER_BYTES
from kafkalite.model import (
    NO_EPOCH,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    TimestampType,
)
from kafkalite.records.checksum import crc32c

Buffer = bytes | bytearray | memoryview

HEADER_BYTES: Final = RECORD_BATCH_HEADER_BYTES
MAGIC: Final = 2
COLUMNAR: Final = 7
MAX_INT64: Final = 2**63 - 1

CODEC_MASK: Final = 0b111
TIMESTAMP_TYPE_BIT: Final = 1 << 3
TRANSACTIONAL_BIT: Final = 1 << 4
CONTROL_BIT: Final = 1 << 5
COLUMN_CODEC_SHIFT: Final = 8

LENGTH_POSITION: Final = 8
CRC_POSITION: Final = 17
ATTRIBUTES_POSITION: Final = 21
MAX_TIMESTAMP_POSITION: Final = 35
PRODUCER_POSITION: Final = 43
#: The number of bytes up to the end of the length field, which the length does not count.
LENGTH_OVERHEAD_BYTES: Final = 12

HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_OFFSET_AND_LENGTH: Final = struct.Struct(">qi")
_BASE_OFFSET: Final = struct.Struct(">q")
_UINT32: Final = struct.Struct(">I")
_INT32: Final = struct.Struct(">i")
_INT16: Final = struct.Struct(">h")
_PRODUCER: Final = struct.Struct(">qhi")
#: base offset, batch length, leader epoch, magic, last offset delta: the place of a batch in its log. The CRC
#: covers only the last of them.
PLACE: Final = struct.Struct(">qiib6xi")
# base offset, batch length, magic, last offset delta, max timestamp: the fields that `scan` reads.
_SCAN: Final = struct.Struct(">qi4xb6xi8xq")
# The same with the CRC and the attributes before the delta, then producer id, producer epoch, base sequence:
# the fields that `scan_producers` reads.
_SCAN_PRODUCERS: Final = struct.Struct(">qi4xbIhi8xqqhi")

MIN_LENGTH: Final = HEADER_BYTES - LENGTH_OVERHEAD_BYTES  #: the least value of the length field
_MAX_BASE_OFFSET: Final = MAX_INT64 - MAX_RECORDS_PER_BATCH
_make_tuple: Final = tuple.__new__  # the constructor of a named tuple takes three times as long

assert HEADER.size == HEADER_BYTES
assert LENGTH_POSITION + _INT32.size == LENGTH_OVERHEAD_BYTES


class Codec(enum.IntEnum):
    """The compression of a batch, with Kafka's numbers. Configurations use the lower-case name."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4

    @classmethod
    def parse(cls, text: str) -> Codec:
        """Convert a name such as ``"lz4"``, in upper or lower case. Raises ConfigError for
        ``compression.type`` if the name is unknown."""
        codec = cls.__members__.get(text.upper())
        if codec is None:
            allowed = "one of " + ", ".join(name.lower() for name in cls.__members__)
            raise ConfigError(key="compression.type", value=text, allowed=allowed)
        return codec

    def __str__(self) -> str:
        return self.name.lower()


_CODECS: Final = tuple(Codec)
# Both codec fields of the attributes, and their valid values. The second counts only in a batch of columns.
_CODEC_BITS: Final = CODEC_MASK | CODEC_MASK << COLUMN_CODEC_SHIFT
_KNOWN_CODEC_BITS: Final = frozenset(
    bits
    for bits in range(_CODEC_BITS + 1)
    if (bits >> COLUMN_CODEC_SHIFT if bits & CODEC_MASK == COLUMNAR else bits & CODEC_MASK) < len(_CODECS)
)


class BatchHeader(NamedTuple):
    """The fields of one header. ``length_bytes`` is the size of the whole batch, including the header.

    The class is a tuple because a header is made for each batch that is read, and creating a frozen dataclass
    takes four times as long.
    """

    base_offset: int
    length_bytes: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def last_offset(self) -> int:
        """The offset of the last record (inclusive)."""
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        """The offset after the last record."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def is_columnar(self) -> bool:
        """Whether the body consists of columns rather than Kafka's rows."""
        return self.attributes & CODEC_MASK == COLUMNAR

    @property
    def codec(self) -> Codec:
        shift = COLUMN_CODEC_SHIFT if self.is_columnar else 0
        return _CODECS[self.attributes >> shift & CODEC_MASK]

    @property
    def timestamp_type(self) -> TimestampType:
        if self.attributes & TIMESTAMP_TYPE_BIT:
            return TimestampType.LOG_APPEND_TIME
        return TimestampType.CREATE_TIME

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL_BIT)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL_BIT)


def parse_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """Return the header at ``position`` after checking its fields. The CRC and the body are not read.

    Raises CorruptBatchError if the header is cut off, or if its magic, length, record count, base offset,
    timestamps or codec is invalid.
    """
    # One flat condition and no constructor of the named tuple: this runs for each produced and fetched batch.
    try:
        fields = HEADER.unpack_from(buffer, position)
    except struct.error:
        raise CorruptBatchError(
            f"a record batch header has {HEADER_BYTES} bytes, but {max(len(buffer) - position, 0)} are left"
            f" at position {position}"
        ) from None
    base_offset, length, _, magic, _, attributes, last_delta, base_ms, max_ms, _, _, _, count = fields
    header = _make_tuple(BatchHeader, (base_offset, length + LENGTH_OVERHEAD_BYTES) + fields[2:])  # noqa: RUF005 - unpacking is slower
    if (
        magic == MAGIC
        and length >= MIN_LENGTH
        and 0 <= last_delta < MAX_RECORDS_PER_BATCH
        and last_delta + 1 == count
        and 0 <= base_offset <= _MAX_BASE_OFFSET
        and base_ms >= NO_TIMESTAMP <= max_ms
        and attributes & _CODEC_BITS in _KNOWN_CODEC_BITS
    ):
        return header
    raise CorruptBatchError(f"no valid record batch header at position {position}: {_problem(header)}")


def _problem(header: BatchHeader) -> str:
    """Return a description of the invalid field."""
    if header.magic != MAGIC:
        return f"magic is {header.magic}, not {MAGIC}"
    if header.length_bytes < HEADER_BYTES:
        return f"its length field is {header.length_bytes} bytes, less than a header"
    if header.last_offset_delta + 1 != header.record_count:
        return f"{header.record_count} records, but the last offset delta is {header.last_offset_delta}"
    if not 1 <= header.record_count <= MAX_RECORDS_PER_BATCH:
        return f"{header.record_count} records, not 1 to {MAX_RECORDS_PER_BATCH}"
    if not 0 <= header.base_offset <= _MAX_BASE_OFFSET:
        return f"base offset is {header.base_offset}"
    if header.base_timestamp_ms < NO_TIMESTAMP or header.max_timestamp_ms < NO_TIMESTAMP:
        return f"timestamps {header.base_timestamp_ms} and {header.max_timestamp_ms} ms are below -1"
    kafka_codec = header.attributes & CODEC_MASK
    codec = header.attributes >> COLUMN_CODEC_SHIFT & CODEC_MASK if kafka_codec == COLUMNAR else kafka_codec
    return f"unknown compression codec {codec}"


def total_length(buffer: Buffer, position: int = 0) -> int:
    """Return the size of the whole batch at ``position``, read from its first 12 bytes.

    Returns 0 if these 12 bytes are zero (preallocated space). Raises CorruptBatchError if fewer than 12 bytes
    are left, or if the length is less than a header's.
    """
    if len(buffer) - position < LENGTH_OVERHEAD_BYTES:
        raise CorruptBatchError(f"fewer than {LENGTH_OVERHEAD_BYTES} bytes of a batch at position {position}")
    base_offset, batch_length = _OFFSET_AND_LENGTH.unpack_from(buffer, position)
    if batch_length == 0 and base_offset == 0:
        return 0
    length_bytes: int = batch_length + LENGTH_OVERHEAD_BYTES
    if length_bytes < HEADER_BYTES:
        raise CorruptBatchError(f"a batch of {length_bytes} bytes at position {position}: no header fits")
    return length_bytes


def scan(buffer: Buffer, position: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Scan the batch headers from ``position`` (inclusive) to ``end`` (exclusive) quickly.

    Yields (position, base_offset, last_offset_delta, max_timestamp_ms, total_length) of each complete batch.
    Stops before a batch that exceeds ``end`` or has an invalid length, magic or last offset delta. To notice
    this, the caller compares the end of the last batch with ``end``. CRCs are not checked.
    """
    end = min(end, len(buffer))
    unpack_from = _SCAN.unpack_from
    last_start = end - HEADER_BYTES
    while position <= last_start:
        base_offset, batch_length, magic, last_offset_delta, max_timestamp_ms = unpack_from(buffer, position)
        length_bytes = batch_length + LENGTH_OVERHEAD_BYTES
        if (
            length_bytes < HEADER_BYTES
            or position + length_bytes > end
            or magic != MAGIC
            or last_offset_delta < 0
        ):
            return
        yield position, base_offset, last_offset_delta, max_timestamp_ms, length_bytes
        position += length_bytes


def scan_producers(
    buffer: Buffer, position: int, end: int
) -> Iterator[tuple[int, int, int, int, int, int, int, int, int]]:
    """Scan the batch headers as ``scan`` does, but yield other fields.

    Yields (position, attributes, base_offset, last_offset_delta, max_timestamp_ms, producer_id,
    producer_epoch, base_sequence, crc).
    """
    end = min(end, len(buffer))
    unpack_from = _SCAN_PRODUCERS.unpack_from
    last_start = end - HEADER_BYTES
    while position <= last_start:
        base_offset, batch_length, magic, crc, attributes, last_delta, *rest = unpack_from(buffer, position)
        length_bytes = batch_length + LENGTH_OVERHEAD_BYTES
        if length_bytes < HEADER_BYTES or position + length_bytes > end or magic != MAGIC or last_delta < 0:
            return
        max_timestamp_ms, producer_id, producer_epoch, base_sequence = rest
        yield (
            position,
            attributes,
            base_offset,
            last_delta,
            max_timestamp_ms,
            producer_id,
            producer_epoch,
            base_sequence,
            crc,
        )
        position += length_bytes


def check(buffer: Buffer) -> BatchHeader:
    """Return the header of the batch that fills ``buffer``.

    Raises CorruptBatchError for an invalid header, a wrong length or a wrong CRC. The body is not unpacked.
    Its columns are checked when they are read.
    """
    header = parse_header(buffer)
    if header.length_bytes != len(buffer):
        raise _wrong_length(buffer, header)
    view = buffer if type(buffer) is memoryview else memoryview(buffer)
    actual = crc32c(view[ATTRIBUTES_POSITION:])
    if actual != header.crc:
        raise CorruptBatchError(
            f"record batch at offset {header.base_offset}: CRC-32C is {actual:#010x},"
            f" the header has {header.crc:#010x}",
            hint="the bytes changed in transit or on disk; fetch or send the batch again",
        )
    return header


def check_length(buffer: Buffer) -> BatchHeader:
    """Return the header as ``check`` does, without checking the CRC."""
    header = parse_header(buffer)
    if header.length_bytes != len(buffer):
        raise _wrong_length(buffer, header)
    return header


def _wrong_length(buffer: Buffer, header: BatchHeader) -> CorruptBatchError:
    return CorruptBatchError(
        f"record batch at offset {header.base_offset}: its length field is {header.length_bytes} bytes,"
        f" but there are {len(buffer)}"
    )


def stamp(buffer: bytearray | memoryview, *, base_offset: int, leader_epoch: int) -> None:
    """Write base offset and leader epoch in place. The CRC does not cover them and stays valid."""
    _BASE_OFFSET.pack_into(buffer, 0, base_offset)
    _INT32.pack_into(buffer, LENGTH_OVERHEAD_BYTES, leader_epoch)


def stamp_log_append_time(buffer: bytearray | memoryview, now_ms: int) -> None:
    """Set the timestamp of every record of the batch to ``now_ms``, and update the CRC.

    This is for topics with ``message.timestamp.type=LogAppendTime``. Only the attribute bit and the max
    timestamp change. If the bit is set, readers ignore the timestamps in the body.
    """
    (attributes,) = _INT16.unpack_from(buffer, ATTRIBUTES_POSITION)
    _INT16.pack_into(buffer, ATTRIBUTES_POSITION, attributes | TIMESTAMP_TYPE_BIT)
    _BASE_OFFSET.pack_into(buffer, MAX_TIMESTAMP_POSITION, now_ms)
    seal(buffer)


def stored_crc(buffer: Buffer) -> int:
    """Return the CRC field of the batch in ``buffer``, unchecked."""
    crc: int
    (crc,) = _UINT32.unpack_from(buffer, CRC_POSITION)
    return crc


def log_append_time_crc(buffer: Buffer, time_ms: int) -> int:
    """Return the CRC that the batch gets from ``stamp_log_append_time``, without changing ``buffer``."""
    copy = bytearray(buffer)
    stamp_log_append_time(copy, time_ms)
    return stored_crc(copy)


def stamp_producer(
    buffer: bytearray | memoryview,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
    *,
    transactional: bool = False,
) -> None:
    """Write the producer and the transactional flag, and update the CRC, which covers both."""
    (attributes,) = _INT16.unpack_from(buffer, ATTRIBUTES_POSITION)
    attributes = attributes | TRANSACTIONAL_BIT if transactional else attributes & ~TRANSACTIONAL_BIT
    _INT16.pack_into(buffer, ATTRIBUTES_POSITION, attributes)
    _PRODUCER.pack_into(buffer, PRODUCER_POSITION, producer_id, producer_epoch, base_sequence)
    seal(buffer)


def pack_control_header(
    base_offset: int,
    size_bytes: int,
    attributes: int,
    *,
    count: int = 1,
    leader_epoch: int = NO_EPOCH,
    timestamp_ms: int = NO_TIMESTAMP,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
) -> bytes:
    """Return the header of a columnar control batch of ``size_bytes``. ``seal`` must add the CRC."""
    length = size_bytes - LENGTH_OVERHEAD_BYTES
    fixed = (MAGIC, 0, attributes | COLUMNAR | CONTROL_BIT, count - 1, timestamp_ms, timestamp_ms)
    return HEADER.pack(
        base_offset, length, leader_epoch, *fixed, producer_id, producer_epoch, NO_SEQUENCE, count
    )


def seal(buffer: bytearray | memoryview) -> None:
    """Compute and write the CRC of the batch in ``buffer``."""
    with memoryview(buffer) as view, view[ATTRIBUTES_POSITION:] as covered:
        _UINT32.pack_into(buffer, CRC_POSITION, crc32c(covered))
