"""Each rule of groups has a schedule that needs it (R35, R38, R39, R56)."""

from __future__ import annotations

import pytest

from proof.groups.directed import DIRECTED
from proof.mutants import effects


@pytest.mark.parametrize("name", DIRECTED)
def test_a_schedule_breaks_only_without_its_rule(name, mutant):
    assert DIRECTED[name]() is None
    mutant(name)
    assert DIRECTED[name]() is not None


def test_every_rule_of_groups_has_a_schedule():
    names = {name for name in effects() if name.startswith(("R35", "R38", "R39", "R56"))}
    assert DIRECTED.keys() == names - {"R39-non-member"}  # which random histories find (proof.worlds)
