"""Fetched batches as one table."""

from __future__ import annotations

import pytest

pytest.importorskip("pyarrow")

from kafkalite.client.consumer.arrow import table
from kafkalite.client.consumer.fetched_batch import FetchedBatch
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import build_batch


def test_batches_of_several_topics_are_one_table() -> None:
    first = FetchedBatch("a", 0, RecordBatch(build_batch([b"1", b"2"], [b"k", None], 5)), 1)
    second = FetchedBatch("b", 3, RecordBatch(build_batch([None], None, 6, [(("h", b"x"),)])), 0)
    found = table([first, second]).to_pydict()
    assert found["topic"] == ["a", "b"]
    assert found["partition"] == [0, 3]
    assert found["offset"] == [1, 0]
    assert found["value"] == [b"2", None]
    assert found["key"] == [None, None]
    assert found["headers"][1] == [{"name": "h", "value": b"x"}]


def test_no_batches_are_a_table_without_rows() -> None:
    batch = FetchedBatch("a", 0, RecordBatch(build_batch([b"1"])), 0)
    assert table([]).schema == table([batch]).schema
    assert table([]).num_rows == 0
