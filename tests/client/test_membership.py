"""The member side of KIP-848, without a network."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kafkalite import TopicPartition
from kafkalite.client.group.membership import (
    JOINING,
    LEAVING,
    LEAVING_FOR_A_WHILE,
    MemberSettings,
    Membership,
)
from kafkalite.protocol.messages.groups import AssignedTopic, ConsumerGroupHeartbeatResponse

WAIT_MS = 5_000


def _membership(**settings: Any) -> Membership:
    given = {
        "group_id": "g",
        "member_id": "m",
        "instance_id": None,
        "assignor": None,
        "max_poll_interval_ms": 1000,
        **settings,
    }
    membership = Membership(MemberSettings(**given))
    membership.subscribe(["t"], None)
    return membership


def _answer(epoch: int, *partitions: int, topic_id: str = "i") -> ConsumerGroupHeartbeatResponse:
    assignment = [AssignedTopic(topic_id, "t", list(partitions))] if partitions != (-1,) else None
    return ConsumerGroupHeartbeatResponse(0, None, "m", epoch, WAIT_MS, 45_000, assignment)


NOTHING_NEW = -1


def _heartbeat(membership: Membership, epoch: int, *partitions: int, **more: Any) -> Any:
    request = membership.request(WAIT_MS)
    membership.on_response(request, _answer(epoch, *partitions, **more))
    return request


def _tps(*partitions: int) -> list[TopicPartition]:
    return [TopicPartition("t", partition) for partition in partitions]


def _owned(request: Any) -> list[int] | None:
    return None if request.owned is None else [p for topic in request.owned for p in topic.partitions]


def test_a_join_sends_everything_and_does_not_wait() -> None:
    membership = _membership(instance_id="i", assignor="range")
    request = membership.request(WAIT_MS)
    assert (request.member_epoch, request.max_wait_ms, request.rebalance_timeout_ms) == (JOINING, 0, 1000)
    assert (request.subscribed_topics, request.subscribed_pattern) == (["t"], "")
    assert (request.instance_id, request.assignor, request.owned) == ("i", "range", [])


def test_owned_partitions_are_sent_once_per_epoch() -> None:
    """Owned partitions count only when they are sent at the current epoch."""
    membership = _membership()
    _heartbeat(membership, 1, 0, 1)
    membership.take(membership.adding())
    request = _heartbeat(membership, 1, NOTHING_NEW)
    assert (_owned(request), request.subscribed_topics, request.max_wait_ms) == ([0, 1], None, WAIT_MS)
    assert not membership.has_changes_to_send
    assert _owned(_heartbeat(membership, 2, NOTHING_NEW)) is None
    assert membership.has_changes_to_send
    assert _owned(_heartbeat(membership, 2, NOTHING_NEW)) == [0, 1]


def test_a_partition_is_owned_until_it_is_released() -> None:
    """R38: a revoked partition stays in ``owned`` until the user is done with it."""
    membership = _membership()
    _heartbeat(membership, 1, 0, 1)
    membership.take(membership.adding())
    _heartbeat(membership, 1, NOTHING_NEW)
    _heartbeat(membership, 2, 0)
    assert list(membership.revoking()) == _tps(1) and membership.waits_for_user
    assert _owned(membership.request(WAIT_MS)) == [0, 1]
    membership.release(_tps(1))
    assert membership.has_changes_to_send and not membership.waits_for_user
    assert _owned(membership.request(WAIT_MS)) == [0]


def test_a_recreated_topic_is_revoked_and_added() -> None:
    membership = _membership()
    _heartbeat(membership, 1, 0)
    membership.take(membership.adding())
    _heartbeat(membership, 2, 0, topic_id="another")
    assert membership.revoking() == {_tps(0)[0]: "i"} and membership.adding() == {}
    membership.release(_tps(0))
    assert membership.adding() == {_tps(0)[0]: "another"}


def test_an_outdated_response_is_ignored() -> None:
    membership = _membership()
    _heartbeat(membership, 3, 0)
    late = membership.request(WAIT_MS)
    _heartbeat(membership, 4, 0, 1)
    assert not membership.on_response(late, _answer(3, 2))
    assert membership.epoch == 4 and list(membership.adding()) == _tps(0, 1)


def test_after_a_lost_response_owned_partitions_are_sent_again() -> None:
    membership = _membership()
    _heartbeat(membership, 1, 0)
    membership.take(membership.adding())
    _heartbeat(membership, 1, NOTHING_NEW)
    membership.on_failure()
    assert _owned(membership.request(0)) == [0]


def test_an_expelled_member_loses_its_partitions_and_rejoins() -> None:
    membership = _membership()
    joining = membership.request(WAIT_MS)
    membership.on_response(joining, _answer(1, 0))
    membership.take(membership.adding())
    before = membership.request(WAIT_MS)
    assert list(membership.on_expelled()) == _tps(0)
    assert not membership.is_member and membership.owned == {}
    assert not membership.on_response(before, _answer(1, 0))  # a response to a previous membership
    request = membership.request(WAIT_MS)
    assert (request.member_epoch, request.subscribed_topics, request.owned) == (JOINING, ["t"], [])


def test_a_new_subscription_is_sent_until_acknowledged() -> None:
    membership = _membership()
    before = membership.request(WAIT_MS)
    membership.subscribe([], "x.*")
    membership.on_response(before, _answer(1))
    request = membership.request(WAIT_MS)
    assert (request.subscribed_topics, request.subscribed_pattern) == ([], "x.*")
    membership.on_response(request, _answer(1))
    assert membership.request(WAIT_MS).subscribed_topics is None


def test_a_static_member_leaves_temporarily() -> None:
    assert _membership().leave_request(is_for_good=False).member_epoch == LEAVING
    static = _membership(instance_id="i")
    assert static.leave_request(is_for_good=False).member_epoch == LEAVING_FOR_A_WHILE
    assert static.leave_request(is_for_good=True).member_epoch == LEAVING


def test_many_partitions_are_sent_in_several_lists() -> None:
    membership = _membership()
    request = membership.request(0)
    pieces = [AssignedTopic("i", "t", list(range(first, first + 100))) for first in range(0, 1000, 100)]
    answer = ConsumerGroupHeartbeatResponse(0, None, "m", 1, WAIT_MS, 45_000, pieces)
    membership.on_response(request, answer)
    membership.take(membership.adding())
    told = membership.request(0).owned
    assert told is not None and max(len(topic.partitions) for topic in told) <= 128
    assert _owned(membership.request(0)) == list(range(1000))


@given(st.lists(st.tuples(st.sets(st.integers(0, 5)), st.booleans(), st.booleans()), max_size=30))
def test_only_assigned_partitions_are_owned_and_all_are_released(
    turns: list[tuple[set[int], bool, bool]],
) -> None:
    """For any assignments, with or without lost responses and actions of the user."""
    membership = _membership()
    granted = set[TopicPartition]()
    for epoch, (partitions, is_heard, acts) in enumerate(turns, 1):
        request = membership.request(WAIT_MS)
        granted |= set(_tps(*partitions))
        if is_heard:
            membership.on_response(request, _answer(epoch, *sorted(partitions)))
            assert set(membership.assigned) == set(_tps(*partitions))
        else:
            membership.on_failure()
        if acts:
            membership.release(membership.revoking())
            membership.take(membership.adding())
            assert not membership.waits_for_user and membership.owned == membership.assigned
        assert set(membership.owned) <= granted
