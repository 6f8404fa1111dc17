"""Every schedule by which Raft as shipped lost data, against our voters; the loss of each rule is found."""

from __future__ import annotations

import pytest

from proof.mutants import ACTIVE, effects, violation_without
from proof.raft import schedules as raft_schedules


@pytest.mark.parametrize("name", raft_schedules.SCHEDULES)
def test_schedule_violates_nothing(name):
    assert raft_schedules.SCHEDULES[name]() is None


@pytest.mark.parametrize("mutant", raft_schedules.DIRECTED)
def test_a_rule_that_is_missing_is_noticed(mutant):
    assert violation_without(mutant, raft_schedules.DIRECTED[mutant]) is not None
    assert not ACTIVE


def test_every_rule_of_raft_has_its_schedule():
    kinds = ("RAFT-", "R54-voter-", "R59-", "R90-newest-message")
    names = {name for name in effects() if name.startswith(kinds)}
    assert raft_schedules.DIRECTED.keys() == names - {"RAFT-read-before-no-op"}  # random schedules find it
