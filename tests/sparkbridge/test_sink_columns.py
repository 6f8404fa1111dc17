from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from kafkalite.errors import RecordError, RecordTooLargeError
from kafkalite.records.builder import RecordBatchBuilder
from kafkalite.records.partitioners import partition_for_key
from sparkbridge.sink.columns import (
    BATCH_BYTES,
    NO_PARTITION,
    PartitionSlice,
    Records,
    Splitter,
    cut,
    joined,
    record_overhead,
)
from sparkbridge.sink.schema import SINK_COLUMNS, SinkColumns

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
TYPES = {
    "value": pa.binary(),
    "key": pa.binary(),
    "headers": HEADERS,
    "topic": pa.string(),
    "partition": pa.int32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}


def batch_of(types: dict[str, Any] | None = None, **columns: Sequence[Any]) -> Any:
    types = {**TYPES, **(types or {})}
    arrays = [pa.array(values, types[name]) for name, values in columns.items()]
    return pa.record_batch(arrays, names=list(columns))


def columns_of(batch: Any) -> SinkColumns:
    return SinkColumns(**{name: batch.schema.get_field_index(name) for name in batch.schema.names})


def split(
    batch: Any, topic: str | None = "t", partitioner: str = "roundrobin", partitions: int = 3
) -> list[PartitionSlice]:
    numbers = count()
    columns = columns_of(batch)
    if topic is not None:
        columns = columns._replace(topic=None)
    splitter = Splitter(
        columns, topic, partitioner, lambda _: partitions, lambda _: next(numbers) % partitions
    )
    return list(splitter.split(batch, 1_000))


def values(slice_: PartitionSlice) -> list[Any]:
    return list(slice_.records.values.cast(pa.binary()).to_pylist())


def test_rows_without_key_are_not_copied() -> None:
    batch = batch_of(value=[b"1", b"2", None])
    (slice_,) = split(batch)
    assert (slice_.topic, slice_.partition) == ("t", NO_PARTITION)
    assert values(slice_) == [b"1", b"2", None]
    assert slice_.records.values.buffers()[2].address == batch.column(0).buffers()[2].address


def test_no_rows_make_no_slice() -> None:
    assert split(batch_of(value=[])) == []


def test_a_column_of_null_keys_counts_as_no_key() -> None:
    (slice_,) = split(batch_of(value=[b"1"], key=[None]))
    assert slice_.partition == NO_PARTITION
    assert slice_.records.keys is None


def test_keys_go_where_the_client_sends_them_in_order() -> None:
    keys = [f"k{number % 7}".encode() for number in range(100)]
    slices = split(batch_of(value=[b"%d" % number for number in range(100)], key=keys))
    expected: dict[int, list[bytes]] = {}
    for number, key in enumerate(keys):
        expected.setdefault(partition_for_key(key, 3), []).append(b"%d" % number)
    assert {slice_.partition: values(slice_) for slice_ in slices} == expected


def test_string_keys_are_hashed_as_their_bytes() -> None:
    slices = split(
        batch_of({"key": pa.string(), "value": pa.string()}, value=["ä"], key=["schlüssel"]), partitions=50
    )
    assert [slice_.partition for slice_ in slices] == [partition_for_key("schlüssel".encode(), 50)]


def test_rows_with_and_without_key_in_one_batch() -> None:
    slices = split(batch_of(value=[b"a", b"b", b"c"], key=[b"k", None, None]), partitions=7)
    where = {value: slice_.partition for slice_ in slices for value in values(slice_)}
    assert where == {b"a": partition_for_key(b"k", 7), b"b": 0, b"c": 0}


def test_hash_has_a_partition_for_rows_without_key() -> None:
    none = partition_for_key(b"", 7)
    slices = split(batch_of(value=[b"a", b"b"], key=[None, b"k"]), partitioner="hash", partitions=7)
    where = {value: slice_.partition for slice_ in slices for value in values(slice_)}
    assert where == {b"a": none, b"b": partition_for_key(b"k", 7)}
    (slice_,) = split(batch_of(value=[b"a", b"b"]), partitioner="hash", partitions=7)
    assert slice_.partition == none


def test_random_uses_every_partition() -> None:
    slices = split(batch_of(value=[b"x"] * 1_000, key=[b"k"] * 1_000), partitioner="random")
    assert [slice_.partition for slice_ in slices] == [0, 1, 2]
    assert sum(slice_.records.row_count for slice_ in slices) == 1_000


def test_the_column_partition_overrides_the_key() -> None:
    batch = batch_of(value=[b"a", b"b", b"c", b"d"], key=[b"k"] * 4, partition=[2, 0, 2, None])
    where: dict[int, list[bytes]] = {}
    for slice_ in split(batch, partitions=3):
        where.setdefault(slice_.partition, []).extend(values(slice_))
    expected: dict[int, list[bytes]] = {2: [b"a", b"c"], 0: [b"b"]}
    expected.setdefault(partition_for_key(b"k", 3), []).append(b"d")
    assert where == expected


def test_a_null_partition_without_key_takes_the_next() -> None:
    slices = split(batch_of(value=[b"a", b"b"], partition=[1, None]))
    assert {slice_.partition: values(slice_) for slice_ in slices} == {0: [b"b"], 1: [b"a"]}


def test_a_column_of_null_partitions_counts_as_no_partition() -> None:
    (slice_,) = split(batch_of(value=[b"a", b"b"], partition=[None, None]))
    assert slice_.partition == NO_PARTITION


@pytest.mark.parametrize("wrong", [-1, 3])
def test_a_missing_partition(wrong: int) -> None:
    with pytest.raises(RecordError, match=rf"partition {wrong}, but topic 't' has partitions 0 to 2"):
        split(batch_of(value=[b"a", b"b"], partition=[0, wrong]))


def test_a_topic_of_one_partition_checks_the_column_too() -> None:
    with pytest.raises(RecordError, match="partition 1, but topic 't' has partitions 0 to 0"):
        split(batch_of(value=[b"a"], partition=[1]), partitions=1)


def test_topics_by_the_row_keep_their_order() -> None:
    batch = batch_of(value=[b"1", b"2", b"3", b"4"], topic=["a", "b", "a", "b"])
    slices = split(batch, None)
    assert [(slice_.topic, values(slice_)) for slice_ in slices] == [("a", [b"1", b"3"]), ("b", [b"2", b"4"])]


def test_topics_and_partitions_by_the_row() -> None:
    batch = batch_of(value=[b"1", b"2", b"3"], topic=["a", "b", "a"], partition=[2, 1, 0])
    slices = split(batch, None)
    assert [(slice_.topic, slice_.partition, values(slice_)) for slice_ in slices] == [
        ("a", 0, [b"3"]),
        ("a", 2, [b"1"]),
        ("b", 1, [b"2"]),
    ]


def test_a_row_without_topic() -> None:
    with pytest.raises(RecordError, match="a row has no topic: column 'topic' is null"):
        split(batch_of(value=[b"1", b"2"], topic=["a", None]), None)


def test_the_topic_option_ignores_the_column() -> None:
    (slice_,) = split(batch_of(value=[b"1"], topic=[None]), "out")
    assert slice_.topic == "out"


def test_timestamps_are_milliseconds_whatever_the_zone() -> None:
    when = datetime(2024, 5, 6, 7, 8, 9, 123_999, tzinfo=UTC)
    batch = batch_of(
        {"timestamp": pa.timestamp("us", tz="Asia/Kolkata")}, value=[b"1", b"2"], timestamp=[when, None]
    )
    (slice_,) = split(batch)
    assert slice_.records.timestamps.to_pylist() == [int(when.timestamp() * 1000), 1_000]


def test_a_timestamp_before_1970() -> None:
    with pytest.raises(RecordError, match="before 1970"):
        split(batch_of(value=[b"1"], timestamp=[datetime(1969, 12, 31, tzinfo=UTC)]))


def test_large_arrow_types() -> None:
    large = {
        "value": pa.large_binary(),
        "key": pa.large_string(),
        "topic": pa.large_string(),
        "headers": pa.large_list(pa.struct([("key", pa.large_string()), ("value", pa.large_binary())])),
    }
    batch = batch_of(
        large, value=[b"1", b"2"], key=["k", None], topic=["a", "b"], headers=[[("h", b"1")], None]
    )
    first, second = split(batch, None)
    assert (first.topic, second.topic) == ("a", "b")
    assert values(first) == [b"1"]
    for slice_ in (first, second):
        assert [piece.row_count for piece, _ in cut(slice_.records, 1_000, 10, 20)] == [1]
    builder = RecordBatchBuilder()
    builder.extend_arrow(*first.records[:2], 0, first.records.headers)
    assert builder.record_count == 1


# --- sizes -------------------------------------------------------------------------------------------


def pieces(records: Records, limit_bytes: int, limit_records: int = 1_000_000) -> list[Records]:
    room = limit_bytes - BATCH_BYTES
    return [piece for piece, _ in cut(records, room, limit_records, _overhead(records))]


def _overhead(records: Records) -> int:
    return record_overhead(
        SinkColumns(
            0,
            key=None if records.keys is None else 1,
            headers=None if records.headers is None else 1,
            timestamp=None if records.timestamps is None else 1,
        )
    )


def built(parts: Sequence[Records]) -> bytearray:
    builder = RecordBatchBuilder()
    one = joined(parts)
    builder.extend_arrow(one.values, one.keys, 0 if one.timestamps is None else one.timestamps, one.headers)
    return builder.build()


contents = st.one_of(st.none(), st.binary(max_size=60))
rows = st.lists(
    st.tuples(
        contents,
        contents,
        st.integers(0, 2**40),
        st.one_of(st.none(), st.lists(st.tuples(st.text(max_size=5), contents), max_size=4)),
    ),
    min_size=1,
    max_size=60,
)


@given(rows, st.integers(0, 5), st.booleans(), st.booleans(), st.booleans())
def test_pieces_fit_and_are_complete(
    given_rows: Any, skip: int, has_keys: bool, has_timestamps: bool, has_headers: bool
) -> None:
    whole = Records(
        pa.array([row[0] for row in given_rows], pa.binary()),
        pa.array([row[1] for row in given_rows], pa.binary()) if has_keys else None,
        pa.array([row[2] for row in given_rows], pa.int64()) if has_timestamps else None,
        pa.array([row[3] for row in given_rows], HEADERS) if has_headers else None,
    )
    records = whole.slice(min(skip, whole.row_count - 1), whole.row_count)
    limit_bytes = 700
    parts = pieces(records, limit_bytes)
    assert [value for part in parts for value in part.values.to_pylist()] == records.values.to_pylist()
    if has_keys:
        assert [key for part in parts for key in part.keys.to_pylist()] == records.keys.to_pylist()
    for part in parts:
        assert len(built([part])) <= limit_bytes
    assert (
        len(built(parts))
        <= sum(size for _, size in cut(records, limit_bytes - BATCH_BYTES, 100, _overhead(records)))
        + BATCH_BYTES
    )


def test_a_batch_is_filled() -> None:
    records = Records(pa.array([b"x" * 100] * 10_000, pa.binary()))
    parts = pieces(records, 100_000)
    assert all(len(built([part])) > 98_000 for part in parts[:-1])


def test_ten_thousand_rows_of_a_hundred_bytes_are_one_batch() -> None:
    records = Records(pa.array([b"x" * 100] * 10_000, pa.binary()))
    assert len(pieces(records, 1 << 20)) == 1


def test_a_batch_has_no_more_records_than_allowed() -> None:
    records = Records(pa.array([b""] * 25, pa.binary()))
    assert [part.row_count for part in pieces(records, 1 << 20, limit_records=10)] == [10, 10, 5]


def test_a_row_too_large_for_any_batch() -> None:
    records = Records(pa.array([b"x", b"x" * 5_000, b"x"], pa.binary()))
    with pytest.raises(RecordTooLargeError, match=r"max\.message\.bytes"):
        pieces(records, 4_000)


def test_parts_with_and_without_keys_are_joined() -> None:
    first = Records(pa.array([b"1"]))
    second = Records(pa.array([b"2"]), pa.array([b"k"]))
    one = joined([first, second])
    assert one.values.to_pylist() == [b"1", b"2"]
    assert one.keys.to_pylist() == [None, b"k"]


def test_every_column_of_the_sink_is_known_to_these_tests() -> None:
    assert set(TYPES) == set(SINK_COLUMNS)
