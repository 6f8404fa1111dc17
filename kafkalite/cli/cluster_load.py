"""Reads the brokers and partitions of a cluster, with their sizes and rates, to plan moves with."""

# Tests: tests/cli/test_cluster_balance.py

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kafkalite.client.admin.cluster_health import LIVE, ClusterView, look
from kafkalite.metadata.balance import Host, PlacedPartition
from kafkalite.protocol.messages.admin import DescribeLogDirsRequest, LogDirPartition

if TYPE_CHECKING:
    from kafkalite.client.cluster.client import ClusterClient

Logs = Mapping[tuple[int, str, int], LogDirPartition]
"""(node id, topic, partition) → the log of that replica"""


async def read_cluster(client: ClusterClient, sample_ms: int = 0) -> tuple[list[Host], list[PlacedPartition]]:
    """Return the brokers and partitions to plan with, internal topics included.

    Sizes are those of the leaders' logs. Rates are measured for ``sample_ms``, or 0 if that is 0. Raises the
    errors of ``ClusterClient.call``, also if a live broker does not respond.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    view = await look(client)
    before, began = await _logs(client, view), loop.time()
    if sample_ms:
        await asyncio.sleep(sample_ms / 1000)
        after = await _logs(client, view)
        return hosts_of(view), placed(view, before, after, loop.time() - began)
    return hosts_of(view), placed(view, before, before, 0.0)


async def _logs(client: ClusterClient, view: ClusterView) -> dict[tuple[int, str, int], LogDirPartition]:
    import asyncio

    async def ask(node_id: int) -> Iterable[LogDirPartition]:
        response = (await client.call(DescribeLogDirsRequest(None), node_id=node_id)).message
        found: list[LogDirPartition] = response.partitions
        return found

    nodes = [broker.node_id for broker in view.live]
    responses = await asyncio.gather(*map(ask, nodes))
    return {
        (node_id, log.topic, log.partition): log
        for node_id, logs in zip(nodes, responses, strict=True)
        for log in logs
    }


def hosts_of(view: ClusterView) -> list[Host]:
    """Return the brokers of ``view`` for a plan. Pure."""
    return [Host(each.node_id, each.rack, is_live=view.state_of(each) == LIVE) for each in view.brokers]


def placed(view: ClusterView, before: Logs, after: Logs, seconds: float) -> list[PlacedPartition]:
    """Return the partitions of ``view`` for a plan. Pure.

    The logs were read twice, ``seconds`` apart; if that is 0, all rates are 0. A leader whose log is missing
    counts with the largest log of its followers.
    """
    found: list[PlacedPartition] = []
    live = {broker.node_id for broker in view.live}
    for (topic, number), state in ((each.name, each.state) for each in view.partitions):
        logs = [after[key] for node_id in state.replicas if (key := (node_id, topic, number)) in after]
        led = (state.leader_id, topic, number)
        size = after[led].size_bytes if led in after else max((log.size_bytes for log in logs), default=0)
        rate = 0.0
        if seconds and led in before and led in after:
            rate = bytes_written(before[led], after[led]) / seconds
        in_sync = tuple(node_id for node_id in state.isr if node_id in live)
        replicas = tuple(state.replicas)
        found.append(PlacedPartition(topic, number, replicas, state.leader_id, size, rate, in_sync))
    return found


def bytes_written(before: LogDirPartition, after: LogDirPartition) -> float:
    """Return how many bytes were appended to a log between two descriptions of it.

    That is the growth of the log. If retention or compaction removed records meanwhile, it is the number of
    new offsets times the mean bytes per offset.
    """
    grown = after.size_bytes - before.size_bytes
    is_cut = after.log_start_offset > before.log_start_offset or after.segment_count < before.segment_count
    if grown >= 0 and not is_cut:
        return grown
    offsets = after.log_end_offset - after.log_start_offset
    new = max(0, after.log_end_offset - before.log_end_offset)
    return after.size_bytes * min(1.0, new / offsets) if offsets else 0.0
