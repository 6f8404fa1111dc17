"""Whole clusters whose consumers read from followers in their rack (R65 to R67, KIP-392)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.replication.near_reads import NearReads, is_near
from kafkalite.clock import SystemClock
from kafkalite.errors import ErrorCode
from kafkalite.metadata.image import BrokerState
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.messages.data import FetchPartition, FetchRequest, FetchRequestV1
from kafkalite.testing import Cluster
from kafkalite.testing.wire import WireClient
from proof.waiting import eventually

RACK_AWARE = "RackAwareReplicaSelector"


@asynccontextmanager
async def racks(**settings: Any) -> AsyncIterator[Cluster]:
    """Three nodes in the racks rack-1 to rack-3, and the topic t with one partition."""
    cluster = Cluster(brokers=3, **{"replica_selector_class": RACK_AWARE, **settings})
    for node_id, node in cluster.nodes.items():
        node.settings["broker_rack"] = f"rack-{node_id}"
    async with cluster:
        await cluster.create_topic("t", 1)
        yield cluster


def followers(cluster: Cluster) -> list[int]:
    return [node_id for node_id in (1, 2, 3) if node_id != cluster.leader("t")]


def served(cluster: Cluster) -> dict[int, int]:
    """Return the bytes of records that each node has sent to consumers."""
    return {node_id: cluster.statistics(node_id).fetched_bytes for node_id in cluster.brokers}


async def read(consumer: Any, count: int) -> list[bytes]:
    async with asyncio.timeout(20):
        return [(await consumer.get_one()).value for _ in range(count)]


async def test_a_consumer_reads_from_the_follower_in_its_rack() -> None:
    async with racks() as cluster:
        near, other = followers(cluster)
        values = [b"%d" % number for number in range(200)]
        async with (
            cluster.producer() as producer,
            cluster.consumer("t", client_rack=f"rack-{near}", auto_offset_reset="earliest") as consumer,
        ):
            for value in values[:100]:
                await producer.send("t", value)
            assert await read(consumer, 100) == values[:100]
            for value in values[100:]:
                await producer.send("t", value)
                assert await read(consumer, 1) == [value]
        bytes_of = served(cluster)
        assert bytes_of[other] == 0
        assert bytes_of[near] > 10 * bytes_of[cluster.leader("t")], bytes_of


@pytest.mark.parametrize(
    ("selector", "rack"),
    [("LeaderSelector", "near"), (RACK_AWARE, None), (RACK_AWARE, "leader"), (RACK_AWARE, "elsewhere")],
)
async def test_other_consumers_read_from_the_leader(selector: str, rack: str | None) -> None:
    async with racks(replica_selector_class=selector) as cluster:
        leader = cluster.leader("t")
        name = {"near": f"rack-{followers(cluster)[0]}", "leader": f"rack-{leader}"}.get(rack or "", rack)
        async with (
            cluster.producer() as producer,
            cluster.consumer("t", client_rack=name, auto_offset_reset="earliest") as consumer,
        ):
            await producer.send("t", b"v")
            assert await read(consumer, 1) == [b"v"]
        assert {node_id for node_id, size_bytes in served(cluster).items() if size_bytes} == {leader}


async def test_r66_a_commit_wakes_the_consumers_of_a_follower() -> None:
    """Long polls of followers and consumers last 10 s: only a new high watermark, sent at once, ends both."""
    async with racks(replica_fetch_wait_max_ms=10_000, replica_lag_time_max_ms=30_000) as cluster:
        near, _ = followers(cluster)
        async with (
            cluster.producer() as producer,
            cluster.consumer(
                "t", client_rack=f"rack-{near}", auto_offset_reset="earliest", fetch_max_wait_ms=10_000
            ) as consumer,
        ):
            await producer.send("t", b"first")
            await read(consumer, 1)
            await eventually(lambda: served(cluster)[near] >= 0 and consumer._fetcher.assigned.near_nodes())
            began = time.monotonic()
            for number in range(20):
                await producer.send("t", b"%d" % number)
                assert await read(consumer, 1) == [b"%d" % number]
            assert time.monotonic() - began < 5
        assert served(cluster)[near] > 0


async def test_read_committed_at_a_follower() -> None:
    async with racks() as cluster:
        near, _ = followers(cluster)
        reader = cluster.consumer(
            "t", client_rack=f"rack-{near}", auto_offset_reset="earliest", isolation_level="read_committed"
        )
        async with cluster.producer(transactional_id="x") as producer, reader as consumer:
            for number in range(10):
                try:
                    async with producer.transaction():
                        await producer.send("t", b"%d" % number)
                        if number % 2:
                            raise LookupError("abort")
                except LookupError:
                    pass
            assert await read(consumer, 5) == [b"%d" % number for number in range(0, 10, 2)]
            assert consumer._fetcher.assigned.near_nodes() == {near}
        assert served(cluster)[near] > 0


@pytest.mark.parametrize("is_leader", [True, False])
async def test_the_death_of_a_node_loses_and_repeats_nothing(is_leader: bool) -> None:
    async with racks() as cluster:
        near, _ = followers(cluster)
        async with (
            cluster.producer() as producer,
            cluster.consumer("t", client_rack=f"rack-{near}", auto_offset_reset="earliest") as consumer,
        ):
            await producer.send("t", b"0")
            await read(consumer, 1)
            await eventually(lambda: consumer._fetcher.assigned.near_nodes() == {near})
            for number in range(1, 40):
                sent = producer.send_nowait("t", b"%d" % number)
                if number == 20:
                    await cluster.kill(cluster.leader("t") if is_leader else near)
                assert await read(consumer, 1) == [b"%d" % number]
                await sent


async def ask(cluster: Cluster, node_id: int, request: Any) -> Any:
    async with WireClient(cluster.brokers[node_id].address) as wire:
        return await wire.call(request)


@pytest.mark.parametrize(
    ("request_type", "offset", "epoch", "code"),
    [
        (FetchRequestV1, 0, 0, 0),
        (FetchRequestV1, 0, -1, 0),
        (FetchRequestV1, 2, 0, 0),
        (FetchRequestV1, 5, 0, ErrorCode.OFFSET_OUT_OF_RANGE),
        (FetchRequestV1, 0, 7, ErrorCode.UNKNOWN_LEADER_EPOCH),
        (FetchRequest, 0, 0, ErrorCode.NOT_LEADER_OR_FOLLOWER),
    ],
)
@pytest.mark.parametrize("max_bytes", [0, 1000])
async def test_r65_what_a_follower_answers(
    request_type: Any, offset: int, epoch: int, code: int, max_bytes: int
) -> None:
    async with racks() as cluster:
        near, _ = followers(cluster)
        async with cluster.producer() as producer:
            await producer.send("t", b"a")
            await producer.send("t", b"b")
        hosted = cluster.brokers[near]._services.partitions.find(("t", 0))
        await eventually(lambda: hosted.high_watermark == 2)
        extra = ("rack",) if request_type is FetchRequestV1 else ()
        request = request_type(0, 1, 1000, 0, [FetchPartition("t", 0, epoch, offset, max_bytes)], *extra)
        answer = await ask(cluster, near, request)
        (result,) = answer.partitions
        assert result.error_code == code
        if not code:
            assert (result.high_watermark, bool(result.length_bytes)) == (2, bool(max_bytes) and offset < 2)
        if code == ErrorCode.OFFSET_OUT_OF_RANGE:
            assert (result.log_start_offset, result.high_watermark) == (0, 2)


async def test_r65_a_follower_that_leaves_the_isr_ends_the_long_polls_of_its_consumers() -> None:
    async with racks() as cluster:
        near, _ = followers(cluster)
        hosted = cluster.brokers[near]._services.partitions.find(("t", 0))
        await eventually(lambda: hosted.partition._follower.may_serve())
        request = FetchRequestV1(20_000, 1, 1000, 0, [FetchPartition("t", 0, -1, 0, 1000)], "rack")
        waiting = asyncio.ensure_future(ask(cluster, near, request))
        await eventually(lambda: len(cluster.brokers[near]._services.waiters) == 1)
        state = cluster.brokers[near].image.partition("t", 0)
        hosted.follow(state._replace(isr=(hosted.leader_id,), partition_epoch=state.partition_epoch + 1))
        async with asyncio.timeout(30):
            (result,) = (await waiting).partitions
        assert result.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER


async def test_an_older_broker_is_asked_as_before(caplog: pytest.LogCaptureFixture) -> None:
    """A broker without version 1 of Fetch serves a consumer with a rack from its leaders."""
    caplog.set_level(logging.ERROR)
    async with racks() as cluster:
        async with (
            cluster.producer() as producer,
            cluster.consumer("t", client_rack="rack-1", auto_offset_reset="earliest") as consumer,
        ):
            link = consumer._cluster
            for node_id in (1, 2, 3):
                connection = await link.connection(node_id, 1)
                connection._protocol._versions[ApiKey.FETCH] = 0
            await producer.send("t", b"v")
            assert await read(consumer, 1) == [b"v"]
        # On a machine that stands still, sessions of brokers end.
        assert not [one for one in caplog.records if not one.name.startswith("kafkalite.broker.cluster")]


def test_r66_only_live_brokers_in_the_rack_are_near() -> None:
    broker = BrokerState(2, 1, (), "a", 0, is_fenced=False)
    assert is_near(broker, "a")
    assert not is_near(broker, "b")
    assert not is_near(None, "a")
    assert not is_near(broker._replace(is_fenced=True), "a")
    assert not is_near(broker._replace(is_shutting_down=True), "a")


def test_a_follower_names_no_replica() -> None:
    config = BrokerConfig.from_settings({"replica.selector.class": RACK_AWARE, "broker.rack": "a"})
    reads = NearReads(config, SimpleNamespace(), lambda: None, SystemClock())  # type: ignore[arg-type, return-value]
    assert reads.preferred(SimpleNamespace(is_leader=False), "b", 0) is None  # type: ignore[arg-type]
    assert reads.preferred(SimpleNamespace(is_leader=True), "a", 0) is None  # type: ignore[arg-type]
