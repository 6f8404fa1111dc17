"""Damage to files at rest: each kind changes one node's files, and a plan with damage keeps a sound copy."""

from __future__ import annotations

import random

import pytest

from kafkalite.rng import seeded_rng
from kafkalite.testing.sim.simulation import Simulation
from proof.disk_trees import disk_with_files, tree_of
from proof.sim.atlas import DAMAGES, ON_REQUEST, Atlas
from proof.sim.nodes import make_nodes
from proof.sim.plan import draw

FILES = {
    "/data/a/0.log": bytes(range(1, 200)) * 20,
    "/data/b/0.log": b"another segment" * 90,
    "/data/node.json": b"{}",
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_changes_files(kind: str) -> None:
    changed = 0
    for seed in range(8):
        disk = disk_with_files(FILES)
        assert DAMAGES[kind](disk, random.Random(seed))
        changed += tree_of(disk) != FILES
    assert changed > 1


def test_only_one_node_of_a_run_is_damaged() -> None:
    with Simulation(1) as simulation:
        first, second, _ = make_nodes(simulation, 3, {})
        atlas = Atlas()
        assert atlas.victim(second) is second
        assert atlas.victim(first) is second


def test_a_plan_has_damage_only_on_request_and_then_keeps_a_sound_copy() -> None:
    for seed in range(80):
        assert not {*draw(seed, seeded_rng(seed)).faults} & {*ON_REQUEST}
        plan = draw(seed, seeded_rng(seed), factors=dict.fromkeys(ON_REQUEST, 2.0))
        assert {*plan.faults} & {*ON_REQUEST}
        assert plan.min_insync_replicas == 2
        assert "replace_disk" not in plan.faults
        assert not plan.load.changes_min_isr
