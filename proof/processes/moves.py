"""The fault ``move``: a broker joins, gets its share of the partitions, and leaves, while nodes are killed.

The moves are those of ``kl cluster balance --apply`` and ``kl cluster decommission``, as separate processes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Final

from kafkalite.rng import Rng
from kafkalite.testing.process_cluster import ProcessCluster

#: A move must be complete within this time, although nodes are killed meanwhile.
MOVE_LIMIT_S: Final = 120.0
#: No node is killed any more after this time, so that the moves can end.
_KILLING_S: Final = 8.0
#: The bytes per second of each broker, so that moves are in progress when nodes are killed.
_THROTTLE: Final = 200_000


async def move(cluster: ProcessCluster, rng: Rng) -> str:
    """Add a broker, move its share of the partitions to it, and decommission it, while nodes are killed.

    Raises AssertionError if the brokers are not balanced within one partition after each of these.
    """
    before = [node_id for node_id, node in cluster.nodes.items() if node.is_broker]
    added = await cluster.add_broker()
    await cluster.wait(is_whole=True, node_id=added, limit_s=MOVE_LIMIT_S)
    options = ("--yes", "--throttle", str(_THROTTLE))
    killed = await _while_killing(cluster, rng, "balance", "--apply", *options)
    await _kl(cluster, "balance", "--apply", "--yes")  # a run that was cut off has left the rest
    await _check_balanced(cluster, [*before, added])
    killed += await _while_killing(cluster, rng, "decommission", str(added), *options)
    await cluster.remove(added)
    await _kl(cluster, "balance", "--apply", "--yes")
    await _check_balanced(cluster, before)
    return f"node {added} joined and left, {killed} killed meanwhile"


async def _while_killing(cluster: ProcessCluster, rng: Rng, *command: str) -> int:
    """Run ``kl cluster`` with the words of ``command``, and kill and start nodes meanwhile. Return how many
    were killed. A command that lost its brokers is run again."""
    loop = asyncio.get_running_loop()
    running = asyncio.ensure_future(_kl(cluster, *command))
    end_s = loop.time() + _KILLING_S
    killed = 0
    try:
        while not running.done() and loop.time() < end_s:
            await asyncio.sleep(0.2 + rng.random())
            nodes = sorted(cluster.nodes)
            victim = nodes[rng.randrange(len(nodes))]
            if running.done() or not cluster.nodes[victim].is_running:
                continue  # a decommissioned broker stops by itself
            await cluster.kill(victim)
            killed += 1
            await asyncio.sleep(1.5 * rng.random())
            await cluster.start_node(victim)
        await running
    finally:
        running.cancel()
    return killed


async def _kl(cluster: ProcessCluster, *command: str) -> None:
    """Run ``kl cluster`` until it succeeds. Raises TimeoutError after MOVE_LIMIT_S, with its last errors."""
    said = ""
    try:
        async with asyncio.timeout(MOVE_LIMIT_S):
            while True:
                code, said = await _kl_once(cluster, *command)
                if (
                    code == 0 or "there is no broker" in said
                ):  # an earlier run was cut off after its last step
                    return
                await asyncio.sleep(0.5)
    except TimeoutError:
        words = " ".join(command)
        raise TimeoutError(
            f"kl cluster {words} is not done after {MOVE_LIMIT_S:g} s: {said[-500:]}"
        ) from None


async def _kl_once(cluster: ProcessCluster, *command: str) -> tuple[int, str]:
    words = ["-m", "kafkalite", "cluster", *command, "-b", cluster.bootstrap_servers]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, said = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    assert process.returncode is not None
    return process.returncode, said.decode(errors="replace")


async def _check_balanced(cluster: ProcessCluster, brokers: Sequence[int]) -> None:
    """Raise AssertionError unless the brokers have equal numbers of replicas and of preferred leaders, within
    one."""
    view = await cluster.wait(is_whole=True, brokers=len(brokers), limit_s=MOVE_LIMIT_S)
    held = dict.fromkeys(brokers, 0)
    led = dict(held)
    for each in view.partitions:
        led[each.state.replicas[0]] += 1
        for node_id in each.state.replicas:
            held[node_id] += 1
    for counts in (held, led):
        if max(counts.values()) - min(counts.values()) > 1:
            raise AssertionError(f"not balanced: {held} replicas, {led} preferred leaders by broker")
