"""The batch of one record, for those who wait for each: the same bytes as ``build_batch``, sooner.

A batch of one has every length known beforehand, so it is two packs and two joins, about 2 microseconds
where columns of any length take 14.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import Final

from kafkalite.model import NO_EPOCH, NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_SEQUENCE
from kafkalite.records.checksum import crc32c
from kafkalite.records.columns import ARRAY_OF_4, NIL, binary_column, binary_parts
from kafkalite.records.header import COLUMNAR, HEADER_BYTES, LENGTH_OVERHEAD_BYTES, MAGIC

# base offset, batch length, leader epoch, magic, crc | and what the CRC covers of the header.
_UNCOVERED: Final = Struct(">qiibI")
_COVERED: Final = Struct(">hiqqqhii")

_BEFORE_COLUMNS: Final = b"".join((ARRAY_OF_4, NIL))
NO_PRODUCER: Final = (NO_PRODUCER_ID, NO_PRODUCER_EPOCH, NO_SEQUENCE)

assert _UNCOVERED.size + _COVERED.size == HEADER_BYTES


def build_single(
    value: bytes, key: bytes | None, timestamp_ms: int, producer: tuple[int, int, int] = NO_PRODUCER
) -> bytes:
    """An uncompressed batch of one record without headers. ``timestamp_ms`` is -1 or more, unchecked.

    ``producer`` is its id, epoch and the record's sequence.
    """
    key_column = NIL if key is None else b"%b%b%b" % (_column_head(len(key)), key, NIL)
    covered = b"".join(
        (
            _COVERED.pack(COLUMNAR, 0, timestamp_ms, timestamp_ms, *producer, 1),
            _BEFORE_COLUMNS,
            key_column,
            _column_head(len(value)),
            value,
            _AFTER_VALUE,
        )
    )
    length = _UNCOVERED.size + len(covered) - LENGTH_OVERHEAD_BYTES
    return _UNCOVERED.pack(0, length, NO_EPOCH, MAGIC, crc32c(covered)) + covered


_AFTER_VALUE: Final = b"".join((NIL, NIL))  # no validity; no headers


@lru_cache(maxsize=1024)
def _column_head(length: int) -> bytes:
    """What stands before the bytes of a column's one value of that length."""
    parts = binary_parts(binary_column([bytes(length)]))
    return b"".join(parts[:-2])
