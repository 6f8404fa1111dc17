"""The search for mutants, on some of them; ``make mutants`` searches for each."""

from __future__ import annotations

import pytest

from proof import hostile
from proof.damage import directed as damage_directed
from proof.mutants import ACTIVE, effects
from proof.mutants.__main__ import find, main


@pytest.mark.parametrize("mutant", [*damage_directed.DIRECTED, *hostile.DIRECTED])
def test_its_schedule_finds_it(mutant: str) -> None:
    """The other directed schedules have tests beside those of what they test."""
    finding = find(mutant, core_budget_s=0, cluster_budget_s=0)
    assert finding.how, f"nothing finds {mutant}: {effects()[mutant]}"
    assert finding.symptom
    assert not ACTIVE


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["R4-truncate-to-hw", "R42-any-identity", "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    assert "R4-truncate-to-hw" in printed
    assert "score: 2 of 2, 100 %" in printed


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(SystemExit):
        main(["R99-nothing"])
