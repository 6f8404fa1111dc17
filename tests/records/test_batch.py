"""The view over one batch: columns, records, back-to-back batches, hostile bodies."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest

from kafkalite.errors import BatchTooLargeError, CorruptBatchError, RecordError
from kafkalite.limits import MAX_RECORDS_PER_BATCH, MIB
from kafkalite.model import Record, TimestampType
from kafkalite.records.batch import RecordBatch, iter_batches
from kafkalite.records.builder import build_batch
from kafkalite.records.compression import compress
from kafkalite.records.header import Codec, parse_header, stamp_log_append_time

CREATE_TIME = TimestampType.CREATE_TIME
NIL = b"\xc0"


def _batch() -> bytearray:
    return build_batch(
        [b"a", None, b"c"],
        [b"k", None, b""],
        [10, 11, 9],
        [(), [("h", b"1"), ("h", None)], ()],
        base_offset=40,
    )


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_records_carry_everything(kind: Callable[[bytearray], bytes]) -> None:
    batch = RecordBatch(kind(_batch()))
    expected = [
        Record("t", 3, 40, 10, CREATE_TIME, b"k", b"a", ()),
        Record("t", 3, 41, 11, CREATE_TIME, None, None, (("h", b"1"), ("h", None))),
        Record("t", 3, 42, 9, CREATE_TIME, b"", b"c", ()),
    ]
    records = batch.records("t", 3)
    assert records == expected
    assert all(type(record) is Record for record in records)
    assert all(type(record.key) in (bytes, type(None)) for record in records)
    assert len(batch) == 3
    assert batch.size_bytes == len(batch.buffer) == len(_batch())
    assert repr(batch) == f"<RecordBatch 40..42 none, {len(_batch())} bytes>"


def test_iteration_yields_records_without_an_address() -> None:
    assert [(r.topic, r.partition, r.offset, r.value) for r in RecordBatch(_batch())] == [
        ("", -1, 40, b"a"),
        ("", -1, 41, None),
        ("", -1, 42, b"c"),
    ]


def test_records_start_at_the_requested_offset() -> None:
    batch = RecordBatch(_batch())
    everything = batch.records("t", 0)
    for from_offset in range(38, 45):
        found = batch.records("t", 0, from_offset=from_offset)
        assert found == [record for record in everything if record.offset >= from_offset]
    plain = RecordBatch(build_batch([b"a", b"b"], timestamps_ms=4, base_offset=5))
    assert plain.records("t", 0, from_offset=6) == [Record("t", 0, 6, 4, CREATE_TIME, None, b"b", ())]


def test_unused_columns_are_not_expanded() -> None:
    columns = RecordBatch(build_batch([b"a", b"b"], timestamps_ms=4, base_offset=5)).columns()
    assert columns.offsets == range(5, 7)
    assert (columns.timestamps, columns.keys, columns.headers) == (4, None, None)
    assert RecordBatch(build_batch([None, None])).columns().values == [None, None]


def test_log_append_time_overrules_the_records_own() -> None:
    batch = _batch()
    stamp_log_append_time(batch, 77)
    records = RecordBatch(batch).records("t", 0)
    assert {record.timestamp_ms for record in records} == {77}
    assert {record.timestamp_type for record in records} == {TimestampType.LOG_APPEND_TIME}


def test_making_records_leaves_the_garbage_collector_as_it_was() -> None:
    batch = RecordBatch(_batch())
    assert gc.isenabled()
    batch.records("t", 0)
    assert gc.isenabled()
    gc.disable()
    try:
        batch.records("t", 0)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_crc_is_checked_unless_disabled() -> None:
    batch = _batch()
    batch[-1] ^= 0x20
    with pytest.raises(CorruptBatchError, match=r"CRC-32C is .* the header has"):
        RecordBatch(batch)
    assert RecordBatch(batch, check_crc=False).header.record_count == 3


def test_batches_are_back_to_back() -> None:
    batches = [build_batch([b"%d" % i] * 3, base_offset=3 * i) for i in range(4)]
    payload = b"".join(batches)
    found = list(iter_batches(payload))
    assert [batch.header.base_offset for batch in found] == [0, 3, 6, 9]
    assert [bytes(batch.buffer) for batch in found] == batches
    assert list(iter_batches(b"")) == []


@pytest.mark.parametrize("tail", [bytes(1), bytes(12), bytes(100), None])
def test_a_payload_that_does_not_end_with_a_batch_is_refused(tail: bytes | None) -> None:
    batch = bytes(build_batch([b"a"]))
    reader = iter_batches(batch + (batch[:-1] if tail is None else tail))
    assert next(reader).columns().values == [b"a"]
    with pytest.raises(CorruptBatchError):
        next(reader)


def test_batches_without_a_crc_check() -> None:
    batch = build_batch([b"a"])
    batch[17] ^= 1
    assert len(list(iter_batches(batch, check_crc=False))) == 1
    with pytest.raises(CorruptBatchError):
        next(iter_batches(batch))


def test_kafkas_rows_are_refused_by_name(batch_of_body: Callable[..., bytearray]) -> None:
    batch = RecordBatch(batch_of_body(b"rows", attributes=0))
    for read in (batch.columns, batch.to_arrow):
        with pytest.raises(RecordError, match="Kafka's rows, not columns"):
            read()


def test_an_unreadable_body_names_the_batch(batch_of_body: Callable[..., bytearray]) -> None:
    with pytest.raises(CorruptBatchError, match="batch at offset 9: the body"):
        RecordBatch(batch_of_body(b"", base_offset=9)).columns()


@pytest.mark.parametrize("read", ["columns", "to_arrow"])
@pytest.mark.parametrize("which", ["keys", "values"])
def test_backward_offsets_are_refused_by_every_reader(
    batch_of_body: Callable[..., bytearray], binary_of: Callable[..., bytes], read: str, which: str
) -> None:
    wrong = binary_of([0, 5, 2, 5], b"abcde")
    body = b"\x94" + NIL + (wrong + NIL if which == "keys" else NIL + wrong) + NIL
    with pytest.raises(CorruptBatchError):
        getattr(RecordBatch(batch_of_body(body, count=3)), read)()


@pytest.mark.parametrize("read", ["columns", "to_arrow"])
@pytest.mark.parametrize(
    ("base", "deltas"),
    [
        (5, b"\xc4\x08" + bytes(4) + (-7).to_bytes(4, "little", signed=True)),
        (2**62, b"\xc4\x10" + bytes(8) + (2**62).to_bytes(8, "little")),
        (2**63 - 1, b"\xc4\x08" + bytes(4) + (1).to_bytes(4, "little")),
    ],
)
def test_impossible_timestamps_are_refused_by_every_reader(
    batch_of_body: Callable[..., bytearray], read: str, base: int, deltas: bytes
) -> None:
    batch = batch_of_body(b"\x94" + deltas + NIL * 3, count=2, base_timestamp_ms=base)
    with pytest.raises(CorruptBatchError):
        getattr(RecordBatch(batch), read)()


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec is not Codec.NONE])
def test_a_compressed_bomb_is_refused_by_every_reader(
    batch_of_body: Callable[..., bytearray], codec: Codec
) -> None:
    packed = bytes(compress(codec, bytes(17 * MIB)))
    batch = RecordBatch(batch_of_body(packed, attributes=7 | codec << 8))
    for read in (batch.columns, batch.to_arrow, lambda: batch.records("t", 0)):
        with pytest.raises(BatchTooLargeError):
            read()


def test_the_largest_count_in_the_smallest_body_costs_little(batch_of_body: Callable[..., bytearray]) -> None:
    batch = batch_of_body(b"\x94" + NIL * 4, count=MAX_RECORDS_PER_BATCH)
    start = time.process_time()
    assert len(RecordBatch(batch).columns().values) == MAX_RECORDS_PER_BATCH
    assert time.process_time() - start < 1
    with pytest.raises(CorruptBatchError, match="headers of 1 records"):
        RecordBatch(batch_of_body(b"\x94" + NIL * 3 + b"\x91\x90", count=MAX_RECORDS_PER_BATCH)).columns()


def test_the_header_is_there_without_reading_the_body(batch_of_body: Callable[..., bytearray]) -> None:
    batch = batch_of_body(b"anything", base_offset=3)
    assert RecordBatch(batch).header == parse_header(batch)
