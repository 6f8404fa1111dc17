"""Fetched batches as Arrow in Spark's schema, compared with the records that a consumer returns."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import pyarrow as pa

from kafkalite.errors import CorruptBatchError, RecordError
from kafkalite.model import Record, TimestampType
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import build_batch
from kafkalite.records.header import HEADER_BYTES, Codec, seal, stamp_log_append_time
from sparkbridge.errors import SourceSchemaError
from sparkbridge.source.columns import SparkBatchBuilder
from sparkbridge.source.schema import arrow_schema, source_schema

ALL = arrow_schema(source_schema(include_headers=True))
AS_MAP = arrow_schema(source_schema(include_headers=True, headers_as_map=True))
TIME_MS = 1_700_000_000_000
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def to_spark(
    batch: RecordBatch, topic: str, partition: int, schema: pa.Schema, start: int, end: int
) -> pa.RecordBatch:
    """Return the records with offsets from ``start`` (inclusive) to ``end`` (exclusive)."""
    builder = SparkBatchBuilder(schema, topic, partition)
    builder.add(batch, start, end)
    return builder.build()


def picked(*names: str, **types: Any) -> Any:
    return pa.schema([pa.field(name, types.get(name, ALL.field(name).type)) for name in names])


def batch(values: Sequence[bytes | None], **settings: Any) -> RecordBatch:
    return RecordBatch(build_batch(values, **settings))


def row(record: Record) -> dict[str, Any]:
    """Return the row that Spark must receive for a record."""
    return {
        "key": record.key,
        "value": record.value,
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": EPOCH + timedelta(milliseconds=record.timestamp_ms),
        "timestampType": int(record.timestamp_type),
        "headers": [{"key": name, "value": value} for name, value in record.headers] or None,
    }


def assert_holds(rows: Any, batches: Sequence[RecordBatch], start: int, end: int) -> None:
    rows.validate(full=True)
    assert rows.schema == ALL
    expected = [
        row(record) for one in batches for record in one.records("t", 3) if start <= record.offset < end
    ]
    assert rows.to_pylist() == expected


def gathered(batches: Sequence[RecordBatch], start: int, end: int, schema: Any = ALL) -> Any:
    builder = SparkBatchBuilder(schema, "t", 3)
    for one in batches:
        builder.add(one, start, end)
    return builder.build()


MIXED: dict[str, dict[str, Any]] = {
    "values alone": {},
    "keys": {"keys": [b"k%d" % i if i % 3 else None for i in range(100)]},
    "times": {"timestamps_ms": [TIME_MS + i for i in range(100)]},
    "times far apart": {"timestamps_ms": [(TIME_MS, 0)[i % 2] for i in range(100)]},
    "one time": {"timestamps_ms": TIME_MS},
    "headers": {"headers": [[("h", b"1"), ("h", None), ("ä", b"")] if i % 2 else [] for i in range(100)]},
    **{str(codec): {"codec": codec} for codec in Codec},
}


@pytest.mark.parametrize("settings", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize(
    ("start", "end"), [(0, 10**9), (1000, 1100), (1001, 1099), (1050, 1051), (1009, 1017)]
)
def test_each_column_is_that_of_the_records(settings: dict[str, Any], start: int, end: int) -> None:
    values = [b"v%d" % i * (i % 4) if i % 5 else None for i in range(100)]
    one = batch(values, base_offset=1000, **settings)
    assert_holds(to_spark(one, "t", 3, ALL, start, end), [one], start, end)


@pytest.mark.parametrize(("start", "end"), [(0, 10**9), (7, 1195), (1000, 1030)])
def test_batches_of_all_kinds_are_joined(start: int, end: int) -> None:
    values = [b"v%d" % i if i % 5 else None for i in range(100)]
    batches, offset = [], 0
    for settings in [*MIXED.values(), {}]:
        batches.append(batch(values, base_offset=offset, **settings))
        offset += 100
    batches.append(batch([None, None], base_offset=offset))
    assert_holds(gathered(batches, start, end), batches, start, end)


def test_a_gap_between_batches_shows_in_the_offsets_alone() -> None:
    batches = [batch([b"a"] * 3, base_offset=offset) for offset in (0, 3, 50, 53, 100)]
    rows = gathered(batches, 0, 1000)
    assert rows["offset"].to_pylist() == [0, 1, 2, 3, 4, 5, 50, 51, 52, 53, 54, 55, 100, 101, 102]
    assert_holds(rows, batches, 0, 1000)


def test_six_thousand_batches_of_one_record_are_one_record_batch() -> None:
    batches = [batch([b"%d" % i], base_offset=i, timestamps_ms=TIME_MS + i) for i in range(6000)]
    rows = gathered(batches, 0, 6000)
    assert rows.num_rows == 6000
    assert_holds(rows, batches, 0, 6000)


def test_log_append_time_is_every_record_s() -> None:
    stored = build_batch([b"a", b"b"], timestamps_ms=[5, 6])
    stamp_log_append_time(stored, TIME_MS)
    batches = [RecordBatch(stored), batch([b"c"], base_offset=2, timestamps_ms=7)]
    rows = gathered(batches, 0, 3)
    assert rows["timestampType"].to_pylist() == [1, 1, 0]
    assert batches[0].header.timestamp_type is TimestampType.LOG_APPEND_TIME
    assert_holds(rows, batches, 0, 3)


def test_a_record_without_timestamp_is_a_millisecond_before_1970_as_in_the_connector() -> None:
    rows = to_spark(batch([b"a"]), "t", 3, picked("timestamp"), 0, 1)
    assert rows["timestamp"].to_pylist() == [EPOCH - timedelta(milliseconds=1)]


def test_a_time_beyond_sparks_range_is_named() -> None:
    with pytest.raises(RecordError, match=r"t-3@8 to 9: a time of 9223372036854775807 ms is beyond"):
        to_spark(batch([b"a", b"b"], base_offset=8, timestamps_ms=2**63 - 1), "t", 3, ALL, 0, 10)


def test_values_are_not_copied() -> None:
    received = build_batch([b"x" * 100] * 50, keys=[b"k"] * 50)
    start = pa.py_buffer(received).address
    rows = to_spark(RecordBatch(received), "t", 3, ALL, 10, 40)
    for name in ("key", "value"):
        assert start < rows[name].buffers()[2].address < start + len(received), name


def test_only_the_requested_columns_in_their_order() -> None:
    schema = picked("offset", "value", value=pa.string())
    rows = to_spark(batch(["grün".encode(), None]), "t", 3, schema, 0, 2)
    assert rows.schema == schema
    assert rows.to_pylist() == [{"offset": 0, "value": "grün"}, {"offset": 1, "value": None}]


@pytest.mark.parametrize("before", [0, 1])
def test_bytes_that_are_not_text_are_named(before: int) -> None:
    batches = [batch([b"fine"] * 4, base_offset=0)] * before
    batches.append(batch([b"ok", "ü".encode(), b"\xff\xfe"], base_offset=40))
    with pytest.raises(SourceSchemaError, match=r"t-3@42: the value is not text.*'value binary'"):
        gathered(batches, 0, 100, picked("value", value=pa.string()))


def test_text_split_by_record_bounds_is_named_too() -> None:
    halves = "ü".encode()
    with pytest.raises(SourceSchemaError, match="t-3@0"):
        to_spark(batch([halves[:1], halves[1:]]), "t", 3, picked("value", value=pa.string()), 0, 2)


def test_headers_as_a_map_keep_the_last_of_a_name() -> None:
    headers = [[("a", b"1"), ("b", None), ("a", b"2")], [], [("c", b"")]]
    rows = to_spark(batch([b""] * 3, headers=headers), "t", 3, AS_MAP, 0, 3)
    rows.validate(full=True)
    assert rows.schema == AS_MAP
    assert [None if one is None else dict(one) for one in rows["headers"].to_pylist()] == [
        {"a": b"2", "b": None},
        None,
        {"c": b""},
    ]


def test_nothing_in_the_bounds_adds_nothing() -> None:
    builder = SparkBatchBuilder(ALL, "t", 3)
    builder.add(batch([b"a"] * 5, base_offset=10), 15, 20)
    builder.add(batch([b"a"] * 5, base_offset=10), 0, 10)
    assert (builder.row_count, builder.size_bytes) == (0, 0)


def test_builder_is_empty_after_build() -> None:
    builder = SparkBatchBuilder(ALL, "t", 3)
    builder.add(batch([b"a", b"b"]), 0, 2)
    assert builder.build().num_rows == 2
    builder.add(batch([b"c"], base_offset=2), 0, 3)
    assert builder.build()["value"].to_pylist() == [b"c"]


def offsets_at(stored: bytearray, offsets: Sequence[int]) -> int:
    return stored.index(struct.pack(f"<{len(offsets)}i", *offsets), HEADER_BYTES)


@pytest.mark.parametrize("neighbours", [0, 1])
@pytest.mark.parametrize("wrong", [-1, 7, 2**31 - 1, -(2**31)])
def test_offsets_out_of_order_are_refused_alone_and_joined(neighbours: int, wrong: int) -> None:
    stored = build_batch([b"ab", b"cde", b"f"], base_offset=5)
    struct.pack_into("<i", stored, offsets_at(stored, [0, 2, 5, 6]) + 4, wrong)
    seal(stored)
    fine = [batch([b"12345678"] * 3, base_offset=offset) for offset in (2, 8)]
    batches = [*fine[:neighbours], RecordBatch(stored), *fine[1 : 1 + neighbours]]
    for start in (0, 6):  # the whole batch, and a part that begins at the wrong offset
        with pytest.raises(CorruptBatchError, match="t-3@5: the column value is inconsistent"):
            gathered(batches, start, 100)


def test_timestamps_below_minus_one_are_refused() -> None:
    stored = build_batch([b"a", b"b"], timestamps_ms=[5, 6])
    delta = struct.pack("<2i", 0, 1)
    at = stored.index(delta, HEADER_BYTES)
    struct.pack_into("<2i", stored, at, -7, 0)
    seal(stored)
    with pytest.raises(CorruptBatchError, match="t-3@0: timestamps down to -2 ms"):
        gathered([RecordBatch(stored)], 0, 2)


def test_headers_with_another_record_count_are_refused() -> None:
    stored = build_batch([b"a", b"b"], headers=[[("n", b"v")], []])
    at = stored.index(b"\x92\x91\x92", HEADER_BYTES)
    stored[at] = 0x91
    seal(stored)
    with pytest.raises(CorruptBatchError, match="t-3@0: headers of 1 records"):
        gathered([RecordBatch(stored)], 0, 2)
