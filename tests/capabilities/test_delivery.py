"""Capabilities C5-C7, C12, C13, C15, E4 and B13: progress, acknowledgements, and what a guarantee costs.

That the three guarantees hold (E1-E3, B21) whatever dies is shown in tests/sim/test_every_step.py and
tests/processes/test_transactions.py. Tests with a ``broker`` run in virtual time: computing takes none.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from kafkalite import Broker, Consumer, Deduplicator, Producer, TopicPartition
from kafkalite.client.consumer.deduplication import header_id
from kafkalite.errors import RequestTimedOutError
from kafkalite.protocol.api import ApiKey
from kafkalite.testing.cluster import Cluster
from kafkalite.testing.faults import delay_next, drop_next
from kafkalite.testing.virtual_clock import VirtualClock
from proof.waiting import settle

T0 = TopicPartition("t", 0)
FAST: dict[str, Any] = {
    "group_id": "g",
    "auto_offset_reset": "earliest",
    "retry_backoff_ms": 1,
    "retry_backoff_max_ms": 20,
    "fetch_max_wait_ms": 50,
}
QUICK_SESSIONS = {"group_consumer_session_timeout_ms": 200, "group_consumer_heartbeat_interval_ms": 50}
Kill = Callable[[Consumer], Awaitable[None]]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest_asyncio.fixture
async def broker(clock: VirtualClock) -> AsyncIterator[Broker]:
    """A broker whose topic t has a hundred records in one partition."""
    async with (
        Broker(clock=clock, **QUICK_SESSIONS) as running,
        clock.auto_jump(),
        Producer(running.bootstrap_servers) as producer,
    ):
        await producer.send_many("t", [b"%d" % number for number in range(100)], partition=0)
        yield running


async def _offsets(consumer: Consumer, count: int) -> list[int]:
    offsets: list[int] = []
    while len(offsets) < count:
        some = await consumer.get_many(count - len(offsets), timeout_ms=5_000)
        assert some, f"{len(offsets)} of {count} records came"
        offsets += [record.offset for record in some]
    return offsets


async def test_who_was_killed_is_followed_at_the_committed_offset(broker: Broker, kill: Kill) -> None:
    """C5, C13: without a gap, the next consumer receives the uncommitted records again."""
    settings = {**FAST, "bootstrap_servers": broker.bootstrap_servers, "enable_auto_commit": False}
    consumer = await Consumer("t", **settings).start()
    assert await _offsets(consumer, 40) == list(range(40))
    await consumer.commit()
    assert await _offsets(consumer, 20) == list(range(40, 60))
    await kill(consumer)
    async with Consumer("t", **settings) as heir:
        assert await _offsets(heir, 60) == list(range(40, 100))


async def test_offsets_are_in_the_brokers_and_survive_the_restart_of_all() -> None:
    """C6: in an internal compacted log."""
    async with Cluster(brokers=3, **QUICK_SESSIONS) as cluster:
        await cluster.create_topic("t")
        await cluster.produce("t", [b"%d" % number for number in range(10)], partition=0)
        async with cluster.consumer("t", **FAST) as consumer:
            assert await _offsets(consumer, 7) == list(range(7))
        async with cluster.admin() as admin:
            topic = await admin.describe_topic("__consumer_offsets")
            assert topic.is_internal
            configs = await admin.describe_configs("topic", "__consumer_offsets")
            assert configs["cleanup.policy"].value == "compact"
        await cluster.crash()
        await cluster.start()
        async with cluster.consumer("t", **FAST) as consumer:
            assert await _offsets(consumer, 3) == [7, 8, 9]


async def test_of_redeliveries_with_one_id_one_is_kept(broker: Broker) -> None:
    """C12: produced again by a producer that was started again."""
    servers = broker.bootstrap_servers
    for _ in range(3):
        async with Producer(servers) as producer:
            for number in range(20):
                await producer.send("events", b"", partition=0, headers=[("id", b"%d" % number)])
    seen = Deduplicator(header_id("id"))
    kept: list[bytes | None] = []
    async with Consumer("events", bootstrap_servers=servers, **FAST) as consumer:
        while len(kept) < 20 or (await consumer.lag())[TopicPartition("events", 0)]:
            records = await consumer.get_many(timeout_ms=1_000)
            kept += [dict(record.headers)["id"] for record in seen.new(records)]
    assert kept == [b"%d" % number for number in range(20)]


async def test_a_commit_moves_the_offset_and_asking_brings_what_is_new(broker: Broker) -> None:
    """C15: a long poll is answered by the next record; the acknowledgement is an offset."""
    settings = {**FAST, "bootstrap_servers": broker.bootstrap_servers, "enable_auto_commit": False}
    async with (
        Consumer("t", **{**settings, "fetch_max_wait_ms": 30_000}) as consumer,
        Producer(broker.bootstrap_servers, linger_ms=0) as producer,
    ):
        await _offsets(consumer, 100)
        waiting = asyncio.ensure_future(consumer.get_one(timeout_ms=30_000))
        await settle()
        await producer.send("t", b"new", partition=0)
        async with asyncio.timeout(30):
            record = await waiting
        assert record is not None and record.offset == 100
        for offset in (10, 101):
            await consumer.commit({T0: offset})
            committed = (await consumer.committed())[T0]
            assert committed is not None and committed.offset == offset


async def test_what_each_acks_waits_for() -> None:
    """B13: nothing, the leader, every replica in sync."""
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", configs={"min.insync.replicas": "2"})
        settings = {"linger_ms": 0, "enable_idempotence": False, "retries": 0}
        none = cluster.producer(acks=0, **settings, request_timeout_ms=500)  # close() waits for the response
        leader = cluster.producer(acks=1, **settings)
        every = cluster.producer(acks="all", **settings, request_timeout_ms=300, delivery_timeout_ms=400)
        async with none, leader, every:
            await every.send("t", b"0", partition=0)
            cluster.intercept(ApiKey.PRODUCE, drop_next(1))
            async with asyncio.timeout(30):
                await none.send("t", b"never", partition=0)
            cluster.intercept(ApiKey.REPLICA_FETCH, drop_next(1_000))  # replicas copy nothing from here on
            await leader.send("t", b"1", partition=0)
            with pytest.raises(RequestTimedOutError):
                await every.send("t", b"2", partition=0)
            cluster.intercept(ApiKey.REPLICA_FETCH, None)
            cluster.intercept(ApiKey.PRODUCE, None)


async def test_stronger_guarantees_cost_throughput(broker: Broker, clock: VirtualClock) -> None:
    """E4: where each request takes 5 ms. ``python -m benchmarks transactions`` measures real ones."""
    servers = broker.bootstrap_servers
    slow, loop = delay_next(None, delay_ms=5), asyncio.get_running_loop()
    broker.intercept(lambda request, client: slow(request, lambda: broker.handle(request, client), clock))

    async def measure(
        transform: Callable[[Consumer], Awaitable[None]], **settings: Any
    ) -> tuple[Counter[str], float]:
        """Return (requests by api, seconds) of 10 batches of 10 records."""
        consumer = Consumer("t", bootstrap_servers=servers, max_poll_records=10, **{**FAST, **settings})
        async with consumer:
            await consumer.get_many(0, timeout_ms=0)
            before = Counter(broker.statistics().requests)
            began_s = loop.time()
            await transform(consumer)
            return Counter(broker.statistics().requests) - before, loop.time() - began_s

    async def at_least_once(consumer: Consumer) -> None:
        async with Producer(servers, linger_ms=0) as producer:
            for _ in range(10):
                records = await consumer.get_many(timeout_ms=5_000)
                await producer.send_many("out", [record.value for record in records], partition=0)

    async def exactly_once(consumer: Consumer) -> None:
        async with Producer(servers, linger_ms=0, transactional_id="x") as producer:
            for _ in range(10):
                async with producer.transaction():
                    records = await consumer.get_many(timeout_ms=5_000)
                    await producer.send_many("out", [record.value for record in records], partition=0)
                    await producer.send_offsets(consumer)

    cheap, cheap_s = await measure(at_least_once, group_id="cheap")
    dear, dear_s = await measure(exactly_once, group_id="dear", enable_auto_commit=False)
    assert cheap["PRODUCE"] == dear["PRODUCE"] == 10
    assert dear["END_TXN"] == dear["TXN_OFFSET_COMMIT"] == 10
    assert sum(dear.values()) > sum(cheap.values()) + 20
    assert dear_s > 1.5 * cheap_s
