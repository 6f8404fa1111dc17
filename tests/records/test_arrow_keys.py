"""Partitions of whole arrays of keys: exactly those of single records."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.errors import RecordError
from kafkalite.records.arrow_keys import partitions_of_keys
from kafkalite.records.partitioners import partition_for_key


def expected(keys: list[bytes | None], count: int) -> list[int | None]:
    return [None if key is None else partition_for_key(key, count) for key in keys]


@pytest.mark.parametrize("count", [1, 2, 3, 64, 1000, 2**31 - 1])
def test_every_length_and_every_count(count: int) -> None:
    rng = random.Random(count)
    keys: list[bytes | None] = [rng.randbytes(length) for length in range(300) for _ in range(5)]
    keys += [rng.randbytes(rng.choice([1, 2, 3, 4, 9, 12, 37])) for _ in range(2000)]
    keys += [None, b"", *keys[:50]]
    rng.shuffle(keys)
    found = partitions_of_keys(pa.array(keys, pa.binary()), count)
    assert found.type == pa.int32()
    assert found.to_pylist() == expected(keys, count)


@pytest.mark.parametrize("length", [1, 3, 4, 8, 31, 256, 260])
def test_keys_of_one_length(length: int) -> None:
    rng = random.Random(length)
    keys: list[bytes | None] = [rng.randbytes(length) for _ in range(500)]
    assert partitions_of_keys(pa.array(keys), 12).to_pylist() == expected(keys, 12)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.one_of(st.none(), st.binary(max_size=13)), max_size=200),
    st.integers(1, 40),
    st.integers(0, 9),
    st.sampled_from([pa.binary(), pa.large_binary(), pa.binary_view()]),
    st.booleans(),
)
def test_any_keys(
    keys: list[bytes | None], count: int, cut: int, kind: pa.DataType, is_chunked: bool
) -> None:
    array: Any = pa.array([b"padding", None, *keys, b"end"], pa.binary())[2:-1].cast(kind)
    if is_chunked:
        array = pa.chunked_array([array[:cut], array[cut:]], kind)
    assert partitions_of_keys(array, count).to_pylist() == expected(keys, count)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_text_counts_as_its_utf_8(kind: pa.DataType) -> None:
    texts = [f"ключ-{number}" for number in range(200)]
    found = partitions_of_keys(pa.array(texts, kind), 7).to_pylist()
    assert found == expected([text.encode() for text in texts], 7)


def test_without_keys() -> None:
    assert partitions_of_keys(pa.array([], pa.binary()), 3).to_pylist() == []
    assert partitions_of_keys(pa.nulls(3, pa.binary()), 3).to_pylist() == [None] * 3
    assert partitions_of_keys(pa.array([b""] * 100), 3).to_pylist() == [partition_for_key(b"", 3)] * 100


@pytest.mark.parametrize("keys", [[b"list"], pa.array([[b"a"]])])
def test_invalid_keys_are_refused(keys: Any) -> None:
    with pytest.raises(RecordError, match="cannot be keys"):
        partitions_of_keys(keys, 3)
