"""A leader goes while transactions are open: the next one knows them, and what was aborted (R27, R33)."""

from __future__ import annotations

import pytest

from kafkalite.testing import Cluster


@pytest.mark.parametrize("how", ["kill", "crash", "stop"])
async def test_a_new_leader_goes_on_with_the_transactions_of_the_old_one(how: str) -> None:
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", 1)
        async with (
            cluster.producer(transactional_id="ends") as ends,
            cluster.producer(transactional_id="fails") as fails,
        ):
            async with ends.transaction():
                await ends.send("t", b"committed before")
            with pytest.raises(RuntimeError):
                async with fails.transaction():
                    await fails.send("t", b"aborted before")
                    raise RuntimeError
            with pytest.raises(RuntimeError):
                async with fails.transaction(), ends.transaction():
                    await ends.send("t", b"in doubt")
                    await fails.send("t", b"aborted across")
                    old = cluster.leader("t")
                    await getattr(cluster, how)(old)
                    await ends.send("t", b"committed across")
                    await ends.commit_transaction()
                    raise RuntimeError
            hosted = cluster.brokers[cluster.leader("t")].partitions.leader("t", 0)
            await cluster.wait_until(lambda: hosted.last_stable_offset == hosted.log.log_end_offset)
            values = await _read(cluster, "read_committed")
            assert values == [b"committed before", b"in doubt", b"committed across"]
            assert len(hosted.log.aborted_between(0, 100)) == 2
            everything = set(await _read(cluster, "read_uncommitted"))
            assert everything >= {*values, b"aborted before", b"aborted across"}


async def _read(cluster: Cluster, level: str) -> list[bytes | None]:
    values: list[bytes | None] = []
    async with cluster.consumer("t", isolation_level=level, auto_offset_reset="earliest") as consumer:
        while records := await consumer.get_many(timeout_ms=300):
            values += [record.value for record in records]
    return values
