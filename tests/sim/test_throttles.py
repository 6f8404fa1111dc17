"""Throttled moves: bytes counted in virtual time (R70, KIP-73)."""

from __future__ import annotations

import pytest

from proof.sim.throttles import (
    ends_with_its_option,
    moves_at_the_rate,
    run,
    writes_to_a_moving_partition,
    writes_while_throttled,
)

BOTH = ("leader", "follower")


@pytest.mark.parametrize("partitions", [1, 7])
@pytest.mark.parametrize("sides", [("leader",), ("follower",), BOTH], ids="+".join)
def test_a_move_takes_the_time_of_its_rate(sides: tuple[str, ...], partitions: int) -> None:
    assert run(moves_at_the_rate, sides=sides, partitions=partitions) is None


@pytest.mark.parametrize("sides", [("leader",), ("follower",), BOTH], ids="+".join)
def test_replicas_in_sync_are_never_throttled(sides: tuple[str, ...]) -> None:
    assert run(writes_while_throttled, sides=sides) is None


def test_a_move_goes_on_when_its_throttle_is_removed() -> None:
    assert run(ends_with_its_option) is None


def test_no_client_waits_for_a_throttled_replica_that_joins() -> None:
    assert run(writes_to_a_moving_partition) is None
