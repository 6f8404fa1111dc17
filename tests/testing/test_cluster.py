"""Cluster: brokers for tests that survive restarts, crash, and fail on request."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kafkalite import testing
from kafkalite.broker.server.responses import Pending
from kafkalite.errors import (
    ClientError,
    ConfigError,
    ErrorCode,
    InvalidReplicationFactorError,
    PolicyViolationError,
    RecordError,
)
from kafkalite.model import TopicPartition
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.connection import RequestError
from kafkalite.protocol.messages import data, metadata
from kafkalite.testing import (
    Cluster,
    SyncCluster,
    VirtualClock,
    WireClient,
    delay_next,
    disconnect_next,
    drop_next,
    fail_next,
)
from proof.waiting import eventually

DAY_MS = 24 * 3_600_000


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
@pytest.mark.parametrize("storage", ["memory", "disk"])
async def test_acknowledged_records_survive_restart_and_crash(transport: str, storage: str) -> None:
    async with Cluster(transport=transport, storage=storage) as cluster:  # type: ignore[arg-type]
        await cluster.create_topic("t", partitions=2)
        await cluster.produce("t", [b"1", b"2"], partition=1)
        address = cluster.bootstrap_servers
        await cluster.restart()
        assert cluster.bootstrap_servers == address
        await cluster.produce("t", [b"3"], partition=1)
        await cluster.crash()
        await cluster.start()
        records = await cluster.records("t")
        assert [(r.partition, r.offset, r.value) for r in records] == [
            (1, 0, b"1"),
            (1, 1, b"2"),
            (1, 2, b"3"),
        ]
        assert cluster.statistics().topic_count == 1


async def test_a_crash_loses_unsynced_records() -> None:
    async with Cluster(durability="page-cache", seed=3) as cluster:
        await cluster.create_topic("t")
        await cluster.produce("t", [b"lost"])
        await cluster.crash()
        await cluster.start()
        assert len(await cluster.records("t")) <= 1  # the seed decides what a power loss leaves


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"brokers": 0}, "brokers is 0, but must be from 1 to 100"),
        ({"controllers": -1}, "controllers is -1, but must be 0 or more"),
        ({"brokers": 3, "clock": VirtualClock()}, "for one broker"),
        ({"transport": "pigeon"}, "inproc or tcp"),
        ({"storage": "paper"}, "memory or disk"),
    ],
)
def test_unknown_arguments_are_refused_by_name(arguments: dict[str, object], message: str) -> None:
    cluster = Cluster.__new__(Cluster)
    with pytest.raises(ConfigError, match=message):
        cluster.__init__(**arguments)  # type: ignore[misc]
    assert repr(cluster) == "<Cluster >", "a traceback with local variables shows it"


async def test_a_refused_request_is_retried_by_the_producer() -> None:
    async with Cluster() as cluster:
        await cluster.create_topic("t")
        cluster.intercept(ApiKey.PRODUCE, fail_next(2))
        await cluster.produce("t", [b"1"])
        assert [r.value for r in await cluster.records("t")] == [b"1"]
        assert cluster.statistics().requests["PRODUCE"] == 1  # refused requests did not reach their handler


async def test_faults_act_on_the_wire() -> None:
    clock = VirtualClock()
    async with Cluster(clock=clock) as cluster:
        ask = metadata.DescribeClusterRequest()
        api = ApiKey.DESCRIBE_CLUSTER
        async with WireClient(cluster.bootstrap_servers) as wire:
            cluster.intercept(api, fail_next(error_code=ErrorCode.SHUTTING_DOWN))
            refused = await wire.call(ask)
            assert isinstance(refused, RequestError)
            assert refused.error_code == ErrorCode.SHUTTING_DOWN
            assert (await wire.call(ask)).error_code == 0

            cluster.intercept(api, delay_next(delay_ms=1000))
            wire.send(ask)
            await clock.advance(999)
            assert cluster.statistics().requests[api.name] == 1
            await clock.advance(1)
            assert (await wire.response()).message.error_code == 0

            cluster.intercept(api, drop_next())
            wire.send(ask)
            wire.send(ask)  # waits behind the lost one, as on any ordered connection
            for _ in range(5):
                await asyncio.sleep(0)
            assert not wire._responses
        for after in (False, True):
            before = cluster.statistics().requests[api.name]
            cluster.intercept(api, disconnect_next(after=after))
            async with WireClient(cluster.bootstrap_servers) as wire:
                wire.send(ask)
                await wire.closed()
            assert cluster.statistics().requests[api.name] - before == int(after)
        cluster.intercept(api, fail_next(100))
        cluster.intercept(api, None)
        async with WireClient(cluster.bootstrap_servers) as wire:
            assert (await wire.call(ask)).error_code == 0


async def test_a_delayed_long_poll_and_a_client_that_leaves() -> None:
    clock = VirtualClock()
    async with Cluster(clock=clock) as cluster:
        await cluster.create_topic("t")
        fetch = data.FetchRequest(60_000, 1, 100, 0, [data.FetchPartition("t", 0, -1, 0, 100)])
        cluster.intercept(ApiKey.FETCH, delay_next(2, delay_ms=10))
        async with WireClient(cluster.bootstrap_servers) as wire:
            wire.send(fetch)
            await eventually(lambda: clock.sleeper_count > 3)
            await clock.advance(10)
            assert cluster.statistics().waiting_requests == 1
            await cluster.produce("t", [b"x"])
            assert (await wire.response()).message.partitions[0].length_bytes > 0
        async with WireClient(cluster.bootstrap_servers) as wire:
            wire.send(fetch)
            for _ in range(5):
                await asyncio.sleep(0)  # it is delayed when its client goes


@pytest.mark.parametrize(("is_idempotent", "values"), [(True, [b"1"]), (False, [b"1", b"1"])])
async def test_an_ack_that_is_lost_after_the_append_is_a_duplicate_without_idempotence(
    is_idempotent: bool, values: list[bytes]
) -> None:
    async with Cluster() as cluster:
        await cluster.create_topic("t")
        cluster.intercept(ApiKey.PRODUCE, disconnect_next(after=True))
        async with cluster.producer(enable_idempotence=is_idempotent) as producer:
            await producer.send("t", b"1")
        assert [r.value for r in await cluster.records("t")] == values


async def test_three_brokers_survive_the_loss_of_one() -> None:
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", partitions=3, configs={"min.insync.replicas": "2"})
        await cluster.produce("t", [b"%d" % number for number in range(30)])
        led_by = cluster.leader("t", 0)
        assert led_by in cluster.brokers
        await cluster.kill(led_by)
        await cluster.wait_until(lambda: cluster.leader("t", 0) not in {led_by, -1})
        await cluster.produce("t", [b"%d" % number for number in range(30, 60)])
        await cluster.start(led_by)
        states = cluster.broker.image.topics["t"].partitions
        assert len(states) == 3
        await cluster.wait_until(
            lambda: all(len(state.isr) == 3 for state in cluster.broker.image.topics["t"].partitions)
        )
        assert sorted(int(r.value) for r in await cluster.records("t")) == list(range(60))
        assert cluster.statistics(led_by).node_id == led_by


async def test_the_leader_is_unknown_while_no_node_runs() -> None:
    cluster = Cluster()
    with pytest.raises(AssertionError, match="no node of the cluster is running"):
        cluster.leader("t")
    async with cluster:
        await cluster.create_topic("t")
        assert (cluster.leader("t"), cluster.leader("other")) == (1, -1)
    with pytest.raises(AssertionError, match="no node of the cluster is running"):
        cluster.leader("t")


async def test_a_topic_is_created_although_a_broker_is_fenced_for_a_moment() -> None:
    """As after a process that stood still, on a loaded machine."""
    async with Cluster(brokers=3) as cluster:
        cluster.intercept("BrokerHeartbeat", lambda _request, _proceed, _clock: Pending())
        await cluster.wait_until(lambda: len(cluster.broker.image.live_brokers()) < 3)
        cluster.intercept("BrokerHeartbeat", None)
        await cluster.create_topic("t", replication_factor=3)
        await cluster.kill(next(node for node in cluster.brokers if node != cluster.controller_id))
        with pytest.raises(InvalidReplicationFactorError):
            await cluster.create_topic("u", replication_factor=4)


@pytest.mark.parametrize("layout", [{"brokers": 3}, {"brokers": 1, "controllers": 3}])
def test_the_blocking_twin_of_several(layout: dict[str, int]) -> None:
    threads = set(threading.enumerate())
    with SyncCluster(**layout) as cluster:
        cluster.create_topic("t", partitions=2)
        cluster.produce("t", [b"1", b"2"])
        controller = cluster.controller_id
        assert controller is not None
        cluster.kill(controller)
        cluster.wait_until(lambda inside: inside.controller_id not in {None, controller})
        cluster.wait_until(lambda inside: inside.leader("t", 0) in inside.brokers)
        cluster.start()
        assert sorted(record.value for record in cluster.records("t")) == [b"1", b"2"]
        assert cluster.statistics().topic_count == 1
        assert cluster.leader("t", 1) in cluster.cluster.brokers
    assert set(threading.enumerate()) <= threads, "no thread is left"


async def test_nodes_on_disks_leave_no_thread_behind() -> None:
    threads = set(threading.enumerate())
    async with Cluster(brokers=3, storage="disk", transport="tcp") as cluster:
        await cluster.create_topic("t")
        await cluster.produce("t", [b"1"])
        await cluster.kill(1)
    left = set(threading.enumerate()) - threads
    assert not [thread for thread in left if "raft" in thread.name], left


async def test_time_moves_the_brokers_retention() -> None:
    async with Cluster(clock=VirtualClock()) as cluster:
        await cluster.create_topic("t", configs={"retention.ms": str(7 * DAY_MS)})
        async with cluster.producer() as producer:
            await producer.send("t", b"old", timestamp_ms=cluster.clock.wall_ms())
        await cluster.advance(8 * DAY_MS)
        assert await cluster.records("t") == []
        key = TopicPartition("t", 0)
        async with cluster.consumer(auto_offset_reset="earliest") as consumer:
            consumer.assign([key])
            await consumer.seek(key, 0)  # the record is deleted: the reset policy finds the new start
            async with cluster.producer() as producer:
                await producer.send("t", b"new", timestamp_ms=cluster.clock.wall_ms())
            (record,) = await consumer.get_many(timeout_ms=5000)
            assert (record.offset, record.value) == (1, b"new")


async def test_only_a_virtual_clock_can_be_advanced() -> None:
    async with Cluster() as cluster:
        with pytest.raises(AssertionError, match="VirtualClock"):
            await cluster.advance(1)


def test_the_blocking_twin_does_the_same() -> None:
    with SyncCluster(clock=VirtualClock()) as cluster:
        cluster.create_topic("t", partitions=2, configs={"retention.ms": "1000"})
        cluster.produce("t", [b"1"], partition=0)
        cluster.restart()
        cluster.intercept(ApiKey.PRODUCE, fail_next())
        cluster.produce("t", [b"2"], partition=0)
        assert [r.value for r in cluster.records("t")] == [b"1", b"2"]
        cluster.crash()
        cluster.start()
        cluster.stop()
        cluster.start()
        assert cluster.statistics().topic_count == 1
        assert cluster.address == cluster.bootstrap_servers
        cluster.advance(10 * DAY_MS)
        assert cluster.records("t") == []
        assert "running" in repr(cluster)
        assert cluster.cluster.broker.is_running
    cluster.close()
    with pytest.raises(AssertionError, match="not started"):
        cluster.records("t")


async def test_errors_are_raised_unchanged_from_the_other_thread() -> None:
    with SyncCluster() as cluster:
        cluster.intercept(ApiKey.CREATE_TOPICS, fail_next(error_code=ErrorCode.POLICY_VIOLATION))
        with pytest.raises(PolicyViolationError, match="refused by a test"):
            cluster.create_topic("t")


def test_a_wrong_number_of_brokers_shows_the_right_call():
    for make in (Cluster, SyncCluster):
        with pytest.raises(
            ConfigError, match=r"brokers is 'h:9092', but must be a number of nodes.*Cluster\(brokers=3\)"
        ):
            make("h:9092")


def test_the_broker_is_named_with_its_module():
    with pytest.raises(AttributeError, match="has no attribute 'Broker'; import it from kafkalite"):
        testing.Broker  # noqa: B018


async def test_wrong_arguments_of_a_cluster_are_named() -> None:
    async with Cluster() as cluster:
        for call in (cluster.start, cluster.stop, cluster.kill, cluster.crash, cluster.restart):
            with pytest.raises(ClientError, match=r"no node 5 \(the nodes of the cluster: 1\)"):
                await call(5)
        with pytest.raises(ClientError, match="no node 5"):
            cluster.statistics(5)
        with pytest.raises(ClientError, match="None is no Snapshot"):
            await cluster.restore(None)  # type: ignore[arg-type]
        for values in (b"text", "text"):
            with pytest.raises(RecordError, match="put it into a list"):
                await cluster.produce("t", values)  # type: ignore[arg-type]
        assert cluster.broker.is_running
