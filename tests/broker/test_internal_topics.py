"""Topics whose names begin with two underscores are for brokers only: clients may only read them."""

from __future__ import annotations

from typing import Any

import pytest

from kafkalite.broker.broker import Broker
from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.coordination.internal_topics import GROUP, TRANSACTION, new_topic
from kafkalite.errors import ConfigError, ErrorCode
from kafkalite.model import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from kafkalite.protocol.messages import admin, data, groups, metadata
from kafkalite.testing import Cluster
from kafkalite.testing.wire import WireClient

REFUSED = ErrorCode.INVALID_TOPIC_EXCEPTION


async def test_clients_create_no_internal_topic(wire: WireClient, broker: Broker) -> None:
    topics = [admin.NewTopic(name, 1, 1, {}) for name in ("a", OFFSETS_TOPIC, "b", "__mine")]
    created = await wire.call(admin.CreateTopicsRequest(1000, False, topics))
    assert [(one.name, one.error_code) for one in created.topics] == [
        ("a", 0),
        (OFFSETS_TOPIC, REFUSED),
        ("b", 0),
        ("__mine", REFUSED),
    ]
    told = await wire.call(metadata.MetadataRequest([OFFSETS_TOPIC, "c"], True))
    assert [one.error_code for one in told.topics] == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, 0]
    assert sorted(broker.image.topics) == ["a", "b", "c"]


async def test_clients_change_no_internal_topic(
    wire: WireClient, batch_of: Any, produce: Any, fetch: Any, new_topic: Any
) -> None:
    await wire.call(new_topic("t"))
    found = await wire.call(groups.FindCoordinatorRequest(GROUP, ["g"]))
    assert found.coordinators[0].error_code == 0
    batch = batch_of(b"v")
    appended = await wire.call(produce(batch, OFFSETS_TOPIC), batch)
    assert appended.partitions[0].error_code == REFUSED
    deleted = await wire.call(admin.DeleteTopicsRequest(1000, [OFFSETS_TOPIC, "t"]))
    assert [one.error_code for one in deleted.topics] == [REFUSED, 0]
    grown = await wire.call(
        admin.CreatePartitionsRequest(1000, False, [admin.PartitionCount(OFFSETS_TOPIC, 60)])
    )
    assert grown.topics[0].error_code == REFUSED
    cut = await wire.call(data.DeleteRecordsRequest(1000, [data.DeleteRecordsPartition(OFFSETS_TOPIC, 0, 0)]))
    assert cut.partitions[0].error_code == REFUSED
    read = await wire.call(fetch(0, OFFSETS_TOPIC))
    assert read.partitions[0].error_code == 0


@pytest.mark.parametrize(
    ("brokers", "settings", "partitions", "replicas", "min_isr"),
    [
        (3, {"log_dirs": "/d"}, 50, 3, "2"),
        (1, {"log_dirs": "/d"}, 50, 1, "1"),
        (1, {}, 4, 1, "1"),
        (5, {"log_dirs": "/d", "offsets_topic_replication_factor": 5}, 50, 5, "2"),
        (1, {"offsets_topic_num_partitions": 7}, 7, 1, "1"),
    ],
)
def test_how_the_offsets_topic_is_created(
    brokers: int, settings: dict[str, Any], partitions: int, replicas: int, min_isr: str
) -> None:
    topic = new_topic(GROUP, BrokerConfig(**settings), brokers)
    assert (topic.name, topic.num_partitions, topic.replication_factor) == (
        OFFSETS_TOPIC,
        partitions,
        replicas,
    )
    assert topic.configs["min.insync.replicas"] == min_isr
    assert topic.configs["cleanup.policy"] == "compact"


def test_how_the_transactions_topic_is_created() -> None:
    config = BrokerConfig(
        log_dirs="/d", transaction_state_log_num_partitions=9, transaction_state_log_segment_bytes=2**20
    )
    topic = new_topic(TRANSACTION, config, 3)
    assert (topic.name, topic.num_partitions, topic.configs["segment.bytes"]) == (
        TRANSACTIONS_TOPIC,
        9,
        "1048576",
    )


async def test_creation_waits_for_brokers_that_have_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic created with one replica, because the other brokers were a second late, would keep one."""
    async with Cluster(brokers=3, offsets_topic_num_partitions=2) as cluster:
        await cluster.kill(3)
        await cluster.wait_until(lambda: len(cluster.broker.image.live_brokers()) == 2)
        async with WireClient(cluster.broker.address) as wire:
            asked = groups.FindCoordinatorRequest(GROUP, ["g"])
            (found,) = (await wire.call(asked)).coordinators
            assert found.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
            assert "3 replicas, and 2 brokers are alive" in found.error_message
            await cluster.start(3)
            await cluster.wait_until(lambda: len(cluster.broker.image.live_brokers()) == 3)
            assert (await wire.call(asked)).coordinators[0].error_code == 0
            assert len(cluster.broker.image.topics[OFFSETS_TOPIC].partitions[0].replicas) == 3
            await cluster.kill(3)
            await cluster.wait_until(lambda: len(cluster.broker.image.live_brokers()) == 2)
            monkeypatch.setattr("kafkalite.broker.coordination.internal_topics.GATHERING_MS", 0)
            asked = groups.FindCoordinatorRequest(TRANSACTION, ["app"])
            await wire.call(asked)
            assert len(cluster.broker.image.topics[TRANSACTIONS_TOPIC].partitions[0].replicas) == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"group_consumer_heartbeat_interval_ms": 45_000},
        {"group_consumer_assignors": "sticky"},
        {"group_consumer_assignors": ()},
    ],
)
def test_contradicting_coordinator_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BrokerConfig(**settings)
