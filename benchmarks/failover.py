"""kill -9: the time until a record is acknowledged again, and until the cluster can be administered again."""

from __future__ import annotations

import asyncio
import itertools
import time

import uvloop

from benchmarks.harness import Row, percentile, plain_row, scratch_dir, time_row
from benchmarks.nodes import Nodes, running, until, whole
from kafkalite.client.admin.admin import Admin
from kafkalite.client.producer.producer import Producer
from kafkalite.errors import KafkaliteError

ROUNDS = 10
PAUSED_ROUNDS = 3
TOPIC = "failover"


async def _leader_round(
    nodes: Nodes, admin: Admin, producer: Producer, *, is_paused: bool = False, is_controller: bool = False
) -> float:
    """Return the seconds from the kill or pause of a leader to its partition's next acknowledgement.

    ``is_controller`` selects a leader whose node is the active controller, or else another leader.
    """
    controller_id = await _controller(admin)
    partition = next(
        p
        for p in (await admin.describe_topic(TOPIC)).partitions
        if p.leader_id >= 0 and (p.leader_id == controller_id) == is_controller
    )
    await producer.send(TOPIC, b"before", partition=partition.partition)
    epoch = -1 if is_paused else await _epoch(admin, partition.leader_id)
    start = time.monotonic()
    (nodes.pause if is_paused else nodes.kill)(partition.leader_id)
    await producer.send(TOPIC, b"after", partition=partition.partition)
    seconds = time.monotonic() - start
    (nodes.resume if is_paused else nodes.start)(partition.leader_id)
    await _heal(admin, partition.leader_id, epoch)
    return seconds


async def _controller(admin: Admin) -> int:
    """Return the node id of the active controller. Waits until a broker knows it."""
    while True:
        controller_id = (await admin.describe_cluster()).controller_id
        if controller_id >= 0:
            return controller_id
        await asyncio.sleep(0.05)


async def _controller_round(nodes: Nodes, admin: Admin, name: str) -> float:
    """Return the seconds from the kill of the active controller to the creation of the next topic."""
    controller_id = await _controller(admin)
    epoch = await _epoch(admin, controller_id)
    start = time.monotonic()
    nodes.kill(controller_id)
    while True:
        try:
            await admin.create_topic(name, 1, 1)
            break
        except KafkaliteError:
            await asyncio.sleep(0.02)
    seconds = time.monotonic() - start
    nodes.start(controller_id)
    await _heal(admin, controller_id, epoch)
    return seconds


async def _epoch(admin: Admin, node_id: int) -> int:
    """Return the epoch of a broker, or -1 while it is fenced."""
    brokers = (await admin.describe_cluster()).brokers
    return next((each.broker_epoch for each in brokers if each.node_id == node_id and not each.is_fenced), -1)


async def _heal(admin: Admin, node_id: int, epoch: int) -> None:
    """Wait until the node has a broker epoch above ``epoch``, and every replica is in sync."""

    async def is_back() -> bool:
        return await _epoch(admin, node_id) > epoch

    await until(is_back, f"node {node_id} back", limit_s=30, pause_s=0.1)
    await until(lambda: whole(admin, TOPIC), f"node {node_id} back in sync", limit_s=30, pause_s=0.1)
    preferred = {p.leader_id for p in (await admin.describe_topic(TOPIC)).partitions}
    if len(preferred) < 3:
        await admin.elect_leaders(return_exceptions=True)
        await asyncio.sleep(0.2)


async def _measure(path: str) -> tuple[list[float], list[float], list[float], list[float]]:
    async with running(path) as (nodes, admin):
        await admin.create_topic(TOPIC, 6, 3)
        async with Producer(nodes.bootstrap_servers, linger_ms=0) as producer:
            leaders = [await _leader_round(nodes, admin, producer) for _ in range(ROUNDS)]
            both = [await _leader_round(nodes, admin, producer, is_controller=True) for _ in range(ROUNDS)]
            paused = [
                await _leader_round(nodes, admin, producer, is_paused=True) for _ in range(PAUSED_ROUNDS)
            ]
        names = (f"new-{number}" for number in itertools.count())
        controllers = [await _controller_round(nodes, admin, next(names)) for _ in range(ROUNDS)]
    return leaders, both, controllers, paused


def run() -> list[Row]:
    with scratch_dir() as path:
        leaders, both, controllers, paused = uvloop.run(_measure(path))
    return [
        time_row(
            "leader fail-over, median",
            f"kill -9 of a leader to the next acknowledgement of acks=all, {ROUNDS} rounds",
            percentile(leaders, 0.5),
            "s",
            at_most=0.8,
        ),
        plain_row("leader fail-over, worst", "of the same rounds", max(leaders), "s"),
        time_row(
            "leader and controller fail-over, median",
            f"the same for a leader whose node is the active controller, {ROUNDS} rounds",
            percentile(both, 0.5),
            "s",
            at_most=1.5,
        ),
        plain_row("leader and controller fail-over, worst", "of the same rounds", max(both), "s"),
        time_row(
            "controller fail-over, median",
            f"kill -9 of the active controller (which is a broker too) to the next topic, {ROUNDS} rounds",
            percentile(controllers, 0.5),
            "s",
            at_most=3,
        ),
        plain_row("controller fail-over, worst", "of the same rounds", max(controllers), "s"),
        plain_row(
            "fail-over of a stopped leader, median",
            f"SIGSTOP, so that it does not hang up: found by the session's end, {PAUSED_ROUNDS} rounds",
            percentile(paused, 0.5),
            "s",
        ),
    ]
