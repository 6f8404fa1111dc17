"""The end of a batch and its losses: each rule, and invariants over whole runs with crashes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.model import TopicPartition
from sparkbridge.offsets import Loss, OffsetRange, Positions, StreamOffset, TopicSnapshot
from sparkbridge.options import SourceOptions
from sparkbridge.source.planning import Proposal, SourcePlan, share_out, went_back, whole_ranges
from sparkbridge.source.start_and_end import LookupResults, StartOffsetMismatchError

T0, T1, T2 = (TopicPartition("t", number) for number in range(3))
U0 = TopicPartition("u", 0)
NOW_MS = 1_700_000_000_000


def make_plan(**options: Any) -> SourcePlan:
    given = {"kafka.bootstrap.servers": "h:1"} | {name: str(value) for name, value in options.items()}
    if "assign" not in given:
        given["subscribePattern"] = ".*"
    return SourcePlan(SourceOptions.parse(given, is_stream=True))


def logs(
    *ends: int, starts: tuple[int, ...] = (), id_: str = "id", topic: str = "t"
) -> dict[str, TopicSnapshot]:
    return {topic: TopicSnapshot(id_, starts or (0,) * len(ends), ends)}


def at(*positions: int, id_: str = "id", **more: Any) -> StreamOffset:
    return StreamOffset(
        {TopicPartition("t", number): offset for number, offset in enumerate(positions)}, {"t": id_}, **more
    )


def parsed(text: str) -> StreamOffset:
    return StreamOffset.parse(json.loads(text))


def latest(
    plan: SourcePlan, start: StreamOffset, snapshot: Any, now_ms: int = NOW_MS, **more: Any
) -> Proposal:
    return plan.latest(start, snapshot, now_ms, **({"is_limited": True} | more))


def spans(ranges: list[OffsetRange]) -> dict[TopicPartition, tuple[int, int]]:
    return {TopicPartition(each.topic, each.partition): (each.start, each.end) for each in ranges}


# --- without limits --------------------------------------------------------------------------------
def test_a_batch_goes_to_the_end() -> None:
    plan = make_plan()
    proposal = latest(plan, at(3, 4), logs(10, 4))
    assert proposal.end == at(10, 4)
    assert proposal.has_batch
    assert (proposal.losses, proposal.wants_bytes) == ([], None)
    assert proposal.seen == {T0: 10, T1: 4}
    ranges, losses = plan.ranges(at(3, 4), proposal.end, logs(12, 9))
    assert ranges == [OffsetRange("t", 0, 3, 10, "id")]
    assert losses == []


def test_without_new_data_the_start_itself_is_returned() -> None:
    start = StreamOffset.parse({"t": {"0": 5}, "@ids": {"t": "id"}, "@from": {"t": {"0": 2}}})
    proposal = latest(make_plan(), start, logs(5))
    assert proposal.end is start
    assert not proposal.has_batch


def test_a_checkpoint_of_the_connector_is_continued_and_gets_ids() -> None:
    start = StreamOffset.parse({"t": {"0": 5}})
    assert latest(make_plan(), start, logs(5)).end is start
    assert latest(make_plan(), start, logs(6)).end == at(6)


def test_a_broker_without_topic_ids_is_accepted() -> None:
    proposal = latest(make_plan(), StreamOffset({T0: 5}), logs(6, id_=""))
    assert proposal.end == StreamOffset({T0: 6})
    assert latest(make_plan(), at(5), logs(6, id_="")).losses == []


def test_only_assigned_partitions_are_read() -> None:
    plan = make_plan(assign='{"t":[1]}')
    start = StreamOffset({T1: 2}, {"t": "id"})
    snapshot = {"t": TopicSnapshot("id", (-1, 0), (-1, 7))} | logs(9, topic="u")
    assert latest(plan, start, snapshot).end.positions == {T1: 7}
    assert latest(plan, start, snapshot).seen == {T1: 7}


# --- the beginning ---------------------------------------------------------------------------------
def test_the_initial_offset_is_the_same_when_asked_twice() -> None:
    plan = make_plan()
    first = plan.initial(logs(10, 10), {T0: 5, T1: 10})
    assert first == at(5, 10, is_initial=True)
    assert plan.initial(logs(20, 20), {T0: 20, T1: 20}) is first


def test_the_first_batch_has_its_own_start() -> None:
    plan = make_plan()
    start = plan.initial(logs(10, 10), {T0: 5, T1: 10})
    end = latest(plan, start, logs(12, 10)).end
    assert end == at(12, 10, from_={T0: 5, T1: 10})


def test_a_start_at_latest_loses_nothing_when_the_first_batch_crashes() -> None:
    plan = make_plan()
    start = plan.initial(logs(50), {T0: 50})
    logged = json.dumps(latest(plan, start, logs(80)).end.to_json())
    # The driver dies. After the restart "latest" is 100, and Spark runs the logged batch from there.
    again = make_plan()
    later = again.initial(logs(100), {T0: 100})
    ranges, losses = again.ranges(later, parsed(logged), logs(100))
    assert (spans(ranges), losses) == ({T0: (50, 80)}, [])


def test_an_idle_start_is_logged_at_once() -> None:
    plan = make_plan(minOffsetsPerTrigger=100)
    start = plan.initial(logs(50), {T0: 50})
    proposal = latest(plan, start, logs(50))
    assert proposal.has_batch
    assert proposal.end == at(50, from_={T0: 50})
    assert plan.ranges(start, proposal.end, logs(50)) == ([], [])
    assert not latest(plan, proposal.end, logs(50)).has_batch


def test_a_query_without_topics_starts() -> None:
    plan = make_plan()
    start = plan.initial({}, {})
    proposal = latest(plan, start, {})
    assert proposal.end == StreamOffset({})
    assert not latest(plan, proposal.end, {}).has_batch
    assert latest(plan, proposal.end, logs(3)).end == at(3, from_={T0: 0})


# --- maxOffsetsPerTrigger --------------------------------------------------------------------------
def test_the_maximum_is_divided_by_lag_exactly() -> None:
    proposal = latest(make_plan(maxOffsetsPerTrigger=10), at(0, 0, 5), logs(100, 50, 5))
    assert proposal.end == at(7, 3, 5)
    assert latest(make_plan(maxOffsetsPerTrigger=150), at(0, 0, 5), logs(100, 50, 5)).end == at(100, 50, 5)


def test_the_maximum_does_not_limit_trigger_once() -> None:
    plan = make_plan(maxOffsetsPerTrigger=10, minOffsetsPerTrigger=10, maxBytesPerTrigger=1)
    latest(plan, at(0), logs(1))
    proposal = latest(plan, at(0), logs(3), is_limited=False)
    assert (proposal.end, proposal.wants_bytes) == (at(3), None)


lags_of = st.dictionaries(
    st.integers(0, 20).map(lambda number: TopicPartition("t", number)), st.integers(1, 10**6), min_size=1
)


@settings(derandomize=True, deadline=None)
@given(lags_of, st.integers(1, 10**6), st.dictionaries(st.just(T0), st.integers(1, 9)))
def test_parts_of_the_limit_are_exact_fair_and_within_the_lag(
    lags: dict[TopicPartition, int], limit: int, waits: dict[TopicPartition, int]
) -> None:
    shares = share_out(lags, limit, waits)
    total = sum(lags.values())
    assert sum(shares.values()) == min(limit, total)
    for tp, lag in lags.items():
        assert 0 <= shares[tp] <= lag
        assert abs(shares[tp] - lag * min(limit, total) / total) < 1


def test_the_remainder_of_rounding_goes_first_to_parts_below_one() -> None:
    assert share_out({T0: 1, T1: 66, T2: 33}, 10, {}) == {T0: 1, T1: 6, T2: 3}
    assert share_out({T0: 1, T1: 1, T2: 98}, 10, {T1: 1}) == {T0: 0, T1: 1, T2: 9}


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 1000), min_size=2, max_size=8), st.integers(1, 5))
def test_no_partition_starves_however_much_the_others_get(rates: list[int], limit: int) -> None:
    """The small partition always has one record, the others grow faster than they are read."""
    plan = make_plan(maxOffsetsPerTrigger=limit)
    ends = [1, *(10_000 * rate for rate in rates)]
    offset = at(*(0 for _ in ends))
    for _ in range(2 * len(ends)):
        offset = latest(plan, offset, logs(*ends)).end
        ends = [1, *(end + 1000 for end in ends[1:])]
        if offset.positions[T0] == 1:
            return
    pytest.fail(f"t-0 never had its turn: {offset}")


def test_a_partition_that_gets_nothing_stays_and_a_new_one_is_not_added() -> None:
    plan = make_plan(maxOffsetsPerTrigger=1)
    offset = latest(plan, at(0), logs(100, 2)).end
    assert offset == at(1)
    assert latest(plan, offset, logs(100, 2)).end == at(1, 1, from_={T1: 0})
    overtaken = logs(13, 1000, starts=(12, 0))
    assert latest(make_plan(maxOffsetsPerTrigger=1), at(5, 0), overtaken).end == at(5, 1)


# --- minOffsetsPerTrigger and maxTriggerDelay ------------------------------------------------------
def test_the_minimum_delays_a_batch_until_the_maximum_delay() -> None:
    plan = make_plan(minOffsetsPerTrigger=10, maxTriggerDelay="60s")
    first = latest(plan, at(0), logs(1), NOW_MS)
    assert first.has_batch  # the first trigger of a run never waits
    start = first.end
    assert latest(plan, start, logs(10), NOW_MS + 59_999).end is start
    assert latest(plan, start, logs(11), NOW_MS + 1).end == at(11)
    start = at(11)
    assert latest(plan, start, logs(12), NOW_MS + 60_000).end is start
    assert latest(plan, start, logs(12), NOW_MS + 60_001).end == at(12)
    assert latest(plan, at(12), logs(12), NOW_MS + 10**9).has_batch is False


def test_minimum_and_maximum_together() -> None:
    plan = make_plan(minOffsetsPerTrigger=5, maxOffsetsPerTrigger=8, maxTriggerDelay="60s")
    offset = latest(plan, at(0), logs(20)).end
    assert offset == at(8)
    offset = latest(plan, offset, logs(20)).end
    assert offset == at(16)
    assert latest(plan, offset, logs(20)).end is offset
    assert latest(plan, offset, logs(21)).end == at(21)


def test_a_change_is_not_delayed() -> None:
    plan = make_plan(minOffsetsPerTrigger=100)
    latest(plan, at(0, 0), logs(1, 0))
    proposal = latest(plan, at(1, 0), logs(1))
    assert proposal.end == at(1)
    assert [loss[:4] for loss in proposal.losses] == [("t", 1, 0, 0)]


# --- maxBytesPerTrigger ----------------------------------------------------------------------------
def test_an_end_by_bytes_limits_the_batch() -> None:
    plan = make_plan(maxBytesPerTrigger="1k")
    proposal = latest(plan, at(3, 5), logs(10, 5, 4))
    assert proposal.wants_bytes is not None
    assert proposal.wants_bytes == ({T0: 3, T2: 0}, {T0: 10, T2: 4}, 1024, None)
    cut = plan.cut(proposal, {T0: 6, T2: 1})
    assert cut.end == at(6, 5, 1, from_={T2: 0})
    assert cut.wants_bytes is None
    assert plan.cut(cut, {T0: 3}) is cut


def test_an_end_by_bytes_stays_within_the_requested_range() -> None:
    plan = make_plan(maxBytesPerTrigger=1, maxOffsetsPerTrigger=4)
    proposal = latest(plan, at(3, 3), logs(10, 10))
    assert proposal.end == at(5, 5)
    assert plan.cut(proposal, {T0: 99, T1: 1}).end == at(5, 3)


def test_a_limit_to_no_records_makes_no_batch() -> None:
    plan = make_plan(maxBytesPerTrigger=1)
    start = at(3)
    proposal = latest(plan, start, logs(10, 5, starts=(0, 2)))
    assert plan.cut(proposal, {}).end is start
    assert plan.cut(proposal, {}).losses == []
    assert [loss[:4] for loss in plan.cut(proposal, {T1: 3}).losses] == [("t", 1, 0, 2)]


def test_a_limit_keeps_the_start_of_the_query() -> None:
    plan = make_plan(maxBytesPerTrigger=1)
    proposal = latest(plan, plan.initial(logs(9, 9), {T0: 2, T1: 3}), logs(9, 9))
    assert plan.cut(proposal, {T0: 4}).end == at(4, 3, from_={T0: 2, T1: 3})


def test_a_limit_does_not_read_a_new_topic_from_an_old_offset() -> None:
    plan = make_plan(maxBytesPerTrigger=1)
    proposal = latest(plan, at(7, 7, id_="old"), logs(9, 9, id_="new"))
    assert plan.cut(proposal, {T0: 4}).end == StreamOffset({T0: 4}, {"t": "new"}, {T0: 0})


def test_a_partition_left_without_bytes_is_first_at_the_next_trigger() -> None:
    plan, start, firsts = make_plan(maxBytesPerTrigger=1), at(0, 0, 0), []
    for _ in range(4):
        proposal = latest(plan, start, logs(10, 10, 10))
        asked = proposal.wants_bytes
        assert asked is not None
        firsts.append(asked.first)
        served = asked.first or T2
        start = plan.cut(proposal, {served: asked.starts[served] + 1}).end
    assert firsts == [None, T0, T1, T2]
    assert start == at(1, 1, 2)


def test_no_partition_starves_between_two_limits() -> None:
    """Two of three partitions have offsets. The larger one has bytes, unless another one waits."""
    plan, start, ends = make_plan(maxOffsetsPerTrigger=2, maxBytesPerTrigger=1), at(0, 0, 0), (1000, 10, 10)
    for _ in range(12):
        proposal = latest(plan, start, logs(*ends))
        asked = proposal.wants_bytes
        assert asked is not None
        served = asked.first or min(asked.starts)
        start = plan.cut(proposal, {served: asked.starts[served] + 1}).end
    assert min(start.positions.values()) > 0


def test_without_data_no_bytes_are_looked_up() -> None:
    plan = make_plan(maxBytesPerTrigger=1)
    assert latest(plan, at(3), logs(3)).wants_bytes is None


# --- AvailableNow ----------------------------------------------------------------------------------
def test_available_now_ends_where_the_logs_ended() -> None:
    plan = make_plan(maxOffsetsPerTrigger=6)
    plan.prepare_available_now()
    offset = at(0, 0)
    offset = latest(plan, offset, logs(10, 1)).end
    grown = logs(100, 100, 100) | logs(100, topic="u", id_="v")
    found = [offset]
    while (proposal := latest(plan, offset, grown)).has_batch:
        offset = proposal.end
        found.append(offset)
    assert offset == at(10, 1)
    assert len(found) == 2


def test_available_now_is_fixed_at_the_first_snapshot() -> None:
    plan = make_plan()
    plan.prepare_available_now()
    pending_start, pending_end = at(0), at(5)
    assert spans(plan.ranges(pending_start, pending_end, logs(9))[0]) == {T0: (0, 5)}
    offset = latest(plan, pending_end, logs(9)).end
    assert offset == at(9)
    assert latest(plan, offset, logs(20)).end is offset
    plan.prepare_available_now()  # the next run with the same reader
    assert latest(plan, offset, logs(20)).end == at(20)


def test_available_now_ignores_the_minimum() -> None:
    plan = make_plan(minOffsetsPerTrigger=100)
    plan.prepare_available_now()
    offset = latest(plan, at(0), logs(1)).end
    plan.prepare_available_now()
    assert latest(plan, offset, logs(2)).end == at(2)


def test_available_now_from_the_start_of_a_query_ends() -> None:
    plan = make_plan()
    plan.prepare_available_now()
    start = plan.initial(logs(5), {T0: 5})
    offset = latest(plan, start, logs(5)).end
    assert offset == at(5, from_={T0: 5})
    assert latest(plan, offset, logs(50)).end is offset


def test_available_now_leaves_a_topic_created_again_to_the_next_run() -> None:
    plan = make_plan(maxOffsetsPerTrigger=2)
    plan.prepare_available_now()
    offset = latest(plan, at(0, id_="old"), logs(9, id_="old")).end
    proposal = latest(plan, offset, logs(9, id_="new"))
    assert proposal.end == StreamOffset({})
    assert [loss.why for loss in proposal.losses] == ["the topic was deleted and created again"]
    assert not latest(plan, proposal.end, logs(9, id_="new")).has_batch
    again = make_plan()
    again.prepare_available_now()
    assert latest(again, proposal.end, logs(9, id_="new")).end == at(9, id_="new", from_={T0: 0})


def test_available_now_ends_although_retention_overtakes_it() -> None:
    plan = make_plan()
    plan.prepare_available_now()
    offset = latest(plan, at(5), logs(20)).end
    plan.prepare_available_now()
    overtaken = logs(40, starts=(40,))
    proposal = latest(plan, offset, overtaken)
    assert proposal.end == at(40)
    ranges, losses = plan.ranges(offset, proposal.end, overtaken)
    assert ranges == []
    assert [loss[:4] for loss in losses] == [("t", 0, 20, 40)]
    assert not latest(plan, proposal.end, logs(60, starts=(50,))).has_batch


# --- an ending in a stream -------------------------------------------------------------------------
def test_a_bound_ends_a_stream() -> None:
    plan = make_plan(endingOffsets='{"t":{"0":7,"1":-1}}')
    start = plan.initial(logs(5, 5), {T0: 0, T1: 0})
    offset = latest(plan, start, logs(5, 5)).end
    assert offset.positions == {T0: 5, T1: 5}
    offset = latest(plan, offset, logs(50, 50)).end
    assert offset.positions == {T0: 7, T1: 50}
    assert latest(plan, offset, logs(80, 50)).end is offset


def test_a_bound_before_the_start_reads_nothing() -> None:
    plan = make_plan(endingOffsets='{"t":{"0":7}}')
    assert not latest(plan, at(9), logs(50)).has_batch


def test_a_relative_bound_counts_from_the_first_snapshot() -> None:
    plan = make_plan(endingOffsets="-10")
    offset = latest(plan, at(0), logs(50)).end
    assert offset == at(40)
    assert latest(plan, offset, logs(500)).end is offset


def test_a_time_is_looked_up_until_it_is_found() -> None:
    plan = make_plan(endingTimestamp=1000)
    assert plan.needed_lookups(logs(5), NOW_MS).times == {T0: 1000}
    offset = latest(plan, at(0), logs(5), results=LookupResults({T0: None})).end
    assert offset == at(5)
    offset = latest(plan, offset, logs(9), results=LookupResults({T0: 8})).end
    assert offset == at(8)
    assert not plan.needed_lookups(logs(20), NOW_MS)
    assert latest(plan, offset, logs(20)).end is offset


def test_a_relative_time_counts_from_the_first_snapshot() -> None:
    plan = make_plan(endingTimestamp="-10m")
    assert plan.needed_lookups(logs(5), NOW_MS).times == {T0: NOW_MS - 600_000}
    assert plan.needed_lookups(logs(5), NOW_MS + 5).times == {T0: NOW_MS - 600_000}


def test_a_missing_end_by_bytes_reads_nothing() -> None:
    with pytest.raises(KeyError):
        latest(make_plan(endingTimestamp=1000), at(0), logs(5))


def test_without_an_ending_nothing_is_looked_up() -> None:
    assert not make_plan().needed_lookups(logs(5), NOW_MS)
    assert not make_plan(endingOffsets='{"t":{"0":5}}').needed_lookups(logs(5, 5), NOW_MS)


def test_ending_json_names_exactly_what_a_new_query_reads() -> None:
    plan = make_plan(endingOffsets='{"t":{"0":7}}')
    with pytest.raises(StartOffsetMismatchError, match=r"endingOffsets must name.*lacks t-1"):
        plan.initial(logs(5, 5), {T0: 0, T1: 0})
    assert latest(plan, at(0), logs(5, 5)).end == at(5)  # a later partition is not read


def test_the_minimum_does_not_delay_the_last_batch_before_the_bound() -> None:
    plan = make_plan(endingOffsets='{"t":{"0":7}}', minOffsetsPerTrigger=5)
    offset = latest(plan, at(0), logs(5)).end
    assert latest(plan, offset, logs(6)).end is offset
    assert latest(plan, offset, logs(9)).end == at(7)


# --- changes and losses ----------------------------------------------------------------------------
def test_a_new_partition_starts_at_its_log_start_and_keeps_it() -> None:
    plan = make_plan()
    proposal = latest(plan, at(5), logs(5, 3))
    assert proposal.end == at(5, 3, from_={T1: 0})
    assert proposal.losses == []
    ranges, losses = make_plan().ranges(at(5), proposal.end, logs(9, 9))
    assert (spans(ranges), losses) == ({T1: (0, 3)}, [])


def test_a_new_partition_that_does_not_begin_at_zero_is_a_loss() -> None:
    proposal = latest(make_plan(), at(5), logs(5, 9, starts=(0, 4)))
    assert proposal.end == at(5, 9, from_={T1: 4})
    assert [loss[:4] for loss in proposal.losses] == [("t", 1, 0, 4)]
    assert "new" in proposal.losses[0].why

    proposal = latest(make_plan(), at(5), logs(5, 9, starts=(0, 1)))
    assert [loss[:4] for loss in proposal.losses] == [("t", 1, 0, 1)]


def test_a_new_partition_without_records_makes_no_batch() -> None:
    assert not latest(make_plan(), at(5), logs(5, 0)).has_batch


def test_a_new_topic_is_read_completely() -> None:
    proposal = latest(make_plan(), at(5), logs(5) | logs(3, topic="u", id_="v"))
    assert proposal.end == StreamOffset({T0: 5, U0: 3}, {"t": "id", "u": "v"}, {U0: 0})


def test_a_deleted_topic_is_a_loss_that_is_reported_once() -> None:
    proposal = latest(make_plan(), at(5, 6), {})
    assert proposal.end == StreamOffset({})
    assert [(str(loss)) for loss in proposal.losses] == [
        "t-0 from offset 5 on: the topic or the partition was deleted or is no longer read",
        "t-1 from offset 6 on: the topic or the partition was deleted or is no longer read",
    ]
    again = latest(make_plan(), proposal.end, {})
    assert (again.has_batch, again.losses) == (False, [])


def test_a_topic_created_again_is_detected_by_its_id_and_read_from_its_start() -> None:
    plan = make_plan()
    start = at(5, id_="old")
    proposal = latest(plan, start, logs(9, starts=(2,), id_="new"))
    assert proposal.end == at(9, id_="new", from_={T0: 2})
    assert [(loss.topic, loss.why) for loss in proposal.losses] == [
        ("t", "the topic was deleted and created again")
    ]
    ranges, losses = plan.ranges(start, proposal.end, logs(9, starts=(2,), id_="new"))
    assert (spans(ranges), losses) == ({T0: (2, 9)}, [])


def test_offsets_that_moved_back_are_a_loss_and_never_read_twice() -> None:
    plan = make_plan()
    start = at(9, 3)
    assert went_back(start, logs(6, 3)) == [T0]
    proposal = latest(plan, start, logs(6, 3))
    assert proposal.end == at(6, 3)
    assert [loss[:4] for loss in proposal.losses] == [("t", 0, 6, 9)]
    assert plan.ranges(start, proposal.end, logs(6, 3)) == ([], [])
    assert latest(plan, proposal.end, logs(8, 3)).end == at(8, 3)
    assert [loss[:4] for loss in latest(make_plan(), at(9), logs(8)).losses] == [("t", 0, 8, 9)]


def test_an_end_that_did_not_move_back_is_not_looked_up_again() -> None:
    assert went_back(at(6, 3), logs(6, 9)) == []
    assert went_back(at(9, id_="old"), logs(6, id_="new")) == []


def test_retention_that_overtakes_is_reported_with_the_ranges() -> None:
    plan = make_plan()
    start, snapshot = at(5, 5), logs(20, 20, starts=(12, 20))
    proposal = latest(plan, start, snapshot)
    assert (proposal.end, proposal.losses) == (at(20, 20), [])
    ranges, losses = plan.ranges(start, proposal.end, snapshot)
    assert spans(ranges) == {T0: (12, 20)}
    assert [loss[:4] for loss in losses] == [("t", 0, 5, 12), ("t", 1, 5, 20)]


def test_no_more_is_reported_lost_than_the_batch_had() -> None:
    ranges, losses = make_plan().ranges(at(5), at(9), logs(20, starts=(12,)))
    assert (ranges, [loss[:4] for loss in losses]) == ([], [("t", 0, 5, 9)])


def test_a_log_start_before_the_position_is_no_loss() -> None:
    snapshot = logs(20, starts=(5,))
    assert whole_ranges({T0: 5}, {T0: 20}, {}, snapshot) == ([OffsetRange("t", 0, 5, 20, "id")], [])
    assert whole_ranges({T0: 3}, {T0: 3}, {}, snapshot) == ([], [])


def test_limits_count_from_the_log_start() -> None:
    assert latest(make_plan(maxOffsetsPerTrigger=3), at(5), logs(20, starts=(12,))).end == at(15)


@pytest.mark.parametrize(
    ("snapshot", "why"),
    [
        ({}, "the topic or the partition was deleted or is no longer read"),
        (logs(), "the topic or the partition was deleted or is no longer read"),
        (logs(9, id_="new"), "the topic was deleted and created again"),
    ],
)
def test_records_deleted_between_planning_and_reading_are_reported(snapshot: Any, why: str) -> None:
    ranges, losses = make_plan().ranges(at(2), at(9), snapshot)
    assert ranges == []
    assert losses == [Loss("t", 0, 2, 9, why)]


def test_a_replay_of_a_partition_without_a_start_begins_at_its_log_start() -> None:
    ranges, losses = make_plan().ranges(StreamOffset({}), StreamOffset({T0: 9}), logs(9, starts=(4,)))
    assert (spans(ranges), losses) == ({T0: (4, 9)}, [])
    ranges, losses = make_plan().ranges(StreamOffset({}), StreamOffset({T0: 9}), {})
    assert (ranges, [loss[:4] for loss in losses]) == ([], [("t", 0, 0, 9)])


def test_ranges_are_split() -> None:
    plan = make_plan(minPartitions=4)
    assert [each.size for each in plan.ranges(at(0), at(8), logs(8))[0]] == [2, 2, 2, 2]
    plan = make_plan(maxRecordsPerPartition=3)
    assert [each.size for each in plan.ranges(at(0), at(8), logs(8))[0]] == [2, 3, 3]


# --- whole runs ------------------------------------------------------------------------------------
@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=4),
    st.lists(st.integers(0, 40), min_size=4, max_size=4),
    st.integers(0, 3),
    st.booleans(),
)
def test_ranges_depend_only_on_the_json_and_the_log_starts(
    partitions: list[tuple[int, int, int]], growth: list[int], born: int, is_initial: bool
) -> None:
    starts = tuple(start for start, _, _ in partitions)
    ends = tuple(start + a + b for start, a, b in partitions)
    positions = {TopicPartition("t", n): start + a for n, (start, a, _) in enumerate(partitions)}
    start = StreamOffset(positions, {"t": "id"}, is_initial=is_initial)
    end = latest(make_plan(maxOffsetsPerTrigger=30), start, logs(*ends, starts=starts)).end
    if end is start:
        return
    text = json.dumps(end.to_json())
    now = make_plan().ranges(start, end, logs(*ends, starts=starts))
    later_ends = tuple(end + more for end, more in zip(ends, growth, strict=False)) + (7,) * born
    later = logs(*later_ends, starts=starts + (0,) * born)
    known = parsed(json.dumps(start.to_json()))
    assert make_plan().ranges(known, parsed(text), later) == now
    if is_initial:  # after the crash, initialOffset may return anything
        moved = {tp: offset + 3 for tp, offset in positions.items()}
        assert make_plan().ranges(StreamOffset(moved), parsed(text), later) == now


@dataclass
class Run:
    """A query as Spark runs it: an offset log, a commit log, and crashes at any point."""

    options: dict[str, Any]
    ends: list[int]
    batches: list[tuple[str, str]] = field(default_factory=list)
    finished: int = 0
    read: dict[TopicPartition, list[tuple[int, int]]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)

    def snapshot(self) -> dict[str, TopicSnapshot]:
        return logs(*self.ends)

    def execute(self, plan: SourcePlan, start: str, end: str) -> None:
        ranges, losses = plan.ranges(parsed(start), parsed(end), self.snapshot())
        assert losses == []
        self.sizes.append(sum(each.size for each in ranges))
        for each in ranges:
            self.read.setdefault(TopicPartition(each.topic, each.partition), []).append(
                (each.start, each.end)
            )
        self.finished = len(self.batches)

    def go(self, triggers: int, crash_at: int, answer: Any) -> None:
        """Run the driver once: a pending batch, then triggers; it dies before batch ``crash_at`` runs."""
        plan = make_plan(**self.options)
        if len(self.batches) > self.finished:
            start, end = self.batches[-1]
            if len(self.batches) == 1:  # no log has the initial offset: Spark asks for it again
                latest_now = {TopicPartition("t", n): end_ for n, end_ in enumerate(self.ends)}
                start = json.dumps(plan.initial(self.snapshot(), latest_now).to_json())
            self.execute(plan, start, end)
        for trigger in range(triggers):
            if self.batches:
                text = self.batches[-1][1]
                start_offset = parsed(text)
            else:
                begin: Positions = {TopicPartition("t", n): 0 for n in range(len(self.ends))}
                start_offset = plan.initial(self.snapshot(), begin)
                text = json.dumps(start_offset.to_json())
            proposal = latest(plan, start_offset, self.snapshot())
            if proposal.wants_bytes is not None:
                proposal = plan.cut(proposal, answer(proposal.wants_bytes))
            assert proposal.losses == []
            if not proposal.has_batch:
                continue
            self.batches.append((text, json.dumps(proposal.end.to_json())))
            if trigger == crash_at:
                return
            self.execute(plan, *self.batches[-1])


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    st.sampled_from([{}, {"maxOffsetsPerTrigger": 7}, {"maxBytesPerTrigger": 5}, {"minPartitions": 3}]),
    st.lists(st.integers(0, 30), min_size=1, max_size=3),
    st.lists(
        st.tuples(
            st.integers(0, 3), st.integers(0, 4), st.lists(st.integers(0, 20), max_size=3), st.booleans()
        ),
        max_size=6,
    ),
)
def test_every_offset_is_read_once_whatever_crashes(
    options: dict[str, Any], ends: list[int], lives: list[tuple[int, int, list[int], bool]]
) -> None:
    run = Run(options, list(ends))

    def by_one(asked: Any) -> Positions:  # a log of one byte per record: at least one record of each
        return {tp: min(asked.ends[tp], start + asked.max_bytes) for tp, start in asked.starts.items()}

    for triggers, crash_at, growth, is_born in lives:
        run.go(triggers, crash_at, by_one)
        run.ends = [
            end + more for end, more in zip(run.ends, [*growth, 0, 0, 0, 0, 0, 0, 0, 0, 0], strict=False)
        ]
        run.ends += [4] * is_born
    run.go(100, -1, by_one)
    for number, end in enumerate(run.ends):
        at_ = 0
        for first, until in sorted(run.read.get(TopicPartition("t", number), [])):
            assert first == at_, "read twice or left out"
            at_ = until
        assert at_ == end
    most = options.get("maxOffsetsPerTrigger")
    if most is not None:
        assert all(size <= most for size in run.sizes)
