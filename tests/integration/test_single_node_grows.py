"""A node that ran alone becomes one of three voters: topics, records and group offsets are still there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kafkalite.broker.broker import Broker
from kafkalite.client.admin.admin import Admin
from kafkalite.client.consumer.consumer import Consumer
from kafkalite.client.producer.producer import Producer
from kafkalite.errors import DataDirectoryError
from kafkalite.storage.disk import RealFileSystem
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.waiting import eventually

CLUSTER_ID = "grows"
VOTERS = ",".join(f"{node_id}@inproc://grows-voter-{node_id}" for node_id in (1, 2, 3))
VALUES = [b"%d" % number for number in range(200)]


@pytest.fixture(params=["memory", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A function that makes a broker, alone or as one of three; its disk outlives it."""
    disks: dict[int, FileSystem] = {
        node_id: RealFileSystem() if request.param == "disk" else MemoryFileSystem() for node_id in (1, 2, 3)
    }

    def make(node_id: int, *, alone: bool = False) -> Broker:
        settings: dict[str, Any] = {
            "node_id": node_id,
            "cluster_id": CLUSTER_ID,
            "listeners": f"inproc://grows-{node_id}",
            "log_dirs": f"{tmp_path}/{node_id}",
        }
        if not alone:
            settings |= {"cluster_secret": "a secret of this test", "controller_quorum_voters": VOTERS}
        return Broker(filesystem=disks[node_id], **settings)

    return make


async def _values(address: str) -> list[bytes | None]:
    """All values of the topic, as a group that commits its position reads them."""
    values: list[bytes | None] = []
    async with Consumer("t", bootstrap_servers=address, auto_offset_reset="earliest") as consumer:
        ends = await consumer.end_offsets(consumer.assignment())
        while len(values) < sum(ends.values()):
            values += [record.value for record in await consumer.get_many(10_000, timeout_ms=5_000)]
    return values


async def test_a_node_that_ran_alone_becomes_one_of_three_and_keeps_everything(make: Any) -> None:
    async with make(1, alone=True) as broker:
        async with Admin(broker.address) as admin:
            await admin.create_topic("t", partitions=3, replication_factor=1, configs={"retention.ms": "-1"})
        async with Producer(broker.address) as producer:
            for value in VALUES:
                producer.send_nowait("t", value)
            await producer.flush()
        topic_id = broker.image.topics["t"].topic_id

    brokers = [make(node_id) for node_id in (1, 2, 3)]
    await asyncio.wait_for(asyncio.gather(*(broker.start() for broker in brokers)), 30)
    try:
        async with asyncio.timeout(30):
            await eventually(lambda: all(broker.image.live_brokers() == {1, 2, 3} for broker in brokers))
        for broker in brokers:
            assert broker.image.topics["t"].topic_id == topic_id
            assert sorted(await _values(broker.address), key=lambda value: int(value or b"")) == VALUES
        async with Admin(brokers[1].address) as admin:
            await admin.create_topic("after", partitions=3, replication_factor=3)
        async with Producer(brokers[2].address, acks="all") as producer:
            await producer.send("t", b"200")
            await producer.send("after", b"0")
    finally:
        await asyncio.gather(*(broker.stop() for broker in brokers))

    with pytest.raises(DataDirectoryError, match=r"of a node of a cluster, with the voters \[1, 2, 3\]"):
        await make(1, alone=True).start()

    # The metadata is on the other two as well: they go on without the node that was alone.
    brokers = [make(node_id) for node_id in (2, 3)]
    await asyncio.wait_for(asyncio.gather(*(broker.start() for broker in brokers)), 30)
    try:
        for broker in brokers:
            assert {"t", "after"} <= broker.image.topics.keys()
    finally:
        await asyncio.gather(*(broker.stop() for broker in brokers))


async def test_a_node_that_waits_for_the_others_can_go_on_alone(make: Any) -> None:
    async with make(1, alone=True) as broker, Admin(broker.address) as admin:
        await admin.create_topic("t")
    voter = make(1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(voter.start(), 0.5)
    async with make(1, alone=True) as broker:
        assert "t" in broker.image.topics
