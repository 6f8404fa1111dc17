"""Groups while their coordinator dies: the same epochs, the same owners, nothing committed is lost (R36)."""

from __future__ import annotations

import asyncio
from collections import Counter

from kafkalite import TopicPartition
from kafkalite.testing.cluster import Cluster


async def test_members_go_on_when_their_coordinator_dies() -> None:
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", partitions=3, configs={"min.insync.replicas": "2"})
        settings = {"group_id": "g", "auto_offset_reset": "earliest", "retry_backoff_ms": 10}
        one = cluster.consumer("t", **settings)
        two = cluster.consumer("t", **settings)
        async with one, two, cluster.producer() as producer:
            async with asyncio.timeout(30):
                while len(one.assignment()) == 3 or not two.assignment():
                    await asyncio.gather(one.get_many(timeout_ms=20), two.get_many(timeout_ms=20))
            before = (one.assignment(), two.assignment())
            epochs = (one.group_metadata(), two.group_metadata())
            values: Counter[bytes | None] = Counter()
            for number in range(3):
                for partition in range(3):
                    await producer.send("t", b"%d-%d" % (number, partition), partition=partition)
                if number == 1:
                    assert one._group is not None and one._group.link.node_id is not None
                    await cluster.kill(one._group.link.node_id)
                async with asyncio.timeout(20):
                    while len(values) < (number + 1) * 3:
                        for consumer in (one, two):
                            values.update(r.value for r in await consumer.get_many(timeout_ms=50))
                await asyncio.gather(one.commit(), two.commit())
            assert set(values.values()) == {1}
            assert (one.assignment(), two.assignment()) == before
            assert (one.group_metadata(), two.group_metadata()) == epochs
            committed = {**await one.committed(), **await two.committed()}
            assert {tp: at.offset for tp, at in committed.items() if at} == {
                TopicPartition("t", partition): 3 for partition in range(3)
            }
