"""The replay of a new coordinator: every kind of batch, and nothing that is damaged."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkalite.broker.coordination.loader import replay_batches
from kafkalite.coordinator_types import Instant, StateRecord
from kafkalite.errors import CorruptBatchError
from kafkalite.model import NO_PRODUCER_ID
from kafkalite.records.builder import build_batch
from kafkalite.records.control import build_marker
from kafkalite.records.header import HEADER_BYTES, Codec, stamp
from kafkalite.records.single import read_single

NOW = Instant(1, 2)


class Told:
    """A machine that records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def replay(self, record: StateRecord, now: Instant, *, producer_id: int = NO_PRODUCER_ID) -> None:
        assert now == NOW
        self.calls.append((record.key, record.value, producer_id))

    def end_transaction(self, producer_id: int, *, is_commit: bool) -> None:
        self.calls.append((producer_id, is_commit))


def log_of(*batches: bytes | bytearray) -> memoryview:
    return memoryview(b"".join(batches))


def test_every_kind_of_batch() -> None:
    told = Told()
    count = replay_batches(
        told,
        log_of(
            build_batch([b"1"], [b"a"], 1),
            build_batch([None], [b"a"], 1),
            build_batch([b"2", None, b"3"], [b"b", b"c", b"d"], 1),
            build_batch([b"nobody's"], None, 1),
            build_batch([b"4", b"5"], [None, b"e"], 1),
            build_batch([b"6" * 300], [b"f"], 1, codec=Codec.GZIP),
            build_batch([b"7"], [b"g"], 1, producer_id=9, producer_epoch=0, transactional=True),
            build_marker(9, 1, 5, True, 1),
            build_marker(8, 1, 5, False, 1),
        ),
        NOW,
    )
    assert told.calls == [
        (b"a", b"1", -1),
        (b"a", None, -1),
        (b"b", b"2", -1),
        (b"c", None, -1),
        (b"d", b"3", -1),
        (b"e", b"5", -1),
        (b"f", b"6" * 300, -1),
        (b"g", b"7", 9),
        (9, True),
        (8, False),
    ]
    assert count == 10


def test_gaps_left_by_compaction_are_skipped() -> None:
    gaps = pytest.importorskip("kafkalite.records.gaps")
    told = Told()
    gap = gaps.build_gap(3, 700, 2)
    assert replay_batches(told, log_of(gap, build_batch([b"1"], [b"a"], 1)), NOW) == 1
    assert told.calls == [(b"a", b"1", -1)]


@pytest.mark.parametrize("position", range(0, 90, 3))
def test_damage_is_never_replayed(position: int) -> None:
    batch = build_batch([b"value"], [b"key"], 1)
    stamp(batch, base_offset=7, leader_epoch=3)
    if position >= len(batch):
        return
    batch[position] ^= 0x10
    told = Told()
    is_covered = position < 8 or 12 <= position < 16  # the leader writes offset and leader epoch
    if is_covered:
        assert replay_batches(told, log_of(batch), NOW) == 1
    else:
        with pytest.raises(CorruptBatchError):
            replay_batches(told, log_of(batch), NOW)
        assert not told.calls


@pytest.mark.parametrize("length", [1, 20, 60, 70])
def test_a_batch_that_is_cut_off(length: int) -> None:
    with pytest.raises(CorruptBatchError):
        replay_batches(Told(), log_of(build_batch([b"value"], [b"key"], 1)[:length]), NOW)


@given(st.none() | st.binary(max_size=300), st.none() | st.binary(max_size=300), st.booleans())
def test_a_single_record_is_read_as_any_batch(
    key: bytes | None, value: bytes | None, has_headers: bool
) -> None:
    headers = [[("name", b"x")]] if has_headers else None
    batch = bytes(build_batch([value], [key], 1, headers))
    row = read_single(batch, HEADER_BYTES, len(batch))
    if row is None:
        assert has_headers or key is None or max(len(key), len(value or b"")) > 255
    else:
        assert row == (key, value)
    told = Told()
    assert replay_batches(told, memoryview(batch), NOW) == 1
    assert told.calls == ([] if key is None else [(key, value, -1)])


@given(st.binary(max_size=60))
def test_no_bytes_make_it_fail(body: bytes) -> None:
    row = read_single(body, 0, len(body))
    assert row is None or isinstance(row[0], bytes)
