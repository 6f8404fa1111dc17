"""The directed schedules of transactions and coordinators (R31-R34, R36): each needs its rule alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kafkalite.testing.sim.simulation import Violation
from proof.groups import directed as group_directed
from proof.mutants import effects
from proof.mutants.__main__ import _directed
from proof.sim import directed as cluster_directed
from proof.sim.stage import Stage, play
from proof.transactions import directed as txn_directed
from proof.transactions import log as txn_log

pytestmark = pytest.mark.slow

COORDINATION = {*(f"R{number}" for number in range(31, 42))}
SCHEDULES = {**txn_directed.DIRECTED, **cluster_directed.DIRECTED}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_breaks_only_without_its_rule(name: str, mutant: Callable[[str], None]) -> None:
    assert SCHEDULES[name]() is None
    mutant(name)
    found = SCHEDULES[name]()
    assert found is not None
    assert found.startswith(name.partition("-")[0] + ":"), "it is the rule's own promise that is broken"


def test_every_rule_of_groups_transactions_and_compaction_has_a_schedule() -> None:
    names = {*SCHEDULES, *group_directed.DIRECTED, *txn_log.DIRECTED}
    assert names <= {*effects()}
    assert all(_directed(name) is not None for name in names)
    wanted = {rule for name in effects() if (rule := name.partition("-")[0]) in COORDINATION}
    assert wanted <= {name.partition("-")[0] for name in names} | {"R40"}  # random groups find those


def test_an_accident_is_not_taken_for_a_finding() -> None:
    """A failure other than the schedule's own promise is raised."""

    async def story(stage: Stage) -> str | None:
        await stage.until(lambda: False, seconds=0.1)
        return "never"

    with pytest.raises(Violation, match="stage"):
        play(story)
