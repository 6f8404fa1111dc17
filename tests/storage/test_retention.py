from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.model import NO_TIMESTAMP
from kafkalite.storage.retention import RetentionPlan, SegmentSummary, plan_retention

SEGMENTS = [SegmentSummary(offset, offset + 10, 100, 1000 * offset // 10) for offset in range(0, 50, 10)]


def plan(segments: list[SegmentSummary] | None = None, **changes: Any) -> RetentionPlan:
    segments = SEGMENTS if segments is None else segments
    settings: dict[str, Any] = {
        "log_size_bytes": sum(segment.size_bytes for segment in segments),
        "log_start_offset": 0,
        "up_to": 1 << 60,
        "retention_ms": -1,
        "retention_bytes": -1,
        "now_ms": 0,
    }
    return plan_retention(iter(segments), **(settings | changes))


def test_without_limits_nothing_is_removed() -> None:
    assert plan(now_ms=1 << 60) == (0, 0)


def test_time_removes_whole_segments_whose_newest_record_is_older() -> None:
    assert plan(retention_ms=1000, now_ms=2000) == (1, 10)  # at exactly retention.ms a record stays
    assert plan(retention_ms=1000, now_ms=3001) == (3, 30)


def test_time_stops_at_the_first_young_segment() -> None:
    segments = [SEGMENTS[0], SEGMENTS[1]._replace(max_timestamp_ms=99_999), *SEGMENTS[2:]]
    assert plan(segments, retention_ms=10, now_ms=99_999) == (1, 10)


def test_time_removes_the_active_segment_too() -> None:
    assert plan(retention_ms=1, now_ms=1_000_000) == (5, 50)


def test_size_keeps_at_least_the_limit() -> None:
    assert plan(retention_bytes=500) == (0, 0)
    assert plan(retention_bytes=499) == (0, 0)
    assert plan(retention_bytes=400) == (1, 10)
    assert plan(retention_bytes=250) == (2, 20)
    assert plan(retention_bytes=0) == (5, 50)


def test_segments_below_the_log_start_are_removed() -> None:
    assert plan(log_start_offset=25) == (2, 25)
    assert plan(log_start_offset=30) == (3, 30)


def test_nothing_above_the_high_watermark_is_removed() -> None:
    assert plan(retention_ms=1, now_ms=1_000_000, up_to=29) == (2, 20)
    assert plan(retention_ms=1, now_ms=1_000_000, up_to=30) == (3, 30)


def test_a_segment_without_timestamps_does_not_age() -> None:
    segments = [SegmentSummary(0, 10, 100, NO_TIMESTAMP), *SEGMENTS[1:]]
    assert plan(segments, retention_ms=1, now_ms=1_000_000) == (0, 0)
    assert plan(segments, retention_bytes=0) == (5, 50)


def test_a_segment_without_records_is_removed_with_the_next_one_that_has_some() -> None:
    gap = SegmentSummary(0, 10, 100, NO_TIMESTAMP, is_gap=True)
    assert plan([gap, *SEGMENTS[1:]], retention_ms=1, now_ms=1_000_000) == (5, 50)
    assert plan([gap, *SEGMENTS[1:]], retention_ms=10**9, now_ms=1_000_000) == (0, 0)
    assert plan([gap, *SEGMENTS[1:]], retention_ms=1, now_ms=1_000_000, up_to=10) == (0, 0)


def test_an_empty_active_segment_stays() -> None:
    assert plan([SegmentSummary(0, 0, 0, NO_TIMESTAMP)], retention_bytes=0, retention_ms=0, now_ms=9) == (
        0,
        0,
    )


def test_only_the_removed_segments_and_one_more_are_read() -> None:
    def endless() -> Any:
        yield from SEGMENTS[:3]
        raise AssertionError("asked for more")

    found = plan_retention(
        endless(),
        log_size_bytes=500,
        log_start_offset=0,
        up_to=99,
        retention_ms=1000,
        retention_bytes=-1,
        now_ms=2001,
    )
    assert found == (2, 20)


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(-1, 100)), min_size=1, max_size=8),
    st.integers(-1, 1000),
    st.integers(-1, 120),
    st.integers(0, 300),
    st.integers(0, 90),
)
def test_the_remaining_segments_are_a_suffix_within_the_limits(
    shape: list[tuple[int, int]], retention_bytes: int, retention_ms: int, now_ms: int, up_to: int
) -> None:
    segments = [SegmentSummary(10 * n, 10 * n + 10, size, at) for n, (size, at) in enumerate(shape)]
    count, start = plan(
        segments, retention_bytes=retention_bytes, retention_ms=retention_ms, now_ms=now_ms, up_to=up_to
    )
    gone, kept = segments[:count], segments[count:]
    assert start == 10 * count
    assert all(segment.next_offset <= up_to for segment in gone)
    for number, segment in enumerate(gone):
        left = sum(one.size_bytes for one in segments[number + 1 :])
        old = retention_ms >= 0 and NO_TIMESTAMP != segment.max_timestamp_ms < now_ms - retention_ms
        assert old or (0 <= retention_bytes <= left)
    if kept and kept[0].next_offset <= up_to:
        left = sum(one.size_bytes for one in kept[1:])
        assert retention_bytes < 0 or left < retention_bytes
        assert (
            retention_ms < 0
            or kept[0].max_timestamp_ms in range(now_ms - retention_ms, 1000)
            or (kept[0].max_timestamp_ms == NO_TIMESTAMP)
        )
