"""Fetch sessions: a listing is responded to once, with records, a divergence or an error."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kafkalite.broker.handlers.replica_fetch import _Updates
from kafkalite.broker.quotas.replication_quota import ReplicationQuota
from kafkalite.broker.replication.fetch_sessions import MAX_EPOCH, FetchSession, FetchSessions
from kafkalite.errors import FetchSessionIdNotFoundError, InvalidFetchSessionEpochError
from kafkalite.metadata.throttles import Throttle
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages.cluster import ReplicaFetchPartition, ReplicaFetchRequest
from kafkalite.storage.log import Slice

TOPIC = "a" * 32
BATCH_BYTES = 1 << 14


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
    assert (list(session.ready), session.throttled) == ([throttled, other], {})


class _Led:
    """A partition whose leader always has more records, in batches of 16 KiB."""

    high_watermark, log_start_offset, leader_epoch = 1 << 40, 0, 0

    def __init__(self, number: int) -> None:
        self.key = TopicPartition("t", number)

    def awaits(self, _node_id: int) -> bool:
        return False

    def read_for_replica(self, _offset: int, max_bytes: int, *, is_checked: bool) -> Slice:
        size_bytes = max(1, max_bytes // BATCH_BYTES) * BATCH_BYTES
        return Slice([memoryview(bytes(size_bytes))], size_bytes, 0)


@pytest.mark.parametrize("turnaround_ms", [2, 20, 60, 200])
def test_a_throttled_partition_does_not_starve_beside_another(
    session: FetchSession, turnaround_ms: int
) -> None:
    """A follower lists what it has received at once, so one partition could use up the quota each time."""
    quota = ReplicationQuota()
    quota.update(Throttle(1_000_000, {"t": None}), 0)
    message = request(session.session_id, 1)
    now_ms, sent, listed = 0, Counter({0: 0, 1: 0}), [0, 1]
    while now_ms < 20_000:
        for number in listed:
            replica = session.list(position(sent[number], partition=number))
            replica.hosted = _Led(number)
            session.ready[replica] = None
        while not (updates := _Updates(session, message, 10 << 20, quota, now_ms)).is_due:
            now_ms += max(1, quota.wait_ms(now_ms))
        received = [one for one in updates.reply().message.partitions if one.length_bytes]
        for one in received:
            sent[one.partition] += one.length_bytes
        listed = [one.partition for one in received]
        now_ms += turnaround_ms
    assert min(sent.values()) > 0.4 * sent.total(), sent


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
