"""Helpers of the tests of records: fixtures, because test files don't import each other."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from kafkalite.records.header import HEADER, HEADER_BYTES, seal

MakeBatch = Callable[..., bytearray]


@pytest.fixture(scope="session")
def batch_of_body() -> MakeBatch:
    """Return a function that puts any body under a header with the right length and CRC."""

    def make(
        body: bytes, *, count: int = 1, attributes: int = 7, base_timestamp_ms: int = 0, base_offset: int = 0
    ) -> bytearray:
        header = HEADER.pack(
            base_offset,
            HEADER_BYTES - 12 + len(body),
            -1,
            2,
            0,
            attributes,
            count - 1,
            base_timestamp_ms,
            base_timestamp_ms,
            -1,
            -1,
            -1,
            count,
        )
        batch = bytearray(header + body)
        seal(batch)
        return batch

    return make


@pytest.fixture(scope="session")
def binary_of() -> Callable[..., bytes]:
    """Return a function that writes one column of keys or values byte by byte, as specified."""

    def make(
        offsets: list[int], data: bytes, validity: bytes | None = None, *, raw_offsets: bytes | None = None
    ) -> bytes:
        packed = b"".join(struct.pack("<i", offset) for offset in offsets)
        out = b"\x93"
        for part in (raw_offsets if raw_offsets is not None else packed, data, validity):
            out += b"\xc0" if part is None else b"\xc6" + struct.pack(">I", len(part)) + part
        return out

    return make
