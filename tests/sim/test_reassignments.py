"""A reassignment survives the death of any node at any step, and loses nothing (R60)."""

from __future__ import annotations

import pytest

from proof.sim.reassignments import killed

pytestmark = pytest.mark.slow

LEAVES, STAYS, IS_ADDED = 0, 1, 2


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02, 0.1])
@pytest.mark.parametrize("victim", [LEAVES, STAYS, IS_ADDED])
@pytest.mark.parametrize("loses_power", [False, True], ids=["kill", "power"])
def test_a_reassignment_survives_the_death_of_a_node(victim: int, after_s: float, loses_power: bool) -> None:
    assert killed(victim, after_s, loses_power=loses_power) is None
