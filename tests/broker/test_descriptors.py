"""What connections may use of a process's file descriptors."""

from __future__ import annotations

import pytest

from kafkalite.broker.server.descriptors import DescriptorLimits, limits_of


@pytest.mark.parametrize(
    ("configured", "limit", "expected"),
    [
        (2**31 - 1, 1_024, DescriptorLimits(512, 896, 960)),
        (100, 1_024, DescriptorLimits(100, 896, 960)),
        (2**31 - 1, 65_536, DescriptorLimits(32_768, 65_280, 65_408)),
        (2**31 - 1, 1, DescriptorLimits(1, 1, 1)),
    ],
)
def test_half_of_the_descriptors_and_a_reserve_are_not_for_clients(
    configured: int, limit: int, expected: DescriptorLimits
) -> None:
    assert limits_of(configured, limit) == expected
