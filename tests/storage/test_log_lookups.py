"""``Log.offset_for_bytes``, compared with adding up batches. Lookups by time are in test_log.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.errors import LogOfflineError
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.memory_filesystem import MemoryFileSystem

DIRECTORY = "/data/log"
INTERVAL_BYTES = 512
RECORDS = 3  # of each batch
Sizes = list[tuple[int, int, int]]  # (base offset, next offset, bytes)


def new_log(segment_bytes: int = 4096) -> Log:
    fs = MemoryFileSystem()
    fs.make_dirs("/data")
    return Log.create(
        fs, DIRECTORY, LogConfig(segment_bytes=segment_bytes, index_interval_bytes=INTERVAL_BYTES)
    )


def fill(log: Log, make_batch: Callable[..., bytearray], bodies: list[int]) -> Sizes:
    sizes = []
    for seed, body_bytes in enumerate(bodies):
        batch = make_batch(RECORDS, body_bytes=body_bytes, seed=seed)
        base_offset = log.append(batch, now_ms=1, leader_epoch=0).base_offset
        sizes.append((base_offset, base_offset + RECORDS, len(batch)))
    return sizes


def expected(sizes: Sizes, log_start: int, start: int, end: int, max_bytes: int) -> tuple[int, int, int]:
    """Return the expected result by adding up batch after batch."""
    start = max(start, log_start)
    touched = [one for one in sizes if max(one[0], start) < min(one[1], end)]
    total = sum(size for _, _, size in touched)
    if total <= max(max_bytes, 0):
        return end, total, total
    reached, sum_bytes = touched[0][1], touched[0][2]
    for _, next_offset, size in touched[1:]:
        if sum_bytes + size > max_bytes:
            break
        reached, sum_bytes = next_offset, sum_bytes + size
    return end if sum_bytes == total else min(reached, end), sum_bytes, total


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_range_is_measured_as_by_adding_up_batches(data: st.DataObject, make_batch: Any) -> None:
    log = new_log(data.draw(st.sampled_from([1024, 2048, 1 << 20])))
    sizes = fill(log, make_batch, data.draw(st.lists(st.integers(0, 900), max_size=30)))
    log_start = log.delete_before(data.draw(st.integers(0, log.log_end_offset)))
    for _ in range(10):
        start = data.draw(st.integers(0, log.log_end_offset + 5))
        end = data.draw(st.integers(start, log.log_end_offset + 9))
        max_bytes = data.draw(st.integers(-1, 12_000))
        found = log.offset_for_bytes(start, end, max_bytes)
        assert found == expected(sizes, log_start, start, end, max_bytes)


def test_every_limit_at_every_start(make_batch: Any) -> None:
    """Tests the edges of batches and segments, and one byte before and behind."""
    log = new_log(1024)
    sizes = fill(log, make_batch, [0, 300, 10, 900, 40, 40, 500, 0])
    assert log.segment_count >= 3
    ends = [0]
    for _, _, size in sizes:
        ends.append(ends[-1] + size)
    limits = {edge - before + step for edge in ends for before in ends for step in (-1, 0, 1)}
    for start in range(log.log_end_offset + 1):
        for limit in limits:
            found = log.offset_for_bytes(start, log.log_end_offset, limit)
            assert found == expected(sizes, 0, start, log.log_end_offset, limit)


def test_reading_piece_by_piece_reads_everything(make_batch: Any) -> None:
    log = new_log()
    fill(log, make_batch, [number * 13 % 700 for number in range(200)])
    offset = taken = 0
    while offset < log.log_end_offset:
        reached, size_bytes, total_bytes = log.offset_for_bytes(offset, log.log_end_offset, 1500)
        assert reached > offset and total_bytes == log.size_bytes - taken
        offset, taken = reached, taken + size_bytes
    assert taken == log.size_bytes


@pytest.mark.parametrize("length", [10, 300, 6000])
def test_the_cost_does_not_depend_on_the_range(
    make_batch: Any, length: int, walked: Callable[[], int]
) -> None:
    log = new_log(16 << 10)
    fill(log, make_batch, [100] * 2000)
    assert log.segment_count > 10
    for start in range(0, 6000 - length + 1, 211):
        before = walked()
        log.offset_for_bytes(start, start + length, length * 20)
        assert walked() - before < 3 * INTERVAL_BYTES  # at the start, at the end, and at the limit


def test_damage_is_reported(make_batch: Any) -> None:
    log = new_log()
    fill(log, make_batch, [200] * 30)
    segment = log._segments.segments[0]
    segment.file.write_at(0, bytes(segment.size_bytes))
    with pytest.raises(LogOfflineError):
        log.offset_for_bytes(0, log.log_end_offset, 1000)
