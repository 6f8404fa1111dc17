"""durability=page-cache: if all replicas die at the same time, only an operator may elect a leader."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from kafkalite import Admin, Consumer, Producer, TopicPartition
from kafkalite.testing import ProcessCluster
from kafkalite.testing.process_cluster import SECRET

pytestmark = pytest.mark.slow

TOPIC = "t"


async def kl(cluster: ProcessCluster, *arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kafkalite",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=os.environ
        | {"KL_BOOTSTRAP_SERVERS": cluster.bootstrap_servers, "KAFKALITE_CLUSTER_SECRET": SECRET},
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, out.decode()


async def test_after_the_death_of_all_an_unclean_election_is_requested_and_works(tmp_path: Path) -> None:
    async with ProcessCluster(tmp_path, settings={"durability": "page-cache"}) as cluster:
        async with Admin(cluster.bootstrap_servers) as admin:
            await admin.create_topic(TOPIC, 1, 3, configs={"min.insync.replicas": "2"})
        await cluster.wait(is_whole=True, brokers=3, topics=[TOPIC])
        async with Producer(cluster.bootstrap_servers) as producer:
            await producer.send(TOPIC, b"before")
        await cluster.kill(1, 2, 3)
        await cluster.start(wait=False)
        await cluster.wait(brokers=3)
        code, out = await kl(cluster, "cluster", "status", "--leaderless", "-o", "json")
        assert code == 0
        assert [row["name"] for row in json.loads(out)] == ["t-0"]
        assert (await kl(cluster, "cluster", "status", "--check"))[0] == 9

        code, out = await kl(cluster, "cluster", "elect", "--unclean", "-y", "t-0", "-o", "json")
        assert code == 0, out
        assert json.loads(out)[0]["result"] == "elected"
        await cluster.wait(is_whole=True, brokers=3, topics=[TOPIC])
        async with Producer(cluster.bootstrap_servers) as producer:
            await producer.send(TOPIC, b"after")
        async with Consumer(bootstrap_servers=cluster.bootstrap_servers) as consumer:
            consumer.assign([TopicPartition(TOPIC, 0)])
            await consumer.seek_to_beginning()
            found: list[bytes | None] = []
            async with asyncio.timeout(20):
                while len(found) < 2:
                    found += [record.value for record in await consumer.get_many(timeout_ms=500)]
        assert found == [b"before", b"after"]  # the processes died, but not the machine's memory
