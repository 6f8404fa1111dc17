"""Ranges split for tasks: like Spark's connector, and invariants."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkbridge.offsets import OffsetRange
from sparkbridge.source.splitting import cut, split


def _ranges(*sizes: int) -> list[OffsetRange]:
    return [OffsetRange("t", i, 10 * i, 10 * i + size, "id") for i, size in enumerate(sizes)]


def _sizes(ranges: list[OffsetRange]) -> list[int]:
    return [range_.size for range_ in ranges]


def test_without_bounds_a_partition_is_a_task() -> None:
    ranges = _ranges(5, 3)
    assert split(ranges) == ranges


def test_empty_ranges_are_omitted() -> None:
    assert _sizes(split(_ranges(5, 0, 3))) == [5, 3]
    assert split([]) == []
    assert split(_ranges(0, 0), min_partitions=3, max_records=2) == []


# The results of Spark's connector for the same sizes.
@pytest.mark.parametrize(
    ("sizes", "min_partitions", "expected"),
    [
        ((1, 1, 1), 3, [1, 1, 1]),
        ((4,), 4, [1, 1, 1, 1]),
        ((4, 20), 4, [4, 6, 7, 7]),
        ((0, 20), 4, [5, 5, 5, 5]),
        ((1, 1000), 4, [1, 333, 333, 334]),
        ((4, 20), 1, [4, 20]),
        ((10,), 3, [3, 3, 4]),
        ((4, 20, 0), 4, [4, 6, 7, 7]),
        ((10, 10, 1), 6, [3, 3, 4, 3, 3, 4, 1]),
        ((10_000, 15_000, 20_000), 9, [5000] * 9),
        ((500, 12_000, 15_001), 6, [500, 6000, 6000, 5000, 5000, 5001]),
        ((1, 1, 10_000), 6, [1, 1, 2500, 2500, 2500, 2500]),
        ((1, 1, 2), 4, [1, 1, 1, 1]),
        ((10,), 4, [2, 2, 3, 3]),
        ((2,), 10, [1, 1]),
    ],
)
def test_min_partitions_splits_the_large_ranges(
    sizes: tuple[int, ...], min_partitions: int, expected: list[int]
) -> None:
    assert _sizes(split(_ranges(*sizes), min_partitions=min_partitions)) == expected


def test_max_records_is_applied_before_min_partitions() -> None:
    assert _sizes(split(_ranges(10), max_records=4)) == [3, 3, 4]
    assert _sizes(split(_ranges(10, 2), max_records=5, min_partitions=2)) == [5, 5, 2]
    assert _sizes(split(_ranges(10), max_records=5, min_partitions=4)) == [2, 3, 2, 3]


def test_a_piece_keeps_its_topic_partition_and_id() -> None:
    assert cut(OffsetRange("t", 7, 100, 104, "id"), 2) == [
        OffsetRange("t", 7, 100, 102, "id"),
        OffsetRange("t", 7, 102, 104, "id"),
    ]
    assert len(cut(OffsetRange("t", 0, 0, 3), 10)) == 3


def test_offsets_beyond_float_precision_are_split_exactly() -> None:
    whole = OffsetRange("t", 0, 2**60 + 1, 2**62 + 1)
    pieces = split([whole], min_partitions=3)
    assert pieces[0].start == whole.start
    assert pieces[-1].end == whole.end
    assert max(_sizes(pieces)) - min(_sizes(pieces)) <= 1


sizes = st.lists(st.integers(0, 10_000), max_size=12)
bound = st.none() | st.integers(1, 60)


@settings(derandomize=True, deadline=None)
@given(sizes, bound, st.none() | st.integers(1, 5_000))
def test_the_pieces_add_up_to_the_ranges(
    sizes: list[int], min_partitions: int | None, most: int | None
) -> None:
    if most is not None and sum(sizes) // most > 2_000:
        most = sum(sizes)
    ranges = [OffsetRange(f"t{i % 3}", i, i, i + size) for i, size in enumerate(sizes)]
    pieces = split(ranges, min_partitions=min_partitions, max_records=most)
    left = iter(pieces)
    for whole in ranges:
        at = whole.start
        while at < whole.end:
            piece = next(left)
            assert (piece.topic, piece.partition, piece.start) == (whole.topic, whole.partition, at)
            assert piece.size > 0
            at = piece.end
        assert at == whole.end or whole.size == 0
    assert next(left, None) is None


@settings(derandomize=True, deadline=None)
@given(sizes, bound, st.none() | st.integers(10, 5_000))
def test_counts_and_sizes_are_within_bounds(
    sizes: list[int], min_partitions: int | None, most: int | None
) -> None:
    ranges = _ranges(*sizes)
    pieces = split(ranges, min_partitions=min_partitions, max_records=most)
    full = sum(size > 0 for size in sizes)
    by_most = full if most is None else sum(-(-size // most) for size in sizes)
    assert full <= len(pieces) <= sum(sizes)
    if most is not None:
        assert all(piece.size <= most for piece in pieces)
    if min_partitions is None or min_partitions <= by_most:
        assert len(pieces) == by_most
    else:
        # An aim, not a guarantee: rounding may miss it by at most half a piece for each split range.
        assert by_most <= len(pieces) <= min_partitions + by_most
