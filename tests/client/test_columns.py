"""Columns split by partition and size, against the obvious loop."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.client.producer.columns import RecordColumns, split_by_partition, split_by_size
from kafkalite.client.producer.pending_batch import BATCH_OVERHEAD_BYTES, record_size
from kafkalite.errors import RecordError, RecordTooLargeError
from kafkalite.records.builder import build_batch

_ITEM = st.none() | st.binary(max_size=200)
_HEADERS = st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=20)), max_size=3).map(tuple)


@st.composite
def _columns(draw: st.DrawFn) -> RecordColumns:
    count = draw(st.integers(1, 60))
    sized = {"min_size": count, "max_size": count}
    return RecordColumns(
        draw(st.lists(_ITEM, **sized)),
        draw(st.none() | st.lists(_ITEM, **sized)),
        draw(st.just(5) | st.lists(st.integers(0, 10**12), **sized)),
        draw(st.none() | st.lists(_HEADERS, **sized)),
    )


def _rows(columns: RecordColumns) -> list[tuple[object, ...]]:
    count = len(columns)
    times = (
        columns.timestamps_ms
        if not isinstance(columns.timestamps_ms, int)
        else [columns.timestamps_ms] * count
    )
    return list(
        zip(
            columns.values,
            columns.keys or [None] * count,
            times,
            columns.headers or [()] * count,
            strict=True,
        )
    )


@settings(derandomize=True, deadline=None)
@given(_columns(), st.integers(600, 3000), st.integers(1, 30))
def test_parts_are_within_the_limits_and_lose_nothing(
    columns: RecordColumns, limit_bytes: int, limit_records: int
) -> None:
    parts = list(split_by_size(columns, limit_bytes, limit_records))
    assert [row for part in parts for row in _rows(part)] == _rows(columns)
    for part in parts:
        assert 1 <= len(part) <= limit_records
        built = build_batch(part.values, part.keys, part.timestamps_ms, part.headers)
        assert len(built) <= limit_bytes, "the estimate is never too low"


@settings(derandomize=True, deadline=None)
@given(_columns(), st.data())
def test_partitions_keep_the_order(columns: RecordColumns, data: st.DataObject) -> None:
    count = len(columns)
    chosen = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    rows = _rows(columns)
    expected = {
        partition: [row for row, target in zip(rows, chosen, strict=True) if target == partition]
        for partition in sorted(set(chosen))
    }
    found = {partition: _rows(part) for partition, part in split_by_partition(columns, chosen)}
    assert found == expected
    assert list(found) == list(expected)


def test_one_record_above_the_limit_is_refused_before_the_first_part() -> None:
    columns = RecordColumns([b"a", b"x" * 1000, b"b"], None, 0, None)
    with pytest.raises(RecordTooLargeError, match="record 1 has 1018 bytes"):
        next(split_by_size(columns, 500, 10))


@pytest.mark.parametrize("column", ["keys", "timestamps", "headers"])
def test_columns_of_other_lengths_are_refused(column: str) -> None:
    given = {"keys": None, "timestamps": 0, "headers": None, column: [b"k"]}
    with pytest.raises(RecordError, match=f"1 {column} for 2 values"):
        RecordColumns([b"a", b"b"], given["keys"], given["timestamps"], given["headers"]).check()


@pytest.mark.parametrize("value", [b"abc", bytearray(b"abc"), "abc"])
def test_one_value_is_refused_as_a_column_of_values(value: Any) -> None:
    told = rf"the values are one {type(value).__name__}, .* \(put it into a list: \["
    with pytest.raises(RecordError, match=told):
        RecordColumns(value, None, 0, None).check()


@settings(derandomize=True, deadline=None)
@given(_ITEM, _ITEM, _HEADERS)
def test_a_records_size_is_never_understated(
    value: bytes | None, key: bytes | None, headers: tuple[tuple[str, bytes | None], ...]
) -> None:
    alone = build_batch([value], [key], [2**62], [headers])
    assert len(alone) <= record_size(value, key, headers) + BATCH_OVERHEAD_BYTES
