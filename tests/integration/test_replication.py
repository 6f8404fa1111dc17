"""Three brokers: in-sync replicas keep acknowledged records, whichever broker dies, lags or is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.broker.server.responses import Pending, Response
from kafkalite.clock import Clock
from kafkalite.errors import ErrorCode
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages import data
from kafkalite.testing import Cluster
from kafkalite.testing.wire import WireClient
from proof.waiting import eventually

Make = Callable[..., Any]
MIN_TWO = {"min.insync.replicas": "2"}


def hosted(cluster: Cluster, node_id: int, topic: str = "t", partition: int = 0) -> HostedPartition:
    broker = cluster.brokers[node_id]
    return broker.partitions.by_id(broker.image.topics[topic].topic_id, partition)


def log_bytes(cluster: Cluster, node_id: int, topic: str = "t", partition: int = 0) -> bytes:
    log = hosted(cluster, node_id, topic, partition).partition.log
    read = log.read(log.log_start_offset, max_bytes=2**30, up_to=log.log_end_offset)
    return b"".join(bytes(buffer) for buffer in read.buffers)


def isr(cluster: Cluster, topic: str = "t", partition: int = 0) -> tuple[int, ...]:
    broker = max((b for b in cluster.brokers.values() if b.is_running), key=lambda b: b.image.metadata_offset)
    state = broker.image.partition(topic, partition)
    assert state is not None
    return state.isr


def others(cluster: Cluster, node_id: int) -> list[int]:
    return [one for one in cluster.brokers if one != node_id]


async def produce(
    cluster: Cluster, node_id: int, batch: bytearray, *, acks: int = -1, timeout_ms: int = 5_000
) -> data.ProducedPartition:
    """To that very broker, whatever it leads."""
    async with WireClient(cluster.brokers[node_id].address) as wire:
        asked = data.ProducePartition("t", 0, len(batch))
        answer = await wire.call(data.ProduceRequest(acks, timeout_ms, None, [asked]), batch)
        result: data.ProducedPartition = answer.partitions[0]
        return result


async def settled(cluster: Cluster, topic: str = "t", partitions: int = 1) -> None:
    """Return when every replica is in sync and knows as much."""

    def is_settled() -> bool:
        for number in range(partitions):
            replicas = [hosted(cluster, node_id, topic, number) for node_id in cluster.brokers]
            if len(isr(cluster, topic, number)) < len(replicas):
                return False
            if len({(one.partition.log.log_end_offset, one.high_watermark) for one in replicas}) > 1:
                return False
        return True

    await cluster.wait_until(is_settled, what="all in sync")


def assert_identical(cluster: Cluster, topic: str = "t", partitions: int = 1) -> None:
    for number in range(partitions):
        assert len({log_bytes(cluster, node_id, topic, number) for node_id in cluster.brokers}) == 1


@pytest.mark.parametrize("storage", ["memory", "disk"])
@pytest.mark.parametrize("durability", ["fsync", "page-cache"])
async def test_acknowledged_by_all_is_on_all(storage: Any, durability: str) -> None:
    async with Cluster(brokers=3, storage=storage) as cluster:
        await cluster.create_topic("t", 6, {"durability": durability, **MIN_TWO})
        values = [b"value-%d" % number for number in range(2_000)]
        await cluster.produce("t", values)
        for partition in range(6):
            leader = hosted(cluster, cluster.leader("t", partition), "t", partition)
            for node_id in cluster.brokers:
                one = hosted(cluster, node_id, "t", partition)
                end = (
                    one.partition.log.synced_end_offset
                    if durability == "fsync"
                    else one.partition.log.log_end_offset
                )
                assert end >= leader.high_watermark == leader.partition.log.log_end_offset
        await settled(cluster, partitions=6)
        assert_identical(cluster, partitions=6)
        assert sorted(record.value or b"" for record in await cluster.records("t")) == sorted(values)


@pytest.mark.parametrize("is_crash", [False, True], ids=["killed", "power lost"])
async def test_the_leader_dies_and_nothing_is_lost(is_crash: bool) -> None:
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", configs=MIN_TWO)
        sent: list[bytes] = []
        async with cluster.producer(delivery_timeout_ms=30_000) as producer:
            for turn in range(3):
                for number in range(20):
                    value = b"%d-%d" % (turn, number)
                    await producer.send("t", value)
                    sent.append(value)
                dead = cluster.leader("t")
                await (cluster.crash(dead) if is_crash else cluster.kill(dead))
                await producer.send("t", b"while %d is dead" % turn)
                sent.append(b"while %d is dead" % turn)
                assert cluster.leader("t") not in {dead, -1}
                await cluster.start(dead)
                await settled(cluster)
        assert [record.value for record in await cluster.records("t")] == sent
        assert_identical(cluster)


async def test_every_broker_dies_and_nothing_is_lost() -> None:
    """R16, R24: the last one standing holds all, and the others come back to it."""
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", 3, MIN_TWO)
        values = [b"%d" % number for number in range(300)]
        await cluster.produce("t", values)
        await cluster.crash()
        await cluster.start()
        await cluster.wait_until(lambda: all(cluster.leader("t", number) > 0 for number in range(3)))
        assert sorted(record.value or b"" for record in await cluster.records("t")) == sorted(values)
        await settled(cluster, partitions=3)
        assert_identical(cluster, partitions=3)


async def test_below_min_insync_replicas_nothing_is_acknowledged_by_all(batch_of: Make) -> None:
    """R6, R9, R16."""
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", configs=MIN_TWO)
        leader = cluster.leader("t")
        follower, last = others(cluster, leader)
        assert (await produce(cluster, leader, batch_of(b"0"))).error_code == 0
        await cluster.kill(follower)
        await cluster.wait_until(lambda: follower not in isr(cluster))
        assert (await produce(cluster, leader, batch_of(b"1"))).error_code == 0
        await _swallow_polls(cluster, leader)
        waiting = asyncio.create_task(produce(cluster, leader, batch_of(b"2")))
        await cluster.wait_until(lambda: hosted(cluster, leader).partition.log.log_end_offset == 3)
        # Two of three controllers are gone with the next kill: so it leaves in good order.
        await asyncio.gather(cluster.stop(last), cluster.start(follower))
        cluster.intercept(ApiKey.REPLICA_FETCH, None, node_id=leader)
        assert (await waiting).error_code in {0, ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND}
        await cluster.start(last)
        await settled(cluster)
        assert_identical(cluster)


async def test_only_acks_all_is_refused_while_too_few_replicas_are_in_sync(batch_of: Make) -> None:
    """R6, R9: with 3 replicas and min.insync.replicas=2, one may fail, and each record is on two."""
    async with Cluster(brokers=3, controllers=1) as cluster:
        await cluster.create_topic("t", configs=MIN_TWO)
        leader = cluster.leader("t")
        first, second = others(cluster, leader)
        await cluster.kill(first)
        await cluster.wait_until(lambda: first not in isr(cluster))
        assert (await produce(cluster, leader, batch_of(b"0"))).error_code == 0
        assert log_bytes(cluster, leader) == log_bytes(cluster, second)
        await cluster.kill(second)
        await cluster.wait_until(lambda: isr(cluster) == (leader,))
        refused = await produce(cluster, leader, batch_of(b"1"))
        assert refused.error_code == ErrorCode.NOT_ENOUGH_REPLICAS
        assert hosted(cluster, leader).partition.log.log_end_offset == 1, "nothing was appended"
        assert (await produce(cluster, leader, batch_of(b"2"), acks=1)).error_code == 0
        assert hosted(cluster, leader).high_watermark == 1, "consumers receive no record of one replica"
        await cluster.start(first)
        await cluster.wait_until(lambda: first in isr(cluster))
        assert (await produce(cluster, leader, batch_of(b"3"))).error_code == 0
        assert [record.value for record in await cluster.records("t")] == [b"0", b"2", b"3"]


async def test_a_slow_follower_leaves_the_isr_and_comes_back(batch_of: Make) -> None:
    """R12, R15."""
    async with Cluster(brokers=3, replica_lag_time_max_ms=500) as cluster:
        await cluster.create_topic("t", configs=MIN_TWO)
        leader = cluster.leader("t")
        slow = others(cluster, leader)[0]
        await produce(cluster, leader, batch_of(b"0"))

        def hold(request: Request, _proceed: Any, _clock: Clock) -> Response | Pending | None:
            return Pending() if request.message.node_id == slow else None

        cluster.intercept(ApiKey.REPLICA_FETCH, hold, node_id=leader)
        assert (await produce(cluster, leader, batch_of(b"1"), timeout_ms=10_000)).error_code == 0
        await cluster.wait_until(lambda: slow not in isr(cluster))
        assert (await produce(cluster, leader, batch_of(b"2"))).error_code == 0
        cluster.intercept(ApiKey.REPLICA_FETCH, None, node_id=leader)
        await cluster.wait_until(lambda: slow in isr(cluster))
        assert_identical(cluster)


async def test_a_leader_cut_off_is_fenced_and_its_tail_gives_way(batch_of: Make) -> None:
    """The split brain at offset 7: two records claim it, the committed one stays (R3, R4, R20)."""
    async with Cluster(brokers=3, controllers=3) as cluster:
        await cluster.create_topic("t", configs=MIN_TWO)
        old = cluster.leader("t")
        for number in range(7):
            assert (await produce(cluster, old, batch_of(b"%d" % number))).base_offset == number
        await _cut_off(cluster, old)
        lonely = await produce(cluster, old, batch_of(b"lost"), acks=1)
        assert (lonely.error_code, lonely.base_offset) == (0, 7)
        waiting = asyncio.create_task(produce(cluster, old, batch_of(b"never"), timeout_ms=60_000))
        await cluster.wait_until(lambda: cluster.leader("t") not in {old, -1})
        new = cluster.leader("t")
        await cluster.wait_until(lambda: hosted(cluster, new).is_leader, what=f"{new} to know it leads")
        kept = await produce(cluster, new, batch_of(b"kept"))
        assert (kept.error_code, kept.base_offset) == (0, 7)
        assert hosted(cluster, old).high_watermark == 7
        _heal(cluster, old)
        assert (await waiting).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        await settled(cluster)
        assert_identical(cluster)
        values = [record.value for record in await cluster.records("t")]
        assert values == [b"%d" % number for number in range(7)] + [b"kept"]


async def _cut_off(cluster: Cluster, node_id: int) -> None:
    """Let nothing pass between that broker and any other node; clients still reach it.

    Returns when the polls that were waiting at that broker are answered.
    """

    def from_it(request: Request, _proceed: Any, _clock: Clock) -> Response | Pending | None:
        is_from_it = (request.client_id or "").endswith(f"-{node_id}") or (
            getattr(request.message, "node_id", None) == node_id
        )
        return Pending() if is_from_it else None

    for api in (ApiKey.BROKER_HEARTBEAT, ApiKey.FETCH_METADATA, ApiKey.ALTER_PARTITION):
        cluster.intercept(api, from_it)
    await _swallow_polls(cluster, node_id)


async def _swallow_polls(cluster: Cluster, leader: int) -> None:
    """Answer no fetch of a follower from now on. Returns when each has sent one that is not answered."""
    polled: set[int] = set()

    def swallow(request: Request, _proceed: Any, _clock: Clock) -> Pending:
        polled.add(request.message.node_id)
        return Pending()

    cluster.intercept(ApiKey.REPLICA_FETCH, swallow, node_id=leader)
    followers = {node_id for node_id, broker in cluster.brokers.items() if broker.is_running} - {leader}
    await eventually(lambda: polled >= followers)


def _heal(cluster: Cluster, node_id: int) -> None:
    cluster.intercept(ApiKey.REPLICA_FETCH, None, node_id=node_id)
    for api in (ApiKey.BROKER_HEARTBEAT, ApiKey.FETCH_METADATA, ApiKey.ALTER_PARTITION):
        cluster.intercept(api, None)


async def test_a_replica_catches_up_with_a_large_log() -> None:
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", configs=MIN_TWO)
        leader = cluster.leader("t")
        dead = others(cluster, leader)[0]
        await cluster.kill(dead)
        values = [bytes([number % 256]) * 50_000 for number in range(600)]
        await cluster.produce("t", values)
        await cluster.start(dead)
        await settled(cluster)
        assert_identical(cluster)


async def test_the_leader_alone_acknowledges_to_who_asks_for_that(batch_of: Make) -> None:
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", configs=MIN_TWO)
        leader = cluster.leader("t")
        await _cut_off(cluster, leader)
        result = await produce(cluster, leader, batch_of(b"0"), acks=1)
        assert (result.error_code, result.base_offset) == (0, 0)
        refused = await produce(cluster, leader, batch_of(b"1"), acks=-1, timeout_ms=50)
        assert refused.error_code in {ErrorCode.REQUEST_TIMED_OUT, ErrorCode.NOT_LEADER_OR_FOLLOWER}
        _heal(cluster, leader)


async def test_consumers_read_only_what_is_committed(batch_of: Make) -> None:
    """R11: consumers receive no record that could still be lost."""
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", configs=MIN_TWO)
        leader = cluster.leader("t")
        await produce(cluster, leader, batch_of(b"0"))
        await _cut_off(cluster, leader)
        await produce(cluster, leader, batch_of(b"1"), acks=1)
        async with WireClient(cluster.brokers[leader].address) as wire:
            asked = data.FetchPartition("t", 0, -1, 1, 2**20)
            answer = await wire.call(data.FetchRequest(20, 1, 2**20, 0, [asked]))
            assert answer.partitions[0].length_bytes == 0
        _heal(cluster, leader)


@pytest.mark.parametrize("is_leader", [False, True], ids=["follower", "leader"])
async def test_a_replica_damaged_on_the_disk_is_fetched_again(is_leader: bool) -> None:
    """R24: it counts nowhere until it has fetched all again; the damaged files are kept."""
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", configs=MIN_TWO)
        values = [b"%d" % number for number in range(50)]
        await cluster.produce("t", values)
        leader = cluster.leader("t")
        victim = leader if is_leader else others(cluster, leader)[0]
        directory = hosted(cluster, victim).partition.log.directory
        await cluster.kill(victim)
        disk = cluster.nodes[victim].filesystem
        assert disk is not None
        disk.write_atomically(f"{directory}/log-state", b"garbage")
        await cluster.start(victim)
        await settled(cluster)
        assert_identical(cluster)
        await eventually(lambda: disk.exists(f"{directory}.damaged-1"))
        assert [record.value for record in await cluster.records("t")] == values
