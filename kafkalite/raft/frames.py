"""Frames: the framing of msgpack values in metadata files, which detects torn writes and bit rot.

::

    frame = u32 length | u32 crc32c | msgpack            big-endian; the checksum covers the msgpack bytes

A writer syncs each frame before it begins the next one. So a crash can tear only the last frame, of which
nothing has been acknowledged. A damaged frame before an intact frame is corruption (R24, R25).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import msgpack

from kafkalite.errors import CorruptLogError, StorageError
from kafkalite.records.checksum import crc32c

REPAIR_HINT: Final = (
    "restore the directory from a backup; a voter of a running cluster can start with an empty directory and"
    " --rejoin"
)

_HEADER: Final = struct.Struct(">II")
_MIN_PAYLOAD_BYTES: Final = 2


def frame(value: Any) -> bytes:
    """Encode one value as a frame."""
    payload: bytes = msgpack.packb(value)
    return _HEADER.pack(len(payload), crc32c(payload)) + payload


def read_frames(data: bytes, path: str) -> tuple[list[tuple[int, list[Any]]], int]:
    """Return (position, array) of each intact frame, and the position after the last intact frame.

    Bytes after that position are a torn tail. Raises CorruptLogError if the first frame is damaged, if an
    intact frame follows a damaged one, or if a payload is not a msgpack array.
    """
    values, position = read_intact_frames(data, path)
    later, _ = next(frames_after(data, position + 1), (None, b""))
    if later is not None:
        expected = f"an intact frame, because the one at {later} was written after it"
        raise corrupt(path, position, expected, "a bad checksum")
    if not values:
        raise corrupt(path, 0, "an intact header", "none")
    return values, position


def read_intact_frames(data: bytes, path: str) -> tuple[list[tuple[int, list[Any]]], int]:
    """Return (position, array) of each frame before the first damaged one, and the position after these
    frames.

    Raises CorruptLogError if a payload is not a msgpack array.
    """
    values: list[tuple[int, list[Any]]] = []
    position = 0
    while (payload := _payload_at(data, position)) is not None:
        values.append((position, _unpack(payload, path, position)))
        position += _HEADER.size + len(payload)
    return values, position


def frames_after(data: bytes, position: int) -> Iterator[tuple[int, bytes]]:
    """Yield (position, payload) of each intact frame from ``position`` on."""
    while position < len(data):
        payload = _payload_at(data, position)
        if payload is not None:
            yield position, payload
        position += 1 if payload is None else _HEADER.size + len(payload)


def read_single_frame(data: bytes, path: str) -> list[Any]:
    """Return the array in a file of exactly one frame. Raises CorruptLogError."""
    payload = _payload_at(data, 0)
    if payload is None or _HEADER.size + len(payload) != len(data):
        raise corrupt(path, 0, "one intact frame", "something else")
    return _unpack(payload, path, 0)


def check_version(header: list[Any], path: str, format_name: str, version: int) -> None:
    """Raise StorageError for another version of the format, or CorruptLogError for another format."""
    if header[:1] != [format_name]:
        raise corrupt(path, 0, f"a header of {format_name}", f"{str(header)[:80]} with a good checksum")
    if header[1:2] != [version]:
        found = header[1] if len(header) > 1 else "none"
        raise StorageError(
            f"{path} has format version {found}, and this program reads version {version}",
            hint="a newer kafkalite wrote it; start that version again",
        )


def corrupt(path: str, position: int, expected: str, actual: str) -> CorruptLogError:
    """Return the error for damage at ``position`` of a metadata file."""
    return CorruptLogError(path=path, position=position, expected=expected, actual=actual, hint=REPAIR_HINT)


def _payload_at(data: bytes, position: int) -> bytes | None:
    """Return the payload of the frame at ``position``, or None if it is incomplete or damaged."""
    start = position + _HEADER.size
    if start > len(data):
        return None
    length, checksum = _HEADER.unpack_from(data, position)
    if not _MIN_PAYLOAD_BYTES <= length <= len(data) - start:
        return None
    payload = data[start : start + length]
    return payload if crc32c(payload) == checksum else None


def _unpack(payload: bytes, path: str, position: int) -> list[Any]:
    try:
        value = msgpack.unpackb(payload)
    except (ValueError, msgpack.UnpackException) as error:
        raise corrupt(path, position, "msgpack", str(error)) from error
    if not isinstance(value, list):
        raise corrupt(path, position, "an array", type(value).__name__)
    return value
