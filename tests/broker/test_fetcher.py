"""Fetcher: what it lists, when it sends, and what it does after late, lost and refused responses."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.partitions.hosted_partition import FetchListener
from kafkalite.broker.quotas.replication_quota import ReplicationQuota
from kafkalite.broker.replication.fetcher import Fetcher
from kafkalite.clock import SystemClock
from kafkalite.errors import (
    ConnectionFailedError,
    CorruptBatchError,
    FetchSessionIdNotFoundError,
    NotLeaderOrFollowerError,
    StorageError,
)
from kafkalite.metadata.throttles import Throttle
from kafkalite.protocol.messages.cluster import (
    ReplicaFetchedPartition,
    ReplicaFetchRequest,
    ReplicaFetchResponse,
)
from kafkalite.replication.follower import FetchPosition, NextFetch
from proof.waiting import eventually, settle

EMPTY = memoryview(b"")


class FakeHosted:
    """A follower with outcomes chosen by a test."""

    def __init__(self, number: int) -> None:
        self.key = SimpleNamespace(topic="t", partition=number)
        self.topic_id = "t"
        self.leader_epoch = 4
        self.offline_reason: str | None = None
        self.listener: FetchListener | None = None
        self.offset = 0
        self.is_busy = False
        self.outcome: NextFetch | Exception | None = NextFetch.NOT_DUE
        self.taken: list[ReplicaFetchedPartition] = []

    def fetch_position(self) -> FetchPosition | None:
        if self.is_busy:
            return None
        return FetchPosition(4, self.offset, 3, self.offset, 0, self.offset)

    def on_fetched(self, response: Any, batches: memoryview, asked: Any, wall_ms: int) -> NextFetch | None:
        self.taken.append(response)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        if self.outcome in (NextFetch.AFTER_SYNC, NextFetch.NOW):
            self.offset += len(batches)
        return self.outcome

    def progress(self, outcome: NextFetch | Exception = NextFetch.NOW) -> None:
        """A sync has ended, or disk work."""
        assert self.listener is not None
        self.listener.on_progress(outcome)


class FakeConnection:
    """The leader's end: collects requests, responds when a test calls ``answer``."""

    def __init__(self) -> None:
        self.requests: list[ReplicaFetchRequest] = []
        self.waiting: list[Any] = []
        self.is_closed = False

    def request(self, message: ReplicaFetchRequest, on_answer: Any, timeout_ms: int) -> None:
        if self.is_closed:
            raise ConnectionFailedError("gone")
        self.requests.append(message)
        self.waiting.append(on_answer)

    def close(self) -> None:
        self.is_closed = True

    def response(self, *partitions: ReplicaFetchedPartition) -> None:
        payload = memoryview(bytes(sum(partition.length_bytes for partition in partitions)))
        self.waiting.pop(0)(ReplicaFetchResponse(0, None, 9, list(partitions)), payload, None)

    def fail(self, error: Exception) -> None:
        self.waiting.pop(0)(None, EMPTY, error)


class Leader:
    """Opens connections."""

    def __init__(self) -> None:
        self.connections: list[FakeConnection] = []
        self.refusals = 0

    async def connect(self, node_id: int) -> Any:
        assert node_id == 1
        if self.refusals:
            self.refusals -= 1
            raise ConnectionFailedError("not yet")
        if not self.connections or self.connections[-1].is_closed:
            self.connections.append(FakeConnection())
        return self.connections[-1]

    @property
    def connection(self) -> FakeConnection:
        return self.connections[-1]


@pytest.fixture
def leader() -> Leader:
    return Leader()


@pytest.fixture
async def fetcher(leader: Leader) -> Any:
    broken: list[BaseException] = []
    config = BrokerConfig(node_id=2, replica_fetch_backoff_ms=20)
    made = Fetcher(
        1,
        config,
        SystemClock(),
        leader.connect,
        lambda: 77,
        broken.append,
        lambda *_: None,
        ReplicationQuota(),
        lambda _: False,
    )
    yield made
    made.close()
    assert not broken


def news(number: int, length_bytes: int = 0, **changes: Any) -> ReplicaFetchedPartition:
    return ReplicaFetchedPartition("t", number, 0, None, 4, 0, 0, -1, -1, length_bytes)._replace(**changes)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def opened(fetcher: Fetcher, leader: Leader, *hosted: Any) -> FakeConnection:
    for one in hosted:
        fetcher.add(one)
    await eventually(lambda: leader.connections and leader.connection.waiting)
    leader.connection.response()
    return leader.connection


async def test_the_first_request_opens_a_session_and_lists_all(fetcher: Fetcher, leader: Leader) -> None:
    several = [FakeHosted(number) for number in range(3)]
    connection = await opened(fetcher, leader, *several)
    first, second = connection.requests
    assert (first.session_id, first.session_epoch, first.node_id, first.broker_epoch) == (0, 0, 2, 77)
    assert [listed.partition for listed in first.partitions] == [0, 1, 2]
    assert (second.session_id, second.session_epoch, second.partitions) == (9, 1, [])


async def test_a_request_waits_at_the_leader_until_a_position_changes(
    fetcher: Fetcher, leader: Leader
) -> None:
    one, other = FakeHosted(0), FakeHosted(1)
    connection = await opened(fetcher, leader, one, other)
    await settle()
    assert len(connection.requests) == 2
    other.progress()
    await eventually(lambda: len(connection.requests) == 3)
    assert [listed.partition for listed in connection.requests[2].partitions] == [1]
    connection.response()  # of the earlier one, which the leader has ended
    assert len(connection.requests) == 3


async def test_after_a_small_response_the_sync_is_reported_with_the_new_offset(
    fetcher: Fetcher, leader: Leader
) -> None:
    one = FakeHosted(0)
    connection = await opened(fetcher, leader, one)
    one.outcome = NextFetch.AFTER_SYNC
    connection.response(news(0, 100))
    assert len(connection.requests) == 2
    one.progress()
    await eventually(lambda: len(connection.requests) == 3)
    assert connection.requests[2].partitions[0].fetch_offset == 100


async def test_a_long_sync_does_not_delay_the_next_fetch(fetcher: Fetcher, leader: Leader) -> None:
    one = FakeHosted(0)
    connection = await opened(fetcher, leader, one)
    one.outcome = NextFetch.AFTER_SYNC
    connection.response(news(0, 100))
    await eventually(lambda: len(connection.requests) == 3)
    assert connection.requests[2].partitions[0].fetch_offset == 100


@pytest.mark.parametrize(
    ("size", "outcome"), [(2**20, NextFetch.AFTER_SYNC), (100, NextFetch.NOW)], ids=["large", "page-cache"]
)
async def test_more_is_fetched_at_once(
    fetcher: Fetcher, leader: Leader, size: int, outcome: NextFetch
) -> None:
    one = FakeHosted(0)
    connection = await opened(fetcher, leader, one)
    one.outcome = outcome
    connection.response(news(0, size))
    assert [listed.fetch_offset for listed in connection.requests[2].partitions] == [size]


@pytest.mark.parametrize("error", [NotLeaderOrFollowerError("not me"), CorruptBatchError("torn")])
async def test_a_partition_that_fails_is_fetched_again_later(
    fetcher: Fetcher, leader: Leader, error: Exception
) -> None:
    bad, good = FakeHosted(0), FakeHosted(1)
    connection = await opened(fetcher, leader, bad, good)
    bad.outcome = error
    connection.response(news(0, 10), news(1))
    assert len(good.taken) == 1
    await eventually(lambda: any(request.forgotten for request in connection.requests))
    again = next(request for request in connection.requests if request.forgotten)
    assert [gone.partition for gone in again.forgotten] == [0]
    assert [listed.partition for listed in again.partitions] == [0]


async def test_a_failed_partition_is_forgotten_too_when_it_is_no_longer_followed(
    fetcher: Fetcher, leader: Leader
) -> None:
    """The leader still has its position."""
    bad, good = FakeHosted(0), FakeHosted(1)
    connection = await opened(fetcher, leader, bad, good)
    bad.outcome = CorruptBatchError("damaged on the way")
    connection.response(news(0, 10), news(1))
    fetcher.remove(bad)  # type: ignore[arg-type]
    await eventually(lambda: any(request.forgotten for request in connection.requests))
    assert not any(request.partitions for request in connection.requests if request.forgotten)


async def test_a_truncated_replica_is_listed_again(fetcher: Fetcher, leader: Leader) -> None:
    one = FakeHosted(0)
    connection = await opened(fetcher, leader, one)
    one.outcome = NextFetch.REPEATED
    connection.response(news(0, diverging_epoch=2, diverging_end_offset=0))
    assert len(connection.requests[2].forgotten) == len(connection.requests[2].partitions) == 1


async def test_partitions_beyond_one_request_are_listed_in_the_next(
    fetcher: Fetcher, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafkalite.broker.replication.fetcher.MAX_LISTED", 2)
    connection = await opened(fetcher, leader, *(FakeHosted(number) for number in range(7)))
    await eventually(lambda: len(connection.requests) == 4)
    listed = [one.partition for request in connection.requests for one in request.partitions]
    assert listed == list(range(7))


async def busy_with_log_start(fetcher: Fetcher, leader: Leader) -> tuple[FakeHosted, FakeConnection]:
    """A replica whose disk is busy with another log start."""
    one = FakeHosted(0)
    connection = await opened(fetcher, leader, one)
    one.outcome = None
    one.is_busy = True
    connection.response(news(0, log_start_offset=2))
    return one, connection


async def test_a_sync_that_ends_while_the_disk_is_busy_is_reported_afterwards(
    fetcher: Fetcher, leader: Leader
) -> None:
    """Otherwise the high watermark would not move before the next record."""
    one, connection = await busy_with_log_start(fetcher, leader)
    one.progress()
    await turns()
    assert not any(request.partitions for request in connection.requests[1:])
    one.is_busy = False
    one.progress()
    await eventually(lambda: connection.requests[-1].partitions)
    assert not connection.requests[-1].forgotten


async def test_a_response_that_came_while_the_disk_was_busy_is_fetched_again(
    fetcher: Fetcher, leader: Leader
) -> None:
    """The leader takes it for delivered, and would never send it again (L1)."""
    one, connection = await busy_with_log_start(fetcher, leader)
    one.progress()
    await eventually(lambda: bool(connection.waiting))
    one.outcome = NextFetch.REPEATED
    connection.response(news(0, 10))
    one.is_busy = False
    one.progress()
    await eventually(lambda: connection.requests[-1].partitions)
    assert len(connection.requests[-1].forgotten) == len(connection.requests[-1].partitions) == 1


async def test_disk_work_that_fails_is_retried_after_a_pause(fetcher: Fetcher, leader: Leader) -> None:
    one, connection = await busy_with_log_start(fetcher, leader)
    one.is_busy = False
    one.progress(StorageError("the disk is full"))
    one.progress()
    assert not any(request.partitions for request in connection.requests[1:])
    await eventually(lambda: connection.requests[-1].partitions)
    assert len(connection.requests[-1].forgotten) == 1


async def test_a_lost_connection_is_opened_again_and_the_session_too(
    fetcher: Fetcher, leader: Leader
) -> None:
    one = FakeHosted(0)
    connection = await opened(fetcher, leader, one)
    leader.refusals = 2
    connection.fail(ConnectionFailedError("reset"))
    await eventually(lambda: len(leader.connections) == 2 and leader.connection.requests)
    assert connection.is_closed
    (request,) = leader.connection.requests
    assert (request.session_id, len(request.partitions)) == (0, 1)


async def test_a_lost_session_is_opened_again_on_the_same_connection(
    fetcher: Fetcher, leader: Leader
) -> None:
    """R3: responses of the lost session are dropped."""
    one = FakeHosted(0)
    connection = await opened(fetcher, leader, one)
    one.progress()
    await eventually(lambda: len(connection.waiting) == 2)
    connection.fail(FetchSessionIdNotFoundError("who?"))
    connection.response(news(0, 10))
    assert one.taken == []
    await eventually(lambda: len(connection.requests) == 4)
    assert (connection.requests[3].session_id, len(connection.requests[3].partitions)) == (0, 1)


async def test_a_removed_partition_is_forgotten_and_its_responses_are_ignored(
    fetcher: Fetcher, leader: Leader
) -> None:
    one, other = FakeHosted(0), FakeHosted(1)
    connection = await opened(fetcher, leader, one, other)
    fetcher.remove(one)  # type: ignore[arg-type]
    connection.response(news(0, 10), news(1))
    assert (one.taken, len(other.taken)) == ([], 1)
    assert one.listener is None
    await eventually(lambda: any(request.forgotten for request in connection.requests))
    fetcher.remove(other)  # type: ignore[arg-type]
    await eventually(lambda: len(fetcher) == 0 and not fetcher._forgotten)
    count = len(connection.requests)
    while connection.waiting:
        connection.response()
    assert len(connection.requests) == count  # nothing to fetch, nothing to send


async def test_adding_a_partition_again_changes_nothing_unless_its_epoch_changed(
    fetcher: Fetcher, leader: Leader
) -> None:
    one = FakeHosted(0)
    connection = await opened(fetcher, leader, one)
    fetcher.add(one)  # type: ignore[arg-type]
    await turns()
    assert len(connection.requests) == 2
    one.leader_epoch = 5
    fetcher.add(one)  # type: ignore[arg-type]
    await eventually(lambda: len(connection.requests) == 3)
    assert len(connection.requests[2].partitions) == 1


async def test_a_throttled_partition_does_not_starve_beside_another(fetcher: Fetcher, leader: Leader) -> None:
    """A response returns most of the bytes that were spent for it in advance, and its partition lists again
    at once."""
    fetcher._quota.update(Throttle(1_000_000, {"t": None}), SystemClock().monotonic_ms())
    first, second = hosted = FakeHosted(0), FakeHosted(1)
    for one in hosted:
        one.outcome = NextFetch.NOW
    connection = await opened(fetcher, leader, *hosted)
    listed = [[one.partition for one in connection.requests[0].partitions]]
    for number in (0, 1, 0):
        connection.response(news(number, 1_000, high_watermark=1 << 40))
        await turns()
        listed.append([one.partition for one in connection.requests[-1].partitions])
    assert listed == [[0], [1], [0], [1]]
    assert (first.offset, second.offset) == (2_000, 1_000)


async def test_a_partition_with_an_offline_log_is_dropped(fetcher: Fetcher, leader: Leader) -> None:
    one = FakeHosted(0)
    connection = await opened(fetcher, leader, one)
    one.outcome = CorruptBatchError("x")
    one.offline_reason = "the disk is gone"
    connection.response(news(0, 10))
    assert len(fetcher) == 0
