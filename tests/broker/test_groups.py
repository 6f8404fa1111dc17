"""Consumer groups over the wire: one broker, the real machine, hand-written members.

Covers ``handlers/groups.py`` and ``coordination/held_heartbeats.py``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kafkalite.broker.broker import Broker
from kafkalite.broker.cluster.node_state import NodeState
from kafkalite.broker.coordination.internal_topics import GROUP, TRANSACTION
from kafkalite.errors import (
    BrokerError,
    ConnectionFailedError,
    CoordinatorNotAvailableError,
    ErrorCode,
    InvalidProducerEpochError,
    InvalidRequestError,
    NotCoordinatorError,
    ProducerFencedError,
    UnknownMemberIdError,
    broker_error,
)
from kafkalite.model import NO_EPOCH, NO_OFFSET, NO_TIMESTAMP, OFFSETS_TOPIC
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.connection import RequestError
from kafkalite.protocol.messages import admin, data, groups, transactions
from kafkalite.testing import Cluster, VirtualClock
from kafkalite.testing.faults import fail_next
from kafkalite.testing.wire import WireClient
from proof.durable_state import durable_state
from proof.waiting import eventually, settle

RETRIED = {
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.SHUTTING_DOWN,
}


def member_id(number: int) -> str:
    return f"{number:032x}"


def heartbeat(
    number: int,
    epoch: int,
    *,
    topics: list[str] | None = None,
    owned: list[groups.AssignedTopic] | None = None,
    wait_ms: int = 0,
    group: str = "g",
    instance_id: str | None = None,
) -> groups.ConsumerGroupHeartbeatRequest:
    if epoch == 0:
        topics, owned = topics or ["t"], owned or []
    return groups.ConsumerGroupHeartbeatRequest(
        group, member_id(number), epoch, instance_id, 60_000, topics, None, None, owned, wait_ms
    )


def offset(partition: int, value: int, metadata: str | None = None) -> groups.CommittedOffset:
    return groups.CommittedOffset("t", partition, value, 0, metadata, NO_TIMESTAMP, "", 0, None)


def commit(number: int, epoch: int, *offsets: groups.CommittedOffset) -> groups.OffsetCommitRequest:
    name = member_id(number) if number else ""
    return groups.OffsetCommitRequest("g", name, epoch, None, list(offsets))


def fetch(group: str = "g", partitions: list[groups.GroupPartition] | None = None) -> Any:
    return groups.OffsetFetchRequest(group, "", NO_EPOCH, False, partitions)


def held_by(assignment: list[groups.AssignedTopic] | None) -> list[int]:
    assert assignment is not None
    return sorted(number for topic in assignment for number in topic.partitions)


def checked(message: Any) -> Any:
    """Return the response. Raises the BrokerError of a refused request."""
    if isinstance(message, RequestError):
        raise broker_error(message.error_code, message.error_message or "")
    return message


class Caller:
    """Sends requests to the coordinator and retries temporary errors."""

    def __init__(self, cluster: Cluster | Broker) -> None:
        self._cluster = cluster
        self._wires: dict[str, WireClient] = {}

    def _addresses(self) -> list[str]:
        if isinstance(self._cluster, Broker):
            return [self._cluster.address]
        return [broker.address for broker in self._cluster.brokers.values() if broker.is_running]

    async def wire(self, address: str) -> WireClient:
        wire = self._wires.get(address)
        if wire is None or wire.is_closed:
            wire = self._wires[address] = await WireClient(address).__aenter__()
        return wire

    async def find(self, key: str = "g", kind: int = GROUP) -> groups.Coordinator:
        while True:
            for address in self._addresses():
                try:
                    request = groups.FindCoordinatorRequest(kind, [key])
                    answer = checked(await (await self.wire(address)).call(request))
                except (OSError, ConnectionFailedError, BrokerError):
                    continue
                (found,) = answer.coordinators
                if not found.error_code:
                    return found
            await asyncio.sleep(0.01)

    async def call(self, request: Any, key: str = "g", kind: int = GROUP) -> Any:
        """Return the coordinator's response, after retrying temporary errors. Raises the BrokerError of a
        refusal.
        """
        while True:
            try:
                found = await self.find(key, kind)
                return checked(await (await self.wire(found.address)).call(request))
            except BrokerError as error:
                if error.code not in RETRIED:
                    raise
            except (OSError, ConnectionFailedError):
                pass
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        for wire in self._wires.values():
            await wire.__aexit__(None, None, None)


@asynccontextmanager
async def asking(cluster: Cluster | Broker) -> AsyncIterator[Caller]:
    caller = Caller(cluster)
    try:
        yield caller
    finally:
        await caller.close()


@asynccontextmanager
async def a_group(partitions: int = 3, **settings: Any) -> AsyncIterator[tuple[Broker, Caller]]:
    settings.setdefault("offsets_topic_num_partitions", 2)
    async with Broker(listeners="inproc://", **settings) as broker, asking(broker) as caller:
        wire = await caller.wire(broker.address)
        await wire.call(admin.CreateTopicsRequest(1000, False, [admin.NewTopic("t", partitions, 1, {})]))
        await caller.find()
        yield broker, caller


# --- requests of a member --------------------------------------------------------------------------


async def test_r56_a_late_commit_from_an_older_connection_moves_no_offset_back() -> None:
    async with a_group() as (broker, caller), WireClient(broker.address) as newer:
        epoch = (await caller.call(heartbeat(1, 0))).member_epoch
        assert (await caller.call(commit(1, epoch, offset(0, 10)))).error_code == 0
        assert (await newer.call(commit(1, epoch, offset(0, 30)))).error_code == 0
        with pytest.raises(InvalidRequestError, match="has committed on a newer connection"):
            await caller.call(commit(1, epoch, offset(0, 20)))
        (found,) = (await caller.call(fetch())).offsets
        assert found.offset == 30


async def test_a_member_joins_commits_and_leaves() -> None:
    async with a_group() as (broker, caller):
        joined = await caller.call(heartbeat(1, 0))
        assert (joined.error_code, held_by(joined.assignment)) == (0, [0, 1, 2])
        assert joined.heartbeat_interval_ms == 5_000
        epoch = joined.member_epoch
        assert epoch > 0
        stays = await caller.call(heartbeat(1, epoch, owned=joined.assignment))
        assert (stays.member_epoch, stays.assignment) == (epoch, None)
        done = await caller.call(commit(1, epoch, offset(0, 5, "so far"), offset(2, 7)))
        assert [one.error_code for one in done.offsets] == [0, 0]
        fetched = await caller.call(fetch())
        assert [(one.partition, one.offset, one.metadata) for one in fetched.offsets] == [
            (0, 5, "so far"),
            (2, 7, None),
        ]
        wanted = [groups.GroupPartition("t", 1)]
        assert (await caller.call(fetch(partitions=wanted))).offsets[0].offset == NO_OFFSET
        left = await caller.call(heartbeat(1, -1))
        assert left.error_code == 0
        assert broker.statistics().group_count == 1


async def members(caller: Caller) -> set[str]:
    (group,) = (await caller.call(groups.DescribeGroupsRequest(["g"], False))).groups
    return {member.member_id for member in group.members}


async def test_any_text_is_a_member_id() -> None:
    """Clients choose their ids, and no rule of the protocol makes them hexadecimal."""
    name = "Kasse 3 in Köln / \N{PINE DECORATION}"
    async with a_group() as (_, caller):
        joined = await caller.call(heartbeat(1, 0)._replace(member_id=name))
        assert (joined.member_id, held_by(joined.assignment)) == (name, [0, 1, 2])
        stays = heartbeat(1, joined.member_epoch, owned=joined.assignment)._replace(member_id=name)
        assert (await caller.call(stays)).error_code == 0
        committed = await caller.call(commit(1, joined.member_epoch, offset(0, 5))._replace(member_id=name))
        assert committed.offsets[0].error_code == 0
        assert await members(caller) == {name}
        for wrong in ("", "x" * 256):
            with pytest.raises(InvalidRequestError):
                await caller.call(heartbeat(1, 0)._replace(member_id=wrong))


async def test_a_zombies_commit_is_refused() -> None:
    """R39"""
    async with a_group() as (_, caller):
        epoch = (await caller.call(heartbeat(1, 0))).member_epoch
        await caller.call(heartbeat(1, -1))
        with pytest.raises(UnknownMemberIdError):
            await caller.call(commit(1, epoch, offset(0, 5)))


async def test_groups_are_listed_described_and_deleted() -> None:
    async with a_group() as (_, caller):
        joined = await caller.call(heartbeat(1, 0))
        await caller.call(commit(1, joined.member_epoch, offset(0, 5)))
        listed = await caller.call(groups.ListGroupsRequest([]))
        assert [(one.group_id, one.member_count) for one in listed.groups] == [("g", 1)]
        stable = await caller.call(groups.ListGroupsRequest(["Stable"]))
        assert stable.groups == listed.groups
        unknown = await caller.call(groups.ListGroupsRequest(["Sleeping"]))
        assert (unknown.error_code, unknown.groups) == (0, [])
        described = await caller.call(groups.DescribeGroupsRequest(["g", "nobody's"], True))
        known, unknown = described.groups
        assert held_by(known.members[0].assignment) == [0, 1, 2]
        assert known.members[0].client_id == "wire-client"
        assert known.journal
        assert unknown.error_code == ErrorCode.GROUP_ID_NOT_FOUND
        deleted = await caller.call(groups.DeleteGroupsRequest(["g"]))
        assert deleted.groups[0].error_code == ErrorCode.NON_EMPTY_GROUP
        await caller.call(heartbeat(1, -1))
        gone = await caller.call(groups.OffsetDeleteRequest("g", [groups.GroupPartition("t", 0)]))
        assert gone.offsets[0].error_code == 0
        deleted = await caller.call(groups.DeleteGroupsRequest(["g", "nobody's"]))
        assert [one.error_code for one in deleted.groups] == [0, ErrorCode.GROUP_ID_NOT_FOUND]
        assert (await caller.call(groups.ListGroupsRequest([]))).groups == []


# --- long polls ------------------------------------------------------------------------------------


async def test_a_heartbeat_waits_until_there_is_something_new() -> None:
    """A rebalance takes milliseconds: the held heartbeats of both members are answered at once."""
    async with a_group(2) as (broker, caller), WireClient(broker.address) as first:
        joined = await caller.call(heartbeat(1, 0))
        first.send(heartbeat(1, joined.member_epoch, owned=joined.assignment, wait_ms=60_000))
        await eventually(lambda: len(broker.coordinators.heartbeats) == 1)
        second = await caller.call(heartbeat(2, 0))
        assert held_by(second.assignment) == []
        told = (await first.response()).message
        kept = held_by(told.assignment)
        assert len(kept) == 1
        waiting = heartbeat(2, second.member_epoch, owned=[], wait_ms=60_000)
        async with WireClient(broker.address) as other:
            other.send(waiting)
            await eventually(lambda: len(broker.coordinators.heartbeats) == 1)
            await first.call(heartbeat(1, told.member_epoch, owned=told.assignment))
            got = (await other.response()).message
        assert sorted(kept + held_by(got.assignment)) == [0, 1]
        assert len(broker.coordinators.heartbeats) == 0


async def test_a_heartbeat_without_anything_new_is_answered_in_time() -> None:
    async with a_group() as (broker, caller):
        joined = await caller.call(heartbeat(1, 0))
        began = time.monotonic()
        wire = await caller.wire(broker.address)
        wire.send(heartbeat(1, joined.member_epoch, owned=joined.assignment, wait_ms=30))
        answer = (await wire.response()).message
        assert (answer.error_code, answer.assignment) == (0, None)
        assert time.monotonic() - began >= 0.029


async def test_no_answer_waits_for_longer_than_half_a_session() -> None:
    settings = {"group_consumer_session_timeout_ms": 300, "group_consumer_heartbeat_interval_ms": 10}
    async with a_group(**settings) as (broker, caller):
        joined = await caller.call(heartbeat(1, 0))
        wire = await caller.wire(broker.address)
        waiting = heartbeat(1, joined.member_epoch, owned=joined.assignment, wait_ms=2**31 - 1)
        for _ in range(3):
            answer = checked(await wire.call(waiting))
            assert answer.member_epoch == joined.member_epoch


async def test_a_later_heartbeat_ends_the_wait_of_the_one_before() -> None:
    async with a_group() as (broker, caller), WireClient(broker.address) as other:
        joined = await caller.call(heartbeat(1, 0))
        other.send(heartbeat(1, joined.member_epoch, owned=joined.assignment, wait_ms=60_000))
        await eventually(lambda: len(broker.coordinators.heartbeats) == 1)
        await caller.call(heartbeat(1, joined.member_epoch))
        assert (await other.response()).message.error_code == 0
        other.send(heartbeat(1, joined.member_epoch, wait_ms=60_000))
        await eventually(lambda: len(broker.coordinators.heartbeats) == 1)
        await caller.call(heartbeat(1, -1))
        assert (await other.response()).message.error_code == 0
        assert len(broker.coordinators.heartbeats) == 0


async def test_a_heartbeat_of_a_client_that_is_gone_is_not_held() -> None:
    async with a_group() as (broker, caller):
        joined = await caller.call(heartbeat(1, 0))
        async with WireClient(broker.address) as other:
            other.send(heartbeat(1, joined.member_epoch, owned=joined.assignment, wait_ms=60_000))
            await eventually(lambda: len(broker.coordinators.heartbeats) == 1)
        await eventually(lambda: len(broker.coordinators.heartbeats) == 0)


async def test_a_member_keeps_its_partitions_when_the_connection_of_its_join_ends() -> None:
    """It may have received them, and no partition has two owners (R38)."""
    async with a_group() as (broker, caller):
        async with WireClient(broker.address) as first:
            assert held_by((await first.call(heartbeat(1, 0))).assignment) == [0, 1, 2]
        await eventually(lambda: broker.statistics().connection_count == 1)
        later = await caller.call(heartbeat(2, 0))
        assert later.assignment is None or held_by(later.assignment) == []
        assert await members(caller) == {member_id(1), member_id(2)}


async def test_new_partitions_end_the_wait() -> None:
    async with a_group(1) as (broker, caller), WireClient(broker.address) as other:
        joined = await caller.call(heartbeat(1, 0))
        other.send(heartbeat(1, joined.member_epoch, owned=joined.assignment, wait_ms=60_000))
        await eventually(lambda: len(broker.coordinators.heartbeats) == 1)
        wire = await caller.wire(broker.address)
        await wire.call(admin.CreatePartitionsRequest(1000, False, [admin.PartitionCount("t", 4)]))
        told = (await other.response()).message
        assert held_by(told.assignment) == [0, 1, 2, 3]


async def test_a_stopping_broker_answers_held_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_group() as (broker, caller), WireClient(broker.address) as other:
        joined = await caller.call(heartbeat(1, 0))
        other.send(heartbeat(1, joined.member_epoch, owned=joined.assignment, wait_ms=60_000))
        await eventually(lambda: len(broker.coordinators.heartbeats) == 1)
        monkeypatch.setattr("kafkalite.broker.broker.STOP_GRACE_MS", 600_000)
        await broker.stop()
        with pytest.raises(NotCoordinatorError):
            checked((await other.response()).message)


# --- time ------------------------------------------------------------------------------------------


async def test_a_silent_members_partitions_go_to_the_others() -> None:
    clock = VirtualClock()
    async with Cluster(clock=clock, offsets_topic_num_partitions=1) as cluster, asking(cluster) as caller:
        wire = await caller.wire(cluster.broker.address)
        await wire.call(admin.CreateTopicsRequest(1000, False, [admin.NewTopic("t", 2, 1, {})]))
        first = await caller.call(heartbeat(1, 0))
        await clock.advance(30_000)
        second = await caller.call(heartbeat(2, 0))
        await clock.advance(15_001)
        await settle()
        got = await caller.call(heartbeat(2, second.member_epoch, owned=[]))
        assert held_by(got.assignment) == [0, 1]
        with pytest.raises(UnknownMemberIdError):
            await caller.call(heartbeat(1, first.member_epoch))


# --- failover --------------------------------------------------------------------------------------


@asynccontextmanager
async def three_brokers(**settings: Any) -> AsyncIterator[tuple[Cluster, Caller]]:
    settings = {"offsets_topic_num_partitions": 2, **settings}
    async with Cluster(brokers=3, **settings) as cluster, asking(cluster) as caller:
        await cluster.create_topic("t", partitions=3)
        yield cluster, caller


async def coordinator_of(cluster: Cluster, caller: Caller) -> int:
    return (await caller.find()).node_id


@pytest.mark.parametrize("end", ["kill", "stop", "crash"])
async def test_another_broker_continues_with_the_same_epochs_and_offsets(end: str) -> None:
    """R36"""
    async with three_brokers() as (cluster, caller):
        joined = await caller.call(heartbeat(1, 0))
        assert held_by(joined.assignment) == [0, 1, 2]
        await caller.call(commit(1, joined.member_epoch, offset(1, 42)))
        before = await coordinator_of(cluster, caller)

        def is_whole() -> bool:
            state = cluster.brokers[before].image.topics[OFFSETS_TOPIC].partitions[0]
            return (len(state.replicas), len(state.isr)) == (3, 3)

        await eventually(is_whole)
        await getattr(cluster, end)(before)
        fetched = await caller.call(fetch())
        assert [(one.partition, one.offset) for one in fetched.offsets] == [(1, 42)]
        assert await coordinator_of(cluster, caller) != before
        stays = await caller.call(heartbeat(1, joined.member_epoch, owned=joined.assignment))
        assert (stays.error_code, stays.member_epoch, stays.assignment) == (0, joined.member_epoch, None)
        await caller.call(commit(1, joined.member_epoch, offset(1, 43)))


async def test_a_deposed_coordinator_serves_no_more(mutant: Callable[[str], None]) -> None:
    """R36: leadership moves while the broker lives; from then on it responds NOT_COORDINATOR."""
    assert await _answer_of_the_deposed() == ErrorCode.NOT_COORDINATOR
    mutant("R36-keep-serving")
    assert await _answer_of_the_deposed() == ErrorCode.NONE


async def _answer_of_the_deposed() -> int:
    async with three_brokers(auto_leader_rebalance_enable=False) as (cluster, caller):
        await caller.call(heartbeat(1, 0))
        before = await coordinator_of(cluster, caller)
        number = (await caller.find()).partition
        key = (OFFSETS_TOPIC, number)
        await cluster.stop(before)
        await cluster.start(before)
        await cluster.wait_until(
            lambda: before in cluster.brokers[before].image.partition(*key).isr, what="in sync again"
        )
        moved_to = await coordinator_of(cluster, caller)
        deposed = cluster.brokers[moved_to]
        shard = deposed.coordinators.find(GROUP, number)
        await cluster.wait_until(lambda: shard.is_loaded)
        wire = await WireClient(deposed.address).__aenter__()
        cluster_wire = await caller.wire(deposed.address)
        await cluster_wire.call(admin.ElectLeadersRequest(1000, False, [admin.ElectionPartition(*key)]))
        await cluster.wait_until(lambda: deposed.image.partition(*key).leader != moved_to)
        try:
            checked(await wire.call(fetch()))
        except BrokerError as error:
            return error.code
        finally:
            await wire.__aexit__(None, None, None)
        return 0


# --- offsets in transactions -----------------------------------------------------------------------


def in_transaction(
    identity: tuple[int, int], *offsets: groups.CommittedOffset, member: int = 0, epoch: int = NO_EPOCH
) -> groups.TxnOffsetCommitRequest:
    name = member_id(member) if member else ""
    return groups.TxnOffsetCommitRequest("app", *identity, "g", name, epoch, None, list(offsets))


def stable() -> groups.OffsetFetchRequest:
    wanted = [groups.GroupPartition("t", 0)]
    return groups.OffsetFetchRequest("g", "", NO_EPOCH, True, wanted)


async def begin(caller: Caller) -> tuple[int, int]:
    """Return the producer id and epoch of a transactional producer."""
    begun = await caller.call(data.InitProducerIdRequest("app", 60_000, -1, -1), "app", TRANSACTION)
    assert begun.error_code == 0
    return begun.producer_id, begun.producer_epoch


@pytest.mark.parametrize("is_commit", [True, False])
async def test_offsets_take_effect_with_their_transaction(is_commit: bool) -> None:
    """R35"""
    async with a_group() as (_, caller):
        epoch = (await caller.call(heartbeat(1, 0))).member_epoch
        await caller.call(commit(1, epoch, offset(0, 3)))
        identity = await begin(caller)
        done = await caller.call(in_transaction(identity, offset(0, 9), member=1, epoch=epoch))
        assert [one.error_code for one in done.offsets] == [0]
        assert (await caller.call(fetch())).offsets[0].offset == 3
        unstable = (await caller.call(stable())).offsets[0]
        assert unstable.error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT
        end = transactions.EndTxnRequest("app", *identity, is_commit)
        ended = await caller.call(end, "app", TRANSACTION)
        assert ended.error_code == 0
        while (found := (await caller.call(stable())).offsets[0]).error_code:
            assert found.error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT
            await asyncio.sleep(0)
        assert found.offset == (9 if is_commit else 3)


async def test_a_transactions_offsets_need_a_member_of_the_group() -> None:
    """R35, KIP-447"""
    async with a_group() as (_, caller):
        epoch = (await caller.call(heartbeat(1, 0))).member_epoch
        identity = await begin(caller)
        with pytest.raises(UnknownMemberIdError):
            await caller.call(in_transaction(identity, offset(0, 9), member=2, epoch=epoch))


async def test_offsets_of_a_fenced_producer_are_refused() -> None:
    async with a_group() as (_, caller):
        identity = await begin(caller)
        await begin(caller)
        with pytest.raises((ProducerFencedError, InvalidProducerEpochError)):
            await caller.call(in_transaction(identity, offset(0, 9)))


async def test_pending_offsets_survive_a_failover() -> None:
    """R35, R36"""
    async with three_brokers(transaction_state_log_num_partitions=2) as (cluster, caller):
        identity = await begin(caller)
        done = await caller.call(in_transaction(identity, offset(0, 9)))
        assert [one.error_code for one in done.offsets] == [0]
        await cluster.kill(await coordinator_of(cluster, caller))
        unstable = (await caller.call(stable())).offsets[0]
        assert unstable.error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT
        await caller.call(transactions.EndTxnRequest("app", *identity, True), "app", TRANSACTION)
        while (found := (await caller.call(stable())).offsets[0]).error_code:
            await asyncio.sleep(0.01)
        assert found.offset == 9


# --- before the commitment -------------------------------------------------------------------------


async def _is_answered_before_it_is_safe() -> tuple[bool, int]:
    """Send a commit that no follower has. Return whether it was answered, and the offset after a failover."""
    settings = {"replica_fetch_wait_max_ms": 20, "offsets_topic_num_partitions": 1}
    async with three_brokers(**settings) as (cluster, caller):
        await caller.call(commit(0, NO_EPOCH, offset(0, 1)))
        before = await coordinator_of(cluster, caller)
        cluster.intercept(ApiKey.REPLICA_FETCH, fail_next(10**6), node_id=before)
        await asyncio.sleep(0.1)  # longer than replica.fetch.wait.max.ms: polls that waited are answered
        async with WireClient(cluster.brokers[before].address) as wire:
            wire.send(commit(0, NO_EPOCH, offset(0, 2)))
            wire.send(fetch())
            shard = cluster.brokers[before].coordinators.groups("g")
            await eventually(lambda: shard.high_watermark < shard.end_offset)
            told = asyncio.ensure_future(wire.response())
            await settle()
            is_told = told.done()
            told.cancel()
        await cluster.kill(before)
        cluster.intercept(ApiKey.REPLICA_FETCH, None, node_id=before)
        return is_told, (await caller.call(fetch())).offsets[0].offset


async def test_a_commit_is_acknowledged_when_the_replicas_have_it(mutant: Callable[[str], None]) -> None:
    """R36, R39: an acknowledged offset is there after a failover."""
    assert await _is_answered_before_it_is_safe() == (False, 1)
    mutant("R36-answer-uncommitted")
    assert await _is_answered_before_it_is_safe() == (True, 1)


async def test_held_requests_are_refused_when_another_broker_leads() -> None:
    """R36: a held request becomes NOT_COORDINATOR with the leadership; the next coordinator takes a retry."""
    settings = {"replica_fetch_wait_max_ms": 20, "offsets_topic_num_partitions": 1}
    async with three_brokers(**settings) as (cluster, caller):
        await caller.call(commit(0, NO_EPOCH, offset(0, 1)))
        before = await coordinator_of(cluster, caller)
        cluster.intercept(ApiKey.REPLICA_FETCH, fail_next(10**6), node_id=before)
        await asyncio.sleep(0.1)  # longer than replica.fetch.wait.max.ms: polls that waited are answered
        async with WireClient(cluster.brokers[before].address) as wire:
            wire.send(commit(0, NO_EPOCH, offset(0, 2)))
            await settle()
            stopping = asyncio.ensure_future(cluster.stop(before))
            with pytest.raises(NotCoordinatorError):
                checked((await wire.response()).message)
            await stopping
        await caller.call(commit(0, NO_EPOCH, offset(0, 2)))
        assert (await caller.call(fetch())).offsets[0].offset == 2


async def test_too_few_in_sync_replicas_is_a_temporary_error() -> None:
    async with three_brokers(offsets_topic_num_partitions=1) as (cluster, caller):
        await caller.call(commit(0, NO_EPOCH, offset(0, 1)))
        before = await coordinator_of(cluster, caller)
        others = [node_id for node_id in cluster.nodes if node_id != before]
        await cluster.kill(others[0])
        await cluster.wait_until(
            lambda: len(cluster.brokers[before].image.partition(OFFSETS_TOPIC, 0).isr) == 2
        )
        await caller.call(commit(0, NO_EPOCH, offset(0, 2)))
        shard = cluster.brokers[before].coordinators.groups("g")
        shard.partition._leader.set_min_insync_replicas(3)
        async with WireClient(cluster.brokers[before].address) as wire:
            with pytest.raises(CoordinatorNotAvailableError):
                checked(await wire.call(commit(0, NO_EPOCH, offset(0, 3))))
        assert (await caller.call(fetch())).offsets[0].offset == 2


async def test_an_isolated_coordinator_has_the_replicas_confirm_it() -> None:
    """R23: cut off from the controllers, a coordinator returns nothing that another one may have changed."""
    settings = {"replica_fetch_wait_max_ms": 20, "offsets_topic_num_partitions": 1}
    async with three_brokers(**settings) as (cluster, caller):
        await caller.call(commit(0, NO_EPOCH, offset(0, 1)))
        before = await coordinator_of(cluster, caller)
        broker = cluster.brokers[before]
        shard = broker.coordinators.groups("g")
        broker.coordinators.node = NodeState("", session_end_ms=0)
        end = shard.end_offset
        assert (await caller.call(fetch())).offsets[0].offset == 1  # the replicas confirm
        assert shard.end_offset == end + 1
        cluster.intercept(ApiKey.REPLICA_FETCH, fail_next(10**6), node_id=before)
        await asyncio.sleep(0.1)  # longer than replica.fetch.wait.max.ms: polls that waited are answered
        async with WireClient(broker.address) as wire:
            wire.send(fetch())
            answer = asyncio.ensure_future(wire.response())
            await settle()
            assert not answer.done()
            cluster.intercept(ApiKey.REPLICA_FETCH, None, node_id=before)
            assert (await answer).message.offsets[0].offset == 1
        await cluster.kill(before)
        assert (await caller.call(fetch())).offsets[0].offset == 1


async def test_a_compacted_log_loads_to_the_same_state() -> None:
    """R36: without the records that compaction removed, a coordinator reaches the same state."""
    settings = {
        "offsets_topic_num_partitions": 1,
        "transaction_state_log_num_partitions": 1,
        "offsets_topic_segment_bytes": 4096,
        "log_cleaner_backoff_ms": 10**9,
    }
    async with Cluster(**settings) as cluster, asking(cluster) as caller:
        await cluster.create_topic("t", partitions=3)
        epoch = (await caller.call(heartbeat(1, 0))).member_epoch
        identity = await begin(caller)
        for number in range(200):
            await caller.call(commit(1, epoch, offset(number % 3, number, f"text {number}")))
            if number % 20 == 0:
                await caller.call(in_transaction(identity, offset(0, number), member=1, epoch=epoch))
                end = transactions.EndTxnRequest("app", *identity, number % 40 == 0)
                ended = await caller.call(end, "app", TRANSACTION)
                identity = (ended.producer_id, ended.producer_epoch)
                while (await caller.call(stable())).offsets[0].error_code:
                    await asyncio.sleep(0)
        await caller.call(heartbeat(2, 0))
        await caller.call(heartbeat(2, -1))
        await caller.call(in_transaction(identity, offset(2, 777), member=1, epoch=epoch))
        shard = cluster.broker.coordinators.groups("g")
        expected, size_bytes = durable_state(shard.machine), shard.partition.log.size_bytes
        cleaner = cluster.broker.housekeeping.cleaner
        assert cleaner is not None
        await cleaner.clean()
        assert shard.partition.log.size_bytes < size_bytes / 2
        await cluster.restart()
        await caller.call(fetch())
        again = cluster.broker.coordinators.groups("g")
        assert again is not shard
        assert durable_state(again.machine) == expected
