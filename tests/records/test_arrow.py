"""Arrow in both directions: the same records, sliced and chunked arrays, and no copies of values."""

from __future__ import annotations

import ctypes
import datetime
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest

from kafkalite.errors import CorruptBatchError, RecordError
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import RecordBatchBuilder, build_batch
from kafkalite.records.header import Codec, stamp_log_append_time


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def test_every_column_arrives() -> None:
    batch = build_batch(
        [b"a", None, b""],
        [None, b"k", b"l"],
        [5, 3, 2**40],
        [(), [("h", b"1"), ("h", None)], ()],
        base_offset=7,
    )
    table = RecordBatch(batch).to_arrow()
    table.validate(full=True)
    assert table.schema.names == ["offset", "timestamp", "key", "value", "headers"]
    assert table.schema.field("timestamp").type == pa.timestamp("ms", tz="UTC")
    assert table.column("offset").to_pylist() == [7, 8, 9]
    assert table.column("timestamp").cast(pa.int64()).to_pylist() == [5, 3, 2**40]
    assert table.column("key").to_pylist() == [None, b"k", b"l"]
    assert table.column("value").to_pylist() == [b"a", None, b""]
    assert table.column("headers").to_pylist() == [
        None,
        [{"name": "h", "value": b"1"}, {"name": "h", "value": None}],
        None,
    ]


def test_only_the_requested_columns_are_built() -> None:
    batch = RecordBatch(build_batch([b"a"], [b"k"], 5))
    assert batch.to_arrow(["value"]).to_pydict() == {"value": [b"a"]}
    assert batch.to_arrow(("key", "offset")).to_pydict() == {"key": [b"k"], "offset": [0]}
    with pytest.raises(RecordError, match="no column partition, price; there are offset, timestamp, key"):
        batch.to_arrow(["value", "partition", "price"])


def test_columns_without_content_are_nulls_or_one_timestamp() -> None:
    table = RecordBatch(build_batch([None] * 3, timestamps_ms=1_700_000_000_000)).to_arrow()
    table.validate(full=True)
    assert (
        table.column("timestamp").to_pylist()
        == [datetime.datetime(2023, 11, 14, 22, 13, 20, tzinfo=datetime.UTC)] * 3
    )
    for name in ("key", "value", "headers"):
        assert table.column(name).null_count == 3


def test_no_timestamp_and_wide_deltas() -> None:
    assert RecordBatch(build_batch([b"a"])).to_arrow().column("timestamp").cast(pa.int64()).to_pylist() == [
        -1
    ]
    times = [0, 2**50, 5]
    table = RecordBatch(build_batch([b"a"] * 3, timestamps_ms=times)).to_arrow()
    assert table.column("timestamp").cast(pa.int64()).to_pylist() == times


def test_log_append_time_is_every_rows_time() -> None:
    batch = build_batch([b"a", b"b"], timestamps_ms=[1, 2])
    stamp_log_append_time(batch, 50)
    times = RecordBatch(batch).to_arrow().column("timestamp")
    assert times.cast(pa.int64()).to_pylist() == [50, 50]


@pytest.mark.parametrize("count", [1, 1000])
def test_values_keys_and_validity_are_not_copied(count: int) -> None:
    batch = build_batch([b"value"] * count + [None], [b"key"] * count + [None])
    first = _address(batch)
    table = RecordBatch(batch).to_arrow()
    for name in ("key", "value"):
        validity, _, data = table.column(name).buffers()
        for buffer in (validity, data):
            assert first < buffer.address
            assert buffer.address + buffer.size <= first + len(batch)
    del batch  # the result keeps the bytes alive
    assert table.column("value").to_pylist() == [b"value"] * count + [None]


def test_offsets_are_aligned_whatever_lies_before_them() -> None:
    for key in (b"", b"k", b"kk", b"kkk"):
        _, offsets, _ = RecordBatch(build_batch([b"v"], [key])).to_arrow().column("value").buffers()
        assert offsets.address % 4 == 0


@pytest.mark.parametrize("codec", Codec)
def test_compressed_batches_too(codec: Codec) -> None:
    values = [b"value %d" % i for i in range(100)]
    table = RecordBatch(build_batch(values, codec=codec)).to_arrow()
    assert table.column("value").to_pylist() == values


def test_batches_make_one_table() -> None:
    batches = [RecordBatch(build_batch([b"a", b"b"], base_offset=2 * i)).to_arrow() for i in range(3)]
    assert pa.Table.from_batches(batches).column("offset").to_pylist() == list(range(6))


# --- from Arrow --------------------------------------------------------------------------------------

VALUES = [b"", b"one", None, b"three", b"f" * 300, None, b"six", b"seven", b"eight", None, b"ten"]


@pytest.mark.parametrize(
    "kind",
    [pa.binary(), pa.large_binary(), pa.string(), pa.large_string(), pa.binary_view(), pa.string_view()],
)
@pytest.mark.parametrize(
    "piece", [slice(None), slice(1, None), slice(0, 3), slice(3, 9), slice(8, 11), slice(2, 3)]
)
def test_arrays_and_their_slices_are_accepted(kind: pa.DataType, piece: slice) -> None:
    array = pa.array(VALUES, pa.binary()).cast(kind)[piece]
    expected = VALUES[piece]
    builder = RecordBatchBuilder()
    builder.extend_arrow(array, array, 5)
    assert builder.build() == build_batch(expected, expected, 5) or 0 < array.null_count < len(array)
    columns = RecordBatch(builder.build()).columns()
    assert columns.values == expected
    assert (columns.keys or [None] * len(expected)) == expected


def test_arrays_without_nulls_or_with_nothing_else() -> None:
    builder = RecordBatchBuilder()
    builder.extend_arrow(pa.array([b"a", b"", b"ccc"]))
    builder.extend_arrow(pa.nulls(2, pa.binary()))
    builder.extend_arrow(pa.nulls(2))
    builder.extend_arrow(pa.array([], pa.binary()))
    builder.append(b"last")
    values = [b"a", b"", b"ccc", None, None, None, None, b"last"]
    assert builder.record_count == len(values)
    assert builder.build() == build_batch(values)


def test_empty_values_are_accepted() -> None:
    builder = RecordBatchBuilder()
    builder.extend_arrow(pa.array([b"", b""]))
    builder.extend_arrow(pa.array([b"", b"", None, b""])[1:])
    assert RecordBatch(builder.build()).columns().values == [b"", b"", b"", None, b""]


def test_fixed_size_binary_is_accepted() -> None:
    builder = RecordBatchBuilder()
    builder.extend_arrow(pa.array([b"abcd", None], pa.binary(4)))
    assert RecordBatch(builder.build()).columns().values == [b"abcd", None]


def test_chunked_arrays_and_timestamps_of_arrow() -> None:
    values = pa.chunked_array([[b"a", None], [], [b"c"]], pa.binary())
    times = pa.chunked_array([[3], [4, 5]], pa.int64())
    builder = RecordBatchBuilder()
    builder.extend_arrow(values, pa.chunked_array([[b"k"], [b"l", None]], pa.binary()), times)
    columns = RecordBatch(builder.build()).columns()
    assert (columns.values, columns.keys, columns.timestamps) == (
        [b"a", None, b"c"],
        [b"k", b"l", None],
        [3, 4, 5],
    )


HEADERS = [[("a", b"1"), ("b", None)], [], None, [("a", b"")]]


@pytest.mark.parametrize("name_type", [pa.string(), pa.large_string(), pa.string_view()])
@pytest.mark.parametrize("wrap", [pa.list_, pa.large_list])
def test_headers_of_arrow_are_accepted(name_type: pa.DataType, wrap: Any) -> None:
    struct = pa.struct([("name", name_type), ("value", pa.binary())])
    rows = [None if row is None else [{"name": n, "value": v} for n, v in row] for row in HEADERS]
    array = pa.array([[{"name": "x", "value": b"x"}], *rows], wrap(struct))[1:]
    builder = RecordBatchBuilder()
    builder.extend_arrow(pa.array([b"v"] * 4), headers=array)
    assert builder.build() == build_batch([b"v"] * 4, headers=[row or () for row in HEADERS])


def test_headers_may_be_maps_or_none_at_all() -> None:
    maps = pa.array([[("a", b"1")], None], pa.map_(pa.string(), pa.binary()))
    builder = RecordBatchBuilder()
    builder.extend_arrow(pa.array([b"v"] * 2), headers=maps)
    assert RecordBatch(builder.build()).columns().headers == [(("a", b"1"),), ()]
    for nothing in (maps[1:], pa.array([[]], pa.map_(pa.string(), pa.binary())), pa.nulls(1)):
        builder.clear()
        builder.extend_arrow(pa.array([b"v"]), headers=nothing)
        assert RecordBatch(builder.build()).columns().headers is None


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        (["list"], "list is not an Arrow array"),
        (pa.array([1]), "int64 cannot be headers"),
        (pa.array([["a"]]), "cannot be headers"),
        (pa.array([[{"name": None, "value": b""}]]), "a header, or its name, is null"),
        (pa.array([[None]], pa.list_(pa.struct([("n", pa.string()), ("v", pa.binary())]))), "is null"),
        (pa.array([[{"name": "a", "value": 1}]]), "cannot be headers"),
        (pa.array([[{"name": "a", "value": b"", "more": b""}]]), "cannot be headers"),
        (pa.nulls(2), "2 headers for 1 values"),
    ],
)
def test_invalid_headers_are_refused(headers: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        RecordBatchBuilder().extend_arrow(pa.array([b"v"]), headers=headers)


@pytest.mark.parametrize(
    "times", [[7, 7, 7], [5, 2**31 + 4, 6], [5, 2**31 + 5, 6], [2**40, -1, 3], [9, 8, 7]]
)
@pytest.mark.parametrize("first", [0, 1])
def test_timestamps_of_arrow_build_what_lists_build(times: list[int], first: int) -> None:
    builder = RecordBatchBuilder()
    values = [b"v"] * (3 - first)
    builder.extend_arrow(pa.array(values), timestamps_ms=pa.array(times)[first:])
    assert builder.build() == build_batch(values, timestamps_ms=times[first:])
    builder.append(b"w", None, 1)
    assert builder.build() == build_batch([*values, b"w"], timestamps_ms=[*times[first:], 1])


def test_timestamps_that_leave_64_bits_are_refused() -> None:
    builder = RecordBatchBuilder()
    with pytest.raises(RecordError, match="cannot be timestamps"):
        builder.extend_arrow(pa.array([b"v"]), timestamps_ms=pa.array([2**62], pa.timestamp("s")))
    builder.extend_arrow(pa.array([b"v", b"w"]), timestamps_ms=pa.array([-1, 2**63 - 1]))
    with pytest.raises(RecordError, match="too far apart"):
        builder.build()


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Paris"])
def test_timestamps_of_any_unit_become_milliseconds(unit: str, zone: str | None) -> None:
    moments = [1_700_000_000, 1_700_000_001]
    scale = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    times = pa.array([moment * scale for moment in moments], pa.timestamp(unit, tz=zone))
    builder = RecordBatchBuilder()
    builder.extend_arrow(pa.array([b"a", b"b"]), timestamps_ms=times)
    assert RecordBatch(builder.build()).columns().timestamps == [moment * 1000 for moment in moments]


def test_timestamps_may_be_a_list() -> None:
    builder = RecordBatchBuilder()
    builder.extend_arrow(pa.array([b"a", b"b"]), timestamps_ms=[1, 5])
    assert RecordBatch(builder.build()).columns().timestamps == [1, 5]


def test_finer_timestamps_lose_their_fraction() -> None:
    builder = RecordBatchBuilder()
    builder.extend_arrow(pa.array([b"a", b"b"]), timestamps_ms=pa.array([1999, 5000], pa.timestamp("us")))
    assert RecordBatch(builder.build()).columns().timestamps == [1, 5]


@pytest.mark.parametrize(
    ("values", "keys", "times", "message"),
    [
        (pa.array([1, 2]), None, 1, "int64 cannot be keys or values"),
        ([b"list"], None, 1, "list is not an Arrow array"),
        (pa.array([b"a"]), pa.array([b"a", b"b"]), 1, "2 keys for 1 values"),
        (pa.array([], pa.binary()), pa.array([b"a"]), 1, "1 keys for 0 values"),
        (pa.array([b"a"]), None, pa.array([1, 2]), "2 timestamps for 1 values"),
        (pa.array([b"a"]), None, pa.array([None], pa.int64()), "a timestamp is null"),
        (pa.array([b"a"]), None, pa.array(["x"]), "string cannot be timestamps"),
        (pa.array([b"a"]), None, pa.array([-2]), "timestamp -2 is not a whole number"),
        (pa.array([b"a"]), None, -2, "timestamp -2 is not a whole number"),
    ],
)
def test_invalid_columns_are_refused_without_effect(
    values: object, keys: object, times: object, message: str
) -> None:
    builder = RecordBatchBuilder()
    builder.append(b"good")
    before = builder.build()
    with pytest.raises(RecordError, match=message):
        builder.extend_arrow(values, keys, times)  # type: ignore[arg-type]
    assert builder.build() == before


def test_an_inconsistent_array_is_refused() -> None:
    offsets = pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 9, 1)))
    array = pa.Array.from_buffers(pa.binary(), 2, [None, offsets, pa.py_buffer(b"a")])
    with pytest.raises(RecordError, match="cannot be keys or values: Offset"):
        RecordBatchBuilder().extend_arrow(array)


def test_arrow_there_and_back() -> None:
    table = RecordBatch(build_batch(VALUES, list(reversed(VALUES)), range(11))).to_arrow()
    builder = RecordBatchBuilder()
    builder.extend_arrow(table.column("value"), table.column("key"), table.column("timestamp"))
    again = RecordBatch(builder.build()).to_arrow()
    assert again.equals(table)


def test_a_table_of_damaged_columns_is_refused() -> None:
    batch = build_batch([b"abc", b"def"])
    position = batch.index(b"\x93\xc4") + 3 + 4
    batch[position : position + 4] = (100).to_bytes(4, "little")
    with pytest.raises(CorruptBatchError, match="are inconsistent"):
        RecordBatch(batch, check_crc=False).to_arrow()


def test_pyarrow_is_not_imported_until_asked_for() -> None:
    code = (
        "import sys; from kafkalite.records.batch import RecordBatch;"
        "from kafkalite.records.builder import build_batch;"
        "RecordBatch(build_batch([b'a'])).columns();"
        "assert not {'pyarrow', 'numpy', 'cramjam'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
