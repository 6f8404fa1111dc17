"""Work that retriable errors delay is reported as a warning within two seconds."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

import kafkalite
from kafkalite.client.cluster.setbacks import LATE_MS, REPEAT_MS, Setbacks
from kafkalite.errors import (
    ClientClosedError,
    ClientError,
    ConnectionFailedError,
    CoordinatorNotAvailableError,
    DeliveryTimeoutError,
    ErrorCode,
    KafkaliteError,
    NotEnoughReplicasError,
    RequestTimeoutError,
    UnknownTopicOrPartitionError,
)
from kafkalite.protocol.api import ApiKey
from kafkalite.records.builder import build_batch
from kafkalite.testing import Cluster, fail_next

LIMIT_S = 2.0


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_retry_that_soon_succeeds_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    setbacks = Setbacks()
    setbacks.note("orders-0", NotEnoughReplicasError("too few"), 0)
    assert setbacks
    setbacks.clear("orders-0")
    assert not setbacks
    setbacks.note("orders-0", NotEnoughReplicasError("too few"), 2 * LATE_MS)
    assert told(caplog) == [], "the first failure was forgotten"


def test_late_work_is_warned_of_once_and_again_after_a_change_or_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setbacks = Setbacks()
    for now_ms in range(0, LATE_MS + REPEAT_MS, 500):
        setbacks.note("orders-0", NotEnoughReplicasError("too few", hint="add brokers"), now_ms)
    assert told(caplog) == ["waiting: too few"]
    setbacks.note("orders-0", NotEnoughReplicasError("no disk"), LATE_MS + REPEAT_MS)
    setbacks.note("orders-0", NotEnoughReplicasError("no disk"), LATE_MS + 2 * REPEAT_MS)
    assert told(caplog) == ["waiting: too few", "waiting: no disk"], "after a gap, it is the first failure"


def test_partitions_that_fail_in_turn_are_each_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    setbacks = Setbacks()
    for now_ms in range(0, LATE_MS + REPEAT_MS, 500):
        for number in range(2):
            setbacks.note(number, NotEnoughReplicasError(f"orders-{number}"), now_ms)
    assert told(caplog) == ["waiting: orders-0", "waiting: orders-1"]


def test_a_known_cause_replaces_errors_that_it_explains_and_no_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setbacks = Setbacks(lambda: "the majority is lost")
    for number, error in enumerate(
        (
            ConnectionFailedError("refused"),
            RequestTimeoutError("late"),
            CoordinatorNotAvailableError("__consumer_offsets needs 3 replicas"),
            NotEnoughReplicasError("too few"),
        )
    ):
        setbacks.note(number, error, REPEAT_MS * 2 * number, late_ms=0)
    assert told(caplog) == ["waiting: the majority is lost"] * 3 + ["waiting: too few"]


async def test_a_slow_start_leaves_no_setback(
    fake_broker: Any, make_fault: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fake_broker.topics["orders"] = 1
    fake_broker.fault(ApiKey.METADATA, make_fault(close=True))
    async with kafkalite.Producer(fake_broker.address) as producer:
        cluster = producer._sender.cluster
        assert not cluster.setbacks
        cluster._on_silence(fake_broker.address)
        assert "does not respond" in told(caplog)[0]
        await producer.send("orders", b"a")
        (connection, *_) = cluster._connections()
        cluster._on_slow(connection)
        assert "is slow to respond" in told(caplog)[1]
        assert not cluster.setbacks


async def test_errors_that_need_no_metadata_are_late_too(
    fake_broker: Any, make_fault: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fake_broker.topics["orders"] = 1
    fake_broker.always[ApiKey.FETCH] = make_fault(code=int(ErrorCode.OFFSET_NOT_AVAILABLE))
    async with kafkalite.Consumer("orders", bootstrap_servers=fake_broker.address) as consumer:
        reading = asyncio.ensure_future(consumer.getone())
        await until_told(caplog, "orders-0")
        del fake_broker.always[ApiKey.FETCH]
        fake_broker.append("orders", 0, build_batch([b"a"]))
        assert (await asyncio.wait_for(reading, 30)).value == b"a"
        assert not consumer._cluster.setbacks


@pytest.mark.parametrize("settings", [{}, {"group_id": "billing", "auto_offset_reset": "earliest"}])
async def test_an_open_transaction_that_holds_records_back_is_named(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with Cluster() as cluster:
        await cluster.create_topic("orders")
        servers = cluster.bootstrap_servers
        async with (
            kafkalite.Producer(servers, transactional_id="billing") as producer,
            kafkalite.Producer(servers) as other,
            kafkalite.Consumer(
                "orders", bootstrap_servers=servers, isolation_level="read_committed", **settings
            ) as consumer,
        ):
            await other.send("orders", b"a")
            async with producer.transaction():
                await producer.send("orders", b"b")
                await other.send("orders", b"c")
                assert (await consumer.getone()).value == b"a"
                reading = asyncio.ensure_future(consumer.getone())
                await until_told(
                    caplog,
                    "waiting: orders-0: an open transaction holds back the records from offset 1 on; "
                    "see 'kl txn list'",
                )
            assert (await asyncio.wait_for(reading, 30)).value == b"b"
            assert not consumer._cluster.setbacks


def test_the_closing_of_the_client_is_no_setback(caplog: pytest.LogCaptureFixture) -> None:
    setbacks = Setbacks()
    setbacks.note("orders-0", ClientClosedError("closed"), 0, late_ms=0)
    assert told(caplog) == []


async def until_told(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Wait for LIMIT_S in pauses of 20 ms, which a loaded machine stretches like the client's work."""
    for _ in range(round(LIMIT_S / 0.02)):
        if any(text in each for each in told(caplog)):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(told(caplog))


async def test_a_producer_whose_records_are_refused_says_so_within_two_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Cluster() as cluster:
        await cluster.create_topic("orders")
        async with kafkalite.Producer(cluster.bootstrap_servers) as producer:
            await producer.send_many("orders", [b"a"] * 7)
            cluster.intercept(ApiKey.PRODUCE, fail_next(None, ErrorCode.NOT_ENOUGH_REPLICAS))
            pending = producer.send_nowait("orders", b"b")
            await until_told(caplog, "refused by a test")
            assert producer.statistics().acknowledged_records == 7
            cluster.intercept(ApiKey.PRODUCE, None)
            await pending


async def test_a_consumer_whose_fetches_are_refused_says_so_within_two_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Cluster() as cluster:
        await cluster.produce("orders", [b"a"])
        async with kafkalite.Consumer("orders", bootstrap_servers=cluster.bootstrap_servers) as consumer:
            cluster.intercept(ApiKey.FETCH, fail_next(None))
            reading = asyncio.ensure_future(consumer.get_many(timeout_ms=5_000))
            await until_told(caplog, "refused by a test")
            reading.cancel()


async def test_a_topic_that_is_missing_is_named_within_two_seconds(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        Cluster(auto_create_topics_enable=False) as cluster,
        kafkalite.Producer(cluster.bootstrap_servers) as producer,
    ):
        pending = producer.send_nowait("missing", b"b")
        await until_told(caplog, "topic 'missing': there is no such topic")
        await cluster.create_topic("missing")
        await pending


async def test_a_member_that_cannot_join_says_so_within_two_seconds(caplog: pytest.LogCaptureFixture) -> None:
    async with Cluster() as cluster:
        await cluster.produce("orders", [b"a"])
        cluster.intercept(ApiKey.CONSUMER_GROUP_HEARTBEAT, fail_next(None, ErrorCode.NOT_COORDINATOR))
        settings = {"group_id": "g", "bootstrap_servers": cluster.bootstrap_servers}
        joining = asyncio.ensure_future(kafkalite.Consumer("orders", **settings).start())
        await until_told(caplog, "refused by a test")
        joining.cancel()
        await asyncio.wait({joining})


async def test_a_consumer_without_topics_raises_instead_of_waiting_for_ever() -> None:
    async with Cluster() as cluster:
        for group in ({}, {"group_id": "readers"}):
            async with kafkalite.Consumer(bootstrap_servers=cluster.bootstrap_servers, **group) as consumer:
                with pytest.raises(ClientError, match="no topics to read"):
                    await consumer.get_one()


async def test_a_lost_majority_is_named_with_the_nodes_that_cannot_be_reached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("orders", partitions=3, replication_factor=3)
        async with kafkalite.Producer(cluster.bootstrap_servers) as producer:
            await producer.send_many("orders", [b"a"] * 7)
            await cluster.kill(2, 3)
            pending = [producer.send_nowait("orders", b"b", partition=number) for number in range(3)]
            async with asyncio.timeout(60):  # elections and sessions end first
                while not any("quorum of controllers is" in each for each in told(caplog)):
                    await asyncio.sleep(0.05)
            assert any("node 2 (" in text and " and node 3 (" in text for text in told(caplog)), told(caplog)
            async with asyncio.timeout(60), kafkalite.Admin(cluster.bootstrap_servers):
                while not any(
                    "the quorum of controllers is lost: 1 of 3 nodes" in each for each in told(caplog)
                ):
                    await asyncio.sleep(0.05)
            await cluster.start(2)
            for each in pending:
                await each


async def test_nodes_that_die_one_after_the_other_are_all_named(caplog: pytest.LogCaptureFixture) -> None:
    async with Cluster(brokers=3) as cluster:
        await cluster.kill(3)
        async with kafkalite.Admin(cluster.bootstrap_servers) as admin, asyncio.timeout(30):
            while not any(each.is_fenced for each in (await admin.describe_cluster()).brokers):
                await asyncio.sleep(0.05)
        await cluster.kill(1)
        async with asyncio.timeout(30):
            async with kafkalite.Admin(cluster.bootstrap_servers, default_api_timeout_ms=3_000) as admin:
                with pytest.raises(KafkaliteError, match="1 of 3 nodes") as failure:
                    await admin.create_topic("orders")
        lost = [text for text in (*told(caplog), failure.value.message) if "nodes can be reached" in text]
        assert all("1 of 3 nodes" in each for each in lost), lost
        assert all("start node 1 (" in each and " and node 3 (" in each for each in lost), lost


async def test_a_dead_lone_broker_is_no_lost_majority(caplog: pytest.LogCaptureFixture) -> None:
    async with Cluster() as cluster:
        await cluster.create_topic("orders")
        async with kafkalite.Producer(cluster.bootstrap_servers) as producer:
            await producer.send("orders", b"a")
            await cluster.kill(1)
            pending = producer.send_nowait("orders", b"b")
            async with asyncio.timeout(30):
                while not any("cannot connect to" in each for each in told(caplog)):
                    await asyncio.sleep(0.05)
            assert not any("of controllers" in each or "a controller" in each for each in told(caplog))
            await cluster.start(1)
            await pending


@pytest.mark.parametrize("comes_back", [False, True])
async def test_a_topic_created_again_with_fewer_partitions_is_named(
    caplog: pytest.LogCaptureFixture, comes_back: bool
) -> None:
    """Records wait for the missing partition, others go to the partitions that exist."""
    async with (
        kafkalite.Broker() as broker,
        kafkalite.Admin(broker.bootstrap_servers) as admin,
        kafkalite.Producer(
            broker.bootstrap_servers,
            linger_ms=0,
            delivery_timeout_ms=60_000 if comes_back else 2_500,
            request_timeout_ms=1_000,
            enable_idempotence=not comes_back,
        ) as producer,
    ):
        await admin.create_topic("shrunk", 2)
        assert (await producer.send("shrunk", b"1", partition=1)).partition == 1
        for number in range(9):
            await producer.send("shrunk", b"1", key=b"%d" % number)
        await admin.delete_topics(["shrunk"])
        await admin.create_topic("shrunk", 1)
        waiting = producer.send_nowait("shrunk", b"2", partition=1)
        text = "shrunk-1: topic 'shrunk' has 1 partition now"
        await until_told(caplog, f"waiting: {text}")
        for number in range(9):
            assert (await producer.send("shrunk", b"3", key=b"%d" % number)).partition == 0
        assert (await producer.send("shrunk", b"3")).partition == 0
        with pytest.raises(UnknownTopicOrPartitionError, match="has partitions 0 to 0, not 1"):
            await producer.send("shrunk", b"3", partition=1)
        if comes_back:
            await admin.create_partitions("shrunk", 2)
            assert (await waiting).partition == 1
            assert (await producer.send("shrunk", b"4", partition=1)).partition == 1
            return
        with pytest.raises(DeliveryTimeoutError, match=f"the last attempt failed: {text}"):
            await waiting
