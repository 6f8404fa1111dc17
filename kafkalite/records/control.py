"""Transaction markers: the control batches that end a producer's transaction in one partition.

A marker is an uncompressed columnar batch with one record, flagged as control and transactional, with the
producer id of the transaction and without a sequence. Key and value have Kafka's format, big-endian. The key
is version 0 and type (0 abort, 1 commit), two bytes each. The value is version 0, two bytes, and the
coordinator's epoch, four bytes. The marker's producer epoch is one higher than the epoch of the transaction
that it ends (R31), so that late batches are refused.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from kafkalite.errors import CorruptBatchError
from kafkalite.records.columns import ARRAY_OF_4, NIL, binary_column, binary_parts
from kafkalite.records.header import (
    ATTRIBUTES_POSITION,
    CONTROL_BIT,
    HEADER_BYTES,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Buffer,
    check,
    pack_control_header,
    seal,
    total_length,
)

VERSION: Final = 0
_ABORT: Final = 0
_COMMIT: Final = 1
_KEY: Final = struct.Struct(">hh")
_VALUE: Final = struct.Struct(">hi")
_ATTRIBUTES: Final = struct.Struct(">h")
_CONTROL_ATTRIBUTES: Final = TRANSACTIONAL_BIT | CONTROL_BIT


class Marker(NamedTuple):
    """The contents of a transaction marker. ``coordinator_epoch`` is the leader epoch of the coordinator's
    partition."""

    is_commit: bool
    coordinator_epoch: int


def _column(value: bytes) -> bytes:
    return b"".join(map(bytes, binary_parts(binary_column([value]))))


_TIMESTAMPS: Final = b"".join((ARRAY_OF_4, NIL))
_HEADERS: Final = NIL
# The columns of one key and one value of fixed length have constant bytes around them.
_KEY_AT: Final = HEADER_BYTES + len(_TIMESTAMPS) + _column(b"\xff" * _KEY.size).index(b"\xff" * _KEY.size)
_AFTER_KEY: Final = HEADER_BYTES + len(_TIMESTAMPS) + len(_column(bytes(_KEY.size)))
_VALUE_AT: Final = _AFTER_KEY + _column(b"\xff" * _VALUE.size).index(b"\xff" * _VALUE.size)
MARKER_BYTES: Final = _AFTER_KEY + len(_column(bytes(_VALUE.size))) + len(_HEADERS)


def build_marker(
    producer_id: int, producer_epoch: int, coordinator_epoch: int, is_commit: bool, timestamp_ms: int
) -> bytearray:
    """Return the marker's batch, in a new buffer that a leader may stamp in place."""
    key = _KEY.pack(VERSION, _COMMIT if is_commit else _ABORT)
    header = pack_control_header(
        0,
        MARKER_BYTES,
        TRANSACTIONAL_BIT,
        timestamp_ms=timestamp_ms,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
    )
    value = _VALUE.pack(VERSION, coordinator_epoch)
    batch = bytearray().join((header, _TIMESTAMPS, _column(key), _column(value), _HEADERS))
    seal(batch)
    return batch


def parse_marker(batch: Buffer) -> Marker:
    """Return the contents of the control batch in ``batch``, without checking its CRC.

    Raises CorruptBatchError if the length, the control and transactional flags, a version or the type is not
    that of a marker. The other fields are not checked.
    """
    if len(batch) != MARKER_BYTES:
        raise CorruptBatchError(f"a control batch of {len(batch)} bytes; a marker has {MARKER_BYTES}")
    (attributes,) = _ATTRIBUTES.unpack_from(batch, ATTRIBUTES_POSITION)
    key_version, kind = _KEY.unpack_from(batch, _KEY_AT)
    value_version, coordinator_epoch = _VALUE.unpack_from(batch, _VALUE_AT)
    if (
        attributes & _CONTROL_ATTRIBUTES != _CONTROL_ATTRIBUTES
        or (key_version, value_version) != (VERSION, VERSION)
        or kind not in (_ABORT, _COMMIT)
    ):
        raise CorruptBatchError(
            f"no transaction marker: attributes {attributes:#06x}, versions {key_version} and"
            f" {value_version}, type {kind}"
        )
    return Marker(kind == _COMMIT, coordinator_epoch)


def check_at(buffer: memoryview, position: int) -> BatchHeader:
    """Check the batch at ``position`` as ``header.check`` does. Check a marker as ``parse_marker`` does, too.

    Returns the header. Raises CorruptBatchError.
    """
    batch = buffer[position : position + total_length(buffer, position)]
    header = check(batch)
    if header.is_control and header.is_transactional:
        parse_marker(batch)
    return header
