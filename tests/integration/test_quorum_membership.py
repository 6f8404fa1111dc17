"""Voters are added and removed while clients write (R93-R98)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import pytest

from kafkalite.cli.app import run
from kafkalite.client.admin.admin import Admin
from kafkalite.client.admin.descriptions import QuorumDescription
from kafkalite.errors import (
    BrokerError,
    DuplicateVoterError,
    InvalidRequestError,
    VoterChangePendingError,
    VoterNotCaughtUpError,
    VoterNotFoundError,
)
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing import Cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with five_nodes("inproc") as cluster:
        yield cluster


@asynccontextmanager
async def five_nodes(transport: Literal["inproc", "tcp"]) -> AsyncIterator[Cluster]:
    """Five nodes that are broker and controller. Node 1 runs as the only voter; the others may join it."""
    cluster = Cluster(
        brokers=5,
        transport=transport,
        broker_session_timeout_ms=30_000,  # a busy machine fences no broker
        transaction_state_log_replication_factor=1,
        offsets_topic_replication_factor=1,
    )
    addresses = dict(
        text.split("@") for text in cluster.nodes[1].settings["controller_quorum_voters"].split(",")
    )
    for node_id, node in cluster.nodes.items():
        node.settings["default_replication_factor"] = 1
        if node_id == 1:
            node.settings["controller_quorum_voters"] = f"1@{addresses['1']}"
        else:
            join(node.settings, addresses, node_id, 1)
    try:
        await cluster.start(1)
        yield cluster
    finally:
        await cluster.close()


def join(settings: dict[str, object], addresses: dict[str, str], node_id: int, *others: int) -> None:
    """Let a node join ``others`` instead of having voters of its own."""
    settings.pop("controller_quorum_voters", None)
    settings["controller_quorum_bootstrap_servers"] = ",".join(f"{i}@{addresses[str(i)]}" for i in others)
    settings["controller_listeners"] = addresses[str(node_id)]


def admin_of(cluster: Cluster) -> Admin:
    return Admin([one for node in cluster.nodes.values() if node.is_running for one in node.broker.addresses])


async def add(cluster: Cluster, node_id: int) -> None:
    """Add a voter as soon as it has caught up and the change before is committed."""
    async with admin_of(cluster) as admin:
        while True:
            try:
                await admin.add_raft_voter(node_id)
                return
            except (VoterNotFoundError, VoterNotCaughtUpError, VoterChangePendingError):
                await asyncio.sleep(0.02)


async def remove(cluster: Cluster, node_id: int) -> None:
    async with admin_of(cluster) as admin:
        await admin.remove_raft_voter(node_id)


async def quorum(cluster: Cluster) -> QuorumDescription:
    async with admin_of(cluster) as admin:
        return await admin.describe_quorum()


def voters(seen: QuorumDescription) -> list[int]:
    return [one.node_id for one in seen.members if one.is_voter]


async def test_r93_a_lone_node_becomes_five_and_another_one_stays_without_a_client_error(
    cluster: Cluster,
) -> None:
    sent, is_over = 0, False

    async def write() -> None:
        nonlocal sent
        async with cluster.producer() as producer:
            while not is_over:
                await producer.send("orders", str(sent).encode())
                sent += 1

    async def change_metadata() -> int:
        count = 0
        while not is_over:
            async with admin_of(cluster) as admin:
                await admin.create_topic(f"topic-{count}", partitions=1)
            count += 1
        return count

    async with cluster.admin() as admin:
        await admin.create_topic("orders", partitions=2)
    clients = [asyncio.create_task(write()), asyncio.create_task(change_metadata())]
    try:
        for node_id in (2, 3, 4, 5):
            await cluster.start(node_id)
            await add(cluster, node_id)
        assert voters(await quorum(cluster)) == [1, 2, 3, 4, 5]
        before = sent
        for node_id in (1, 2, 3, 4):  # node 1 leads
            await remove(cluster, node_id)
        await cluster.wait_until(lambda: sent > before, what="records after the changes")
    finally:
        is_over = True
        done = await asyncio.gather(*clients)
    seen = await quorum(cluster)
    assert (seen.leader_id, voters(seen)) == (5, [5])
    assert {one.node_id for one in seen.members if not one.is_voter} <= {1, 2, 3, 4}
    async with admin_of(cluster) as admin:
        assert len(await admin.list_topics()) >= done[1] + 1
    values: list[int] = []
    async with cluster.consumer("orders", auto_offset_reset="earliest") as consumer:
        async for record in consumer:
            values.append(int(record.value))
            if len(values) == sent:
                break
    assert sorted(values) == list(range(sent))


async def test_r93_the_voters_survive_a_restart_of_all_nodes(cluster: Cluster) -> None:
    for node_id in (2, 3):
        await cluster.start(node_id)
        await add(cluster, node_id)
    await cluster.kill(1, 2, 3)
    await cluster.start(1, 2, 3)
    seen = await quorum(cluster)
    assert voters(seen) == [1, 2, 3] and seen.leader_id > 0


async def test_r97_a_dead_voter_is_replaced_and_its_new_disk_is_another_voter(cluster: Cluster) -> None:
    for node_id in (2, 3):
        await cluster.start(node_id)
        await add(cluster, node_id)
    first = next(one.directory_id for one in (await quorum(cluster)).members if one.node_id == 3)
    await cluster.kill(3)
    cluster.nodes[3].filesystem = MemoryFileSystem(crashable=True)
    await cluster.start(3)
    with pytest.raises(DuplicateVoterError, match=f"voter already, with the directory {first}"):
        async with admin_of(cluster) as admin:
            await admin.add_raft_voter(3)
    await remove(cluster, 3)
    await add(cluster, 3)
    seen = await quorum(cluster)
    second = next(one.directory_id for one in seen.members if one.node_id == 3)
    assert voters(seen) == [1, 2, 3] and first != second != ""


async def test_r96_a_node_that_does_not_follow_the_log_is_refused(cluster: Cluster) -> None:
    async with admin_of(cluster) as admin:
        with pytest.raises(VoterNotFoundError, match="node 4 does not follow the metadata log"):
            await admin.add_raft_voter(4)
        with pytest.raises(InvalidRequestError, match="the only voter"):
            await admin.remove_raft_voter(1)
        with pytest.raises(BrokerError, match="not a directory id in hex"):
            await admin.add_raft_voter(4, directory_id="zz")


async def test_r93_a_node_without_a_quorum_says_how_it_gets_one() -> None:
    async with Cluster() as lone, lone.admin() as admin:
        with pytest.raises(InvalidRequestError, match="a cluster of its own"):
            await admin.add_raft_voter(2)


async def test_r93_a_broker_without_a_vote_follows_the_present_voters(cluster: Cluster) -> None:
    """Broker 3 knows only node 1, which leaves the quorum and stops."""
    cluster.nodes[3].settings.pop("controller_listeners")
    cluster.nodes[3].settings["process_roles"] = "broker"
    await cluster.start(2, 3)
    await add(cluster, 2)
    await remove(cluster, 1)
    broker = cluster.nodes[3].broker
    assert broker is not None
    async with admin_of(cluster) as admin:
        await admin.create_topic("before", partitions=1)
    await cluster.wait_until(lambda: "before" in broker.image.topics, what="the metadata on broker 3")
    await cluster.kill(1)
    async with admin_of(cluster) as admin:
        await admin.create_topic("after", partitions=1)
    await cluster.wait_until(lambda: "after" in broker.image.topics, what="the metadata on broker 3")


async def test_r93_kl_changes_the_voters(capsys: pytest.CaptureFixture[str]) -> None:
    async with five_nodes("tcp") as cluster:
        await cluster.start(2)
        servers = cluster.nodes[1].broker.addresses[0]

        async def kl(*arguments: str) -> tuple[int, str]:
            code = await asyncio.to_thread(run, ["metadata", "quorum", *arguments, "-b", servers])
            printed = capsys.readouterr()
            return code, printed.out + (printed.err if code else "")  # the broker's log may be in err

        assert await kl("add-voter", "2") == (0, "node 2: now a voter; the voters are 1, 2\n")
        assert "observer" not in (await kl())[1]
        code, told = await kl("add-voter", "2")
        assert code != 0 and "node 2 is a voter already" in told
        assert await kl("remove-voter", "2", "-y") == (0, "node 2: no voter any more; the voters are 1\n")
        code, told = await kl("remove-voter", "1", "-y")
        assert code != 0 and "node 1 is the only voter" in told
