"""Capabilities G: replicas, in-sync sets and elections, each shown with the brokers of a whole cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kafkalite import Admin, Producer
from kafkalite.broker.server.responses import Pending, Response
from kafkalite.clock import Clock
from kafkalite.errors import ErrorCode
from kafkalite.metadata.image import ClusterImage
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages import data
from kafkalite.testing import Cluster, WireClient
from kafkalite.testing.sim import Simulation
from proof.sim.nodes import make_nodes
from proof.sim.workload import CLIENT_SETTINGS
from proof.waiting import eventually

Make = Callable[..., Any]


def _isr(cluster: Cluster, partition: int = 0) -> set[int]:
    image = max(
        (broker.image for broker in cluster.brokers.values() if broker.is_running),
        key=lambda image: image.metadata_offset,
    )
    state = image.partition("t", partition)
    assert state is not None
    return set(state.isr)


def _log_bytes(cluster: Cluster, node_id: int) -> bytes:
    broker = cluster.brokers[node_id]
    log = broker.partitions.by_id(broker.image.topics["t"].topic_id, 0).partition.log
    read = log.read(0, max_bytes=2**20, up_to=log.log_end_offset)
    return b"".join(bytes(buffer) for buffer in read.buffers)


async def test_only_the_leader_serves_and_the_others_follow(batch_of: Make) -> None:
    """G2: every other replica refuses writes and reads, and has the leader's log, byte for byte."""
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", configs={"min.insync.replicas": "2"})
        await cluster.produce("t", [b"0", b"1"])
        leader = cluster.leader("t")
        await cluster.wait_until(lambda: len({_log_bytes(cluster, n) for n in cluster.brokers}) == 1)
        for node_id, broker in cluster.brokers.items():
            batch = batch_of(b"2")
            async with WireClient(broker.address) as wire:
                write = data.ProduceRequest(1, 5_000, None, [data.ProducePartition("t", 0, len(batch))])
                read = data.FetchRequest(0, 0, 2**20, 0, [data.FetchPartition("t", 0, -1, 0, 2**20)])
                ends = data.ListOffsetsRequest(0, [data.ListOffsetsPartition("t", 0, -1, -1)])
                (fetched,) = (await wire.call(read)).partitions
                (listed,) = (await wire.call(ends)).partitions
                (produced,) = (await wire.call(write, batch)).partitions
            expected = 0 if node_id == leader else ErrorCode.NOT_LEADER_OR_FOLLOWER
            codes = [fetched.error_code, listed.error_code, produced.error_code]
            assert codes == [expected] * 3, f"broker {node_id}, and {leader} leads"
            assert (fetched.length_bytes > 0) == (node_id == leader)
        await cluster.wait_until(lambda: len({_log_bytes(cluster, n) for n in cluster.brokers}) == 1)


@pytest.mark.parametrize("lag_ms", [1_000, 6_000])
def test_a_replica_that_lags_longer_than_allowed_leaves_and_returns(lag_ms: int) -> None:
    """G4, G5: a live follower that fetches nothing leaves the in-sync set after ``replica.lag.time.max.ms``,
    not before, and is in it again once it has caught up."""
    with Simulation(1) as simulation:
        nodes = make_nodes(simulation, 3, {"replica_lag_time_max_ms": lag_ms})
        addresses = [node.address for node in nodes]
        client = simulation.host("client")

        def image() -> ClusterImage:
            brokers = [node.broker for node in nodes if node.broker is not None]
            return max((broker.image for broker in brokers), key=lambda image: image.metadata_offset)

        def isr(partition: int) -> tuple[int, ...]:
            state = image().partition("t", partition)
            return () if state is None else state.isr

        async def create() -> None:
            async with Admin(addresses, **CLIENT_SETTINGS) as admin:
                await admin.create_topic("t", partitions=3, replication_factor=3)

        async def write(partition: int) -> None:
            settings = CLIENT_SETTINGS | {"acks": 1, "enable_idempotence": False}
            async with Producer(
                addresses, clock=client.clock, rng=simulation.rng("w"), **settings
            ) as producer:
                await producer.send("t", b"x", partition=partition)

        async def story() -> None:
            for node in nodes:
                node.start()
            await eventually(lambda: all(node.is_running for node in nodes))
            await client.run(create())
            await eventually(lambda: all(len(isr(number)) == 3 for number in range(3)))
            controller_id = nodes[0].broker.controller_id if nodes[0].broker else None
            leaders = [state.leader for state in image().topics["t"].partitions]
            number = next(n for n, leader in enumerate(leaders) if leader != controller_id)
            (late,) = (n for n in nodes if n.node_id not in {leaders[number], controller_id})
            leader = nodes[leaders[number] - 1]
            for one, other in ((late, leader), (leader, late)):
                simulation.network.link(one.host.name, other.host.name).cut()
            client.kill()
            await client.run(write(number))
            began_ms = simulation.now_ms
            await eventually(lambda: late.node_id not in isr(number))
            assert 0.9 * lag_ms <= simulation.now_ms - began_ms <= 1.5 * lag_ms + 500
            assert not image().brokers[late.node_id].is_fenced, "its session is alive"
            simulation.network.heal()
            await eventually(lambda: late.node_id in isr(number))

        simulation.run(story())


async def _hold_fetches(cluster: Cluster, leader: int, of: set[int]) -> None:
    """Answer no fetch of these followers at ``leader``. Returns when each has sent one that is not answered.

    What is appended from now on is not on them.
    """
    polled: set[int] = set()

    def hold(request: Request, _proceed: Any, _clock: Clock) -> Response | Pending | None:
        if request.message.node_id not in of:
            return None
        polled.add(request.message.node_id)
        return Pending()

    cluster.intercept(ApiKey.REPLICA_FETCH, hold, node_id=leader)
    await eventually(lambda: polled >= of)


def _end(cluster: Cluster, node_id: int) -> int:
    broker = cluster.brokers[node_id]
    return broker.partitions.by_id(broker.image.topics["t"].topic_id, 0).partition.log_end_offset


def _followers(cluster: Cluster) -> set[int]:
    return {n for n, broker in cluster.brokers.items() if broker.is_running} - {cluster.leader("t")}


async def _leader_after(cluster: Cluster, dead: int) -> int:
    await cluster.wait_until(lambda: cluster.leader("t") not in {dead, -1}, what=f"a leader after {dead}")
    return cluster.leader("t")


async def test_two_of_three_replicas_die_under_load_and_nothing_acknowledged_is_lost() -> None:
    """G6: the leaders die one after the other, each with a record that no other replica has."""
    sent: list[bytes] = []
    async with Cluster(brokers=3, controllers=1) as cluster:
        await cluster.create_topic("t")
        async with cluster.producer(linger_ms=0) as producer:

            async def load(count: int) -> None:
                for _ in range(count):
                    sent.append(b"%d" % len(sent))
                    await producer.send("t", sent[-1])

            for _ in range(2):
                await load(100)
                leader = cluster.leader("t")
                await _hold_fetches(cluster, leader, _followers(cluster))
                sent.append(b"%d" % len(sent))
                waiting = producer.send_nowait("t", sent[-1])
                await cluster.wait_until(lambda leader=leader: _end(cluster, leader) == len(sent))  # type: ignore[misc]
                await cluster.kill(leader)
                await _leader_after(cluster, leader)
                async with asyncio.timeout(30):
                    assert (await waiting).offset == len(sent) - 1
            await load(100)
        assert sum(broker.is_running for broker in cluster.brokers.values()) == 1
        assert [record.value for record in await cluster.records("t")] == sent


@pytest.mark.parametrize("is_unclean", [False, True], ids=["clean", "unclean allowed"])
async def test_only_an_in_sync_replica_is_elected(is_unclean: bool) -> None:
    """G8: the in-sync follower leads soon, although the other one is live and before it in the list; without
    an in-sync replica none leads, unless ``unclean.leader.election.enable`` allows it."""
    configs = {"unclean.leader.election.enable": str(is_unclean).lower()}
    async with Cluster(brokers=3, controllers=1, replica_lag_time_max_ms=1_000) as cluster:
        await cluster.create_topic("t", configs=configs)
        first, stale, last = cluster.brokers[1].image.topics["t"].partitions[0].replicas
        await _hold_fetches(cluster, first, {stale})
        await cluster.produce("t", [b"0"])  # acknowledged once the in-sync set is without the stale one
        await cluster.wait_until(lambda: _isr(cluster) == {first, last})
        await cluster.kill(first)
        began_s = asyncio.get_running_loop().time()
        cluster.intercept(ApiKey.REPLICA_FETCH, _never, node_id=last)
        assert await _leader_after(cluster, first) == last
        assert asyncio.get_running_loop().time() - began_s < 5, "a session lasts 1 s"
        await cluster.produce("t", [b"1"])
        assert _isr(cluster) == {last}
        await cluster.kill(last)
        if is_unclean:
            assert await _leader_after(cluster, last) == stale
            return
        await cluster.wait_until(
            lambda: cluster.leader("t") == -1, what="no leader: the live replica is stale"
        )
        cluster.intercept(ApiKey.REPLICA_FETCH, None, node_id=last)
        await cluster.start(last)
        assert await _leader_after(cluster, -1) == last
        assert [record.value for record in await cluster.records("t")] == [b"0", b"1"]


def _never(_request: Request, _proceed: Any, _clock: Clock) -> Pending:
    return Pending()


async def test_a_record_that_was_read_is_never_missing_or_another_one_afterwards() -> None:
    """G9: the leader dies with a record at offset 7 that no other replica has, and offset 7 is written again;
    a consumer that reads all the time receives the committed record alone, once."""
    async with Cluster(brokers=3, controllers=1) as cluster:
        await cluster.create_topic("t", configs={"min.insync.replicas": "2"})
        first = [b"%d" % number for number in range(7)]
        await cluster.produce("t", first)
        seen: list[tuple[int, bytes | None]] = []

        async def read() -> None:
            async with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
                async for record in consumer:
                    seen.append((record.offset, record.value))

        reading = asyncio.ensure_future(read())
        await cluster.wait_until(lambda: len(seen) == 7)
        leader = cluster.leader("t")
        await _hold_fetches(cluster, leader, _followers(cluster))
        async with cluster.producer(acks=1, enable_idempotence=False) as producer:
            assert (await producer.send("t", b"lost")).offset == 7
        async with WireClient(cluster.brokers[leader].address) as wire:  # waits for it, beside the consumer
            read_on = data.FetchRequest(300, 1, 2**20, 0, [data.FetchPartition("t", 0, -1, 7, 2**20)])
            (fetched,) = (await wire.call(read_on)).partitions
            assert (fetched.length_bytes, fetched.high_watermark) == (0, 7)
        await cluster.kill(leader)
        await _leader_after(cluster, leader)
        await cluster.produce("t", [b"kept"])
        await cluster.wait_until(lambda: len(seen) >= 8)
        await cluster.start(leader)
        await cluster.wait_until(lambda: len(_isr(cluster)) == 3)
        assert seen == list(enumerate([*first, b"kept"]))
        assert [record.value for record in await cluster.records("t")] == [*first, b"kept"]
        reading.cancel()


async def test_leaders_are_spread_over_the_brokers_and_return_to_theirs() -> None:
    """G12: three partitions have three leaders; that of a dead broker moves, and comes back by the election
    of the preferred replicas."""
    async with Cluster(brokers=3, controllers=1, leader_imbalance_check_interval_seconds=1) as cluster:
        await cluster.create_topic("t", 3)

        def leaders() -> list[int]:
            return [cluster.leader("t", number) for number in range(3)]

        before = leaders()
        assert sorted(before) == [1, 2, 3]
        await cluster.kill(3)
        await cluster.wait_until(lambda: set(leaders()) <= {1, 2})
        assert [now for now, was in zip(leaders(), before, strict=True) if was != 3] == [
            was for was in before if was != 3
        ], "the others stay where they were"
        await cluster.start(3)
        await cluster.wait_until(lambda: leaders() == before, what=f"leaders {before}")


@pytest.mark.parametrize("acks", [1, "all"])
async def test_a_record_that_only_a_dead_leader_had_is_lost_with_acks_1_alone(acks: Any) -> None:
    """G11: acks=1 is acknowledged before any copy is made; acks=all is sent again to the next leader."""
    async with Cluster(brokers=3, controllers=1) as cluster:
        await cluster.create_topic("t")
        async with cluster.producer(acks=acks, linger_ms=0) as producer:
            await producer.send("t", b"0")
            await cluster.wait_until(lambda: {_end(cluster, n) for n in cluster.brokers} == {1})
            leader = cluster.leader("t")
            await _hold_fetches(cluster, leader, _followers(cluster))
            sent = producer.send_nowait("t", b"1")
            await cluster.wait_until(lambda: _end(cluster, leader) == 2)
            if acks == 1:
                assert (await sent).offset == 1
            else:
                assert not sent.done()
            await cluster.kill(leader)
            await _leader_after(cluster, leader)
            async with asyncio.timeout(30):
                await sent
                await producer.send("t", b"2")
        values = [record.value for record in await cluster.records("t")]
        assert values == ([b"0", b"2"] if acks == 1 else [b"0", b"1", b"2"])
