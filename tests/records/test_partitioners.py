"""Partitioners: Kafka's hash by its published vectors, and each one's treatment of records without a key."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.errors import ConfigError, RecordError
from kafkalite.records.partitioners import make_partitioner, murmur2, partition_for_key
from kafkalite.rng import seeded_rng


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The vectors of Kafka's Java client, UtilsTest.testMurmur2.
        ("21", -973932308),
        ("foobar", -790332482),
        ("a-little-bit-long-string", -985981536),
        ("a-little-bit-longer-string", -1486304829),
        ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        ("abc", 479470107),
    ],
)
def test_murmur2_is_kafkas(text: str, expected: int) -> None:
    assert murmur2(text.encode()) == expected


def _murmur2_bytewise(data: bytes) -> int:
    """The algorithm step by step, as published by its author."""
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    h = 0x9747B28C ^ len(data)
    while len(data) >= 4:
        k = data[0] | data[1] << 8 | data[2] << 16 | data[3] << 24
        k = (k * m) & mask
        k ^= k >> 24
        k = (k * m) & mask
        h = (h * m) & mask
        h ^= k
        data = data[4:]
    if len(data) == 3:
        h ^= data[2] << 16
    if len(data) >= 2:
        h ^= data[1] << 8
    if len(data) >= 1:
        h ^= data[0]
        h = (h * m) & mask
    h ^= h >> 13
    h = (h * m) & mask
    h ^= h >> 15
    return h if h < 2**31 else h - 2**32


@settings(derandomize=True, deadline=None)
@given(st.binary(max_size=200), st.integers(1, 100))
def test_murmur2_agrees_with_the_bytewise_one(key: bytes, partition_count: int) -> None:
    assert murmur2(key) == _murmur2_bytewise(key)
    expected = (_murmur2_bytewise(key) & 0x7FFFFFFF) % partition_count
    assert partition_for_key(key, partition_count) == expected
    assert partition_for_key(key, partition_count) == expected


@pytest.mark.parametrize("name", ["roundrobin", "sticky", "hash"])
def test_a_key_goes_where_kafka_sends_it(name: str) -> None:
    partitioner = make_partitioner(name, seeded_rng(1))
    for n in range(50):
        key = b"key-%d" % n
        assert partitioner.partition("t", key, b"v", 7) == partition_for_key(key, 7)


def test_roundrobin_moves_on_when_its_batch_closes() -> None:
    partitioner = make_partitioner("roundrobin", seeded_rng(1))
    partitioner.on_batch_closed("t", 0)  # of a key: no keyless record was sent yet
    seen = []
    for _ in range(7):
        seen += [partitioner.partition("t", None, b"v", 3) for _ in range(2)]
        partitioner.on_batch_closed("t", 99)  # of another partition
        partitioner.on_batch_closed("t", seen[-1])
    assert seen == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2, 0, 0]
    assert partitioner.partition("u", None, b"v", 3) == 0


def test_roundrobin_stays_inside_the_existing_partitions() -> None:
    partitioner = make_partitioner("roundrobin", seeded_rng(1))
    assert partitioner.partition("t", None, b"v", 1) == 0
    partitioner.on_batch_closed("t", 0)
    assert partitioner.partition("t", None, b"v", 3) == 1
    partitioner.on_batch_closed("t", 1)
    assert partitioner.partition("t", None, b"v", 2) == 0


def test_sticky_keeps_to_one_partition_until_its_batch_closes_and_then_takes_another() -> None:
    partitioner = make_partitioner("sticky", seeded_rng(2))
    seen = []
    for _ in range(200):
        chosen = {partitioner.partition("t", None, b"v", 3) for _ in range(3)}
        assert len(chosen) == 1
        seen += chosen
        partitioner.on_batch_closed("t", (seen[-1] + 1) % 3)
        partitioner.on_batch_closed("t", seen[-1])
    assert all(a != b for a, b in itertools.pairwise(seen))
    assert min(Counter(seen).values()) > 40 and set(seen) == {0, 1, 2}


def test_sticky_handles_one_partition_and_fewer_partitions() -> None:
    partitioner = make_partitioner("sticky", seeded_rng(3))
    assert partitioner.partition("t", None, b"v", 1) == 0
    partitioner.on_batch_closed("t", 0)
    assert partitioner.partition("t", None, b"v", 1) == 0
    assert partitioner.partition("u", None, b"v", 1000) < 1000
    assert partitioner.partition("u", None, b"v", 1) == 0


def test_random_spreads_every_record_whatever_its_key() -> None:
    partitioner = make_partitioner("random", seeded_rng(4))
    counts = Counter(partitioner.partition("t", b"key", b"v", 3) for _ in range(3000))
    partitioner.on_batch_closed("t", 0)
    assert set(counts) == {0, 1, 2}
    assert min(counts.values()) > 900


def test_hash_takes_a_null_key_for_an_empty_one() -> None:
    partitioner = make_partitioner("hash", seeded_rng(5))
    partitioner.on_batch_closed("t", 0)
    assert partitioner.partition("t", None, b"v", 7) == partition_for_key(b"", 7)


def test_a_function_may_choose_or_decline() -> None:
    def by_value(topic: str, key: bytes | None, value: bytes | None, partition_count: int) -> int | None:
        return {b"first": 0, b"last": partition_count - 1, b"wrong": 9}.get(value or b"")

    partitioner = make_partitioner(by_value, seeded_rng(6))
    assert partitioner.partition("t", b"k", b"last", 5) == 4
    assert partitioner.partition("t", b"k", b"other", 5) == partition_for_key(b"k", 5)
    assert partitioner.partition("t", None, None, 5) == 0
    partitioner.on_batch_closed("t", 0)
    assert partitioner.partition("t", None, None, 5) == 1
    with pytest.raises(RecordError, match=r"chose 9 for a record of 't'.*from 0 to 4"):
        partitioner.partition("t", b"k", b"wrong", 5)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="partitioner is 'murmur', but must be one of roundrobin"):
        make_partitioner("murmur", seeded_rng(7))
