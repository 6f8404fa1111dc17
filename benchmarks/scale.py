"""3,000 partitions with three replicas each: creation, idle load, the loss and return of a node."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import uvloop

from benchmarks.harness import Row, plain_row, scratch_dir, time_row
from benchmarks.nodes import Nodes, running, until, whole
from kafkalite.client.admin.admin import Admin
from kafkalite.errors import TopicAlreadyExistsError

PARTITIONS = 3_000
IDLE_SECONDS = 10.0
TOPIC = "many"


async def _is_led(admin: Admin, without: int) -> bool:
    partitions = (await admin.describe_topic(TOPIC)).partitions
    return all(p.leader_id not in {without, -1} for p in partitions)


async def _idle(nodes: Nodes) -> dict[int, float]:
    """Return {node id: CPU use in percent of a core} while the nodes are idle."""
    before = {node_id: nodes.cpu_seconds(node_id) for node_id in nodes.processes}
    await asyncio.sleep(IDLE_SECONDS)
    return {
        node_id: (nodes.cpu_seconds(node_id) - before[node_id]) / IDLE_SECONDS * 100
        for node_id in nodes.processes
    }


async def _measure(path: str) -> list[Row]:
    async with running(path) as (nodes, admin):
        start = time.monotonic()
        with suppress(TopicAlreadyExistsError):  # the first request was slow, and the client repeated it
            await admin.create_topic(TOPIC, PARTITIONS, 3)
        await until(lambda: whole(admin, TOPIC), "every partition led", limit_s=120)
        created = time.monotonic() - start
        await asyncio.sleep(3)
        idle = await _idle(nodes)
        resident = max(nodes.resident_mib(node_id) for node_id in nodes.processes)
        controller_id = (await admin.describe_cluster()).controller_id
        victim = next(node_id for node_id in nodes.processes if node_id != controller_id)
        start = time.monotonic()
        nodes.kill(victim)
        await until(lambda: _is_led(admin, victim), "every partition led by others", limit_s=60)
        lost = time.monotonic() - start
        start = time.monotonic()
        nodes.start(victim)
        await until(lambda: whole(admin, TOPIC), "everything in sync", limit_s=120, pause_s=0.2)
        back = time.monotonic() - start
    scale = f"{PARTITIONS:,} partitions × 3 replicas, three nodes"
    return [
        plain_row("creation", f"{scale}: one call, until all are led and in sync", created, "s"),
        time_row(
            "idle CPU of a node",
            f"{scale}, the busiest node, % of a core",
            max(idle.values()),
            "%",
            at_most=3,
        ),
        plain_row("memory of a node", f"{scale}, the largest", resident, "MiB"),
        plain_row("fail-over of a broker", f"{scale}: kill -9 until others lead all of its share", lost, "s"),
        plain_row(
            "restart of a broker", f"{scale}: from its start until every replica is in sync", back, "s"
        ),
    ]


def run() -> list[Row]:
    with scratch_dir() as path:
        return uvloop.run(_measure(path))
