r"""Encodes and decodes the blocks of index files, which contain their own checksums.

::

    block     0  magic          4 bytes   "KLIX" offset index, "KLTX" time index
              4  version        u16       2
              6  reserved       u16       0
              8  truncations    u32       the log's truncation count when the block was written
             12  entry count    u32
             16  end offset     i64       exclusive \  all earlier batches are synced, and their
             24  end position   u32       exclusive /  entries are in this block or an earlier one
             28  owner          u32       CRC-32C of the name of the log's directory
             32  head crc       u32       the CRC field of the segment's first batch
             36  tail position  u32       where the last batch before the end begins
             40  tail crc       u32       the CRC field of that batch
             44  crc            u32       CRC-32C over bytes 0..43 and the entries
             48  entries        big-endian; "KLIX": u32 relative offset, u32 position
                                            "KLTX": i64 timestamp_ms, u32 relative offset

The owner and the two batches identify the segment: a segment file of another log, or an older version of
this one, does not have them (R42).

The block that is written with the first batch of the segment has no entries and the end position 0: it only
identifies the batch, and does not prove a sync. In a block that does not identify a batch, the fields of that
batch are 0.

Blocks are appended with plain writes and never synced. If a crash truncates or damages a block, its CRC
fails. This block and all later ones are then ignored and rebuilt from the log. An intact block whose end
position is not 0 proves that the log below its end was synced: such a block is written only after that sync.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from kafkalite.records.checksum import crc32c

OFFSET_MAGIC: Final = b"KLIX"
TIME_MAGIC: Final = b"KLTX"
VERSION: Final = 2

OFFSET_ENTRY_BYTES: Final = 8
TIME_ENTRY_BYTES: Final = 12

_HEADER: Final = struct.Struct(">4sHHIIqIIIII")
_CRC: Final = struct.Struct(">I")
BLOCK_HEADER_BYTES: Final = _HEADER.size + _CRC.size
assert BLOCK_HEADER_BYTES == 48


class Block(NamedTuple):
    """One block. ``end_offset`` and ``end_position`` are exclusive. ``entries`` is encoded as on disk."""

    truncations: int
    end_offset: int
    end_position: int
    entries: bytes
    owner: int = 0
    head_crc: int = 0
    tail_position: int = 0
    tail_crc: int = 0


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
        block.owner,
        block.head_crc,
        block.tail_position,
        block.tail_crc,
    )
    crc = crc32c(head + block.entries)
    return b"".join((head, _CRC.pack(crc), block.entries))


def decode_blocks(magic: bytes, data: bytes, entry_bytes: int) -> Iterator[tuple[Block, int]]:
    """Yield (block, its end position in ``data``) for each intact block before the first bad one."""
    position = 0
    while position + BLOCK_HEADER_BYTES <= len(data):
        fields = _HEADER.unpack_from(data, position)
        found, version, _, truncations, count, end_offset, end_position, *batches = fields
        body = position + BLOCK_HEADER_BYTES
        end = body + count * entry_bytes
        if found != magic or version != VERSION or end > len(data):
            return
        entries = data[body:end]
        crc = crc32c(data[position : position + _HEADER.size] + entries)
        if crc != _CRC.unpack_from(data, position + _HEADER.size)[0]:
            return
        yield Block(truncations, end_offset, end_position, entries, *batches), end
        position = end


def last_block(magic: bytes, tail: bytes, entry_bytes: int) -> Block | None:
    """Return the last block of an index file. ``tail`` are the last bytes of the file. Return None if the
    block is damaged or does not lie completely in ``tail``."""
    position = tail.rfind(magic)
    while position >= 0:
        for block, end in decode_blocks(magic, tail[position:], entry_bytes):
            if position + end == len(tail):
                return block
            break
        position = tail.rfind(magic, 0, position)
    return None
