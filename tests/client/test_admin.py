"""Admin against the real broker, in this process without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kafkalite.broker.broker import Broker
from kafkalite.client.admin.admin import Admin
from kafkalite.client.admin.descriptions import NewTopic
from kafkalite.client.producer.producer import Producer
from kafkalite.errors import (
    BrokerError,
    ClientClosedError,
    ClientError,
    ClusterAuthorizationFailedError,
    ConnectionFailedError,
    InvalidConfigError,
    InvalidPartitionsError,
    InvalidRequestError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
)
from kafkalite.model import NO_OFFSET, TopicPartition
from kafkalite.testing.cluster import Cluster
from proof.waiting import eventually

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest_asyncio.fixture
async def broker() -> AsyncIterator[Broker]:
    async with Broker(listeners="inproc://") as running:
        yield running


@pytest_asyncio.fixture
async def admin(broker: Broker) -> AsyncIterator[Admin]:
    async with Admin(broker.bootstrap_servers, client_id="test") as opened:
        yield opened


async def test_one_topic(admin: Admin) -> None:
    created = await admin.create_topic("t", 3, configs={"retention.ms": "1000"})
    assert (created.name, created.num_partitions, created.replication_factor) == ("t", 3, 1)
    (described,) = await admin.describe_topics(["t"])
    assert (described.topic_id, described.is_internal) == (created.topic_id, False)
    assert [partition.leader_id for partition in described.partitions] == [1, 1, 1]
    assert described.partitions[0].isr == described.partitions[0].replicas == (1,)
    assert [topic.name for topic in await admin.list_topics()] == ["t"]
    with pytest.raises(TopicAlreadyExistsError, match="'t'"):
        await admin.create_topic("t")
    await admin.create_partitions("t", 4)
    with pytest.raises(InvalidPartitionsError):
        await admin.create_partitions("t", 2)
    assert len((await admin.describe_topics(["t"]))[0].partitions) == 4
    assert await admin.delete_topics(["t"]) == {"t": None}
    with pytest.raises(UnknownTopicOrPartitionError):
        await admin.describe_topics(["t"])


async def test_validate_only_changes_nothing(admin: Admin) -> None:
    await admin.create_topic("t", 2, validate_only=True)
    assert await admin.list_topics() == []
    await admin.create_topic("t", 2)
    await admin.create_partitions("t", 5, validate_only=True)
    await admin.alter_configs("topic", "t", {"retention.ms": "5"}, validate_only=True)
    assert len((await admin.list_topics(internal=True))[0].partitions) == 2
    assert (await admin.describe_configs("topic", "t"))["retention.ms"].source != "topic"


async def test_the_results_of_several_topics(admin: Admin) -> None:
    await admin.create_topics({"a": 1, "b": 2})
    with pytest.raises(TopicAlreadyExistsError) as failure:
        await admin.create_topics([NewTopic("c", 3), NewTopic("a"), NewTopic("b")])
    assert failure.value.__notes__ == ["2 of 3 failed"]
    assert len((await admin.describe_topics(["c"]))[0].partitions) == 3, "the good one was created"
    results = await admin.create_topics({"a": 1, "d": 1}, return_exceptions=True)
    assert isinstance(results["a"], TopicAlreadyExistsError)
    assert results["d"].num_partitions == 1
    with pytest.raises(UnknownTopicOrPartitionError):
        await admin.delete_topics(["x", "d"])
    deleted = await admin.delete_topics(["a", "d"], return_exceptions=True)
    assert deleted["a"] is None and isinstance(deleted["d"], BrokerError)


async def test_a_text_is_not_a_list_of_names(admin: Admin) -> None:
    await admin.create_topics({"a": 1, "b": 1})
    for call in (admin.delete_topics, admin.describe_topics, admin.delete_groups):
        with pytest.raises(ClientError, match=r"'ab' is not a list of names \(for example \['ab'\]\)"):
            await call("ab")
    assert [topic.name for topic in await admin.list_topics()] == ["a", "b"]


async def test_settings(admin: Admin) -> None:
    await admin.create_topic("t")
    await admin.alter_configs("topic", "t", {"retention.ms": 1000})  # type: ignore[dict-item]
    configs = await admin.describe_configs("topic", "t")
    assert (configs["retention.ms"].value, configs["retention.ms"].source) == ("1000", "topic")
    assert configs["retention.ms"].documentation
    await admin.alter_configs("topic", "t", {"retention.ms": None})
    assert (await admin.describe_configs("topic", "t"))["retention.ms"].value == "604800000"
    with pytest.raises(InvalidConfigError, match=r"retention\.ms"):
        await admin.alter_configs("topic", "t", {"retention.ms": "soon"})
    with pytest.raises(UnknownTopicOrPartitionError):
        await admin.describe_configs("topic", "x")
    assert "num.partitions" in await admin.describe_configs("broker", "1")


async def test_offsets_and_deleting_records(admin: Admin, broker: Broker) -> None:
    await admin.create_topic("t", 2)
    async with Producer(broker.bootstrap_servers) as producer:
        times = [1000 + 10 * i for i in range(20)]
        await producer.send_many("t", [b"x"] * 20, partition=0, timestamps_ms=times)
    latest = await admin.list_offsets([T0, T1], "latest")
    assert (latest[T0].offset, latest[T1].offset) == (20, 0)
    assert (await admin.list_offsets([T0], 1055))[T0].offset == 6
    assert (await admin.list_offsets([T0], 5000))[T0].offset == NO_OFFSET
    highest = (await admin.list_offsets([T0], "max-timestamp"))[T0]
    assert (highest.offset, highest.timestamp_ms) == (19, 1190)
    assert await admin.delete_records({T0: 7}) == {T0: 7}
    assert (await admin.list_offsets([T0], "earliest"))[T0].offset == 7
    assert await admin.delete_records({T0: -1, T1: 0}) == {T0: 20, T1: 0}
    failed = await admin.delete_records({T1: 99}, return_exceptions=True)
    assert isinstance(failed[T1], BrokerError)
    with pytest.raises(UnknownTopicOrPartitionError, match="not 5"):
        await admin.list_offsets([TopicPartition("t", 5)], "latest")


async def test_the_cluster(admin: Admin, broker: Broker) -> None:
    cluster = await admin.describe_cluster()
    assert (cluster.cluster_id, cluster.controller_id) == (broker.cluster_id, 1)
    assert [(node.node_id, node.address) for node in cluster.brokers] == [(1, broker.address)]
    assert cluster.metadata_offset >= 0


async def test_logs(admin: Admin, broker: Broker) -> None:
    await admin.create_topics({"t": 1, "u": 1})
    async with Producer(broker.bootstrap_servers) as producer:
        await producer.send("t", b"x" * 100)
    logs = {log.topic: log for log in await admin.describe_log_dirs()}
    assert logs["t"].size_bytes > 100
    assert (logs["t"].node_id, logs["t"].log_start_offset, logs["t"].log_end_offset) == (1, 0, 1)
    assert (logs["u"].log_end_offset, logs["u"].offline_reason) == (0, None)
    assert [log.topic for log in await admin.describe_log_dirs(["u"])] == ["u"]


async def test_life(broker: Broker) -> None:
    admin = Admin(broker.bootstrap_servers)
    for early in (admin.list_topics(), admin.list_offsets([T0], "latest")):
        with pytest.raises(ClientClosedError, match="the admin is new"):
            await early
    async with admin:
        assert repr(admin) == "<Admin open, 1 brokers>"
        with pytest.raises(ClientClosedError, match="starts once"):
            await admin.start()
    await admin.close()
    with pytest.raises(ClientClosedError, match="closed"):
        await admin.describe_cluster()
    with pytest.raises(ConnectionFailedError):
        await Admin("inproc://nobody", reconnect_backoff_ms=1).start()


# --- a cluster of three ---------------------------------------------------------------------------


async def test_describing_a_cluster() -> None:
    async with Cluster(brokers=3) as cluster, cluster.admin() as admin:
        await admin.create_topic("t", 3, 3, configs={"min.insync.replicas": "2"})
        described = await admin.describe_cluster()
        assert [node.node_id for node in described.brokers] == [1, 2, 3]
        assert not any(node.is_fenced or node.is_shutting_down for node in described.brokers)
        assert all(node.broker_epoch >= 0 and node.registered_ms > 0 for node in described.brokers)
        partition = (await admin.describe_topic("t")).partitions[0]
        assert sorted(partition.isr) == sorted(partition.replicas) == [1, 2, 3]
        assert (partition.elr, partition.leader_epoch) == ((), 0)
        quorum = await admin.describe_quorum()
        assert quorum.leader_id == quorum.node_id == described.controller_id
        assert {member.node_id for member in quorum.members if member.is_voter} == {1, 2, 3}
        other = await admin.describe_quorum(node_id=quorum.leader_id % 3 + 1)
        assert (other.node_id, other.leader_id) == (quorum.leader_id % 3 + 1, quorum.leader_id)
        tree = await admin.describe_metadata("/topics/t")
        assert tree.nodes["/topics/t"]["partition_count"] == 3
        assert tree.nodes["/topics/t/0"]["leader"] == partition.leader_id
        later = await admin.describe_metadata(
            "/topics/t", after_offset=tree.metadata_offset - 1, max_wait_ms=10
        )
        assert later.metadata_offset >= tree.metadata_offset
        with pytest.raises(InvalidRequestError):
            await admin.describe_metadata("/nowhere")


async def test_leaders_go_back_to_the_preferred_replicas() -> None:
    async with Cluster(brokers=3) as cluster, cluster.admin() as admin:
        await admin.create_topic("t", 3, 3)
        preferred = {
            TopicPartition("t", partition.partition): partition.replicas[0]
            for partition in (await admin.describe_topic("t")).partitions
        }
        await cluster.kill(2)
        await cluster.wait_until(lambda: cluster.leader("t", _led_by(preferred, 2)) not in {2, -1})
        await cluster.start(2)

        async def elected() -> bool:
            found = await admin.elect_leaders(preferred, return_exceptions=True)
            return found == preferred

        await eventually(elected)
        assert await admin.elect_leaders([T0]) == {T0: preferred[T0]}, "as it was already"


def _led_by(leaders: dict[TopicPartition, int], node_id: int) -> int:
    return next(tp.partition for tp, leader in leaders.items() if leader == node_id)


async def test_a_controlled_shutdown() -> None:
    async with Cluster(brokers=3) as cluster, cluster.admin() as admin:
        await admin.create_topic("t", 3, 3)
        with pytest.raises(ClusterAuthorizationFailedError):
            await admin.controlled_shutdown(3, cluster_secret="another secret than the nodes'")
        await admin.controlled_shutdown(3, cluster_secret=cluster.secret)
        with pytest.raises(InvalidRequestError):
            await admin.controlled_shutdown(77, cluster_secret=cluster.secret)

        async def is_gone() -> bool:
            leaders = {partition.leader_id for partition in (await admin.describe_topic("t")).partitions}
            return leaders <= {1, 2}

        await eventually(is_gone)
