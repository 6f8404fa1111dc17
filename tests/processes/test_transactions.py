"""Exactly once while real brokers, coordinators and jobs are killed and stopped; a checker judges.

A bounded part of ``python -m proof.processes.faults --transactions``: the same faults, one round each,
a new seed each time, printed.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from proof.processes.transactions import FAULTS, run

pytestmark = pytest.mark.slow

PLANS = {
    "brokers": ["kill-leader", "kill-group-coordinator", "kill-transaction-coordinator", "kill-all"],
    "jobs": ["kill-job", "pause-job", "replace-job"],
}


@pytest.mark.parametrize("plan", PLANS)
async def test_everything_is_done_exactly_once(plan: str, tmp_path: Path) -> None:
    """E3, R31-R35: output = f(input), in order; transactions are complete or absent; fenced producers are
    refused.
    """
    seed = time.time_ns() % 1_000_000
    again = "python -m proof.processes.faults --transactions"
    print(f"again: {again} --seed {seed}", *(f"--fault {fault}" for fault in PLANS[plan]))
    report = await run(tmp_path, PLANS[plan], rounds=len(PLANS[plan]), seed=seed, load_s=0.3, tell=print)
    assert not report.anomalies, "\n".join(map(str, report.anomalies))
    assert report.committed > 20 and report.transformed > 50
    assert len(report.rounds) == len(PLANS[plan])
    if plan == "jobs":
        assert report.refused["CommitFailedError"] + report.refused["ProducerFencedError"] > 0


def test_every_fault_is_in_a_plan() -> None:
    assert {fault for plan in PLANS.values() for fault in plan} == set(FAULTS)
