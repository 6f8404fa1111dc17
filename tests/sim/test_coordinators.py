"""Coordinators in the simulation: brokers die at any moment, and no committed offset ever goes back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kafkalite.client.admin.admin import Admin
from kafkalite.errors import KafkaliteError
from kafkalite.model import TopicPartition
from kafkalite.testing.sim import Simulation
from proof.sim.nodes import make_nodes
from proof.sim.workload import CLIENT_SETTINGS

pytestmark = pytest.mark.slow

KEY = TopicPartition("t", 0)
SETTINGS: dict[str, Any] = {
    "broker_session_timeout_ms": 2_000,
    "replica_lag_time_max_ms": 1_500,
    "offsets_topic_num_partitions": 3,
}


def run(seed: int) -> tuple[str, dict[str, int], dict[str, int]]:
    """Return (trace hash, the last acknowledged offset of each group, the committed offsets at the end)."""
    told: dict[str, int] = {}
    found: dict[str, int] = {}
    with Simulation(seed) as simulation:
        nodes = make_nodes(simulation, 3, SETTINGS)
        rng = simulation.rng("faults")
        bootstrap = [node.address for node in nodes]

        def admin_of(name: str) -> Admin:
            return Admin(bootstrap, rng=simulation.rng(name), **CLIENT_SETTINGS)

        async def open_topic() -> None:
            async with admin_of("admin") as admin:
                await admin.create_topic(KEY.topic, partitions=1, replication_factor=3)

        async def commit(group: str) -> None:
            async with admin_of(group) as admin:
                for offset in range(1, 40):
                    try:
                        await admin.alter_group_offsets(group, {KEY: offset})
                    except KafkaliteError:
                        continue
                    told[group] = offset
                    read = (await admin.committed_offsets(group))[KEY].offset
                    assert read == offset, f"{group} was told {offset}, and reads {read}"
                    await asyncio.sleep(0.1)

        async def look() -> None:
            async with admin_of("reader") as admin:
                for group in told:
                    found[group] = (await admin.committed_offsets(group))[KEY].offset

        async def story() -> None:
            for node in nodes:
                node.start()
            while not all(node.is_running for node in nodes):
                await asyncio.sleep(0.05)
            await simulation.host("admin").run(open_topic())
            groups = [f"group-{number}" for number in range(4)]
            writers = [asyncio.ensure_future(simulation.host(name).run(commit(name))) for name in groups]
            for _ in range(3):
                await asyncio.sleep(rng.uniform(0.3, 1.5))
                node = nodes[rng.randrange(3)]
                node.lose_power() if rng.random() < 0.5 else node.kill()
                await asyncio.sleep(rng.uniform(0.1, 3.0))
                node.start()
                while not all(node.is_running for node in nodes):
                    await asyncio.sleep(0.05)
            await asyncio.gather(*writers)
            await simulation.host("reader").run(look())

        simulation.run(story())
        assert not simulation.violations
        return simulation.trace_hash, told, found


@pytest.mark.parametrize("seed", range(1, 5))
def test_committed_offsets_survive_failovers(seed: int) -> None:
    """R36, R39, R40"""
    _, told, found = run(seed)
    assert len(told) == 4
    assert {group: found[group] >= offset for group, offset in told.items()} == dict.fromkeys(told, True)


def test_a_run_repeats() -> None:
    assert run(9) == run(9)
