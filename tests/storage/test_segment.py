"""A segment without a log: allocating ahead, saving and loading its indexes."""

from __future__ import annotations

from typing import Any

import pytest

from kafkalite.errors import CorruptLogError, DiskFullError
from kafkalite.storage.checkpoints import LogState
from kafkalite.storage.index_block import BLOCK_HEADER_BYTES, OFFSET_ENTRY_BYTES, OFFSET_MAGIC, decode_blocks
from kafkalite.storage.inspect import read_index
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.storage.segment import RESERVE_BYTES, SAVE_INDEX_ENTRIES, Segment

KIB = 1024
MIB = 1024 * KIB
CONFIG = LogConfig(index_interval_bytes=0, segment_bytes=10 * MIB)
INDEX, TIME_INDEX = "/d/00000000000000000100.index", "/d/00000000000000000100.timeindex"


@pytest.fixture
def fs() -> MemoryFileSystem:
    fs = MemoryFileSystem()
    fs.make_dirs("/d")
    return fs


@pytest.fixture
def segment(fs: MemoryFileSystem) -> Segment:
    return Segment.create(fs, "/d", 100, CONFIG, LogState())


def block_count(fs: MemoryFileSystem) -> int:
    return len(list(decode_blocks(OFFSET_MAGIC, fs.read_bytes(INDEX), OFFSET_ENTRY_BYTES)))


@pytest.fixture
def fill(make_batch: Any) -> Any:
    def fill(segment: Segment, count: int, body_bytes: int = 39) -> None:
        for _ in range(count):
            offset = segment.next_offset
            batch = make_batch(base_offset=offset, body_bytes=body_bytes, timestamp_ms=offset)
            segment.append(batch, offset, offset, offset)

    return fill


def reopen(fs: MemoryFileSystem, segment: Segment, state: LogState | None = None) -> Segment:
    return Segment(
        fs,
        "/d",
        100,
        CONFIG,
        state or LogState(),
        next_offset=segment.next_offset,
        size_bytes=segment.size_bytes,
    )


def test_space_is_allocated_ahead_in_doubling_steps_up_to_the_segments_size(
    segment: Segment, fill: Any
) -> None:
    sizes = []
    while segment.size_bytes < 9 * MIB:
        fill(segment, 1, 50_000)
        if segment.allocated_bytes not in sizes:
            sizes.append(segment.allocated_bytes)
        assert segment.allocated_bytes - segment.size_bytes >= RESERVE_BYTES
    assert sizes[:4] == [66_445, 132_890, 265_780, 531_560]
    assert sizes[-1] == 10 * MIB
    segment.close_for_append()
    assert segment.file.size() == segment.allocated_bytes == segment.size_bytes


def test_on_a_nearly_full_disk_only_the_necessary_space_is_allocated(
    fs: MemoryFileSystem, segment: Segment, fill: Any
) -> None:
    fs.capacity_bytes = RESERVE_BYTES + 350 + 2 * BLOCK_HEADER_BYTES
    fill(segment, 3)
    assert segment.allocated_bytes == RESERVE_BYTES + 300
    with pytest.raises(DiskFullError):
        fill(segment, 1)
    assert segment.allocated_bytes == segment.file.size() == RESERVE_BYTES + 300
    assert (segment.size_bytes, segment.next_offset) == (300, 103)


def test_indexes_are_saved_after_enough_entries_and_only_of_synced_batches(
    fs: MemoryFileSystem, segment: Segment, fill: Any
) -> None:
    fill(segment, SAVE_INDEX_ENTRIES)
    segment.save_indexes(segment.size_bytes, final=False)
    assert block_count(fs) == 1, "one entry short: the first batch has none"
    fill(segment, 40)
    segment.save_indexes(100 * 10, final=False)
    assert block_count(fs) == 1, "little of it is synced"
    segment.save_indexes(100 * 80, final=False)
    saved = read_index(fs, INDEX)
    assert len(saved.entries) == 80
    assert saved.end_offset == 180 == saved.entries[-1].key
    assert len(read_index(fs, TIME_INDEX).entries) == 80


def test_saving_continues_where_it_ended(fs: MemoryFileSystem, segment: Segment, fill: Any) -> None:
    for _ in range(3):
        fill(segment, SAVE_INDEX_ENTRIES + 1)
        segment.save_indexes(segment.size_bytes, final=False)
    fill(segment, 3)
    segment.save_indexes(segment.size_bytes, final=True)
    segment.save_indexes(segment.size_bytes, final=True)
    saved = read_index(fs, INDEX)
    assert block_count(fs) == 5
    assert [entry.key for entry in saved.entries] == list(range(101, segment.next_offset))
    again = reopen(fs, segment)
    again.load_indexes()
    assert list(again.offset_index.positions) == list(segment.offset_index.positions)
    assert list(again.time_index.timestamps) == list(segment.time_index.timestamps)
    fill(again, SAVE_INDEX_ENTRIES + 1)
    again.save_indexes(again.size_bytes, final=True)
    assert block_count(fs) == 6


def test_an_index_that_cannot_be_saved_is_kept_in_memory(
    fs: MemoryFileSystem, segment: Segment, fill: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fill(segment, 70)
    fs.capacity_bytes = fs.used_bytes()
    segment.save_indexes(segment.size_bytes, final=True)
    assert "index not saved" in caplog.text
    fs.capacity_bytes = None
    segment.save_indexes(segment.size_bytes, final=True)
    assert len(read_index(fs, INDEX).entries) == 69


def test_an_unloaded_index_is_not_saved(fs: MemoryFileSystem, segment: Segment, fill: Any) -> None:
    fill(segment, 70)
    again = reopen(fs, segment)
    again.save_indexes(again.size_bytes, final=True)
    assert block_count(fs) == 1


def test_only_entries_on_which_both_files_agree_are_loaded(
    fs: MemoryFileSystem, segment: Segment, fill: Any
) -> None:
    for _ in range(2):
        fill(segment, 70)
        segment.save_indexes(segment.size_bytes, final=False)
    fs.open(TIME_INDEX).truncate(fs.file_size(TIME_INDEX) - 1)
    again = reopen(fs, segment)
    assert again.take_saved_indexes(1000) == (169, False)
    assert len(again.offset_index) == len(again.time_index) == 69
    again.load_indexes()
    assert len(again.offset_index) == 139
    assert not fs.exists(INDEX) and not fs.exists(TIME_INDEX), "they will be rewritten"


def test_blocks_from_before_a_truncation_hold_below_its_end_only(
    fs: MemoryFileSystem, segment: Segment, fill: Any
) -> None:
    fill(segment, 70)
    segment.save_indexes(segment.size_bytes, final=True)
    assert segment.saved_end_offset() == 170
    for truncated_to, expected in ((120, 120), (500, 170)):
        later = reopen(fs, segment, LogState(0, 1, truncated_to))
        assert later.saved_end_offset() == expected
    assert reopen(fs, segment, LogState(0, 1, 120)).take_saved_indexes(1000) == (100, 0)


def test_time_entries_that_do_not_follow_are_refused_with_their_block(
    fs: MemoryFileSystem, segment: Segment, fill: Any
) -> None:
    from kafkalite.storage.index_block import OFFSET_MAGIC, TIME_MAGIC, Block, encode_block

    fill(segment, 3)
    offsets = bytes.fromhex("00000001 00000064 00000002 000000c8")
    times = bytes.fromhex("0000000000000064 00000001 0000000000000063 00000002")
    fs.open(INDEX, create=True).write_at(
        0, encode_block(OFFSET_MAGIC, Block(0, 103, 300, offsets, segment.owner), 8)
    )
    fs.open(TIME_INDEX, create=True).write_at(
        0, encode_block(TIME_MAGIC, Block(0, 103, 300, times, segment.owner), 12)
    )
    again = reopen(fs, segment)
    assert again.take_saved_indexes(1000) == (100, 0)
    assert len(again.offset_index) == len(again.time_index) == 0


def test_an_index_with_wrong_positions_is_rebuilt(
    fs: MemoryFileSystem, segment: Segment, fill: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from kafkalite.storage.index_block import OFFSET_MAGIC, TIME_MAGIC, Block, encode_block

    fill(segment, 3)
    offsets = bytes.fromhex("00000001 00000063")
    fs.open(INDEX, create=True).write_at(
        0, encode_block(OFFSET_MAGIC, Block(0, 103, 300, offsets, segment.owner), 8)
    )
    fs.open(TIME_INDEX, create=True).write_at(
        0, encode_block(TIME_MAGIC, Block(0, 103, 300, b"", segment.owner), 12)
    )
    again = reopen(fs, segment)
    assert again.find(101).position == 100
    assert "index rebuilt" in caplog.text


def test_a_missing_offset_is_damage(fs: MemoryFileSystem, segment: Segment, fill: Any) -> None:
    fill(segment, 10)
    segment.file.write_at(300 + 16, b"\7")
    segment.offset_index.truncate_to_position(0)
    with pytest.raises(CorruptLogError, match="a batch with offset 105"):
        segment.find(105)
    segment.file.write_at(300 + 16, b"\2")
    segment.file.write_at(300 + 7, b"\xee")
    with pytest.raises(CorruptLogError):
        segment.find(103)


def test_repr_shows_the_range_and_the_size(segment: Segment, fill: Any) -> None:
    assert segment.first_timestamp_ms() == -1
    fill(segment, 2)
    assert segment.first_timestamp_ms() == 100
    assert repr(segment) == "<Segment /d [100, 102) 200 bytes>"
    assert segment.is_in_use
    segment.release()
    assert not segment.is_in_use
