"""Where to start and end: the accepted text (position_specs), the look-ups, and the resolved positions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.model import TopicPartition
from sparkbridge.errors import SparkOptionError
from sparkbridge.offsets import Loss, TopicSnapshot
from sparkbridge.position_specs import (
    EARLIEST,
    GROUP,
    LATEST,
    Where,
    parse_ending_offsets,
    parse_ending_times,
    parse_starting_offsets,
    parse_starting_times,
)
from sparkbridge.source.start_and_end import (
    Bounds,
    LookupResults,
    NoOffsetForTimeError,
    StartAfterEndError,
    StartOffsetMismatchError,
    assigned,
    check_order,
    needed_lookups,
    resolve_ending,
    resolve_starting,
)

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
PARTITIONS = {T0: Bounds(10, 100), T1: Bounds(0, 50)}
NOW_MS = 1_700_000_000_000


def _times(text: str, **more: Any) -> Any:
    return parse_starting_times(text, "startingTimestamp", **({"is_latest_without_match": False} | more))


# --- accepted text ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("earliest", EARLIEST),
        (" latest ", LATEST),
        ("group", GROUP),
        ("-100", Where("back", 100)),
        ("-1", Where("back", 1)),
        ("-0", Where("back", 0)),
    ],
)
def test_one_place_for_all_partitions(text: str, place: Where) -> None:
    spec = parse_starting_offsets(text)
    assert spec.where(T0) == place
    assert list(spec.places()) == [place]


def test_json_names_partitions_and_topics() -> None:
    spec = parse_starting_offsets('{"t":{"0":23,"1":-2,"2":-1,"3":"-5","4":"group"},"u":"earliest","v":-1}')
    found = [spec.where(TopicPartition("t", number)) for number in range(6)]
    assert found == [Where("offset", 23), EARLIEST, LATEST, Where("back", 5), GROUP, None]
    assert spec.where(TopicPartition("u", 7)) == EARLIEST
    assert spec.where(TopicPartition("v", 0)) == LATEST
    assert spec.where(TopicPartition("w", 0)) is None
    assert len(list(spec.places())) == 7


@pytest.mark.parametrize(
    "text",
    [
        "",
        "first",
        "first",
        "23",
        "-",
        "--5",
        "- 5",
        "-1.5",
        '{"t":{"0":-3}}',
        '{"t":{"0":9223372036854775808}}',
        '{"t":{"0":true}}',
        '{"t":{"0":null}}',
        '{"t":{"0":1.5}}',
        '{"t":{"0":[1]}}',
        '{"t":{"x":1}}',
        '{"t":{"00":1}}',
        '{"t":[0]}',
        '{"t/u":{"0":1}}',
        '{"t":{"0":1}',
        '{"t":"first"}',
        '{"t":' * 100_000,
    ],
)
def test_an_invalid_place_is_refused_by_name(text: str) -> None:
    with pytest.raises(SparkOptionError) as caught:
        parse_starting_offsets(text)
    assert str(caught.value).startswith("startingOffsets")
    assert caught.value.hint


@pytest.mark.parametrize("text", ["earliest", "group", '{"t":{"0":-2}}', '{"t":"earliest"}'])
def test_a_batch_does_not_end_at_its_start(text: str) -> None:
    with pytest.raises(SparkOptionError, match="endingOffsets"):
        parse_ending_offsets(text)


def test_endings() -> None:
    spec = parse_ending_offsets('{"t":{"0":23,"1":-1,"2":"-9"},"u":"latest"}')
    found = [spec.where(TopicPartition("t", number)) for number in range(3)]
    assert found == [Where("offset", 23), LATEST, Where("back", 9)]
    assert parse_ending_times("5", "endingTimestamp").everywhere == Where("time", 5)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("1431857103000", Where("time", 1431857103000)),
        ("0", Where("time", 0)),
        ("2015-05-17T10:05:03Z", Where("time", 1431857103000)),
        ("2015-05-17T12:05:03+02:00", Where("time", 1431857103000)),
        ("2015-05-17T10:05:03", Where("time", 1431857103000)),
        ("2015-05-17", Where("time", 1431820800000)),
        ("2015-05-17T10:05:03.000001Z", Where("time", 1431857103001)),
        ("-10m", Where("ago", 600_000)),
        ("-1h30m", Where("ago", 5_400_000)),
        ("-1.5H", Where("ago", 5_400_000)),
        ("-250ms", Where("ago", 250)),
        ("-2d", Where("ago", 172_800_000)),
    ],
)
def test_times(text: str, place: Where) -> None:
    assert _times(text).everywhere == place


def test_times_by_topic_and_partition() -> None:
    spec = _times('{"t":{"0":1000,"1":"-10m"},"u":"2015-05-17"}')
    assert spec.where(T0) == Where("time", 1000)
    assert spec.where(T1) == Where("ago", 600_000)
    assert spec.where(TopicPartition("u", 3)) == Where("time", 1431820800000)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-10",
        "-5x",
        "10m",
        "now",
        "latest",
        "-1",
        "1969-12-31",
        '{"t":{"0":-1}}',
        '{"t":-2}',
        "9" * 20,
        "[]",
    ],
)
def test_an_invalid_time_is_refused_by_name(text: str) -> None:
    with pytest.raises(SparkOptionError, match="startingTimestamp"):
        _times(text)


# --- look-ups --------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", ["earliest", "latest", "-5", '{"t":{"0":5,"1":-1}}'])
def test_most_specs_need_no_look_up(text: str) -> None:
    assert not needed_lookups(parse_starting_offsets(text), PARTITIONS, NOW_MS)


def test_a_group_and_times_are_looked_up() -> None:
    asked = needed_lookups(parse_starting_offsets('{"t":{"0":5,"1":"group"}}'), PARTITIONS, NOW_MS)
    assert asked
    assert (asked.times, asked.is_group_wanted) == ({}, True)
    asked = needed_lookups(_times('{"t":{"0":7000,"1":"-10m"}}'), PARTITIONS, NOW_MS)
    assert asked
    assert (asked.times, asked.is_group_wanted) == ({T0: 7000, T1: NOW_MS - 600_000}, False)
    assert needed_lookups(_times("-9h"), {T0: Bounds(0, 1)}, 1000).times == {T0: 0}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"t":{"0":5}}', "lacks t-1$"),
        ('{"t":{"0":5,"1":5,"2":5}}', "names t-2, which is not read"),
        ('{"t":{"0":5},"u":"earliest"}', "lacks t-1 and names u, which is not read"),
    ],
)
def test_json_names_exactly_what_is_read(text: str, problem: str) -> None:
    spec = parse_starting_offsets(text)
    for ask in (lambda: needed_lookups(spec, PARTITIONS, NOW_MS), lambda: resolve_starting(spec, PARTITIONS)):
        with pytest.raises(StartOffsetMismatchError) as caught:
            ask()
        assert caught.match(problem.rstrip("$"))
        assert "the partitions are: t-0, t-1" in caught.value.hint


def test_an_error_lists_few_of_many_partitions() -> None:
    many = {TopicPartition("t", number): Bounds(0, 1) for number in range(1000)}
    with pytest.raises(StartOffsetMismatchError, match="and 991 more") as caught:
        needed_lookups(parse_starting_offsets('{"t":{"0":5}}'), many, NOW_MS)
    assert len(str(caught.value)) < 300


def test_json_without_a_partition_that_is_read() -> None:
    with pytest.raises(StartOffsetMismatchError, match="the partitions are: none"):
        needed_lookups(parse_starting_offsets('{"t":{"0":5}}'), {}, NOW_MS)


# --- resolving -------------------------------------------------------------------------------------
def test_assigned_are_those_of_the_snapshot_or_of_assign() -> None:
    snapshot = {"u": TopicSnapshot("i", (0,), (9,)), "t": TopicSnapshot("j", (1, -1, 2), (5, -1, 6))}
    assert assigned(snapshot) == {
        TopicPartition("t", 0): Bounds(1, 5),
        TopicPartition("t", 2): Bounds(2, 6),
        TopicPartition("u", 0): Bounds(0, 9),
    }
    assert list(assigned(snapshot)) == sorted(assigned(snapshot))
    assert assigned(snapshot, {"t": (7, 2, 1), "v": (0,)}) == {TopicPartition("t", 2): Bounds(2, 6)}


def test_an_end_before_the_log_start_is_no_loss() -> None:
    held_back = assigned({"t": TopicSnapshot("i", (10,), (4,))})
    assert held_back == {T0: Bounds(10, 10)}
    assert resolve_starting(parse_starting_offsets("earliest"), held_back) == ({T0: 10}, [])


@pytest.mark.parametrize(
    ("text", "positions"),
    [
        ("earliest", {T0: 10, T1: 0}),
        ("latest", {T0: 100, T1: 50}),
        ("-60", {T0: 40, T1: 0}),
        ("-0", {T0: 100, T1: 50}),
        ('{"t":{"0":23,"1":"-10"}}', {T0: 23, T1: 40}),
        ('{"t":{"0":10,"1":50}}', {T0: 10, T1: 50}),
    ],
)
def test_places_become_positions(text: str, positions: dict[TopicPartition, int]) -> None:
    resolved = resolve_starting(parse_starting_offsets(text), PARTITIONS)
    assert resolved.positions == positions
    assert resolved.losses == []


def test_an_offset_outside_is_a_loss_and_moved_to_the_nearer_side() -> None:
    resolved = resolve_starting(parse_starting_offsets('{"t":{"0":3,"1":70}}'), PARTITIONS)
    assert resolved.positions == {T0: 10, T1: 50}
    assert [loss[:4] for loss in resolved.losses] == [("t", 0, 3, 10), ("t", 1, 50, 70)]
    assert "before the log start; 10 is used" in resolved.losses[0].why
    assert "beyond the end; 50 is used" in resolved.losses[1].why


def test_a_groups_offsets_are_used_and_other_partitions_are_read_completely() -> None:
    spec = parse_starting_offsets("group")
    assert resolve_starting(spec, PARTITIONS, LookupResults(committed={T1: 30})).positions == {T0: 10, T1: 30}
    resolved = resolve_starting(spec, PARTITIONS, LookupResults(committed={T0: 4, T1: 30}))
    assert resolved.positions == {T0: 10, T1: 30}
    assert [loss[:4] for loss in resolved.losses] == [("t", 0, 4, 10)]


def test_a_time_is_the_first_offset_found() -> None:
    results = LookupResults(times={T0: 42, T1: 0})
    assert resolve_starting(_times("5"), PARTITIONS, results).positions == {T0: 42, T1: 0}


def test_a_record_found_after_the_snapshot_is_no_loss() -> None:
    resolved = resolve_starting(_times("5"), PARTITIONS, LookupResults(times={T0: 120, T1: 0}))
    assert resolved.positions == {T0: 100, T1: 0}
    assert resolved.losses == []


def test_a_time_without_a_record_is_an_error_or_the_end() -> None:
    results = LookupResults(times={T0: 42, T1: None})
    with pytest.raises(NoOffsetForTimeError, match=r"t-1.*startingOffsetsByTimestampStrategy=latest"):
        resolve_starting(_times("5"), PARTITIONS, results)
    latest = _times("5", is_latest_without_match=True)
    assert resolve_starting(latest, PARTITIONS, results).positions == {T0: 42, T1: 50}


@pytest.mark.parametrize(
    ("text", "positions"),
    [
        ("latest", {T0: 100, T1: 50}),
        ("-60", {T0: 40, T1: 0}),
        ('{"t":{"0":23,"1":-1}}', {T0: 23, T1: 50}),
        ('{"t":{"0":3,"1":0}}', {T0: 10, T1: 0}),
    ],
)
def test_endings_become_positions(text: str, positions: dict[TopicPartition, int]) -> None:
    resolved = resolve_ending(parse_ending_offsets(text), PARTITIONS)
    assert (resolved.positions, resolved.losses) == (positions, [])


def test_an_ending_that_is_not_written_yet_is_a_loss() -> None:
    resolved = resolve_ending(parse_ending_offsets('{"t":{"0":120,"1":5}}'), PARTITIONS)
    assert resolved.positions == {T0: 100, T1: 5}
    assert [loss[:4] for loss in resolved.losses] == [("t", 0, 100, 120)]


def test_an_ending_time_is_exclusive_and_without_a_match_the_end() -> None:
    spec = parse_ending_times("5", "endingTimestamp")
    resolved = resolve_ending(spec, PARTITIONS, LookupResults(times={T0: 42, T1: None}))
    assert (resolved.positions, resolved.losses) == ({T0: 42, T1: 50}, [])
    assert resolve_ending(spec, PARTITIONS, LookupResults(times={T0: 120, T1: 3})).losses == []


def test_json_of_endings_names_exactly_what_is_read() -> None:
    with pytest.raises(StartOffsetMismatchError, match="endingOffsets"):
        resolve_ending(parse_ending_offsets('{"t":{"0":5}}'), PARTITIONS)


def test_a_start_after_the_end_is_refused() -> None:
    check_order({T0: 5, T1: 5}, {T0: 5, T1: 6})
    check_order({}, {T0: 5})
    with pytest.raises(StartAfterEndError, match="t-1 would start at offset 7 and end at 6"):
        check_order({T0: 5, T1: 7}, {T0: 5, T1: 6})


places = st.one_of(
    st.sampled_from(["earliest", "latest", "group"]),
    st.integers(0, 300).map(lambda count: f"-{count}"),
    st.integers(-2, 300),
)


@settings(derandomize=True, deadline=None)
@given(
    st.dictionaries(
        st.integers(0, 5), st.tuples(places, st.integers(0, 100), st.integers(0, 100)), min_size=1
    ),
    st.dictionaries(st.integers(0, 5), st.integers(0, 300)),
)
def test_every_start_is_inside_the_log_and_only_moved_ones_are_losses(
    wanted: dict[int, tuple[Any, int, int]], committed: dict[int, int]
) -> None:
    partitions = {
        TopicPartition("t", number): Bounds(start, start + size)
        for number, (_, start, size) in sorted(wanted.items())
    }
    spec = parse_starting_offsets(json.dumps({"t": {str(n): place for n, (place, *_) in wanted.items()}}))
    results = LookupResults(committed={TopicPartition("t", n): offset for n, offset in committed.items()})
    resolved = resolve_starting(spec, partitions, results)
    assert list(resolved.positions) == list(partitions)
    lost = {TopicPartition(loss.topic, loss.partition): loss for loss in resolved.losses}
    for tp, bounds in partitions.items():
        place = wanted[tp.partition][0]
        position = resolved.positions[tp]
        assert bounds.start <= position <= bounds.end
        explicit = place if isinstance(place, int) and place >= 0 else None
        if place == "group":
            explicit = committed.get(tp.partition)
        if explicit is None or bounds.start <= explicit <= bounds.end:
            assert tp not in lost
            assert explicit in {None, position}
        else:
            loss: Loss = lost[tp]
            assert {loss.from_, loss.to} == {explicit, position}
