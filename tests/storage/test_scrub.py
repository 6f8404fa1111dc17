"""R53: the check of segments that no client reads."""

from __future__ import annotations

from typing import Any

import pytest

from kafkalite.storage.compaction_swap import SwapWork
from kafkalite.storage.damage import Damage
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.storage.scrub import CHUNK_BYTES, SegmentScrub

DIRECTORY = "/data/log"
CONFIG = LogConfig(segment_bytes=4096, index_interval_bytes=512, preallocate_min_bytes=1024)
BATCH_BYTES = 161


@pytest.fixture
def fs() -> MemoryFileSystem:
    fs = MemoryFileSystem()
    fs.make_dirs("/data")
    return fs


@pytest.fixture
def log(fs: MemoryFileSystem, make_batch: Any, sync: Any) -> Log:
    """A log with 60 batches in three segments."""
    log = Log.create(fs, DIRECTORY, CONFIG)
    for number in range(60):
        log.append(make_batch(seed=number), now_ms=1, leader_epoch=1)
    sync(log)
    return log


def path(base_offset: int) -> str:
    return f"{DIRECTORY}/{base_offset:020d}.log"


def scrub(log: Log) -> Damage | None:
    offset = 0
    while log.damage is None and (work := log.begin_scrub(offset)) is not None:
        read_bytes = 0
        while not work.is_complete:
            read_bytes += work.run()
        assert work.finding is not None or read_bytes == work.segment.size_bytes
        log.finish_scrub(work)
        offset = work.end_offset
    return log.damage


def test_sound_segments_are_read_completely(log: Log, make_batch: Any) -> None:
    assert scrub(log) is None
    log.append(make_batch(seed=100, body_bytes=2 * CHUNK_BYTES), now_ms=1, leader_epoch=1)
    for number in range(3):
        log.append(make_batch(seed=number, body_bytes=CHUNK_BYTES // 2), now_ms=1, leader_epoch=1)
    assert scrub(log) is None


@pytest.mark.parametrize("base_offset", [0, 25, 50])
@pytest.mark.parametrize("number", [0, 3, 9])
@pytest.mark.parametrize("position", [0, 7, 8, 17, 60, 100, BATCH_BYTES - 1])
def test_r53_one_flipped_bit_in_a_segment_that_nobody_reads(
    base_offset: int, number: int, position: int, fs: MemoryFileSystem, log: Log
) -> None:
    file, at = fs.open(path(base_offset)), number * BATCH_BYTES + position
    file.write_at(at, bytes([file.read_at(at, 1)[0] ^ 4]))
    damage = scrub(log)
    assert damage is not None
    assert (damage.sound_end_offset, damage.records_in_doubt) == (base_offset + number, 1)


@pytest.mark.parametrize("base_offset", [0, 25])
def test_r53_a_segment_of_another_log_or_a_short_one(
    base_offset: int, fs: MemoryFileSystem, log: Log, make_batch: Any
) -> None:
    other = Log.create(fs, "/data/other", CONFIG)
    for number in range(60):
        other.append(make_batch(seed=1000 + number), now_ms=1, leader_epoch=1)
    own, foreign = fs.read_bytes(path(base_offset)), fs.read_bytes(f"/data/other/{base_offset:020d}.log")
    for content in (foreign, own[: 9 * BATCH_BYTES], own[: 9 * BATCH_BYTES + 30], b""):
        fs.write_atomically(path(base_offset), content)
        work = log.begin_scrub(base_offset)
        assert work is not None
        while not work.is_complete:
            work.run()
        assert work.finding is not None
        is_short = content and content != foreign
        assert work.finding.sound_end_offset == base_offset + (9 if is_short else 0)
        assert log.damage is None, "the check alone decides nothing"


def test_damage_in_a_segment_that_was_truncated_or_replaced_meanwhile_is_ignored(
    fs: MemoryFileSystem, log: Log
) -> None:
    for change in (lambda: log.truncate_to(55), lambda: log.delete_before(30)):
        work = log.begin_scrub(0)
        assert work is not None
        fs.open(path(work.segment.base_offset)).write_at(100, b"\xff\xff")
        work.run()
        assert work.finding is not None
        change()
        log.finish_scrub(work)
        assert log.damage is None
    work = _failed_scrub(fs, log)
    log._swap = SwapWork(fs, DIRECTORY, [work.segment], work.segment, "", "", 0)
    log.finish_scrub(work)
    assert log.damage is None
    log._swap = None
    log.finish_scrub(work)
    assert log.damage is not None


def _failed_scrub(fs: MemoryFileSystem, log: Log) -> SegmentScrub:
    work = log.begin_scrub(0)
    assert work is not None
    fs.open(path(work.segment.base_offset)).write_at(100, b"\xff\xff")
    work.run()
    return work
