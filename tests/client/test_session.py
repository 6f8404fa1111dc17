"""Members of a group on an embedded broker: joining, sharing, committing, leaving.

They run in virtual time: a slow machine ends no session."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from kafkalite import Admin, Broker, Consumer, Producer, Record, TopicPartition
from kafkalite.client.group.heartbeats import Heartbeats
from kafkalite.client.group.membership import Membership
from kafkalite.client.group.rebalance_listener import RebalanceListener
from kafkalite.errors import (
    ClientError,
    CommitFailedError,
    ConfigError,
    FencedInstanceIdError,
    MaxPollIntervalError,
    OffsetMetadataTooLargeError,
    UnknownMemberIdError,
    UnknownTopicOrPartitionError,
    UnreleasedInstanceIdError,
)
from kafkalite.model import NO_EPOCH, OffsetAndMetadata
from kafkalite.protocol.messages.groups import OffsetCommitRequest
from kafkalite.testing import VirtualClock
from proof.waiting import eventually

FAST = {"retry_backoff_ms": 1, "retry_backoff_max_ms": 20, "fetch_max_wait_ms": 50}
PARTS = [TopicPartition("t", partition) for partition in range(3)]


class World:
    """A broker with topic t of three partitions, and consumers that are closed at the end."""

    def __init__(self, broker: Broker, producer: Producer, admin: Admin, stack: AsyncExitStack) -> None:
        self.broker = broker
        self.producer = producer
        self.admin = admin
        self.stack = stack

    async def fill(self, count: int, topic: str = "t", partitions: Sequence[int] = (0, 1, 2)) -> None:
        for partition in partitions:
            await self.producer.send_many(topic, [b"%d" % i for i in range(count)], partition=partition)

    def make(self, *topics: str, **settings: Any) -> Consumer:
        given = {"group_id": "g", "auto_offset_reset": "earliest", **FAST, **settings}
        if not topics and "pattern" not in settings:
            topics = ("t",)
        return Consumer(*topics, bootstrap_servers=self.broker.bootstrap_servers, **given)

    async def join(self, *topics: str, **settings: Any) -> Consumer:
        return await self.stack.enter_async_context(self.make(*topics, **settings))

    async def committed(self, group: str = "g") -> dict[TopicPartition, int]:
        found = await self.admin.committed_offsets(group)
        return {tp: at.offset for tp, at in found.items() if at.offset}


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        clock = VirtualClock()
        settings: dict[str, Any] = {
            "group_consumer_session_timeout_ms": 1_000,
            "group_consumer_heartbeat_interval_ms": 200,
        }
        broker = await stack.enter_async_context(Broker(clock=clock, **settings))
        await stack.enter_async_context(clock.auto_jump())
        admin = await stack.enter_async_context(Admin(broker.bootstrap_servers))
        producer = await stack.enter_async_context(Producer(broker.bootstrap_servers, linger_ms=0))
        await admin.create_topic("t", 3)
        yield World(broker, producer, admin, stack)


class Log(RebalanceListener):
    """Records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []

    def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self.calls.append(("assigned", [tp.partition for tp in partitions]))

    async def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        self.calls.append(("revoked", [tp.partition for tp in partitions]))

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        self.calls.append(("lost", [tp.partition for tp in partitions]))


def _numbers(records: Sequence[Record]) -> list[int]:
    return [int(record.value or b"") for record in records]


async def _drain(consumer: Consumer, count: int) -> list[Record]:
    records: list[Record] = []
    while len(records) < count:
        some = await consumer.get_many(timeout_ms=2_000)
        assert some, f"{len(records)} of {count} records came"
        records += some
    return records


async def _settle(consumers: Sequence[Consumer], sizes: list[int]) -> None:
    """Let all of them ask for records until they own so many partitions each, the largest number first."""
    async with asyncio.timeout(30):
        while sorted((len(consumer.assignment()) for consumer in consumers), reverse=True) != sizes:
            await asyncio.gather(*(consumer.get_many(timeout_ms=10) for consumer in consumers))


async def _read_until(consumers: Sequence[Consumer], count: int) -> list[Record]:
    records: list[Record] = []
    async with asyncio.timeout(30):
        while len(records) < count:
            for some in await asyncio.gather(*(consumer.get_many(timeout_ms=20) for consumer in consumers)):
                records += some
    return records


# --- joining and sharing


async def test_a_member_reads_everything_and_its_successor_continues(world: World) -> None:
    await world.fill(10)
    async with world.make() as consumer:
        assert consumer.assignment() == PARTS
        assert len(await _drain(consumer, 30)) == 30
        assert consumer.group_metadata().member_epoch > 0
    assert await world.committed() == dict.fromkeys(PARTS, 10)
    await world.fill(11)
    async with world.make() as consumer:
        assert sorted(_numbers(await _drain(consumer, 33))) == sorted(list(range(11)) * 3)


async def test_partitions_are_shared_by_one_to_four_members(world: World) -> None:
    members: list[Consumer] = []
    for sizes in ([3], [2, 1], [1, 1, 1], [1, 1, 1, 0]):
        members.append(await world.join())
        await _settle(members, sizes)
        held = [tp for member in members for tp in member.assignment()]
        assert sorted(held) == PARTS


async def test_two_groups_each_get_everything(world: World) -> None:
    await world.fill(5)
    one, two = await world.join(group_id="one"), await world.join(group_id="two")
    assert len(await _drain(one, 15)) == len(await _drain(two, 15)) == 15


async def test_members_together_read_every_record_once(world: World) -> None:
    one, two = await world.join(), await world.join()
    await world.fill(100)
    records = await _read_until([one, two], 300)
    assert max(Counter(record.address for record in records).values()) == 1
    assert len(one.assignment()) + len(two.assignment()) == 3


async def test_the_records_of_a_key_come_in_order_to_one_member(world: World) -> None:
    members = [await world.join() for _ in range(3)]
    await _settle(members, [1, 1, 1])
    keys = [b"%d" % key for key in range(10)]
    for number in range(20):
        await asyncio.gather(*(world.producer.send("t", b"%d" % number, key=key) for key in keys))
    of_key: dict[bytes | None, list[int]] = {}
    readers: dict[bytes | None, set[int]] = {}
    async with asyncio.timeout(30):
        while sum(map(len, of_key.values())) < 200:
            for index, member in enumerate(members):
                for record in await member.get_many(timeout_ms=5):
                    of_key.setdefault(record.key, []).append(int(record.value or b""))
                    readers.setdefault(record.key, set()).add(index)
    assert list(of_key.values()) == [list(range(20))] * 10
    assert all(len(indexes) == 1 for indexes in readers.values())


async def test_a_member_that_leaves_hands_its_partitions_over_at_once(world: World) -> None:
    one = await world.join()
    async with world.make() as two:
        await _read_until([one, two], 0)
        async with asyncio.timeout(30):
            while len(one.assignment()) == 3 or not two.assignment():
                await asyncio.gather(one.get_many(timeout_ms=10), two.get_many(timeout_ms=10))
    async with asyncio.timeout(0.5):  # below the session's timeout
        while len(one.assignment()) < 3:
            await one.get_many(timeout_ms=10)


async def test_a_rebalance_takes_milliseconds_not_heartbeat_intervals() -> None:
    async with AsyncExitStack() as stack:
        clock = VirtualClock()
        broker = await stack.enter_async_context(Broker(clock=clock))  # heartbeats every five seconds
        await stack.enter_async_context(clock.auto_jump())
        async with Admin(broker.bootstrap_servers) as admin:
            await admin.create_topic("t", 2)
        settings = {"group_id": "g", "bootstrap_servers": broker.bootstrap_servers}
        one = await stack.enter_async_context(Consumer("t", **settings))
        two = await stack.enter_async_context(Consumer("t", **settings))
        waits = [asyncio.ensure_future(consumer.get_many()) for consumer in (one, two)]
        async with asyncio.timeout(2):
            await eventually(lambda: len(one.assignment()) == len(two.assignment()) == 1)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def test_reading_continues_while_partitions_move(world: World) -> None:
    await world.fill(50)
    one = await world.join(max_poll_records=1)
    await _drain(one, 1)
    two = await world.join(max_poll_records=1)
    records = [*await _read_until([one, two], 149)]
    assert len(records) >= 149


async def test_a_pattern_finds_later_topics(world: World) -> None:
    consumer = await world.join(pattern="x-.*", auto_offset_reset="earliest")
    assert consumer.assignment() == []
    await world.admin.create_topic("x-1", 1)
    await world.fill(1, "x-1", [0])
    assert len(await _drain(consumer, 1)) == 1


async def test_another_subscription_replaces_the_first(world: World) -> None:
    await world.admin.create_topic("u", 1)
    await world.fill(3, "u", [0])
    log = Log()
    consumer = await world.join(listener=log)
    consumer.subscribe("u", listener=log)
    assert len(await _drain(consumer, 3)) == 3
    assert consumer.assignment() == [TopicPartition("u", 0)]
    assert ("revoked", [0, 1, 2]) in log.calls


async def test_latest_skips_nothing_of_a_partition_added_later(world: World) -> None:
    await world.fill(3)
    consumer = await world.join(auto_offset_reset="latest")
    assert await consumer.get_many(timeout_ms=20) == []
    await world.admin.create_partitions("t", 4)
    while len(await world.producer.partitions_for("t")) < 4:
        world.producer._sender.cluster.request_refresh(urgent=True)
        await asyncio.sleep(0.001)
    await world.fill(2, partitions=[3])
    assert _numbers(await _drain(consumer, 2)) == [0, 1]


async def test_a_cancelled_join_leaves_no_member(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = world.make()
    assert consumer._group is not None
    attempt, has_joined = consumer._group.link.attempt, asyncio.Event()

    async def attempt_without_answer(request: Any, **settings: Any) -> Any:
        await attempt(request, **settings)
        has_joined.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(consumer._group.link, "attempt", attempt_without_answer)
    starting = asyncio.ensure_future(consumer.start())
    await has_joined.wait()
    assert (await world.admin.describe_group("g")).members
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not (await world.admin.describe_group("g")).members


async def test_a_response_that_is_older_than_the_session_assigns_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member was suspended, and another one may own the partitions."""
    send, on_response = Heartbeats._send, Membership.on_response
    late: list[Any] = []
    taken: list[Any] = []

    def send_long_ago(heartbeats: Heartbeats, wait_ms: int) -> Any:
        call = send(heartbeats, wait_ms)
        if late:
            return call
        late.append(call.request)
        return call._replace(sent_ms=call.sent_ms - 1_000)

    def take(membership: Membership, request: Any, response: Any) -> bool:
        taken.append(request)
        return on_response(membership, request, response)

    monkeypatch.setattr(Heartbeats, "_send", send_long_ago)
    monkeypatch.setattr(Membership, "on_response", take)
    await _settle([await world.join()], [3])
    assert taken and not any(request is late[0] for request in taken)


async def test_a_missing_topic_is_an_error_at_once(world: World) -> None:
    with pytest.raises(UnknownTopicOrPartitionError):
        await world.make("nothing", allow_auto_create_topics=False).start()


async def test_a_wrong_pattern_is_an_error_at_once(world: World) -> None:
    with pytest.raises(ClientError, match=r"not a regular expression: .*unterminated"):
        world.make(pattern="x(")
    with pytest.raises(ClientError, match="flags"):
        world.make(pattern=re.compile("x", re.IGNORECASE))


# --- the listener


async def test_the_listener_is_called_for_assigned_and_revoked_partitions(world: World) -> None:
    first, second = Log(), Log()
    one = await world.join(listener=first)
    assert first.calls == [("assigned", [0, 1, 2])]
    two = await world.join(listener=second)
    async with asyncio.timeout(30):
        while not two.assignment():
            await asyncio.gather(one.get_many(timeout_ms=10), two.get_many(timeout_ms=10))
    (name, revoked) = first.calls[1]
    assert name == "revoked"
    assert second.calls == [("assigned", revoked)]
    await two.close()
    assert second.calls[-1] == ("revoked", revoked)


async def test_the_next_owner_begins_at_the_commit_of_on_revoked(world: World) -> None:
    """R38: until on_revoked returns, the partition is owned and may be committed."""
    await world.fill(10)

    class Committer(RebalanceListener):
        async def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
            await one.commit({tp: one.positions()[tp] for tp in partitions})

    one = await world.join(enable_auto_commit=False, listener=Committer())
    await _drain(one, 30)
    two = await world.join(enable_auto_commit=False)
    async with asyncio.timeout(30):
        while not two.assignment():
            assert await two.get_many(timeout_ms=10) == []
            await one.get_many(timeout_ms=10)
    assert await two.get_many(timeout_ms=20) == []
    assert set(await world.committed()) == set(two.assignment())


async def test_on_assigned_may_seek(world: World) -> None:
    await world.fill(10)

    class Seeker(RebalanceListener):
        async def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
            for tp in partitions:
                await consumer.seek(tp, 8)

    consumer = world.make(listener=Seeker())
    async with consumer:
        assert sorted(_numbers(await _drain(consumer, 6))) == [8, 8, 8, 9, 9, 9]


async def test_exceptions_of_a_listener_are_raised_by_the_call_for_records(world: World) -> None:
    class Broken(Log):
        async def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
            await super().on_revoked(partitions)
            if len(self.calls) == 2:
                raise ValueError("the listener failed")

    one = await world.join(listener=Broken())
    two = await world.join()
    with pytest.raises(ValueError, match="the listener failed"):
        async with asyncio.timeout(30):
            while True:
                await one.get_many(timeout_ms=10)
    async with asyncio.timeout(30):  # the partition is revoked nevertheless
        while not two.assignment():
            await asyncio.gather(one.get_many(timeout_ms=10), two.get_many(timeout_ms=10))


# --- commits


async def test_every_way_to_commit(world: World) -> None:
    await world.fill(10)
    consumer = await world.join(enable_auto_commit=False)
    records = await _drain(consumer, 30)
    of_first = [record for record in records if record.partition == 0]
    await consumer.commit(of_first[2])
    assert await world.committed() == {PARTS[0]: 3}
    await consumer.commit(of_first[:6])
    assert await world.committed() == {PARTS[0]: 6}
    await consumer.commit({PARTS[1]: 4, PARTS[2]: OffsetAndMetadata(5, NO_EPOCH, "my words")})
    assert (await consumer.committed())[PARTS[2]] == OffsetAndMetadata(5, NO_EPOCH, "my words")
    consumer.commit_nowait({PARTS[1]: 5})
    consumer.commit_nowait({PARTS[1]: 6})
    await consumer.commit({PARTS[2]: 6})
    assert await world.committed() == {PARTS[0]: 6, PARTS[1]: 6, PARTS[2]: 6}
    await consumer.commit()
    assert await world.committed() == dict.fromkeys(PARTS, 10)
    assert set((await consumer.lag()).values()) == {0}
    with pytest.raises(ClientError, match="can't be committed"):
        await consumer.commit([1])  # type: ignore[list-item]


async def test_a_commit_without_a_group_is_an_error(world: World) -> None:
    consumer = await world.join(group_id=None)
    with pytest.raises(ClientError, match="group_id"):
        await consumer.commit()
    with pytest.raises(ClientError, match="group_id"):
        consumer.subscribe("t", listener=Log())


async def test_a_commit_of_an_unassigned_partition_is_refused(world: World) -> None:
    consumer = await world.join()
    with pytest.raises(CommitFailedError, match="t-7 is not assigned"):
        await consumer.commit({TopicPartition("t", 7): 1})
    with pytest.raises(CommitFailedError, match="t-7 is not assigned"):
        consumer.commit_nowait({TopicPartition("t", 7): 1})


async def test_a_failed_commit_nowait_is_raised_by_the_next_commit_or_close(world: World) -> None:
    consumer = await world.join(enable_auto_commit=False)
    consumer.commit_nowait({PARTS[0]: OffsetAndMetadata(0, NO_EPOCH, "x" * 5000)})
    with pytest.raises(OffsetMetadataTooLargeError):
        await consumer.commit({PARTS[1]: 0})
    await consumer.commit({PARTS[1]: 0})
    consumer.commit_nowait({PARTS[0]: OffsetAndMetadata(0, NO_EPOCH, "x" * 5000)})
    with pytest.raises(OffsetMetadataTooLargeError):
        await consumer.close()


async def test_auto_commit_writes_in_the_background(world: World) -> None:
    await world.fill(10)
    consumer = await world.join(auto_commit_interval_ms=1)
    await _drain(consumer, 30)
    async with asyncio.timeout(30):
        while await world.committed() != dict.fromkeys(PARTS, 10):
            await consumer.get_many(timeout_ms=5)


async def test_with_assign_a_group_only_stores_offsets(world: World) -> None:
    await world.fill(10)
    for expected in ([0, 1, 2, 3], [4, 5, 6, 7]):
        async with world.make() as consumer:
            pass
        consumer = Consumer(
            group_id="mine", bootstrap_servers=world.broker.bootstrap_servers, auto_offset_reset="earliest"
        )
        async with consumer:
            consumer.assign([PARTS[0]])
            assert _numbers(await consumer.get_many(4)) == expected
    assert await world.committed("mine") == {PARTS[0]: 8}
    member = await world.join(group_id="mine")
    with pytest.raises(ClientError, match="either assign"):
        member.assign([PARTS[0]])
    async with Consumer(group_id="mine", bootstrap_servers=world.broker.bootstrap_servers) as stranger:
        stranger.assign([PARTS[0]])
        with pytest.raises(CommitFailedError, match="has members, but not this consumer"):
            await stranger.commit({PARTS[0]: 1})


# --- guarantees


@pytest.mark.parametrize("way", ["iterate", "many", "batches"])
async def test_at_least_once_commits_processed_records(world: World, way: str) -> None:
    """After a failure, unprocessed records are returned again."""
    await world.fill(4, partitions=[0])
    given: list[int] = []
    for fails_at in (2, 3):
        with pytest.raises(ZeroDivisionError):
            async with world.make(max_poll_records=2) as consumer:
                if way == "iterate":
                    async for record in consumer:
                        given.append(record.offset)
                        if record.offset == fails_at:
                            raise ZeroDivisionError
                while True:
                    if way == "many":
                        some = [record.offset for record in await consumer.get_many()]
                    else:
                        batches = await consumer.get_batches()
                        some = [record.offset for batch in batches for record in batch.records()]
                    given += some
                    if fails_at in some:
                        raise ZeroDivisionError
    assert (
        given
        == {"iterate": [0, 1, 2, 2, 3], "many": [0, 1, 2, 3, 2, 3], "batches": [0, 1, 2, 3, 0, 1, 2, 3]}[way]
    )


async def test_leaving_a_loop_normally_commits_its_records(world: World) -> None:
    await world.fill(4, partitions=[0])
    async with world.make() as consumer:
        async for record in consumer:
            if record.offset == 1:
                break
    assert await world.committed() == {PARTS[0]: 2}


@pytest.mark.parametrize("way", ["iterate", "many"])
async def test_at_most_once_returns_no_record_twice(world: World, way: str) -> None:
    await world.fill(6, partitions=[0])
    given: list[int] = []
    settings: dict[str, Any] = {"processing_guarantee": "at_most_once", "max_poll_records": 2}
    for fails_at in (0, 2, 4):
        with pytest.raises(ZeroDivisionError):
            async with world.make(**settings) as consumer:
                if way == "iterate":
                    async for record in consumer:
                        given.append(record.offset)
                        assert (await world.committed())[PARTS[0]] > record.offset
                        if record.offset >= fails_at:
                            raise ZeroDivisionError
                while True:
                    some = [record.offset for record in await consumer.get_many()]
                    assert (await world.committed())[PARTS[0]] == some[-1] + 1
                    given += some
                    if some[0] >= fails_at:
                        raise ZeroDivisionError
    assert given == sorted(set(given))


def test_settings_that_contradict_each_other() -> None:
    for settings, match in (
        (
            {"group_id": "g", "processing_guarantee": "at_most_once", "enable_auto_commit": False},
            "auto.commit",
        ),
        ({"processing_guarantee": "at_most_once"}, "processing.guarantee: at_most_once needs group.id"),
        ({"group_instance_id": "i"}, "group.instance.id: needs group.id"),
        ({"group_id": ""}, "group.id"),
    ):
        with pytest.raises(ConfigError, match=re.escape(match)):
            Consumer("t", **settings)  # type: ignore[arg-type]


# --- zombies


async def _pause(consumer: Consumer) -> None:
    """Stop the heartbeats, as in a paused process."""
    assert consumer._group is not None
    task = consumer._group._heartbeats._task
    assert task is not None
    task.cancel()
    await asyncio.wait({task})


def _wake_up(consumer: Consumer) -> None:
    assert consumer._group is not None
    consumer._group._heartbeats._task = None
    consumer._group.start()


async def test_an_expelled_member_commits_nothing_and_joins_again(world: World) -> None:
    """R39: its partitions go to other members after the session timeout, and its commit is refused."""
    await world.fill(10)
    log = Log()
    zombie = await world.join(enable_auto_commit=False, listener=log)
    await _drain(zombie, 30)
    await _pause(zombie)
    heir = await world.join(enable_auto_commit=False)
    async with asyncio.timeout(30):
        while len(heir.assignment()) < 3:
            await heir.get_many(timeout_ms=20)
    await heir.commit(dict.fromkeys(PARTS, 7))
    with pytest.raises(CommitFailedError, match="expelled from group 'g'") as refused:
        await zombie.commit()
    assert isinstance(refused.value.__cause__, UnknownMemberIdError)
    assert await world.committed() == dict.fromkeys(PARTS, 7)
    with pytest.raises(CommitFailedError):
        zombie.commit_nowait()
    _wake_up(zombie)
    async with asyncio.timeout(30):
        while not zombie.assignment() or len(log.calls) < 3:
            await asyncio.gather(zombie.get_many(timeout_ms=10), heir.get_many(timeout_ms=10))
    assert log.calls[:2] == [("assigned", [0, 1, 2]), ("lost", [0, 1, 2])]
    assert log.calls[2][0] == "assigned"


async def test_on_lost_calls_on_revoked_by_default(world: World) -> None:
    calls: list[list[int]] = []

    class Simple(RebalanceListener):
        def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
            calls.append([tp.partition for tp in partitions])

    consumer = await world.join(listener=Simple())
    assert consumer._group is not None
    consumer._group._on_expelled(UnknownMemberIdError("by the test"))
    await consumer.get_many(timeout_ms=10)
    assert calls == [[0, 1, 2]]


async def test_a_consumer_that_does_not_ask_for_records_leaves_the_group(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.fill(10)
    log = Log()
    slow = await world.join(max_poll_interval_ms=1000, listener=log, enable_auto_commit=False)
    records = await _drain(slow, 30)
    async with asyncio.timeout(30):
        await eventually(lambda: any("max.poll.interval.ms" in r.getMessage() for r in caplog.records))
    assert [r.levelno for r in caplog.records if "max.poll" in r.getMessage()] == [logging.ERROR]
    other = await world.join()
    assert len(other.assignment()) == 3  # at once, because it has left
    with pytest.raises(MaxPollIntervalError, match=r"max\.poll\.interval\.ms: 1000"):
        await slow.commit(records[-1])
    assert log.calls == [("assigned", [0, 1, 2])]
    async with asyncio.timeout(30):
        while not slow.assignment() or len(log.calls) < 3:
            await asyncio.gather(slow.get_many(timeout_ms=10), other.get_many(timeout_ms=10))
    assert log.calls[1] == ("lost", [0, 1, 2])


async def test_processing_a_record_for_long_keeps_the_membership(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Wish 13: several times max.poll.interval.ms without a rebalance, with a warning."""
    await world.fill(1)
    log = Log()
    consumer = await world.join(max_poll_interval_ms=200, listener=log)
    (record, *_) = await _drain(consumer, 3)
    async with consumer.processing(record):
        await asyncio.sleep(0.9)
    await consumer.commit(record)
    assert log.calls == [("assigned", [0, 1, 2])]
    warnings = [one for one in caplog.records if "longer than max.poll.interval.ms" in one.getMessage()]
    assert len(warnings) >= 2 and f"record={record.address}" in warnings[0].getMessage()
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
    async with asyncio.timeout(30):  # the interval counts again after the block
        await eventually(lambda: any(one.levelno == logging.ERROR for one in caplog.records))


async def test_processing_without_a_group_does_nothing(world: World) -> None:
    await world.fill(1)
    consumer = Consumer("t", bootstrap_servers=world.broker.bootstrap_servers, auto_offset_reset="earliest")
    async with consumer, consumer.processing(await consumer.getone()):
        assert (await consumer.getone()).topic == "t"


@pytest.mark.parametrize("waits", [True, False])
async def test_waiting_or_iterating_counts_as_asking(world: World, waits: bool) -> None:
    consumer = await world.join(max_poll_interval_ms=400)
    if waits:
        assert await consumer.get_many(timeout_ms=1000) == []
    else:
        await world.fill(10, partitions=[0])
        async for record in consumer:
            await asyncio.sleep(0.08)  # each is well within the interval, their sum is not
            if record.offset == 9:
                break
    assert consumer.assignment() == PARTS
    await consumer.commit()


async def test_a_static_member_keeps_its_partitions_through_a_restart(world: World) -> None:
    log = Log()
    other = await world.join(listener=log)
    async with world.make(group_instance_id="i") as static:
        async with asyncio.timeout(30):
            while not static.assignment() or len(other.assignment()) == 3:
                await asyncio.gather(static.get_many(timeout_ms=10), other.get_many(timeout_ms=10))
        held = static.assignment()
    calls = list(log.calls)
    await other.get_many(timeout_ms=50)
    again = await world.join(group_instance_id="i")
    await asyncio.gather(again.get_many(timeout_ms=20), other.get_many(timeout_ms=20))
    assert again.assignment() == held
    assert log.calls == calls


async def test_a_static_member_with_a_live_predecessor_is_refused(world: World) -> None:
    await world.join(group_instance_id="i")
    with pytest.raises(UnreleasedInstanceIdError, match="another live consumer"):
        await world.make(group_instance_id="i", default_api_timeout_ms=100).start()


async def test_a_static_member_waits_for_the_session_of_its_dead_predecessor(world: World) -> None:
    dead = await world.join(group_instance_id="i")
    await _pause(dead)
    async with asyncio.timeout(30):
        heir = await world.join(group_instance_id="i")
    assert heir.assignment() == PARTS
    _wake_up(dead)
    with pytest.raises(FencedInstanceIdError, match="taken over"):
        async with asyncio.timeout(30):
            while True:
                await dead.get_many(timeout_ms=10)
    with pytest.raises(FencedInstanceIdError):  # and stays so
        await dead.get_many(timeout_ms=10)


async def test_a_commit_at_an_old_epoch_is_repeated_at_the_new_one(world: World) -> None:
    """STALE_MEMBER_EPOCH is temporary: the response with the newer epoch is about to arrive."""
    await world.fill(3)
    one = await world.join(enable_auto_commit=False)
    await _drain(one, 9)
    assert one._group is not None
    membership = one._group.membership
    epoch = membership.epoch
    two = await world.join()
    async with asyncio.timeout(30):
        await eventually(lambda: membership.epoch != epoch)
    membership.epoch = epoch  # as if the response had not arrived
    held = dict(one.positions())
    commit = asyncio.ensure_future(one.commit({PARTS[0]: held[PARTS[0]]}))
    async with asyncio.timeout(30):
        await commit
    assert membership.epoch > epoch and (await world.committed())[PARTS[0]] == 3
    await two.close()


async def test_an_offset_read_before_a_revocation_is_not_used(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.fill(20, partitions=[0])
    consumer = await world.join(enable_auto_commit=False)
    await consumer.commit(await consumer.get_many(5, timeout_ms=2_000))
    group = consumer._group
    assert group is not None
    fetch, has_read = group.commits.fetch, asyncio.Event()

    async def fetch_late(partitions: list[TopicPartition]) -> Any:
        found = await fetch(partitions)
        await asyncio.sleep(0.05)  # a slow response
        has_read.set()
        return found

    monkeypatch.setattr(group.commits, "fetch", fetch_late)
    group._on_expelled(UnknownMemberIdError("expelled once"))
    async with asyncio.timeout(30):
        while (
            group._reading_offsets is None
        ):  # joined again, with the offsets requested: too late for this call
            await consumer.get_many(timeout_ms=1)
        await has_read.wait()
    group._on_expelled(UnknownMemberIdError("expelled again"))
    group._heartbeats.is_away = True
    await group.link.call(group.membership.leave_request(is_for_good=True))
    async with world.make(enable_auto_commit=False) as successor:
        await successor.commit(await _drain(successor, 15))
    monkeypatch.setattr(group.commits, "fetch", fetch)
    async with asyncio.timeout(30):
        while consumer.assignment() != PARTS:
            assert await consumer.get_many(timeout_ms=20) == []
    assert await consumer.get_many(timeout_ms=100) == []


async def test_background_commits_are_written_before_a_revocation(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.fill(20)
    first = await world.join(enable_auto_commit=False)
    await _drain(first, 60)
    assert first._group is not None
    call = first._group.link.call
    late_commits: list[Any] = []

    async def call_late(request: Any, **settings: Any) -> Any:
        if not isinstance(request, OffsetCommitRequest):
            return await call(request, **settings)
        await asyncio.sleep(0.1)  # a slow response
        try:
            return await call(request, **settings)
        finally:
            late_commits.append(request)

    monkeypatch.setattr(first._group.link, "call", call_late)
    first.commit_nowait(dict.fromkeys(PARTS, 10))
    second = await world.join(enable_auto_commit=False)
    records = await _read_until([first, second], 10)
    assert min(_numbers(records)) == 10
    await second.commit()
    await eventually(lambda: late_commits)
    assert await world.committed() == {tp: 20 if tp in second.assignment() else 10 for tp in PARTS}


async def test_a_queued_commit_of_a_revoked_partition_is_not_written(world: World) -> None:
    await world.fill(20)
    first = await world.join(enable_auto_commit=False)
    await _drain(first, 60)
    second = await world.join(enable_auto_commit=False)
    await _settle([first, second], [2, 1])
    (gone,) = second.assignment()
    assert first._group is not None
    first._group.commits.commit_later(dict.fromkeys(PARTS, OffsetAndMetadata(7)))  # as if queued before
    with pytest.raises(CommitFailedError, match=f"{gone} not committed"):
        await first._group.commits.drain()
    assert await world.committed() == {tp: 7 for tp in PARTS if tp != gone}


async def test_an_offset_in_an_open_transaction_is_waited_for_not_ignored(world: World) -> None:
    """R35: with read_committed a partition begins where the transaction ends; opening does not wait."""
    await world.fill(4)
    settings: dict[str, Any] = {"isolation_level": "read_committed", "enable_auto_commit": False}
    writer = Producer(world.broker.bootstrap_servers, transactional_id="tx", retry_backoff_ms=1)
    async with writer:
        async with world.make(**settings) as first:
            await _drain(first, 12)
            await writer.begin_transaction()
            await writer.send("u", b"x")
            await writer.send_offsets(first)
        async with asyncio.timeout(30), world.make(**settings) as second:
            assert await second.get_many(timeout_ms=20) == []
            await writer.commit_transaction()
            await world.fill(1)
            assert [record.offset for record in await _drain(second, 3)] == [4, 4, 4]


async def test_closed_consumers_leave_nothing_behind(world: World) -> None:
    async def one_life() -> None:
        async with world.make() as consumer:
            await consumer.get_many(timeout_ms=0)

    await one_life()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(30):
        await one_life()
    gc.collect()
    assert len(gc.get_objects()) - before < 1500  # the group's journal and the log may grow a little


async def test_closing_wakes_waiting_calls_and_leaves(world: World) -> None:
    consumer = await world.join()
    wait = asyncio.ensure_future(consumer.get_many())
    await asyncio.sleep(0)
    await consumer.close()
    with pytest.raises(ClientError, match="clos"):
        await wait
    assert (await world.admin.describe_group("g")).members == ()
