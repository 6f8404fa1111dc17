"""Fetch sessions: a listing is responded to once, with records, a divergence or an error."""

from __future__ import annotations

from typing import Any

import pytest

from kafkalite.broker.replication.fetch_sessions import MAX_EPOCH, FetchSession, FetchSessions
from kafkalite.errors import FetchSessionIdNotFoundError, InvalidFetchSessionEpochError
from kafkalite.protocol.messages.cluster import ReplicaFetchPartition, ReplicaFetchRequest

TOPIC = "a" * 32


class FakePoll:
    """A request that waits; counts how often it was woken."""

    def __init__(self) -> None:
        self.woken = self.finished = 0

    def update(self) -> None:
        self.woken += 1

    def finish(self) -> None:
        self.finished += 1


def request(session_id: int, epoch: int, *, node_id: int = 2, broker_epoch: int = 7) -> ReplicaFetchRequest:
    return ReplicaFetchRequest(node_id, broker_epoch, session_id, epoch, 500, 1, 2**20, 2**20, [], [])


def position(offset: int, *, partition: int = 0, epoch: int = 0, synced: int = 0) -> ReplicaFetchPartition:
    return ReplicaFetchPartition(TOPIC, partition, epoch, offset, epoch, synced, 0)


@pytest.fixture
def session() -> FetchSession:
    return FetchSessions().open(2, 7)[0]


def test_a_session_counts_its_requests() -> None:
    sessions = FetchSessions()
    assert sessions.find(request(0, 0)) is None
    session, replaced = sessions.open(2, 7)
    assert replaced is None
    for epoch in (1, 2, 3):
        assert sessions.find(request(session.session_id, epoch)) is session
    for epoch in (3, 5, 0):  # repeated, one lost, a new one under an old id
        with pytest.raises(InvalidFetchSessionEpochError, match="expects epoch 4"):
            sessions.find(request(session.session_id, epoch))
    session.epoch = MAX_EPOCH
    assert sessions.find(request(session.session_id, MAX_EPOCH)) is session
    assert session.epoch == 1


def test_a_broker_has_one_session_and_another_incarnation_has_another() -> None:
    sessions = FetchSessions()
    first, _ = sessions.open(2, 7)
    with pytest.raises(InvalidFetchSessionEpochError):
        sessions.find(request(first.session_id, 1, broker_epoch=8))
    second, replaced = sessions.open(2, 8)
    assert replaced is first
    assert (len(sessions), list(sessions)) == (1, [second])
    with pytest.raises(FetchSessionIdNotFoundError):
        sessions.find(request(first.session_id, 1))
    with pytest.raises(FetchSessionIdNotFoundError):
        sessions.find(request(second.session_id, 1, node_id=3))
    with pytest.raises(InvalidFetchSessionEpochError):
        sessions.find(request(0, 1))
    sessions.close(first)
    assert len(sessions) == 1
    sessions.close(second)
    assert len(sessions) == 0


def test_a_listing_is_sent_once(session: FetchSession) -> None:
    replica = session.list(position(5))
    replica.on_appended(100)
    assert list(session.ready) == [replica]
    replica.mark_sent()
    replica.on_appended(100)
    assert not session.ready  # the response to the follower is under way
    assert session.list(position(5, synced=5)) is replica
    assert replica.is_sent  # only its synced end has changed
    session.list(position(6, synced=5))
    assert not replica.is_sent
    replica.on_appended(100)
    assert list(session.ready) == [replica]


@pytest.mark.parametrize("again", [position(5, epoch=1), position(4)], ids=["epoch", "offset"])
def test_another_epoch_or_offset_is_another_listing(session: FetchSession, again: Any) -> None:
    replica = session.list(position(5))
    replica.sent_high_watermark = 5
    replica.mark_sent()
    session.list(again)
    assert not replica.is_sent
    assert replica.sent_high_watermark == -1


def test_a_forgotten_partition_starts_again(session: FetchSession) -> None:
    replica = session.list(position(5))
    replica.on_appended(1)
    replica.on_moved()
    assert session.forget(replica.key) is replica
    assert session.forget(replica.key) is None
    replica.on_appended(1)
    assert not session.ready
    assert not session.moved
    assert session.list(position(5)) is not replica


def test_a_waiting_request_ends_with_enough_bytes(session: FetchSession) -> None:
    replica = session.list(position(0))
    poll = session.poll = FakePoll()
    session.missing_bytes = 250
    for _ in range(4):
        replica.on_appended(100)
    assert poll.woken == 1


def test_an_end_of_leadership_does_not_wait(session: FetchSession) -> None:
    replica = session.list(position(0))
    replica.hosted = object()
    poll = session.poll = FakePoll()
    session.missing_bytes = 10**9
    replica.on_moved()
    assert poll.woken == 0
    replica.on_role_changed()
    assert poll.woken == 1
    assert replica.hosted is None
    assert list(session.ready) == [replica]


def test_reprs(session: FetchSession) -> None:
    replica = session.list(position(5))
    assert repr(session) == f"<FetchSession {session.session_id} of node 2, 1 partitions>"
    assert "of node 2 at 5, open" in repr(replica)


def test_records_of_a_throttled_replica_wait_and_others_do_not(session: FetchSession) -> None:
    throttled, other = session.list(position(5)), session.list(position(5, partition=1))
    throttled.on_appended(100)
    session.throttle(throttled)
    session.poll = poll = FakePoll()
    session.missing_bytes = 1
    throttled.on_appended(100)
    assert (list(session.ready), poll.woken) == ([], 0)
    other.on_appended(100)
    assert (list(session.ready), poll.woken) == ([other], 1)
    session.end_throttling()
    assert (list(session.ready), session.throttled) == ([other, throttled], {})


def test_a_throttled_replica_that_is_awaited_wakes_its_request(session: FetchSession) -> None:
    replica = session.list(position(5))
    replica.on_appended(100)
    session.throttle(replica)
    session.poll = poll = FakePoll()
    session.missing_bytes = 1
    session.end_throttling_of((TOPIC, 1))
    assert poll.woken == 0
    session.end_throttling_of((TOPIC, 0))
    assert (list(session.ready), poll.woken) == ([replica], 1)


@pytest.mark.parametrize("leaves", ["listed again", "forgotten", "led elsewhere"])
def test_a_replica_leaves_the_throttled_ones(session: FetchSession, leaves: str) -> None:
    replica = session.list(position(5))
    replica.on_appended(100)
    session.throttle(replica)
    if leaves == "listed again":
        session.list(position(6))
    elif leaves == "forgotten":
        session.forget((TOPIC, 0))
    else:
        replica.on_role_changed()
    assert session.throttled == {}
