r"""Pack and unpack the self-checking blocks of index files.

::

    block     0  magic          4 bytes   "KLIX" offset index, "KLTX" time index
              4  version        u16       1
              6  reserved       u16       0
              8  truncations    u32       how often the log had been truncated when the block was written
             12  entry count    u32
             16  end offset     i64       exclusive \  everything before has been synced,
             24  end position   u32       exclusive /  and its entries are in this block or in one before
             28  crc            u32       CRC-32C over bytes 0..27 and the entries
             32  entries        big-endian; "KLIX": u32 relative offset, u32 position
                                            "KLTX": i64 timestamp_ms, u32 relative offset

Blocks are appended with plain writes and never synced. A block that a crash cuts or damages fails its
CRC; it and all blocks behind it are ignored and rebuilt from the log. An intact block also proves that
the log below its end was synced, because it is written only after that.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from kafkalite.records.checksum import crc32c

OFFSET_MAGIC: Final = b"KLIX"
TIME_MAGIC: Final = b"KLTX"
VERSION: Final = 1

OFFSET_ENTRY_BYTES: Final = 8
TIME_ENTRY_BYTES: Final = 12

_HEADER: Final = struct.Struct(">4sHHIIqI")
_CRC: Final = struct.Struct(">I")
BLOCK_HEADER_BYTES: Final = _HEADER.size + _CRC.size
assert BLOCK_HEADER_BYTES == 32


class Block(NamedTuple):
    """``end_offset`` and ``end_position`` are exclusive; ``entries`` are encoded as in the file."""

    truncations: int
    end_offset: int
    end_position: int
    entries: bytes


def encode_block(magic: bytes, block: Block, entry_bytes: int) -> bytes:
    assert len(block.entries) % entry_bytes == 0
    head = _HEADER.pack(
        magic,
        VERSION,
        0,
        block.truncations,
        len(block.entries) // entry_bytes,
        block.end_offset,
        block.end_position,
    )
    crc = crc32c(head + block.entries)
    return b"".join((head, _CRC.pack(crc), block.entries))


def decode_blocks(magic: bytes, data: bytes, entry_bytes: int) -> Iterator[tuple[Block, int]]:
    """Yield the intact blocks up to the first bad one, each with the position behind it."""
    position = 0
    while position + BLOCK_HEADER_BYTES <= len(data):
        fields = _HEADER.unpack_from(data, position)
        found, version, _, truncations, count, end_offset, end_position = fields
        body = position + BLOCK_HEADER_BYTES
        end = body + count * entry_bytes
        if found != magic or version != VERSION or end > len(data):
            return
        entries = data[body:end]
        crc = crc32c(data[position : position + _HEADER.size] + entries)
        if crc != _CRC.unpack_from(data, position + _HEADER.size)[0]:
            return
        yield Block(truncations, end_offset, end_position, entries), end
        position = end


def last_block(magic: bytes, tail: bytes, entry_bytes: int) -> Block | None:
    """Return the intact block at the end of ``tail``; None if it begins before ``tail``."""
    position = tail.rfind(magic)
    while position >= 0:
        for block, end in decode_blocks(magic, tail[position:], entry_bytes):
            if position + end == len(tail):
                return block
            break
        position = tail.rfind(magic, 0, position)
    return None
