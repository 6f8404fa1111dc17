"""The ranges that filters leave, compared with filtering every record."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.model import TopicPartition
from sparkbridge.offsets import OffsetRange
from sparkbridge.source.filters import Pruning

spark = pytest.importorskip("pyspark.sql.datasource")

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
RANGES = [OffsetRange("a", 0, 0, 10), OffsetRange("a", 1, 5, 10), OffsetRange("b", 0, 0, 20)]


def when(time_ms: float) -> datetime:
    return EPOCH + timedelta(milliseconds=time_ms)


def narrowed(*filters: Any) -> list[tuple[Any, ...]]:
    return [each[:4] for each in Pruning.of(filters).narrow(RANGES)]


@pytest.mark.parametrize(
    ("each", "left"),
    [
        (spark.EqualTo(("topic",), "b"), [("b", 0, 0, 20)]),
        (spark.EqualNullSafe(("topic",), "b"), [("b", 0, 0, 20)]),
        (spark.In(("topic",), ("b", None, "c")), [("b", 0, 0, 20)]),
        (spark.GreaterThan(("topic",), "a"), [("b", 0, 0, 20)]),
        (spark.EqualTo(("partition",), 1), [("a", 1, 5, 10)]),
        (spark.In(("partition",), (1, 7)), [("a", 1, 5, 10)]),
        (spark.GreaterThanOrEqual(("partition",), 1), [("a", 1, 5, 10)]),
        (spark.LessThanOrEqual(("partition",), 0), [("a", 0, 0, 10), ("b", 0, 0, 20)]),
        (spark.EqualTo(("offset",), 7), [("a", 0, 7, 8), ("a", 1, 7, 8), ("b", 0, 7, 8)]),
        (spark.EqualNullSafe(("offset",), 12), [("b", 0, 12, 13)]),
        (spark.GreaterThan(("offset",), 8), [("a", 0, 9, 10), ("a", 1, 9, 10), ("b", 0, 9, 20)]),
        (spark.GreaterThanOrEqual(("offset",), 10), [("b", 0, 10, 20)]),
        (spark.LessThan(("offset",), 6), [("a", 0, 0, 6), ("a", 1, 5, 6), ("b", 0, 0, 6)]),
        (spark.LessThanOrEqual(("offset",), 3), [("a", 0, 0, 4), ("b", 0, 0, 4)]),
        (spark.In(("offset",), (12, None, 3)), [("a", 0, 3, 10), ("a", 1, 5, 10), ("b", 0, 3, 13)]),
        (spark.LessThan(("offset",), -5), []),
        (spark.In(("offset",), (None,)), []),
        (spark.In(("timestamp",), ()), []),
        (spark.In(("topic",), (None,)), []),
    ],
    ids=str,
)
def test_one_filter(each: Any, left: list[tuple[Any, ...]]) -> None:
    assert narrowed(each) == left


@pytest.mark.parametrize(
    "each",
    [
        spark.EqualTo(("value",), b"x"),
        spark.EqualTo(("headers", "key"), "x"),
        spark.EqualTo(("topic",), None),
        spark.EqualTo(("partition",), "1"),
        spark.EqualTo(("partition",), True),
        spark.EqualTo(("offset",), 1.5),
        spark.In(("offset",), (1, "2")),
        spark.IsNotNull(("topic",)),
        spark.Not(spark.EqualTo(("topic",), "a")),
        spark.StringStartsWith(("topic",), "b"),
        spark.EqualTo(("timestamp",), datetime(2020, 1, 1)),
        spark.EqualTo(("timestamp",), "2020-01-01"),
    ],
    ids=str,
)
def test_filters_without_a_limit_are_skipped(each: Any) -> None:
    assert Pruning.of([each]) == Pruning()


def test_all_filters_must_hold() -> None:
    both = (spark.GreaterThanOrEqual(("offset",), 3), spark.LessThan(("offset",), 7))
    assert narrowed(*both, spark.EqualTo(("topic",), "a"), spark.EqualTo(("partition",), 0)) == [
        ("a", 0, 3, 7)
    ]
    assert narrowed(*both, spark.LessThan(("offset",), 5), spark.GreaterThan(("offset",), 5)) == []


@pytest.mark.parametrize(
    ("each", "from_ms"),
    [
        (spark.GreaterThanOrEqual(("timestamp",), when(1000)), 1000),
        (spark.GreaterThanOrEqual(("timestamp",), when(999.001)), 1000),
        (spark.GreaterThan(("timestamp",), when(1000)), 1001),
        (spark.GreaterThan(("timestamp",), when(999.999)), 1000),
        (spark.EqualTo(("timestamp",), when(1000)), 1000),
        (spark.EqualNullSafe(("timestamp",), when(1000)), 1000),
        (spark.In(("timestamp",), (when(3000), None, when(2000))), 2000),
        (spark.LessThan(("timestamp",), when(1000)), None),
        (spark.LessThanOrEqual(("timestamp",), when(1000)), None),
        (spark.GreaterThanOrEqual(("timestamp",), when(-1)), None),
        (
            spark.GreaterThanOrEqual(
                ("timestamp",), when(3_600_000).astimezone(timezone(timedelta(hours=2)))
            ),
            3_600_000,
        ),
    ],
    ids=str,
)
def test_a_time_is_a_lower_bound_in_whole_milliseconds(each: Any, from_ms: int | None) -> None:
    pruning = Pruning.of([each])
    assert pruning.from_ms == from_ms
    times = pruning.times(RANGES[:2])
    assert times == (
        {} if from_ms is None else {TopicPartition("a", 0): from_ms, TopicPartition("a", 1): from_ms}
    )


def test_the_latest_of_several_times_is_used() -> None:
    filters = [spark.GreaterThan(("timestamp",), when(ms)) for ms in (5, 9, 7)]
    assert Pruning.of(filters).from_ms == 10


def test_offsets_found_for_a_time_narrow() -> None:
    pruning = Pruning(from_ms=5)
    found = {TopicPartition("a", 0): 4, TopicPartition("a", 1): None}
    assert [each[:4] for each in pruning.narrow_by_time(RANGES, found)] == [("a", 0, 4, 10), ("b", 0, 0, 20)]
    beyond = {TopicPartition("a", 0): 10, TopicPartition("a", 1): 2, TopicPartition("b", 0): 19}
    assert [each[:4] for each in pruning.narrow_by_time(RANGES, beyond)] == [
        ("a", 1, 5, 10),
        ("b", 0, 19, 20),
    ]


# --- against every record --------------------------------------------------------------------------
columns = {
    "topic": st.sampled_from(["a", "b", "c", ""]),
    "partition": st.integers(-1, 3),
    "offset": st.integers(-2, 12),
    "timestamp": st.integers(-2000, 12_000).map(lambda us: EPOCH + timedelta(microseconds=us)),
}


@st.composite
def filters(draw: st.DrawFn) -> Any:
    column = draw(st.sampled_from(sorted(columns)))
    kind = draw(
        st.sampled_from(
            [
                "EqualTo",
                "EqualNullSafe",
                "GreaterThan",
                "GreaterThanOrEqual",
                "LessThan",
                "LessThanOrEqual",
                "In",
            ]
        )
    )
    value = columns[column]
    if kind == "In":
        return spark.In((column,), tuple(draw(st.lists(st.none() | value, max_size=3))))
    return getattr(spark, kind)((column,), draw(value))


def holds(each: Any, record: dict[str, Any]) -> bool:
    actual = record[each.attribute[0]]
    match type(each).__name__:
        case "EqualTo" | "EqualNullSafe":
            return bool(actual == each.value)
        case "GreaterThan":
            return bool(actual > each.value)
        case "GreaterThanOrEqual":
            return bool(actual >= each.value)
        case "LessThan":
            return bool(actual < each.value)
        case "LessThanOrEqual":
            return bool(actual <= each.value)
    return actual in each.value


@settings(derandomize=True, deadline=None, max_examples=400)
@given(
    st.lists(filters(), max_size=4),
    st.dictionaries(
        st.tuples(st.sampled_from("ab"), st.integers(0, 2)),
        st.tuples(
            st.integers(0, 3), st.lists(st.integers(-1, 12), max_size=8)
        ),  # log start; timestamps, in any order
        max_size=4,
    ),
)
def test_no_record_that_a_filter_lets_through_is_omitted(
    given_filters: list[Any], logs: dict[Any, Any]
) -> None:
    records = [
        {"topic": topic, "partition": number, "offset": start + index, "timestamp": when(time_ms)}
        for (topic, number), (start, times) in logs.items()
        for index, time_ms in enumerate(times)
    ]
    ranges = [
        OffsetRange(topic, number, start, start + len(times))
        for (topic, number), (start, times) in logs.items()
    ]
    pruning = Pruning.of(given_filters)
    left = pruning.narrow(ranges)
    found = {
        tp: next(
            (
                record["offset"]
                for record in records
                if (record["topic"], record["partition"]) == tp and record["timestamp"] >= when(from_ms)
            ),
            None,
        )
        for tp, from_ms in pruning.times(left).items()
    }
    left = pruning.narrow_by_time(left, found)
    read = {(each.topic, each.partition, offset) for each in left for offset in range(each.start, each.end)}
    wanted = {
        (record["topic"], record["partition"], record["offset"])
        for record in records
        if all(holds(each, record) for each in given_filters)
    }
    assert wanted <= read
    assert read <= {(record["topic"], record["partition"], record["offset"]) for record in records}
    exact = [each for each in given_filters if each.attribute[0] in {"topic", "partition"}]
    assert all(
        holds(each, {"topic": topic, "partition": number}) for each in exact for topic, number, _ in read
    )
