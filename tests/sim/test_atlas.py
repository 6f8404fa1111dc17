"""Damage to files at rest: each kind changes one node's files, and a plan with damage keeps a sound copy."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kafkalite.rng import seeded_rng
from kafkalite.testing.sim.simulation import Simulation
from proof.disk_trees import disk_with_files, tree_of
from proof.sim.atlas import DAMAGES, RARE, Atlas
from proof.sim.nodes import make_nodes
from proof.sim.plan import Plan, draw
from proof.sim.scenario import run_seed

pytestmark = pytest.mark.slow

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


def test_few_plans_have_damage_and_those_keep_a_sound_copy() -> None:
    plans = [draw(seed, seeded_rng(seed)) for seed in range(400)]
    damaged = [plan for plan in plans if {*plan.faults} & {*RARE}]
    assert 60 <= len(damaged) <= 120
    often = dict.fromkeys(RARE, 20.0)
    damaged += [draw(seed, seeded_rng(seed), factors=often) for seed in range(80)]
    assert {name for plan in damaged for name in plan.faults} >= {*RARE}
    for plan in damaged:
        assert plan.min_insync_replicas == 2
        assert "replace_disk" not in plan.faults
        assert not plan.load.changes_min_isr


def test_rare_kinds_do_not_change_the_rest_of_a_plan() -> None:
    for seed in range(40):
        plan = draw(seed, seeded_rng(seed))
        other = draw(seed, seeded_rng(seed), factors={"flip_bit": 20.0})
        assert (plan.broker_settings, plan.jitter_s) == (other.broker_settings, other.jitter_s)


def test_a_node_that_refuses_its_damaged_files_gets_a_new_disk() -> None:
    """A node without node.json refuses to start (R25)."""
    plan = Plan(5, faults={"lose_file": 1}, mean_gap_s=1.0, mean_fault_s=0.5, fault_phase_s=6.0)
    outcomes = [run_seed(seed, plan=replace(plan, seed=seed)) for seed in (1, 2, 3, 4)]
    assert [outcome.violation for outcome in outcomes] == [None] * 4
    assert any("damage-refused" in outcome.probes for outcome in outcomes)
