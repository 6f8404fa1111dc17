"""Control batches: the markers that end transactions (R31, R33)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.errors import CorruptBatchError
from kafkalite.model import NO_SEQUENCE
from kafkalite.records import control
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import RecordBatchBuilder, build_batch
from kafkalite.records.control import MARKER_BYTES, Marker, build_marker, check_at, parse_marker
from kafkalite.records.header import ATTRIBUTES_POSITION, check, seal, stamp, stamp_log_append_time
from kafkalite.records.single import build_single


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**15 - 1),
    st.integers(0, 2**31 - 1),
    st.booleans(),
    st.integers(0, 2**62),
)
def test_a_marker_round_trips(producer_id, epoch, coordinator_epoch, is_commit, now_ms):
    batch = build_marker(producer_id, epoch, coordinator_epoch, is_commit, now_ms)
    header = check(batch)
    assert len(batch) == MARKER_BYTES
    assert (header.is_control, header.is_transactional, header.record_count) == (True, True, 1)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (
        producer_id,
        epoch,
        NO_SEQUENCE,
    )
    assert header.base_timestamp_ms == header.max_timestamp_ms == now_ms
    assert parse_marker(batch) == Marker(is_commit, coordinator_epoch)
    assert check_at(memoryview(bytes(7) + batch), 7) == header


def test_key_and_value_are_kafkas():
    columns = RecordBatch(build_marker(1, 2, 3, True, 4)).columns()
    assert columns.keys == [b"\x00\x00\x00\x01"]
    assert columns.values == [b"\x00\x00\x00\x00\x00\x03"]
    assert RecordBatch(build_marker(1, 2, 3, False, 4)).columns().keys == [b"\x00\x00\x00\x00"]


def test_a_stamped_marker_stays_a_marker():
    batch = build_marker(1, 2, 3, False, 4)
    stamp(batch, base_offset=70, leader_epoch=9)
    stamp_log_append_time(batch, 12)
    check(batch)
    assert parse_marker(batch) == Marker(False, 3)


def _changed(position: int, value: int) -> bytearray:
    batch = build_marker(1, 2, 3, True, 4)
    batch[position] = value
    seal(batch)
    return batch


@pytest.mark.parametrize(
    "batch",
    [
        build_marker(1, 2, 3, True, 4)[:-1],
        bytearray(build_batch([b"value"], transactional=True)),
        _changed(ATTRIBUTES_POSITION + 1, 7),  # neither control nor transactional
        _changed(ATTRIBUTES_POSITION + 1, 7 | 1 << 5),  # only control
        _changed(control._KEY_AT + 3, 2),  # type 2
        _changed(control._VALUE_AT + 1, 1),  # version 1
    ],
)
def test_other_batches_are_not_markers(batch):
    with pytest.raises(CorruptBatchError, match="marker"):
        parse_marker(batch)


def test_transactional_is_a_bit_of_the_header_and_nothing_else():
    plain = build_batch([b"a", b"b"], producer_id=5, producer_epoch=1, base_sequence=0)
    marked = build_batch([b"a", b"b"], producer_id=5, producer_epoch=1, base_sequence=0, transactional=True)
    assert check(marked).attributes == check(plain).attributes | 1 << 4
    assert RecordBatch(marked).columns() == RecordBatch(plain).columns()
    builder = RecordBatchBuilder()
    builder.append(b"a", timestamp_ms=-1)
    builder.append(b"b", timestamp_ms=-1)
    assert builder.build(producer_id=5, producer_epoch=1, base_sequence=0, transactional=True) == marked
    single = build_single(b"a", None, -1, (5, 1, 0), transactional=True)
    assert single == build_batch([b"a"], producer_id=5, producer_epoch=1, base_sequence=0, transactional=True)
