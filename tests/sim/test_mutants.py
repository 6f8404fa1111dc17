"""Every mutant is found."""

from __future__ import annotations

import pytest

from proof.mutants import ACTIVE, effects
from proof.mutants.__main__ import CLUSTER_BUDGET_S, CORE_BUDGET_S, find, main


@pytest.mark.parametrize("mutant", effects())
def test_it_is_found(mutant: str) -> None:
    finding = find(mutant, core_budget_s=CORE_BUDGET_S, cluster_budget_s=CLUSTER_BUDGET_S)
    assert finding.how, f"nothing finds {mutant}: {effects()[mutant]}"
    assert finding.symptom
    assert not ACTIVE


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["R4-truncate-to-hw", "RAFT-vote-twice", "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    assert "R4-truncate-to-hw" in printed
    assert "score: 2 of 2, 100 %" in printed


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(SystemExit):
        main(["R99-nothing"])
