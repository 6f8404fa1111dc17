"""Partitioners: Kafka's hash by its published vectors, and each one's treatment of records without a key."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.errors import ConfigError, RecordError
from kafkalite.records.partitioners import (
    Partitioner,
    PartitionFunction,
    make_partitioner,
    murmur2,
    partition_for_key,
    partition_on_ring,
)
from kafkalite.rng import Rng, seeded_rng


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


def _make(name: str | PartitionFunction, rng: Rng, clock: list[int] | None = None) -> Partitioner:
    """Return a partitioner at the time ``clock[0]``, or 0."""
    time = clock if clock is not None else [0]
    return make_partitioner(name, rng, switch_ms=1000, now_ms=lambda: time[0])


@settings(derandomize=True, deadline=None)
@given(st.binary(max_size=200), st.integers(1, 100))
def test_murmur2_agrees_with_the_bytewise_one(key: bytes, partition_count: int) -> None:
    assert murmur2(key) == _murmur2_bytewise(key)
    expected = (_murmur2_bytewise(key) & 0x7FFFFFFF) % partition_count
    assert partition_for_key(key, partition_count) == expected
    assert partition_for_key(key, partition_count) == expected


@pytest.mark.parametrize("name", ["roundrobin", "sticky", "hash"])
def test_a_key_goes_where_kafka_sends_it(name: str) -> None:
    partitioner = _make(name, seeded_rng(1))
    for n in range(50):
        key = b"key-%d" % n
        assert partitioner.partition("t", key, b"v", 7) == partition_for_key(key, 7)


def test_roundrobin_moves_on_when_its_batch_closes() -> None:
    partitioner = _make("roundrobin", seeded_rng(1))
    partitioner.on_batch_closed("t", 0, 10)  # of a key: no keyless record was sent yet
    seen = []
    for _ in range(7):
        seen += [partitioner.partition("t", None, b"v", 3) for _ in range(2)]
        partitioner.on_batch_closed("t", 99, 10)  # of another partition
        partitioner.on_batch_closed("t", seen[-1], 10)
    assert seen == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2, 0, 0]
    assert partitioner.partition("u", None, b"v", 3) == 0


def test_roundrobin_stays_inside_the_existing_partitions() -> None:
    partitioner = _make("roundrobin", seeded_rng(1))
    assert partitioner.partition("t", None, b"v", 1) == 0
    partitioner.on_batch_closed("t", 0, 10)
    assert partitioner.partition("t", None, b"v", 3) == 1
    partitioner.on_batch_closed("t", 1, 10)
    assert partitioner.partition("t", None, b"v", 2) == 0


@pytest.mark.parametrize("partition_count", [1, 2, 3, 4, 5, 8, 12])
def test_roundrobin_spreads_full_batches_and_remnants_evenly(partition_count: int) -> None:
    partitioner = _make("roundrobin", seeded_rng(1))
    counts = [0] * partition_count
    for number in range(400):
        size = (1000, 90)[number % 2]  # each chunk of input is one full batch and a remnant
        partition = partitioner.partition("t", None, b"v", partition_count)
        assert partition is not None
        counts[partition] += size
        partitioner.on_batch_closed("t", partition, size)
    assert max(counts) - min(counts) <= 1000


def test_roundrobin_does_not_send_everything_to_a_new_partition() -> None:
    partitioner = _make("roundrobin", seeded_rng(1))
    seen = []
    for number in range(36):
        seen.append(partitioner.partition("t", None, b"v", 2 if number < 20 else 4))
        partitioner.on_batch_closed("t", seen[-1], 10)
    assert Counter(seen[20:]) == {0: 4, 1: 4, 2: 4, 3: 4}


def test_sticky_keeps_to_one_partition_until_its_batch_closes_and_then_takes_another() -> None:
    partitioner = _make("sticky", seeded_rng(2))
    seen = []
    for _ in range(200):
        chosen = {partitioner.partition("t", None, b"v", 3) for _ in range(3)}
        assert len(chosen) == 1
        seen += chosen
        partitioner.on_batch_closed("t", (seen[-1] + 1) % 3, 10)
        partitioner.on_batch_closed("t", seen[-1], 10)
    assert all(a != b for a, b in itertools.pairwise(seen))
    assert min(Counter(seen).values()) > 40 and set(seen) == {0, 1, 2}


def test_sticky_handles_one_partition_and_fewer_partitions() -> None:
    partitioner = _make("sticky", seeded_rng(3))
    assert partitioner.partition("t", None, b"v", 1) == 0
    partitioner.on_batch_closed("t", 0, 10)
    assert partitioner.partition("t", None, b"v", 1) == 0
    assert partitioner.partition("u", None, b"v", 1000) < 1000
    assert partitioner.partition("u", None, b"v", 1) == 0


def test_random_spreads_every_record_whatever_its_key() -> None:
    partitioner = _make("random", seeded_rng(4))
    counts = Counter(partitioner.partition("t", b"key", b"v", 3) for _ in range(3000))
    partitioner.on_batch_closed("t", 0, 10)
    assert set(counts) == {0, 1, 2}
    assert min(counts.values()) > 900


def test_hash_takes_a_null_key_for_an_empty_one() -> None:
    partitioner = _make("hash", seeded_rng(5))
    partitioner.on_batch_closed("t", 0, 10)
    assert partitioner.partition("t", None, b"v", 7) == partition_for_key(b"", 7)


def test_a_function_may_choose_or_decline() -> None:
    def by_value(topic: str, key: bytes | None, value: bytes | None, partition_count: int) -> int | None:
        return {b"first": 0, b"last": partition_count - 1, b"wrong": 9}.get(value or b"")

    partitioner = _make(by_value, seeded_rng(6))
    assert partitioner.partition("t", b"k", b"last", 5) == 4
    assert partitioner.partition("t", b"k", b"other", 5) == partition_for_key(b"k", 5)
    assert partitioner.partition("t", None, None, 5) == 0
    partitioner.on_batch_closed("t", 0, 10)
    assert partitioner.partition("t", None, None, 5) == 1
    with pytest.raises(RecordError, match=r"chose 9 for a record of 't'.*from 0 to 4"):
        partitioner.partition("t", b"k", b"wrong", 5)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="partitioner is 'murmur', but must be one of roundrobin"):
        _make("murmur", seeded_rng(7))


def test_a_partition_that_is_added_to_the_ring_takes_keys_and_no_others_move() -> None:
    keys = [b"key-%d" % n for n in range(10_000)]
    before = [partition_on_ring(key, 1) for key in keys]
    assert set(before) == {0}
    for count in range(2, 12):
        after = [partition_on_ring(key, count) for key in keys]
        moved = [new for old, new in zip(before, after, strict=True) if old != new]
        assert set(moved) == {count - 1}
        assert 0.6 < len(moved) / (len(keys) / count) < 1.4
        before = after


def test_the_ring_spreads_keys_and_keyless_records() -> None:
    partitioner = _make("ring", seeded_rng(8))
    counts = Counter(partitioner.partition("t", b"key-%d" % n, b"v", 20) for n in range(20_000))
    assert len(counts) == 20
    assert min(counts.values()) > 600 and max(counts.values()) < 1400
    assert partitioner.partition("t", None, b"v", 3) == 0
    partitioner.on_batch_closed("t", 0, 10)
    assert partitioner.partition("t", None, b"v", 3) == 1


def test_the_ring_is_the_same_in_every_version() -> None:
    """Keys must not move when a client is upgraded."""
    expected = [9, 7, 4, 5, 4, 0, 8, 3, 2, 7, 8, 0]
    assert [partition_on_ring(b"key-%d" % n, 10) for n in range(12)] == expected


def test_timed_keeps_to_one_partition_until_its_time_is_over() -> None:
    clock = [0]
    partitioner = _make("timed", seeded_rng(9), clock)
    seen = []
    for clock[0] in range(0, 60_000, 100):  # a batch each 100 ms
        chosen = partitioner.partition("t", None, b"v", 3)
        assert chosen is not None
        seen.append(chosen)
        partitioner.on_batch_closed("t", chosen, 10)
    runs = [len(list(group)) for _, group in itertools.groupby(seen)]
    assert runs[:-1] == [11] * (len(runs) - 1), "it changes after the batch that is closed at 1000 ms"
    assert set(seen) == {0, 1, 2}
    assert partitioner.partition("t", b"key", b"v", 7) == partition_for_key(b"key", 7)
