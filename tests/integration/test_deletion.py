"""DeleteRecords and retention on three brokers: deleted records stay deleted under every later leader."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.broker.server.responses import Pending, Response
from kafkalite.clock import Clock
from kafkalite.errors import RequestTimedOutError
from kafkalite.model import TopicPartition
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.connection import Request
from kafkalite.testing import Cluster
from proof.waiting import eventually, settle

T0 = TopicPartition("t", 0)
SMALL = {"segment.bytes": "1024", "min.insync.replicas": "2"}


def hosted(cluster: Cluster, node_id: int) -> HostedPartition:
    broker = cluster.brokers[node_id]
    return broker.partitions.by_id(broker.image.topics["t"].topic_id, 0)


@pytest.mark.parametrize("storage", ["memory", "disk"])
async def test_deleted_records_do_not_come_back_with_the_next_leader(storage: Any) -> None:
    async with Cluster(brokers=3, storage=storage) as cluster:
        await cluster.create_topic("t", configs=SMALL)
        await cluster.produce("t", [b"%d" % number for number in range(40)])
        async with cluster.admin() as admin:
            assert await admin.delete_records({T0: 25}) == {T0: 25}
        assert [hosted(cluster, node).log_start_offset for node in cluster.brokers] == [25, 25, 25]
        leader = cluster.leader("t")
        await cluster.kill(leader)
        await cluster.wait_until(lambda: cluster.leader("t") not in {leader, -1})
        assert [record.value for record in await cluster.records("t")] == [b"%d" % n for n in range(25, 40)]
        await cluster.start(leader)
        await cluster.wait_until(lambda: hosted(cluster, leader).log_start_offset == 25)


async def test_an_answer_waits_for_the_replicas_in_sync_and_for_no_others() -> None:
    async with Cluster(brokers=3, replica_lag_time_max_ms=60_000) as cluster:
        await cluster.create_topic("t", configs=SMALL)
        await cluster.produce("t", [b"%d" % number for number in range(40)])
        leader = cluster.leader("t")
        slow = next(node for node in cluster.brokers if node != leader)

        swallowed: list[Request] = []

        def swallow(request: Request, proceed: Any, _clock: Clock) -> Pending | Response | None:
            if request.message.node_id != slow:
                return proceed()
            swallowed.append(request)
            return Pending()

        cluster.intercept(ApiKey.REPLICA_FETCH, swallow, node_id=leader)
        await eventually(lambda: swallowed)
        async with cluster.admin(request_timeout_ms=1_000, default_api_timeout_ms=1_000) as admin:
            with pytest.raises(RequestTimedOutError):
                await admin.delete_records({T0: 25})
        assert hosted(cluster, leader).log_start_offset == 25
        async with cluster.admin() as admin:
            waiting = asyncio.create_task(admin.delete_records({T0: 20}))
            await settle()
            assert not waiting.done(), "deleted here already, but not there"
            await cluster.kill(slow)
            assert await waiting == {T0: 25}


async def test_a_deletion_beside_appends_and_another_deletion() -> None:
    async with Cluster(brokers=3, storage="disk") as cluster:
        await cluster.create_topic("t", configs=SMALL)
        await cluster.produce("t", [b"%d" % number for number in range(60)])
        async with cluster.admin() as admin, cluster.producer() as producer:
            deletions = [admin.delete_records({T0: offset}) for offset in (10, 30, 20, 50)]
            sends = [producer.send("t", b"later") for _ in range(20)]
            starts, _ = await asyncio.gather(asyncio.gather(*deletions), asyncio.gather(*sends))
            assert all(start[T0] >= offset for start, offset in zip(starts, (10, 30, 20, 50), strict=True))
        assert len(await cluster.records("t")) == 30
