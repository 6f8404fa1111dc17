"""A consumer that reads partitions from followers in its rack (R66, R67, KIP-392)."""

from __future__ import annotations

import pytest

from kafkalite.client.cluster.routing import Leader
from kafkalite.client.config import consumer_config
from kafkalite.client.consumer.assigned_partitions import AssignedPartitions, FetchPlan
from kafkalite.client.consumer.near_replica import (
    ASK_APART_MS,
    CONNECT_MS,
    FIRST_PAUSE_MS,
    MAX_UNAVAILABLE,
    NearReplica,
)
from kafkalite.errors import ErrorCode
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages.data import FetchedPartition, PreferredReplica
from kafkalite.records.builder import build_batch
from kafkalite.records.header import stamp

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
LEADER, FOLLOWER = 1, 2
AGE_MS = 10_000


class Reader:
    """The state of a consumer of T0, led by node 1 in epoch 7."""

    def __init__(self, *tps: TopicPartition) -> None:
        self.assigned = AssignedPartitions(
            consumer_config({"client.rack": "a", "metadata.max.age.ms": AGE_MS, "retry.backoff.ms": 100})
        )
        self.assigned.assign(dict.fromkeys(tps or (T0,), "earliest"))
        for state in self.assigned.partitions.values():
            state.seek(0)
        self.state = self.assigned.partitions[T0]
        self.epoch = 7
        self.is_open = True
        self.in_flight: set[int] = set()

    def plans(self, now_ms: int = 0) -> list[FetchPlan]:
        leader = Leader(LEADER, self.epoch)
        return self.assigned.plan(
            now_ms,
            lambda _: leader,
            lambda node_id: node_id == FOLLOWER and not self.is_open,
            None,
            lambda _: self.is_open,
            lambda node_id, _: node_id in self.in_flight,
        )[0]

    def plan(self, now_ms: int = 0) -> FetchPlan:
        (plan,) = self.plans(now_ms)
        return plan

    def name(self, plan: FetchPlan, *tps: TopicPartition, now_ms: int = 0) -> None:
        """Let the leader name the follower in its response to ``plan``."""
        near = [PreferredReplica(*tp, FOLLOWER) for tp in tps or (T0,)]
        self.assigned.on_preferred(plan.requested, near, now_ms)

    def answer(self, plan: FetchPlan, data: bytes = b"", code: int = 0, now_ms: int = 0) -> bool:
        results = [FetchedPartition(*T0, code, None, 100, 100, 0, len(data), [])]
        return self.assigned.on_fetched(plan.requested, results, memoryview(data), now_ms, 0.5)

    def near(self) -> Reader:
        """Let the leader name the follower."""
        self.name(self.plan())
        return self


def batch(base_offset: int) -> bytes:
    made = bytearray(build_batch([b"v"], None, 1))
    stamp(made, base_offset=base_offset, leader_epoch=7)
    return bytes(made)


def source(plan: FetchPlan) -> tuple[int, bool, bool]:
    return plan.node_id, plan.is_near, plan.requested[T0].is_near


def test_the_leader_names_a_follower_until_the_metadata_ages() -> None:
    reader = Reader()
    assert source(reader.plan()) == (LEADER, False, False)
    assert reader.plan().states_rack
    reader.near()
    assert source(reader.plan(AGE_MS - 1)) == (FOLLOWER, True, True)
    assert source(reader.plan(AGE_MS)) == (LEADER, False, False)
    assert reader.plan(AGE_MS).states_rack, "the leader may name one again"


def test_records_of_the_follower_are_read() -> None:
    reader = Reader().near()
    reader.answer(reader.plan(), batch(0))
    found = reader.assigned.next_batch()
    assert found is not None
    assert found.from_offset == 0
    assert source(reader.plan()) == (FOLLOWER, True, True)
    assert reader.plan().partitions[0].fetch_offset == 1


def test_the_leader_serves_if_the_connection_takes_long() -> None:
    reader = Reader().near()
    reader.is_open = False
    assert reader.plans(CONNECT_MS - 1) == []
    assert reader.assigned.next_retry_ms(0) == CONNECT_MS
    plan = reader.plan(CONNECT_MS)
    assert source(plan) == (LEADER, False, False)
    assert not plan.states_rack, "it must not name a follower instead of serving"
    reader.is_open, reader.in_flight = True, {LEADER}
    assert reader.plans(CONNECT_MS) == [], "the same records are not fetched twice"
    reader.in_flight.clear()
    assert source(reader.plan()) == (FOLLOWER, True, True)


def test_another_leader_epoch_ends_it() -> None:
    reader = Reader().near()
    reader.epoch = 8
    assert source(reader.plan()) == (LEADER, False, False)
    reader.epoch = 7
    assert source(reader.plan()) == (LEADER, False, False)


def test_a_late_name_is_ignored() -> None:
    reader = Reader()
    plan = reader.plan()
    reader.state.seek(5)
    reader.name(plan)
    assert source(reader.plan()) == (LEADER, False, False)
    reader.near()
    near = reader.plan()
    reader.assigned.leave_follower(FOLLOWER, 0)
    reader.name(near)  # a follower names no other replica
    assert source(reader.plan()) == (LEADER, False, False)


def test_r67_a_follower_that_is_out_of_range_resets_nothing() -> None:
    reader = Reader().near()
    reader.state.seek(50)
    reader.answer(reader.plan(), code=int(ErrorCode.OFFSET_OUT_OF_RANGE))
    assert (reader.state.position, reader.state.error) == (50, None)
    plan = reader.plan()
    assert source(plan) == (LEADER, False, False)
    assert not plan.states_rack
    reader.answer(plan, code=int(ErrorCode.OFFSET_OUT_OF_RANGE))
    assert reader.state.needs_offset, "the leader's word counts"


def test_r67_no_error_of_a_follower_reaches_the_user() -> None:
    for code in ErrorCode:
        if code <= 0 or code is ErrorCode.OFFSET_NOT_AVAILABLE:
            continue
        reader = Reader().near()
        reader.answer(reader.plan(), code=int(code))
        assert (reader.state.error, reader.state.position) == (None, 0), code
        assert source(reader.plan()) == (LEADER, False, False), code


def test_a_fenced_epoch_asks_for_metadata() -> None:
    reader = Reader().near()
    assert reader.answer(reader.plan(), code=int(ErrorCode.FENCED_LEADER_EPOCH))


def test_a_follower_that_learns_of_commits_late_is_asked_again() -> None:
    reader = Reader().near()
    now_ms = 0
    for _ in range(MAX_UNAVAILABLE):
        reader.answer(reader.plan(now_ms), code=int(ErrorCode.OFFSET_NOT_AVAILABLE), now_ms=now_ms)
        assert reader.plans(now_ms) == [], "after a pause"
        now_ms = reader.state.retry_at_ms
        assert source(reader.plan(now_ms)) == (FOLLOWER, True, True)
    reader.answer(reader.plan(now_ms), code=int(ErrorCode.OFFSET_NOT_AVAILABLE), now_ms=now_ms)
    assert source(reader.plan(now_ms)) == (LEADER, False, False), "at once"


def test_a_served_fetch_ends_the_count_of_late_commits() -> None:
    reader = Reader().near()
    now_ms = 0
    for _ in range(3 * MAX_UNAVAILABLE):
        reader.answer(reader.plan(now_ms), code=int(ErrorCode.OFFSET_NOT_AVAILABLE), now_ms=now_ms)
        now_ms = reader.state.retry_at_ms
        reader.answer(reader.plan(now_ms), now_ms=now_ms)
        assert source(reader.plan(now_ms)) == (FOLLOWER, True, True)


def test_a_lost_connection_returns_to_the_leader_at_once() -> None:
    reader = Reader(T0, T1)
    plan = reader.plan()
    reader.name(plan, T0, T1)
    near = reader.plan()
    assert set(near.requested) == {T0, T1}
    reader.assigned.on_fetch_failed(near.requested, 5, 0.5)
    plan = reader.plan(5)
    assert set(plan.requested) == {T0, T1}
    assert (source(plan), plan.states_rack) == ((LEADER, False, False), False)
    assert reader.plan(5 + FIRST_PAUSE_MS).states_rack


def test_the_pause_grows_with_each_failure() -> None:
    near = NearReplica()
    pauses = []
    for _ in range(6):
        near.prefer(FOLLOWER, 7, 0, AGE_MS)
        near.leave(0, AGE_MS)
        pauses.append(near.leader_until_ms)
    assert pauses == [1_000, 2_000, 4_000, 8_000, AGE_MS, AGE_MS]
    near.on_records()
    near.leave(0, AGE_MS)
    assert near.leader_until_ms == FIRST_PAUSE_MS


def test_partitions_of_one_follower_are_fetched_together_and_each_by_its_source() -> None:
    reader = Reader(T0, T1)
    reader.name(reader.plan(), T1)
    plans = {plan.node_id: plan for plan in reader.plans()}
    assert {node_id: list(plan.requested) for node_id, plan in plans.items()} == {
        LEADER: [T0],
        FOLLOWER: [T1],
    }
    assert reader.assigned.near_nodes() == {FOLLOWER}
    reader.assigned.leave_follower(FOLLOWER, 0)
    assert reader.assigned.near_nodes() == set()


def test_a_partition_that_must_stay_keeps_no_other_from_moving() -> None:
    reader = Reader(T0, T1)
    reader.name(reader.plan(), T1)
    reader.assigned.leave_follower(FOLLOWER, 0)
    apart = reader.plan()
    assert (list(apart.requested), [one[:2] for one in apart.partitions]) == ([T0], [T0])
    assert (apart.states_rack, apart.max_wait_ms) == (True, 0)
    plan = reader.plan(ASK_APART_MS - 1)
    assert (list(plan.requested), plan.states_rack) == ([T0, T1], False), "it must not be named for T1"
    assert plan.max_wait_ms > 0
    assert reader.plan(FIRST_PAUSE_MS).states_rack


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_late_failure_of_a_former_follower_changes_nothing(is_refused: bool) -> None:
    reader = Reader().near()
    old = reader.plan()
    reader.assigned.leave_follower(FOLLOWER, 0)
    other = FOLLOWER + 1
    reader.assigned.on_preferred(reader.plan(FIRST_PAUSE_MS).requested, [PreferredReplica(*T0, other)], 0)
    if is_refused:
        reader.answer(old, code=ErrorCode.NOT_LEADER_OR_FOLLOWER)
    else:
        reader.assigned.on_fetch_failed(old.requested, 5, 0.5)
    assert reader.assigned.near_nodes() == {other}
