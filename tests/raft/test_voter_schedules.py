"""Fixed histories in which the voters change; the loss of each rule is found (R93-R98)."""

from __future__ import annotations

import pytest

from proof.mutants import ACTIVE, effects, violation_without
from proof.raft import voter_schedules

#: Every step of the short changes, and some of the others. ``python -m proof.raft.voter_schedules`` has all.
STRIDES = {"a lone node adds a voter": 2, "two become one": 2}


@pytest.mark.parametrize("name", voter_schedules.SCHEDULES)
def test_schedule_violates_nothing(name):
    assert voter_schedules.SCHEDULES[name]() is None


@pytest.mark.parametrize("mutant", voter_schedules.DIRECTED)
def test_a_rule_that_is_missing_is_noticed(mutant):
    assert violation_without(mutant, voter_schedules.DIRECTED[mutant]) is not None
    assert not ACTIVE


def test_every_rule_of_membership_has_its_schedule():
    rules = ("R93-", "R94-", "R95-", "R96-", "R97-", "R98-")
    assert voter_schedules.DIRECTED.keys() == {name for name in effects() if name.startswith(rules)}


@pytest.mark.parametrize("name", voter_schedules.CHANGES)
def test_r93_a_change_survives_the_loss_of_power_of_each_node(name):
    assert voter_schedules.interrupt(name, STRIDES.get(name, 12)) is None
