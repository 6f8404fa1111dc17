"""Capabilities D: consumer groups, each shown end to end against embedded brokers.

Every member works in the background as a program would, and tells a register what it takes and gives back:
two owners of one partition at one moment fail the test, whatever it is about. Tests with a ``world`` run in
virtual time: computing takes none, so their limits do not depend on the machine.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any

import pytest_asyncio

from kafkalite import Admin, Broker, Consumer, Producer, RebalanceListener, Record, TopicPartition
from kafkalite.broker.server.responses import Pending, Response
from kafkalite.clock import Clock
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.connection import Request
from kafkalite.rng import seeded_rng
from kafkalite.testing.cluster import Cluster, Node
from kafkalite.testing.faults import Fault, Proceed, drop_next
from kafkalite.testing.virtual_clock import VirtualClock

SESSION_MS = 500
PARTS = [TopicPartition("t", number) for number in range(3)]
FAST: dict[str, Any] = {
    "auto_offset_reset": "earliest",
    "retry_backoff_ms": 1,
    "retry_backoff_max_ms": 20,
    "fetch_max_wait_ms": 50,
}
Kill = Callable[[Consumer], Awaitable[None]]


class World:
    """A broker, topic t of three partitions, and the members of groups at work."""

    def __init__(self, broker: Broker, producer: Producer, admin: Admin, kill: Kill) -> None:
        self.broker = broker
        self.producer = producer
        self.admin = admin
        self.kill = kill
        self.owners: dict[tuple[str, TopicPartition], str] = {}
        self.members: list[Member] = []
        self.sent = 0

    async def join(self, *topics: str, group: str = "g", **settings: Any) -> Member:
        member = Member(self, f"{group}-{len(self.members)}", group, topics or ("t",), settings)
        self.members.append(member)
        await member.consumer.start()
        member.task = asyncio.create_task(member.work())
        return member

    async def until(self, condition: Callable[[], bool], limit_s: float = 30.0) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + limit_s
        while not condition():
            for member in self.members:
                if member.task is not None and member.task.done() and not member.is_over:
                    member.task.result()
            held = {member.name: sorted(member.held) for member in self.members}
            assert loop.time() < deadline_s, f"not within {limit_s:g} s; the members hold {held}"
            await asyncio.sleep(0.002)

    def sizes(self, group: str = "g") -> list[int]:
        """How many partitions the members hold, those that left aside."""
        living = [each for each in self.members if each.group == group and not each.is_over]
        return sorted((len(each.held) for each in living), reverse=True)

    def numbers(self, group: str = "g") -> Counter[tuple[int, int]]:
        """What the group was given: (partition, offset)."""
        given = [each.records for each in self.members if each.group == group]
        return Counter((record.partition, record.offset) for records in given for record in records)

    async def send(self, count: int) -> None:
        """``count`` records to each partition."""
        for tp in PARTS:
            values = [b"%d" % number for number in range(self.sent, self.sent + count)]
            await self.producer.send_many("t", values, partition=tp.partition)
        self.sent += count


class Member(RebalanceListener):
    """A program that reads and auto-commits, until it leaves or is killed."""

    def __init__(
        self, world: World, name: str, group: str, topics: Sequence[str], settings: dict[str, Any]
    ) -> None:
        self.world = world
        self.name = name
        self.group = group
        self.held: set[TopicPartition] = set()
        self.records: list[Record] = []
        self.seen_s: dict[int, list[float]] = {}  #: when records of a partition were given
        self.pause_s = 0.0  #: what each record takes
        self.is_over = False
        self.task: asyncio.Task[None] | None = None
        self.consumer = Consumer(
            bootstrap_servers=world.broker.bootstrap_servers, **{"group_id": group, **FAST, **settings}
        )
        self.consumer.subscribe(*topics, listener=self)

    def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        for tp in partitions:
            other = self.world.owners.setdefault((self.group, tp), self.name)
            assert other == self.name, f"{tp} is given to {self.name}, and {other} has it"
        self.held |= set(partitions)

    def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        for tp in partitions:
            assert self.world.owners.pop((self.group, tp)) == self.name
        self.held -= set(partitions)

    async def work(self) -> None:
        while not self.is_over:
            for record in await self.consumer.get_many(10, timeout_ms=20):
                if self.pause_s:
                    await asyncio.sleep(self.pause_s)
                self.records.append(record)
                self.seen_s.setdefault(record.partition, []).append(asyncio.get_running_loop().time())

    async def leave(self) -> None:
        if not self.is_over:
            self.is_over = True
            assert self.task is not None
            await self.task
            await self.consumer.close()

    async def die(self) -> None:
        """Without a farewell. From now on it owns nothing, whatever the coordinator thinks."""
        self.is_over = True
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.world.kill(self.consumer)
        for tp in self.held:
            del self.world.owners[self.group, tp]
        self.held.clear()


@pytest_asyncio.fixture
async def world(kill: Kill) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        clock = VirtualClock()
        settings: dict[str, Any] = {
            "group_consumer_session_timeout_ms": SESSION_MS,
            "group_consumer_heartbeat_interval_ms": 100,
        }
        broker = await stack.enter_async_context(Broker(clock=clock, **settings))
        await stack.enter_async_context(clock.auto_jump())
        admin = await stack.enter_async_context(Admin(broker.bootstrap_servers))
        producer = await stack.enter_async_context(Producer(broker.bootstrap_servers, linger_ms=0))
        await admin.create_topic("t", 3)
        world = World(broker, producer, admin, kill)
        try:
            yield world
        finally:
            await asyncio.gather(*(member.leave() for member in world.members))


async def test_three_partitions_with_one_to_four_members(world: World) -> None:
    """D1, D2, D7: 3 / 2+1 / 1+1+1 / one idle, and the same on the way back; nothing twice, nothing lost."""
    for sizes in ([3], [2, 1], [1, 1, 1], [1, 1, 1, 0]):
        await world.join()
        await world.send(20)
        await world.until(lambda sizes=sizes: world.sizes() == sizes)
        described = await world.admin.describe_group("g")
        held = [tp for member in described.members for tp in member.assignment]
        assert sorted(held) == PARTS, "no partition has two owners in a generation"
    for sizes in ([1, 1, 1], [2, 1], [3]):
        await next(member for member in world.members if not member.is_over).leave()
        await world.send(20)
        await world.until(lambda sizes=sizes: world.sizes() == sizes)
    everything = {(tp.partition, offset) for tp in PARTS for offset in range(world.sent)}
    await world.until(lambda: set(world.numbers()) == everything)
    assert set(world.numbers().values()) == {1}


async def test_the_partitions_of_a_killed_member_resume_and_no_others_stop(world: World) -> None:
    """D3: within the session's timeout; no record is lost."""
    members = [await world.join() for _ in range(3)]
    await world.until(lambda: world.sizes() == [1, 1, 1])
    is_over = False

    async def load() -> None:
        while not is_over:
            await world.send(1)
            await asyncio.sleep(0.005)  # 200 records a second

    sending = asyncio.create_task(load())
    await world.until(lambda: all(len(member.records) > 10 for member in members))
    (orphan,) = members[0].held
    await members[0].die()
    died_s = asyncio.get_running_loop().time()
    heirs = members[1:]
    await world.until(lambda: any(orphan in heir.held for heir in heirs))
    await world.until(lambda: any(orphan.partition in heir.seen_s for heir in heirs))
    flowing_s = min(heir.seen_s[orphan.partition][0] for heir in heirs if orphan.partition in heir.seen_s)
    await asyncio.sleep(0.1)  # the load goes on for a moment
    is_over = True
    await sending
    assert flowing_s - died_s < (SESSION_MS + 400) / 1000
    for heir in heirs:
        (own,) = set(heir.seen_s) - {orphan.partition}
        during = [seen for seen in heir.seen_s[own] if seen >= died_s - 0.05]
        longest_s = max(later - sooner for sooner, later in pairwise(during))
        print(f"flows again after {flowing_s - died_s:.2f} s, longest pause elsewhere {longest_s:.3f} s")
        assert longest_s < 0.8 * (flowing_s - died_s), "its own partition was read on all the time"
    everything = {(tp.partition, offset) for tp in PARTS for offset in range(world.sent)}
    await world.until(lambda: set(world.numbers()) == everything)


async def test_one_group_is_a_queue_and_several_are_a_broadcast(world: World) -> None:
    """A12, D4: n in all for the members of one group, n for each group."""
    for group in ("one", "one", "two", "three"):
        await world.join(group=group)
    await world.until(lambda: world.sizes("one") == [2, 1])
    await world.send(50)
    for group in ("one", "two", "three"):
        await world.until(lambda group=group: len(world.numbers(group)) == 150)
        assert set(world.numbers(group).values()) == {1}
    assert all(member.records for member in world.members)


async def test_an_idle_member_gets_work_when_another_unsubscribes(world: World) -> None:
    """D6: it reads another topic from then on, still a member."""
    await world.admin.create_topic("other", 1)
    members = [await world.join() for _ in range(4)]
    await world.until(lambda: world.sizes() == [1, 1, 1, 0])
    (idle,) = [member for member in members if not member.held]
    quitter = next(member for member in members if member.held)
    quitter.consumer.subscribe("other", listener=quitter)
    await world.until(lambda: len(idle.held) == 1)
    await world.until(lambda: quitter.held == {TopicPartition("other", 0)})
    await world.send(5)
    await world.until(lambda: len(world.numbers()) == 15)


async def test_order_of_a_key_holds_across_rebalances(world: World) -> None:
    """D8: one partition per key, one owner per partition, however often that changes."""
    keys = [b"key-%d" % number for number in range(12)]
    is_over = False
    sent = 0

    async def load() -> None:
        nonlocal sent
        while not is_over:
            sent += 1
            for key in keys:
                await world.producer.send("t", b"%d" % sent, key)
            await asyncio.sleep(0.001)  # virtual time passes only while nothing is ready

    order: list[Record] = []
    sending = asyncio.create_task(load())
    for _ in range(3):
        comer = await world.join()
        await asyncio.sleep(0.03)  # records flow between two changes
        another = await world.join()
        await asyncio.sleep(0.03)  # records flow between two changes
        await comer.leave()
        await asyncio.sleep(0.03)  # records flow between two changes
        assert another.task is not None
    is_over = True
    await sending
    await world.until(lambda: sum(world.numbers().values()) >= sent * len(keys))
    given = [(seen, record) for member in world.members for seen, record in _timed(member)]
    order = [record for _, record in sorted(given, key=lambda one: one[0])]
    for key in keys:
        values = [int(record.value or b"") for record in order if record.key == key]
        assert values == list(range(1, sent + 1))


def _timed(member: Member) -> list[tuple[float, Record]]:
    at = {partition: iter(times) for partition, times in member.seen_s.items()}
    return [(next(at[record.partition]), record) for record in member.records]


async def test_three_members_work_three_times_as_fast_as_one(world: World) -> None:
    """D9: when processing takes the time, as it does here."""
    await world.send(40)

    async def takes_s(count: int, group: str) -> float:
        members = [await world.join(group=group) for _ in range(count)]
        await world.until(lambda: world.sizes(group)[-1] > 0)
        for member in members:
            member.pause_s = 0.012
            await member.consumer.seek_to_beginning()
            member.records.clear()
        began_s = asyncio.get_running_loop().time()
        await world.until(lambda: len(world.numbers(group)) == 120, limit_s=10)
        taken_s = asyncio.get_running_loop().time() - began_s
        for member in members:
            await member.leave()
        return taken_s

    assert await takes_s(1, "alone") > 2.5 * await takes_s(3, "team")


async def test_one_member_reads_from_several_brokers_at_once() -> None:
    """D10: a broker that does not answer holds up its own partitions only."""
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", partitions=3, configs={"min.insync.replicas": "1"})
        leaders = [cluster.leader("t", number) for number in range(3)]
        assert sorted(leaders) == [1, 2, 3]
        reached: set[int] = set()
        silence = drop_next(None)

        def hold(node_id: int) -> Fault:
            def fault(request: Request, proceed: Proceed, clock: Clock) -> Response | Pending | None:
                reached.add(node_id)
                return silence(request, proceed, clock) if node_id == leaders[0] else None

            return fault

        async with cluster.consumer("t", group_id="g", **FAST) as consumer:
            async with asyncio.timeout(30):
                while len(consumer.assignment()) < 3:
                    await consumer.get_many(timeout_ms=20)
            for node_id in leaders:
                cluster.intercept(ApiKey.FETCH, hold(node_id), node_id=node_id)
            found: Counter[int] = Counter()
            for count in (100, 200, 300):
                for number in range(3):
                    await cluster.produce("t", [b"x"] * 100, partition=number)
                async with asyncio.timeout(30):
                    while found[1] < count or found[2] < count:
                        found.update(record.partition for record in await consumer.get_many(timeout_ms=100))
            assert leaders[0] in reached, "it was asked, and has not answered"
            assert found == {1: 300, 2: 300}
            for node_id in leaders:
                cluster.intercept(ApiKey.FETCH, None, node_id=node_id)


async def test_members_and_brokers_are_added_under_load() -> None:
    """D5: no client sees an error. A broker comes back, and a fourth one joins and leads partitions of a new
    topic, which the members read."""
    async with Cluster(brokers=3) as cluster, AsyncExitStack() as stack:
        await cluster.create_topic("t", partitions=3, configs={"min.insync.replicas": "2"})
        topics = {"t": 3}
        producer = await stack.enter_async_context(cluster.producer(linger_ms=0))
        values: Counter[bytes | None] = Counter()
        sent = 0

        async def join() -> None:
            consumer = cluster.consumer(pattern="[tu]", group_id="g", **FAST)
            await stack.enter_async_context(consumer)
            readers.append(asyncio.create_task(read(consumer)))

        async def read(consumer: Consumer) -> None:
            while not is_over:
                values.update(record.value for record in await consumer.get_many(timeout_ms=20))

        async def load() -> None:
            nonlocal sent
            while not is_over:
                for topic, count in list(topics.items()):
                    await producer.send(topic, b"%d" % sent, partition=sent % count)
                    sent += 1

        async def add_broker() -> None:
            ours = cluster.nodes[1].settings
            address = ours["listeners"][0].replace("-1", "-4")
            settings = {**ours, "node_id": 4, "process_roles": "broker", "listeners": address}
            cluster.nodes[4] = Node(4, settings, seeded_rng(4))
            await cluster.start(4)
            await cluster.create_topic("u", partitions=8)
            assert 4 in {cluster.leader("u", number) for number in range(8)}
            topics["u"] = 8

        is_over = False
        readers: list[asyncio.Task[None]] = []
        await join()
        await cluster.stop(3)
        sending = asyncio.create_task(load())
        for step in (join(), cluster.start(3), join(), add_broker()):
            await step
            before = sent
            await cluster.wait_until(lambda before=before: sent > before + 20)
        await cluster.wait_until(lambda: len(values) >= sent - 10)
        is_over = True
        await asyncio.gather(sending, *readers)
        async with asyncio.timeout(30):
            rest = cluster.consumer(pattern="[tu]", group_id="after", **FAST)
            await stack.enter_async_context(rest)
            while len(values) < sent:
                values.update(record.value for record in await rest.get_many(timeout_ms=50))
        assert set(values) == {b"%d" % number for number in range(sent)}


async def test_five_hundred_consumers_come_and_go(world: World) -> None:
    """C14: connections, tasks, parked requests, groups and members are back to what they were."""
    steady = await world.join(group="steady")
    await world.until(lambda: world.sizes("steady") == [3])
    settings: dict[str, Any] = {"bootstrap_servers": world.broker.bootstrap_servers, **FAST}

    async def one_life(number: int) -> None:
        async with Consumer("t", group_id=f"passers-{number % 7}", **settings) as consumer:
            await consumer.get_many(timeout_ms=0)

    async def crowd(count: int) -> None:
        for first in range(0, count, 5):
            await asyncio.gather(*(one_life(first + each) for each in range(5)))
            await world.send(1)

    async def at_rest() -> tuple[int, ...]:
        await world.until(lambda: world.broker.statistics().connection_count == connections)
        counts: deque[int] = deque(maxlen=20)  # no metadata refresh has begun or ended for a while

        def is_settled() -> bool:
            counts.append(len(asyncio.all_tasks()))
            return len(counts) == 20 and len(set(counts)) == 1

        await world.until(is_settled)
        now = world.broker.statistics()
        members = sum(each.member_count for each in await world.admin.list_groups())
        gc.collect()
        return now.connection_count, now.task_count, now.group_count, members, len(asyncio.all_tasks())

    await world.send(1)
    await world.admin.list_groups()
    connections = world.broker.statistics().connection_count
    await crowd(35)
    before, objects = await at_rest(), len(gc.get_objects())
    await crowd(500)
    after = await at_rest()
    assert after[:-1] == before[:-1]
    assert after[-1] <= before[-1] + 3, "tasks: a refresh of metadata may be one, 500 consumers are not"
    assert world.broker.statistics().waiting_requests <= 2, "the steady member's fetch and heartbeat"
    assert len(gc.get_objects()) - objects < 3_000 + 3 * len(steady.records)
    await world.until(lambda: len(world.numbers("steady")) == 3 * world.sent)
    pauses = [b - a for times in steady.seen_s.values() for a, b in pairwise(times)]
    assert sorted(pauses)[int(len(pauses) * 0.99)] < 1.0, "who stays is not held up"
    tracemalloc.start()  # slow, so only for some
    try:
        await crowd(40)
        await at_rest()
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes / 40 < 10_000, "by each, and by its part of the records of the steady member"
    await world.admin.delete_groups([f"passers-{number}" for number in range(7)])
    assert [each.group_id for each in await world.admin.list_groups()] == ["steady"]
