"""The search for mutants, on some of them; ``make mutants`` searches for each."""

from __future__ import annotations

import pytest

from proof import hostile
from proof.damage import directed as damage_directed
from proof.damage import directories
from proof.mutants import ACTIVE, effects
from proof.mutants.__main__ import find, main
from proof.sim.runner import run_small
from proof.worlds import worlds_of

pytestmark = pytest.mark.slow

#: Bugs of one line that reviewers put in, and 100 seeds did not find.
BUGS_OF_A_REVIEW = (
    "R4-names-unsynced",
    "R10-always-settled",
    "R32-late-report",
    "R39-non-member",
    "RAFT-read-before-no-op",
)


@pytest.mark.parametrize("mutant", [*damage_directed.DIRECTED, *directories.DIRECTED, *hostile.DIRECTED])
def test_its_schedule_finds_it(mutant: str) -> None:
    """The other directed schedules have tests beside those of what they test."""
    finding = find(mutant, core_budget_s=0, cluster_budget_s=0)
    assert finding.how, f"nothing finds {mutant}: {effects()[mutant]}"
    assert finding.symptom
    assert not ACTIVE


@pytest.mark.parametrize("mutant", BUGS_OF_A_REVIEW)
def test_random_histories_of_100_seeds_find_it(mutant: str) -> None:
    """``make sim SEEDS=100`` runs these seeds of the small worlds."""
    worlds = worlds_of(mutant)
    seeds = [range(world.per_seed, 101 * world.per_seed) for world in worlds]
    found = (run_small(world.name, each, mutant).failed for world, each in zip(worlds, seeds, strict=True))
    assert any(found), f"no random history finds {mutant}: {effects()[mutant]}"


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["R4-truncate-to-hw", "R42-any-identity", "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    assert "R4-truncate-to-hw" in printed
    assert "score: 2 of 2, 100 %" in printed


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(SystemExit):
        main(["R99-nothing"])
