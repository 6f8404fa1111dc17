"""Real processes are killed, paused and cut off under load; a checker judges the clients' histories.

A bounded part of ``make faults``: the same plan, a few rounds, a new seed each time, printed.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from proof.processes.faults import FAULTS, run

pytestmark = pytest.mark.slow

PLANS = {
    "killed": ["kill-leader", "kill-controller", "kill-all", "kill-two"],
    "cut": ["isolate-leader", "cut-one-way", "cut-one-link", "bad-links", "pause"],
    "damaged": ["damage-one", "damage-after-kill-all"],
    "exhausted": ["few-descriptors", "full-disk"],
    "moved": ["move"],
}


@pytest.mark.parametrize("plan", PLANS)
async def test_nothing_acknowledged_is_lost(plan: str, tmp_path: Path) -> None:
    seed = time.time_ns() % 1_000_000
    print(f"again: python -m proof.processes.faults --seed {seed}", *(f"--fault {f}" for f in PLANS[plan]))
    report = await run(tmp_path, PLANS[plan], rounds=len(PLANS[plan]), seed=seed, tell=print)
    assert not report.anomalies, "\n".join(map(str, report.anomalies))
    assert report.acknowledged > 100
    assert len(report.rounds) == len(PLANS[plan])


async def test_a_rolling_restart_is_not_noticed(tmp_path: Path) -> None:
    report = await run(tmp_path, ["rolling-restart"], rounds=1, seed=1, tell=print)
    assert not report.anomalies, "\n".join(map(str, report.anomalies))


def test_every_fault_is_in_a_plan() -> None:
    planned = {fault for plan in PLANS.values() for fault in plan} | {"rolling-restart", "kill-one"}
    assert planned == set(FAULTS)
