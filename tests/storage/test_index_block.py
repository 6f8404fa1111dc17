from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.storage.index_block import (
    BLOCK_HEADER_BYTES,
    OFFSET_ENTRY_BYTES,
    OFFSET_MAGIC,
    TIME_MAGIC,
    Block,
    decode_blocks,
    encode_block,
)

BLOCK = Block(3, 500, 9000, bytes(range(16)), 1, 2**32 - 1, 3, 4)
ENCODED = encode_block(OFFSET_MAGIC, BLOCK, OFFSET_ENTRY_BYTES)


def decode(data: bytes) -> list[tuple[Block, int]]:
    return list(decode_blocks(OFFSET_MAGIC, data, OFFSET_ENTRY_BYTES))


def test_blocks_are_read_back_with_their_ends() -> None:
    empty = encode_block(OFFSET_MAGIC, Block(3, 600, 9500, b""), OFFSET_ENTRY_BYTES)
    assert len(ENCODED) == BLOCK_HEADER_BYTES + 16
    assert decode(ENCODED + empty) == [(BLOCK, 64), (Block(3, 600, 9500, b""), 112)]


def test_a_block_of_the_other_index_is_ignored() -> None:
    assert list(decode_blocks(TIME_MAGIC, ENCODED, OFFSET_ENTRY_BYTES)) == []


@settings(derandomize=True, deadline=None)
@given(st.integers(0, len(ENCODED) - 1), st.integers(1, 255))
def test_any_changed_byte_ends_the_walk(position: int, change: int) -> None:
    damaged = bytearray(ENCODED)
    damaged[position] ^= change
    assert decode(bytes(damaged)) == []
    assert decode(ENCODED + bytes(damaged)) == [(BLOCK, 64)]


@settings(derandomize=True, deadline=None)
@given(st.integers(0, len(ENCODED) - 1))
def test_a_cut_block_is_ignored(length: int) -> None:
    assert decode(ENCODED[:length]) == []


@settings(derandomize=True, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_not_a_block(noise: bytes) -> None:
    assert decode(noise) == []
