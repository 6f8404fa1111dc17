"""The builder: records round-trip, in whatever pieces they are added; bad records change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from kafkalite.errors import BatchTooLargeError, ConfigError, RecordError
from kafkalite.limits import MAX_DECOMPRESSED_BYTES, MAX_RECORDS_PER_BATCH
from kafkalite.model import TimestampType
from kafkalite.records import builder as builder_module
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import RecordBatchBuilder, build_batch
from kafkalite.records.header import Codec, check


def test_single_records_lists_and_one_call_build_the_same_bytes() -> None:
    values = [b"one", None, b"", b"four"]
    keys = [None, b"k", b"", None]
    times = [5, 5, 7, 2]
    headers: list[Any] = [(), (("a", b"1"),), (), ()]
    singly = RecordBatchBuilder()
    for value, key, time, record_headers in zip(values, keys, times, headers, strict=True):
        singly.append(value, key, time, record_headers)
    at_once = RecordBatchBuilder()
    at_once.extend(iter(values), iter(keys), iter(times), iter(headers))
    expected = build_batch(values, keys, times, headers)
    assert singly.build() == at_once.build() == expected
    in_pieces = RecordBatchBuilder()
    in_pieces.append(values[0], keys[0], times[0], headers[0])
    in_pieces.extend(values[1:3], keys[1:3], times[1:3], headers[1:3])
    in_pieces.extend([])
    in_pieces.append(values[3], keys[3], times[3])
    assert in_pieces.build() == expected
    assert in_pieces.build() == expected  # building changes nothing
    columns = RecordBatch(expected).columns()
    assert columns.values == values
    assert columns.keys == keys
    assert columns.timestamps == times
    assert columns.headers == headers


def test_chunks_without_keys_or_headers_are_filled_with_nulls() -> None:
    builder = RecordBatchBuilder()
    builder.extend([b"a", b"b"], timestamps_ms=7)
    builder.extend([b"c"], [b"key"], [8], [[("h", None)]])
    builder.append(b"d", timestamp_ms=7)
    columns = RecordBatch(builder.build()).columns()
    assert columns.keys == [None, None, b"key", None]
    assert columns.headers == [(), (), (("h", None),), ()]
    assert columns.timestamps == [7, 7, 8, 7]


def test_a_common_timestamp_costs_nothing() -> None:
    builder = RecordBatchBuilder()
    builder.extend([b"a"], timestamps_ms=7)
    builder.extend([b"b"], timestamps_ms=[7])
    batch = builder.build()
    assert RecordBatch(batch).columns().timestamps == 7
    assert (
        batch == build_batch([b"a", b"b"], timestamps_ms=7) == build_batch([b"a", b"b"], timestamps_ms=(7, 7))
    )


def test_the_base_timestamp_is_the_first_and_deltas_may_be_negative() -> None:
    header = RecordBatch(build_batch([b"a", b"b", b"c"], timestamps_ms=[100, 3, 200])).header
    assert (header.base_timestamp_ms, header.max_timestamp_ms) == (100, 200)


def test_no_timestamp_is_minus_one() -> None:
    assert RecordBatch(build_batch([b"a"])).header.max_timestamp_ms == -1


def test_producer_fields_are_stamped() -> None:
    builder = RecordBatchBuilder(timestamp_type=TimestampType.LOG_APPEND_TIME)
    builder.append(b"v", timestamp_ms=4)
    batch = builder.build(base_offset=9, producer_id=8, producer_epoch=7, base_sequence=6, leader_epoch=5)
    header = check(batch)
    assert (header.base_offset, header.producer_id, header.producer_epoch) == (9, 8, 7)
    assert (header.base_sequence, header.leader_epoch) == (6, 5)
    assert header.timestamp_type is TimestampType.LOG_APPEND_TIME
    assert isinstance(batch, bytearray)


@pytest.mark.parametrize("codec", Codec)
def test_every_codec_round_trips(codec: Codec) -> None:
    values = [b"value %d" % i for i in range(500)]
    builder = RecordBatchBuilder(codec=codec)
    builder.extend(values)
    batch = RecordBatch(builder.build())
    assert batch.header.codec is codec
    assert batch.columns().values == values
    assert build_batch(values, codec=codec) == builder.build()
    assert str(codec) in repr(builder) and str(codec) in repr(batch)


def test_a_body_over_the_limit_is_left_uncompressed() -> None:
    value = bytes(MAX_DECOMPRESSED_BYTES - 100)
    batch = RecordBatch(build_batch([value], codec=Codec.ZSTD))
    assert batch.header.codec is Codec.ZSTD
    assert batch.columns().values == [value]
    value = bytes(MAX_DECOMPRESSED_BYTES)
    batch = RecordBatch(build_batch([value], codec=Codec.ZSTD))
    assert batch.header.codec is Codec.NONE
    assert batch.columns().values == [value]


def test_a_level_of_another_codec_is_refused_at_once() -> None:
    with pytest.raises(ConfigError):
        RecordBatchBuilder(codec=Codec.GZIP, level=22)
    assert build_batch([b"a" * 100], codec=Codec.ZSTD, level=19)


def test_mutable_values_are_copied() -> None:
    value = bytearray(b"before")
    builder = RecordBatchBuilder()
    builder.append(value, value)
    builder.extend([value])
    value[:] = b"after!"
    columns = RecordBatch(builder.build()).columns()
    assert columns.values == [b"before", b"before"]
    assert columns.keys == [b"before", None]


def test_subclasses_of_bytes_are_bytes() -> None:
    class Tagged(bytes):
        pass

    builder = RecordBatchBuilder()
    builder.append(Tagged(b"v"), Tagged(b""))
    columns = RecordBatch(builder.build()).columns()
    assert (columns.values, columns.keys) == ([b"v"], [b""])


@pytest.mark.parametrize(
    "record",
    [
        {"value": "text"},
        {"value": 1},
        {"value": b"v", "key": "text"},
        {"value": b"v", "timestamp_ms": -2},
        {"value": b"v", "timestamp_ms": 2**63},
        {"value": b"v", "timestamp_ms": 1.5},
        {"value": b"v", "timestamp_ms": None},
        {"value": b"v", "timestamp_ms": True},
        {"value": b"v", "headers": [("name", 5)]},
        {"value": b"v", "key": b"k", "headers": 5},
    ],
)
def test_a_bad_record_is_refused_without_effect(record: dict[str, Any]) -> None:
    builder = RecordBatchBuilder()
    builder.append(b"good", b"key", 1)
    before = builder.build()
    size_bytes = builder.size_bytes
    with pytest.raises(RecordError):
        builder.append(**record)
    assert builder.build() == before
    assert (len(builder), builder.record_count, builder.size_bytes) == (1, 1, size_bytes)


@pytest.mark.parametrize(
    "columns",
    [
        {"values": [b"a", "text"]},
        {"values": [b"a"], "keys": [7]},
        {"values": [b"a", b"b"], "keys": [b"k"]},
        {"values": [b"a"], "keys": (b"k", b"l")},
        {"values": [b"a"], "keys": iter(())},
        {"values": [], "keys": [b"k"]},
        {"values": [b"a", b"b"], "timestamps_ms": [1]},
        {"values": [b"a", b"b"], "timestamps_ms": [1, -2]},
        {"values": [b"a", b"b"], "timestamps_ms": [1, 2**63]},
        {"values": [b"a", b"b"], "timestamps_ms": [1, "text"]},
        {"values": [b"a", b"b"], "timestamps_ms": -2},
        {"values": [b"a", b"b"], "timestamps_ms": 2**63},
        {"values": [b"a"], "timestamps_ms": None},
        {"values": [b"a"], "headers": []},
        {"values": [b"a"], "headers": [[("n", 5)]]},
    ],
)
def test_bad_columns_are_refused_without_effect(columns: dict[str, Any]) -> None:
    builder = RecordBatchBuilder()
    builder.append(b"good", timestamp_ms=1)
    before = builder.build()
    with pytest.raises(RecordError):
        builder.extend(**columns)
    assert builder.build() == before
    with pytest.raises(RecordError):
        build_batch(**columns)


def test_fractions_among_timestamps_are_refused() -> None:
    for times in ([1, 2.5], [2.0, 2.0]):
        with pytest.raises(RecordError, match="whole number"):
            build_batch([b"a", b"b"], timestamps_ms=times)  # type: ignore[arg-type]


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(RecordError, match="at least one record"):
        RecordBatchBuilder().build()
    with pytest.raises(RecordError, match="at least one record"):
        build_batch([], [])


def test_too_many_records_are_refused() -> None:
    with pytest.raises(BatchTooLargeError, match="the limit is"):
        build_batch([None] * (MAX_RECORDS_PER_BATCH + 1))
    builder = RecordBatchBuilder()
    builder.extend([None] * MAX_RECORDS_PER_BATCH)
    assert RecordBatch(builder.build()).header.record_count == MAX_RECORDS_PER_BATCH
    with pytest.raises(BatchTooLargeError, match="the limit is"):
        builder.extend([None])


def test_too_many_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder_module, "MAX_PAYLOAD_BYTES", 1000)
    assert build_batch([b"x" * 900])
    with pytest.raises(BatchTooLargeError, match="above the limit of 1000"):
        build_batch([b"x" * 1000])


def test_clear_removes_everything() -> None:
    builder = RecordBatchBuilder()
    empty_bytes = builder.size_bytes
    builder.append(b"a", b"k", 5, [("h", b"v")])
    builder.extend([b"b"], [b"k"], [6], [[("h", b"v")]])
    builder.append(b"c")
    assert builder.record_count == len(builder) == 3
    builder.clear()
    assert (builder.record_count, builder.size_bytes) == (0, empty_bytes)
    builder.append(b"d")
    assert RecordBatch(builder.build()).columns().values == [b"d"]


@pytest.mark.parametrize("length", [0, 10, 1000])
@pytest.mark.parametrize("singly", [True, False])
def test_size_bytes_is_near_the_real_size(length: int, singly: bool) -> None:
    builder = RecordBatchBuilder()
    values = [b"v" * length] * 200
    keys = [b"key"] * 200
    headers = [(("name", b"value"),)] * 200
    if singly:
        for i, value in enumerate(values):
            builder.append(value, keys[i], i, headers[i])
    else:
        builder.extend(values, keys, range(200), headers)
    actual = len(builder.build())
    assert actual <= builder.size_bytes <= actual * 1.2
