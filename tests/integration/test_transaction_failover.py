"""Transactions while the broker that coordinates them, or leads what they write, is killed (R31, R32)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kafkalite import Producer
from kafkalite.errors import KafkaliteError
from kafkalite.testing import Cluster


async def _committed(cluster: Cluster, count: int) -> list[int]:
    settings: dict[str, Any] = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
    values: list[int] = []
    async with cluster.consumer("t", **settings) as consumer:
        while len(values) < count:
            records = await consumer.get_many(timeout_ms=10_000)
            assert records, f"{len(values)} of {count}"
            values += [int(record.value or b"") for record in records]
        values += [int(record.value or b"") for record in await consumer.get_many(timeout_ms=50)]
        assert set((await consumer.lag()).values()) == {0}, "nothing is left open"
    return sorted(values)


async def _coordinator(producer: Producer) -> int:
    assert producer._transactions is not None
    return await producer._transactions.coordinator.find()


@pytest.mark.parametrize("when", ["before the commit", "during the commit"])
async def test_the_coordinator_is_killed(when: str) -> None:
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", partitions=3, replication_factor=3)
        async with cluster.producer(transactional_id="app", linger_ms=0) as producer:
            async with producer.transaction():
                await producer.send_many("t", [b"%d" % number for number in range(10)])
            await producer.begin_transaction()
            await producer.send_many("t", [b"%d" % number for number in range(10, 20)])
            victim = await _coordinator(producer)
            if when == "before the commit":
                await cluster.kill(victim)
                await producer.commit_transaction()
            else:
                commit = asyncio.ensure_future(producer.commit_transaction())
                await asyncio.sleep(0)
                await cluster.kill(victim)
                await commit
            async with producer.transaction():
                await producer.send_many("t", [b"%d" % number for number in range(20, 30)])
            assert await _coordinator(producer) != victim
        assert await _committed(cluster, 30) == list(range(30))


async def test_an_abort_and_a_successor_survive_the_coordinators_death() -> None:
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", partitions=3, replication_factor=3)
        async with cluster.producer(transactional_id="app", linger_ms=0) as zombie:
            await zombie.begin_transaction()
            await zombie.send_many("t", [b"666"] * 10)
            await cluster.kill(await _coordinator(zombie))
            async with cluster.producer(transactional_id="app", linger_ms=0) as producer:
                async with producer.transaction():
                    await producer.send_many("t", [b"1", b"2", b"3"])
                with pytest.raises(KafkaliteError, match="fenced"):
                    await zombie.commit_transaction()
        assert await _committed(cluster, 3) == [1, 2, 3]
