"""R47: with min.insync.replicas=1, the only copy of the last records is damaged."""

from __future__ import annotations

import asyncio

from kafkalite.client.admin.cluster_health import describe_recovery, look_at_recovery
from kafkalite.client.cluster.client import ClusterClient
from kafkalite.client.config import admin_config
from kafkalite.client.producer.producer import Producer
from kafkalite.model import TopicPartition
from kafkalite.storage import layout
from proof.damage.kinds import damage_log
from proof.sim.damage import DAMAGES
from proof.sim.nodes import DATA_PATH
from proof.sim.stage import Stage, play
from proof.sim.workload import CLIENT_SETTINGS

KEY = TopicPartition("t", 0)
FIRST = 20
SECOND = 20
WAIT_S = 8.0  # longer than one replica's wait for others


async def write(stage: Stage, count: int) -> None:
    clock, rng = stage.simulation.host("writer").clock, stage.simulation.rng("writer")
    async with Producer(stage.bootstrap, clock=clock, rng=rng, linger_ms=0, **CLIENT_SETTINGS) as producer:
        for _ in range(count):
            await producer.send(KEY.topic, b"x", partition=0)


async def status(stage: Stage) -> list[str]:
    """Return what ``kl cluster status`` prints about the partitions that are recovering."""
    client = ClusterClient(
        admin_config({"bootstrap.servers": ",".join(stage.bootstrap)}), rng=stage.simulation.rng("status")
    )
    await client.start()
    try:
        return [describe_recovery(each) for each in await look_at_recovery(client)]
    finally:
        await client.close()


async def lone_copy(stage: Stage) -> str | None:
    """Two replicas are down while a third one acknowledges alone, and its log is damaged."""
    await stage.open(KEY.topic, configs={"min.insync.replicas": "1"})
    await stage.on("writer", write(stage, FIRST))
    alone = stage.led(KEY.topic)
    others = [node for node in stage.nodes if node.is_broker and node is not alone]
    for node in others:
        node.kill()
    await stage.until(lambda: stage.observer.image.topics[KEY.topic].partitions[0].isr == (alone.node_id,))
    await stage.on("writer", write(stage, SECOND))
    alone.kill()
    name = layout.log_directory_name(stage.observer.image.topics[KEY.topic].topic_id, 0)
    fs = alone.host.filesystem
    assert damage_log(fs, layout.join(DATA_PATH, name), DAMAGES["flip"], stage.simulation.rng("damage"))
    for node in (alone, *others):
        node.start()
    await asyncio.sleep(WAIT_S)
    stage.observer.check()
    (text,) = await stage.on("status", status(stage))
    assert text.startswith("t-0 has no leader and no complete replica")
    assert text.endswith("'kl cluster elect --unclean' accepts the loss")
    assert f"{alone.node_id} damaged" in text
    assert all(f"{node.node_id} reported, ends at {FIRST}" in text for node in others)
    return None


def test_r47_a_lone_damaged_copy_waits_for_an_operator_and_the_status_names_it() -> None:
    assert play(lone_copy, controllers=3) is None
