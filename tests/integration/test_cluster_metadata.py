"""Three nodes: they come up, elect, register; any of them answers and passes on; controllers come and go."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kafkalite.broker.broker import Broker
from kafkalite.errors import BrokerError, ErrorCode, TopicAlreadyExistsError
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.messages import admin, data, metadata
from kafkalite.testing import Cluster, WireClient

ON_BOTH_LOOPS = True

LAYOUTS: list[dict[str, Any]] = [
    {"brokers": 3},
    {"brokers": 3, "controllers": 3},
    {"brokers": 2, "controllers": 1},
]


def everybody_knows_all(cluster: Cluster) -> bool:
    """Whether each broker knows that every one is alive."""
    images = [broker.image for broker in cluster.brokers.values()]
    return all(image.live_brokers() == set(cluster.brokers) for image in images)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("transport", "storage"), [("inproc", "memory"), ("tcp", "disk")])
async def test_a_cluster_is_ready_when_it_has_started(
    layout: dict[str, Any], transport: Any, storage: Any
) -> None:
    async with Cluster(**layout, transport=transport, storage=storage) as cluster:
        assert cluster.controller_id is not None
        for node_id, broker in cluster.brokers.items():
            own = broker.image.brokers[node_id]
            assert not own.is_fenced
            assert own.addresses == broker.addresses
        await cluster.wait_until(lambda: everybody_knows_all(cluster))


async def test_every_broker_answers_and_passes_on() -> None:
    async with Cluster(brokers=3) as cluster:
        for number, broker in enumerate(cluster.brokers.values()):
            name = f"by-{number}"
            async with WireClient(broker.address) as wire:
                topic = admin.NewTopic(name, 3, 3, {"retention.ms": "1000"})
                created = await wire.call(admin.CreateTopicsRequest(5_000, False, [topic]))
                assert created.topics[0].error_code == 0
                (again,) = (await wire.call(admin.CreateTopicsRequest(5_000, False, [topic]))).topics
                assert again.error_code == ErrorCode.TOPIC_ALREADY_EXISTS
                # The very broker that was asked shows it at once.
                assert name in broker.image.topics
                grown = await wire.call(
                    admin.CreatePartitionsRequest(5_000, False, [admin.PartitionCount(name, 6)])
                )
                assert grown.topics[0].error_code == 0
                assert len(broker.image.topics[name].partitions) == 6
                change = admin.ConfigChange("topic", name, "retention.ms", "2000")
                await wire.call(admin.AlterConfigsRequest(False, [change]))
                assert broker.image.topic_configs(name)["retention.ms"] == "2000"
                elected = await wire.call(admin.ElectLeadersRequest(5_000, False, None))
                assert elected.error_code == 0
                gone = await wire.call(admin.DeleteTopicsRequest(5_000, [name]))
                assert gone.topics[0].error_code == 0
                assert name not in broker.image.topics


async def test_every_broker_tells_of_all_and_of_itself_as_it_was_reached() -> None:
    async with Cluster(brokers=3, advertised_listeners="") as cluster:
        for node_id, broker in cluster.brokers.items():
            async with WireClient(broker.address) as wire:
                await cluster.wait_until(lambda: everybody_knows_all(cluster))
                answer = await wire.call(metadata.MetadataRequest([], False))
                told = {b.node_id: b.address for b in answer.brokers}
                assert told == {n: b.address for n, b in cluster.brokers.items()}
                assert answer.controller_id == cluster.controller_id
                described = await wire.call(metadata.DescribeClusterRequest())
                assert [b.node_id for b in described.brokers] == [1, 2, 3]
                assert not any(b.is_fenced or b.is_shutting_down for b in described.brokers)
                assert {b.broker_epoch for b in described.brokers} == {
                    b.broker_epoch for b in cluster.brokers[node_id].image.brokers.values()
                }


async def test_metadata_has_the_addresses_of_the_listener_it_is_asked_at() -> None:
    names = {n: (f"inproc://inside-{n}", f"inproc://outside-{n}") for n in (1, 2)}
    cluster = Cluster(brokers=2)
    for node_id, (inside, outside) in names.items():
        cluster.nodes[node_id].settings["listeners"] = (inside, outside)
    async with cluster:
        await cluster.wait_until(lambda: everybody_knows_all(cluster))
        for listener in (0, 1):
            async with WireClient(names[1][listener]) as wire:
                answer = await wire.call(metadata.MetadataRequest([], False))
                assert [b.address for b in answer.brokers] == [names[1][listener], names[2][listener]]


async def test_a_topic_is_created_by_asking_any_broker_for_it() -> None:
    async with Cluster(brokers=3) as cluster:
        for node_id, broker in cluster.brokers.items():
            async with WireClient(broker.address) as wire:
                answer = await wire.call(metadata.MetadataRequest([f"new-{node_id}"], True))
                assert answer.topics[0].error_code == 0
                assert len(answer.topics[0].partitions[0].replicas) == 3


async def test_producer_ids_of_several_brokers_never_meet() -> None:
    async with Cluster(brokers=3) as cluster:

        async def take(broker: Broker) -> list[int]:
            async with WireClient(broker.address) as wire:
                ask = data.InitProducerIdRequest(None, 1_000, -1, -1)
                return [(await wire.call(ask)).producer_id for _ in range(1_100)]

        taken = [n for ids in await asyncio.gather(*map(take, cluster.brokers.values())) for n in ids]
        assert len(set(taken)) == len(taken) == 3_300
        async with WireClient(cluster.broker.address) as wire:
            bumped = await wire.call(data.InitProducerIdRequest(None, 1_000, taken[0], 4))
            assert (bumped.producer_id, bumped.producer_epoch) == (taken[0], 5)
            fresh = await wire.call(data.InitProducerIdRequest(None, 1_000, taken[0], 2**15 - 2))
            assert fresh.producer_id not in taken
            assert fresh.producer_epoch == 0
        await cluster.restart()
        later = await take(cluster.broker)
        assert not set(later) & {*taken, fresh.producer_id}


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
async def test_another_controller_takes_over(layout: dict[str, Any]) -> None:
    async with Cluster(**layout) as cluster:
        await cluster.create_topic("before")
        old = cluster.controller_id
        assert old is not None
        survivors = [broker for node_id, broker in cluster.brokers.items() if node_id != old]
        await cluster.kill(old)
        async with WireClient(survivors[0].address) as wire:
            topic = admin.NewTopic("after", 1, 2, {})
            created = await wire.call(admin.CreateTopicsRequest(10_000, False, [topic]))
        assert created.topics[0].error_code == 0
        assert cluster.controller_id not in (None, old)
        await cluster.wait_until(lambda: all("after" in broker.image.topics for broker in survivors))
        await cluster.start(old)
        await cluster.wait_until(lambda: "after" in cluster.nodes[old].broker.image.topics)


async def test_r23_without_a_majority_nothing_is_decided_and_clients_are_refused() -> None:
    """Three combined nodes, two gone: the third cannot know whether the others have elected a leader."""
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", partitions=3, replication_factor=1)
        image = cluster.broker.image
        led = next(n for n, state in enumerate(image.topics["t"].partitions) if state.leader == 1)
        gone = next(n for n, state in enumerate(image.topics["t"].partitions) if state.leader == 2)
        await cluster.produce("t", [b"before"], partition=led)
        await cluster.kill(2, 3)
        await cluster.wait_until(lambda: cluster.controller_id is None)
        await cluster.wait_until(lambda: not cluster.brokers[1].partitions.may_serve())
        async with WireClient(cluster.brokers[1].address) as wire:
            topic = admin.NewTopic("u", 1, 1, {})
            refused = await wire.call(admin.CreateTopicsRequest(300, False, [topic]))
            assert refused.error_code == ErrorCode.REQUEST_TIMED_OUT
            assert "no controller" in refused.error_message
            shown = await wire.call(metadata.MetadataRequest(None, False))
            assert shown.controller_id == -1
            assert shown.topics[0].partitions[led].leader_id == 1
            fetch = data.FetchRequest(0, 0, 100, 0, [data.FetchPartition("t", led, -1, 0, 100)])
            (answer,) = (await wire.call(fetch)).partitions
            assert answer.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
            assert "reaches no controller" in answer.error_message
            elsewhere = data.FetchRequest(0, 0, 100, 0, [data.FetchPartition("t", gone, -1, 0, 100)])
            (answer,) = (await wire.call(elsewhere)).partitions
            assert answer.error_code in {
                ErrorCode.NOT_LEADER_OR_FOLLOWER,
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            }
        await cluster.start(2)
        await cluster.produce("t", [b"after"], partition=led)
        async with cluster.admin() as client:
            await client.create_topic("u", partitions=1, replication_factor=1)


async def test_topics_and_configs_survive_the_restart_of_all() -> None:
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", partitions=4, configs={"retention.ms": "5"})
        offset = cluster.broker.image.metadata_offset
        for how in (cluster.stop, cluster.kill, cluster.crash):
            await how()
            await cluster.start()
            for broker in cluster.brokers.values():
                await cluster.wait_until(lambda broker=broker: "t" in broker.image.topics)  # type: ignore[misc]
                assert len(broker.image.topics["t"].partitions) == 4
                assert broker.image.topic_configs("t") == {"retention.ms": "5"}
                assert broker.image.metadata_offset > offset


async def test_the_quorum_and_the_metadata_describe_themselves() -> None:
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", partitions=2)
        leader = cluster.controller_id
        for node_id, broker in cluster.brokers.items():
            async with WireClient(broker.address) as wire:
                quorum = await wire.call(metadata.DescribeQuorumRequest())
                assert (quorum.node_id, quorum.leader_id) == (node_id, leader)
                assert [node.node_id for node in quorum.nodes if node.is_voter] == [1, 2, 3]
                assert all(node.address.startswith("inproc://") for node in quorum.nodes)
                await cluster.wait_until(lambda broker=broker: "t" in broker.image.topics)  # type: ignore[misc]
                tree = await wire.call(metadata.DescribeMetadataRequest("/topics/t", -1, 0))
                assert [node.path for node in tree.nodes] == ["/topics/t", "/topics/t/0", "/topics/t/1"]
                roots = await wire.call(metadata.DescribeMetadataRequest("/", -1, 0))
                assert [n.path for n in roots.nodes] == ["/", "/brokers", "/configs", "/features", "/topics"]
                nothing = await wire.call(metadata.DescribeMetadataRequest("/nothing", -1, 0))
                assert nothing.error_code == ErrorCode.INVALID_REQUEST
        async with WireClient(cluster.broker.address) as wire:
            ask = metadata.DescribeMetadataRequest("/topics", cluster.broker.image.metadata_offset, 10_000)
            wire.send(ask)
            await cluster.create_topic("u")
            answer = (await wire.response()).message
            assert "/topics/u" in [node.path for node in answer.nodes]


async def test_what_is_not_passed_on() -> None:
    from kafkalite.broker.handlers.cluster import FORWARDED

    assert ApiKey.METADATA not in FORWARDED
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t")
        with pytest.raises(TopicAlreadyExistsError):
            await cluster.create_topic("t")
        with pytest.raises(BrokerError, match="replication factor 4"):
            await cluster.create_topic("v", replication_factor=4)
