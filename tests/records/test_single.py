"""The batch of one record equals that of the general builder."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import build_batch
from kafkalite.records.single import build_single


@settings(derandomize=True, deadline=None)
@given(st.binary(max_size=600), st.none() | st.binary(max_size=600), st.integers(-1, 2**62))
def test_it_is_what_build_batch_makes(value: bytes, key: bytes | None, timestamp_ms: int) -> None:
    keys = None if key is None else [key]
    assert build_single(value, key, timestamp_ms) == build_batch([value], keys, timestamp_ms)


@pytest.mark.parametrize("length", [0, 255, 256, 65_535, 65_536, 1_000_000])
def test_lengths_at_every_width_of_prefix(length: int) -> None:
    batch = build_single(b"v" * length, b"k" * length, 5)
    assert batch == build_batch([b"v" * length], [b"k" * length], 5)
    (record,) = RecordBatch(batch).records("t", 0)
    assert (record.key, record.value, record.timestamp_ms) == (b"k" * length, b"v" * length, 5)
