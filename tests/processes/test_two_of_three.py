"""R23: three combined nodes, two of which fail: nothing is elected, and the third refuses clients."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kafkalite import Admin, Consumer, Producer, TopicPartition
from kafkalite.errors import KafkaliteError
from kafkalite.testing import ProcessCluster
from proof.waiting import eventually

pytestmark = pytest.mark.slow

TOPIC = "shared"
#: Longer than broker.session.timeout.ms, so that nothing changes while the other nodes are away.
SESSION_S = 3.5


async def values(servers: str, partition: int, limit_ms: int = 4_000) -> list[bytes | None]:
    """Return all readable records of a partition. Raises KafkaliteError, TimeoutError."""
    async with Consumer(
        bootstrap_servers=servers, request_timeout_ms=2_000, default_api_timeout_ms=limit_ms
    ) as consumer:
        place = TopicPartition(TOPIC, partition)
        consumer.assign([place])
        await consumer.seek_to_beginning()
        end = (await consumer.end_offsets([place]))[place]
        found: list[bytes | None] = []
        async with asyncio.timeout(30):
            while len(found) < end:
                found += [record.value for record in await consumer.get_many(timeout_ms=500)]
        return found


def producer(servers: str, **settings: object) -> Producer:
    limits = {"delivery_timeout_ms": 3_000, "request_timeout_ms": 1_500, "linger_ms": 0}
    return Producer(servers, **(limits | settings))  # type: ignore[arg-type]


async def test_nothing_is_elected_and_the_third_node_refuses_clients(tmp_path: Path) -> None:
    async with ProcessCluster(tmp_path, brokers=3) as cluster:
        async with Admin(cluster.bootstrap_servers) as admin:
            await admin.create_topic(TOPIC, 3, 3, configs={"min.insync.replicas": "1"})
        view = await cluster.wait(is_whole=True, brokers=3, topics=[TOPIC])
        led = {each.state.leader_id: each.name.partition for each in view.partitions}
        survivor = view.controller_id
        mine = led.pop(survivor)
        (friend, theirs), (foe, _) = led.items()
        async with producer(cluster.bootstrap_servers) as clients:
            for partition in (mine, theirs):
                await clients.send(TOPIC, b"before", partition=partition)

        await cluster.kill(friend, foe)
        alone = cluster.nodes[survivor].address
        await until_no_controller(cluster, survivor)
        await asyncio.sleep(SESSION_S)  # about time: nothing may change

        # The others could be alive and cut off from it, and might have elected other leaders.
        with pytest.raises((KafkaliteError, TimeoutError)):
            await values(alone, mine)
        for acks in (1, "all"):
            async with producer(alone, acks=acks, enable_idempotence=False) as clients:
                with pytest.raises(KafkaliteError):
                    await clients.send(TOPIC, b"refused", partition=mine)

        # Nothing is elected, created or changed.
        async with Admin(alone, default_api_timeout_ms=3_000, request_timeout_ms=1_500) as admin:
            with pytest.raises(KafkaliteError):
                await admin.create_topic("never", 1, 1)
        with pytest.raises((KafkaliteError, TimeoutError)):
            await values(alone, theirs)

        # With one of the dead nodes back there is a majority: everything is led and can be written again.
        await cluster.start_node(friend)
        await cluster.wait(brokers=2, node_id=friend, topics=[TOPIC])
        async with producer(cluster.bootstrap_servers, delivery_timeout_ms=20_000) as clients:
            for partition in (mine, theirs):
                await clients.send(TOPIC, b"after", partition=partition)
        for partition in (mine, theirs):
            found = await values(cluster.bootstrap_servers, partition, 30_000)
            assert found == [b"before", b"after"]


async def until_no_controller(cluster: ProcessCluster, node_id: int) -> None:
    async def has_none() -> bool:
        return (await cluster.view(node_id)).controller_id < 0

    await eventually(has_none)
