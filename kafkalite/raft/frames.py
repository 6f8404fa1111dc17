"""Frames: how the metadata files of a node hold msgpack values so that a torn or rotten one is noticed.

::

    frame = u32 length | u32 crc32c | msgpack            big-endian; the checksum is of the msgpack bytes

A writer that syncs each frame before it begins the next leaves at most the last one torn. So a bad frame
with a whole one behind it is damage, and a bad one at the very end is a write that nobody was told of.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import msgpack

from kafkalite.records.checksum import crc32c

HEADER_BYTES: Final = 8

_HEADER: Final = struct.Struct(">II")
_MIN_PAYLOAD_BYTES: Final = 2


def frame(value: Any) -> bytes:
    """One value, framed."""
    payload: bytes = msgpack.packb(value)
    return _HEADER.pack(len(payload), crc32c(payload)) + payload


def payload_at(data: bytes, position: int) -> bytes | None:
    """The payload of the frame at ``position``, or None when no whole one with its checksum stands there."""
    start = position + HEADER_BYTES
    if start > len(data):
        return None
    length, checksum = _HEADER.unpack_from(data, position)
    if not _MIN_PAYLOAD_BYTES <= length <= len(data) - start:
        return None
    payload = data[start : start + length]
    return payload if crc32c(payload) == checksum else None


def next_whole_frame(data: bytes, position: int) -> int | None:
    """Where the first whole frame at or after ``position`` begins, at any byte; None when there is none."""
    return next((at for at in range(position, len(data)) if payload_at(data, at) is not None), None)
