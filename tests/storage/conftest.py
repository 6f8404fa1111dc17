"""Batches and helpers for the tests of storage. Batch bodies are random: storage never parses them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from kafkalite.records.header import (
    HEADER,
    HEADER_BYTES,
    LENGTH_OVERHEAD_BYTES,
    MAGIC,
    parse_header,
    scan,
    seal,
)
from kafkalite.storage import segment
from kafkalite.storage.log import Log

MakeBatch = Callable[..., bytearray]


def _make_batch(
    count: int = 1,
    *,
    body_bytes: int = 100,
    timestamp_ms: int = 1000,
    base_offset: int = 0,
    leader_epoch: int = 0,
    seed: int = 0,
) -> bytearray:
    body = random.Random(f"{seed} {count} {body_bytes} {timestamp_ms}").randbytes(body_bytes)
    batch = bytearray(HEADER_BYTES) + body
    HEADER.pack_into(
        batch,
        0,
        base_offset,
        len(batch) - LENGTH_OVERHEAD_BYTES,
        leader_epoch,
        MAGIC,
        0,
        0,
        count - 1,
        timestamp_ms,
        timestamp_ms,
        -1,
        -1,
        -1,
        count,
    )
    seal(batch)
    return batch


def _split_batches(data: bytes) -> list[tuple[int, bytes]]:
    """Split adjacent batches into (base offset, bytes)."""
    batches, position = [], 0
    while position < len(data):
        header = parse_header(data, position)
        batches.append((header.base_offset, data[position : position + header.length_bytes]))
        position += header.length_bytes
    return batches


def _read_all(log: Log, max_bytes: int = 1 << 30) -> list[tuple[int, bytes]]:
    """Return every batch from the log start on, as (base offset, bytes)."""
    batches: list[tuple[int, bytes]] = []
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        piece = log.read(offset, max_bytes=max_bytes, up_to=log.log_end_offset)
        assert piece.buffers and piece.next_offset > offset
        assert piece.size_bytes == sum(map(len, piece.buffers))
        batches += _split_batches(b"".join(piece.buffers))
        offset = piece.next_offset
    return batches


def _sync(log: Log) -> None:
    work = log.begin_sync()
    if work is not None:
        work.run()
        log.finish_sync(work, None)


@pytest.fixture(scope="session")
def make_batch() -> MakeBatch:
    """make_batch(count, body_bytes=, timestamp_ms=, base_offset=, leader_epoch=, seed=) -> bytearray"""
    return _make_batch


@pytest.fixture(scope="session")
def split_batches() -> Callable[[bytes], list[tuple[int, bytes]]]:
    return _split_batches


@pytest.fixture(scope="session")
def read_all() -> Callable[..., list[tuple[int, bytes]]]:
    return _read_all


@pytest.fixture(scope="session")
def sync() -> Callable[[Log], None]:
    return _sync


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """walked() -> the bytes of batches passed over by lookups so far; loading an index does not count"""
    walked_bytes = 0
    is_loading = False
    load = segment.Segment._walk

    def counting(view: memoryview, start: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
        nonlocal walked_bytes
        reached = start
        for batch in scan(view, start, end):
            if not is_loading:
                walked_bytes += batch[0] - reached
                reached = batch[0]
            yield batch

    def loading(self: segment.Segment, position: int, offset: int) -> tuple[int, int]:
        nonlocal is_loading
        is_loading = True
        try:
            return load(self, position, offset)
        finally:
            is_loading = False

    monkeypatch.setattr(segment, "scan", counting)
    monkeypatch.setattr(segment.Segment, "_walk", loading)
    return lambda: walked_bytes


@pytest.fixture
def torn_tail_cuts(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Return the log events about cut tails so far."""
    yield lambda: [record.getMessage() for record in caplog.records if "torn tail cut" in record.getMessage()]
