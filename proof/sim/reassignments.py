"""Schedules of reassignments in a cluster of real brokers and clients (R60 to R63).

``DIRECTED`` is {mutant: schedule}, as in ``proof.sim.directed``. ``killed`` kills one node at one moment of a
reassignment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from kafkalite.client.admin.admin import Admin
from kafkalite.client.producer.producer import Producer
from kafkalite.errors import KafkaliteError
from kafkalite.metadata.image import PartitionState
from kafkalite.model import TopicPartition
from proof.sim.nodes import DATA_PATH, SimNode
from proof.sim.stage import Stage, play, values_of
from proof.sim.workload import CLIENT_SETTINGS

KEY: Final = TopicPartition("moved", 0)
PATIENCE_S: Final = 20.0
_RETENTION_MS: Final = 4_000
_COMPACTED: Final = {
    "cleanup.policy": "compact",
    "segment.bytes": "4096",
    "delete.retention.ms": str(_RETENTION_MS),
    "min.cleanable.dirty.ratio": "0.01",
    "max.message.bytes": "4000",
}


def _state(stage: Stage) -> PartitionState:
    state = stage.observer.image.partition(*KEY)
    assert state is not None
    return state


async def _reassign(stage: Stage, *replicas: int) -> None:
    async def call() -> None:
        async with Admin(stage.bootstrap, **CLIENT_SETTINGS) as admin:
            await admin.alter_partition_reassignments({KEY: replicas})

    await stage.on("admin", call())


async def _moved(stage: Stage, *replicas: int) -> None:
    def is_moved() -> bool:
        state = _state(stage)
        return state.replicas == replicas and set(state.isr) == set(replicas) and not state.is_reassigning

    await stage.until(is_moved, PATIENCE_S)


async def returns_with_old_log(stage: Stage) -> str | None:
    """Schedule: a replica is removed and added again while its node is down, and a key is deleted between."""
    stage.observer.compacted_topics = (KEY.topic,)
    await stage.open(KEY.topic, replication_factor=2, configs=_COMPACTED)
    await stage.on("writer", stage.write_segment(KEY, b"deleted", b"old"))
    stay, away = _state(stage).replicas
    (spare,) = {node.node_id for node in stage.nodes} - {stay, away}
    node = stage.observer.node_of(away)
    assert node is not None
    node.kill()
    await _reassign(stage, stay, spare)
    await _moved(stage, stay, spare)
    await stage.on("writer", stage.write_segment(KEY, b"deleted", None))
    for number in range(4):
        await asyncio.sleep(1.1 * _RETENTION_MS / 1000)
        await stage.on("writer", stage.write_segment(KEY, b"other", b"%d" % number))
    await _reassign(stage, stay, away)
    await stage.whole()
    await _moved(stage, stay, away)
    found = values_of(node, KEY, b"deleted")
    if found and found[-1] is not None:
        return f"R62: a key that was deleted is back on node {away}, which may lead"
    return None


async def replays_its_removal(stage: Stage) -> str | None:
    """Schedule: the only replica leaves a broker and returns, and the broker restarts."""
    await stage.open(KEY.topic, replication_factor=1, configs={"min.insync.replicas": "1"})
    (first,) = _state(stage).replicas
    other = next(node.node_id for node in stage.nodes if node.is_broker and node.node_id != first)
    await stage.on("writer", stage.write_segment(KEY, b"kept", b"value"))
    for target in (other, first):
        await _reassign(stage, target)
        await _moved(stage, target)
    node = stage.observer.node_of(first)
    assert node is not None
    node.kill()
    node.start()
    end_s = stage.simulation.loop.time() + PATIENCE_S
    while stage.simulation.loop.time() < end_s:
        await asyncio.sleep(0.1)
        if node.is_running and (found := values_of(node, KEY, b"kept")) is not None:
            return None if found else f"R63: node {first} has deleted its log, the only one of {KEY}"
    return f"R63: node {first} does not return"


async def leaves_after_a_loss(stage: Stage) -> str | None:
    """Schedule: a node fails with the only complete log, another replica is elected uncleanly and moves, and
    the node returns."""
    configs = {"min.insync.replicas": "1", "unclean.leader.election.enable": "true"}
    await stage.open(KEY.topic, replication_factor=2, configs=configs)
    complete, short = _state(stage).replicas
    nodes = {node.node_id: node for node in stage.nodes if node.is_broker}
    (spare,) = nodes.keys() - {complete, short}
    nodes[short].kill()
    await stage.until(lambda: _state(stage).isr == (complete,))
    await stage.on("writer", stage.write_segment(KEY, b"lost", b"value"))
    nodes[complete].kill()
    nodes[short].start()
    await stage.until(lambda: _state(stage).leader == short, PATIENCE_S)
    await _reassign(stage, short, spare)
    await _moved(stage, short, spare)
    nodes[complete].start()
    await stage.whole()
    return _is_deleted(stage, nodes[complete], "the only log with acknowledged records")


def _is_deleted(stage: Stage, node: SimNode, what: str) -> str | None:
    """Return the violation of R71 if the node has no files of the partition."""
    topic_id = stage.observer.image.topics[KEY.topic].topic_id
    names = node.host.filesystem.list_dir(DATA_PATH)
    logs = [name for name in names if name.startswith(f"{topic_id}-0") and not name.endswith(".deleted")]
    return None if logs else f"R71: node {node.node_id} has deleted {what}"


async def leaves_before_a_loss(stage: Stage) -> str | None:
    """Schedule: a replica that is down is removed, then another one is elected uncleanly, and the node
    returns. It replays the removal before the election."""
    configs = {"min.insync.replicas": "1", "unclean.leader.election.enable": "true"}
    await stage.open(KEY.topic, replication_factor=2, configs=configs)
    removed, stays = _state(stage).replicas
    nodes = {node.node_id: node for node in stage.nodes if node.is_broker}
    (spare,) = nodes.keys() - {removed, stays}
    await stage.on("writer", stage.write_segment(KEY, b"kept", b"value"))
    nodes[removed].kill()
    await stage.until(lambda: _state(stage).isr == (stays,))
    await _reassign(stage, stays, spare)
    await _moved(stage, stays, spare)
    nodes[spare].kill()
    await stage.until(lambda: _state(stage).isr == (stays,))
    await stage.on("writer", stage.write_segment(KEY, b"lost", b"value"))
    nodes[stays].kill()
    nodes[spare].start()
    await stage.until(lambda: _state(stage).leader == spare, PATIENCE_S)
    nodes[stays].start()
    nodes[removed].start()
    await stage.whole()
    return _is_deleted(stage, nodes[removed], "a log from before an unclean election")


async def _killed(stage: Stage, victim: int, after_s: float, *, loses_power: bool) -> str | None:
    await stage.open(KEY.topic, replication_factor=2, configs={"min.insync.replicas": "1"})
    first, second = _state(stage).replicas
    (third,) = {node.node_id for node in stage.nodes} - {first, second}
    acknowledged: list[bytes] = []

    async def write() -> None:
        clock, rng = stage.simulation.host("writer").clock, stage.simulation.rng("writer")
        async with Producer(stage.bootstrap, clock=clock, rng=rng, **CLIENT_SETTINGS) as producer:
            for number in range(300):
                value = b"%d" % number
                try:
                    await producer.send(KEY.topic, value, key=b"k", partition=0)
                except KafkaliteError:
                    continue
                acknowledged.append(value)
                await asyncio.sleep(0.005)

    writing = asyncio.ensure_future(stage.on("writer", write()))
    await asyncio.sleep(0.1)
    await _reassign(stage, third, second)
    node = stage.observer.node_of((first, second, third)[victim])
    assert node is not None
    await asyncio.sleep(after_s)
    if loses_power:
        node.lose_power()
    else:
        node.kill()
    await asyncio.sleep(0.5)
    await stage.whole()
    await _moved(stage, third, second)
    await writing
    await stage.until(lambda: stage.observer.unconverged() is None)
    for replica in (third, second):
        holder = stage.observer.node_of(replica)
        found = set(values_of(holder, KEY, b"k") or ()) if holder is not None else set()
        if missing := [value for value in acknowledged if value not in found]:
            return f"R60: node {replica} lacks {len(missing)} of {len(acknowledged)} acknowledged records"
    return None


def killed(victim: int, after_s: float, *, loses_power: bool = False) -> str | None:
    """Kill one node ``after_s`` seconds after a reassignment has begun: the replica that leaves (0, the
    leader), the one that stays (1) or the one that is added (2). Return what was lost, or None."""
    return play(partial(_killed, victim=victim, after_s=after_s, loses_power=loses_power))


DIRECTED: Final[dict[str, Callable[[], str | None]]] = {
    "R62-old-log-kept": partial(play, returns_with_old_log, settings={"log_cleaner_backoff_ms": 1_000}),
    "R71-lost-deleted": partial(play, leaves_after_a_loss, controllers=1),
    "R71-lost-later": partial(play, leaves_before_a_loss, controllers=1),
    "R63-replay-deletes": partial(play, replays_its_removal, controllers=1),
}
