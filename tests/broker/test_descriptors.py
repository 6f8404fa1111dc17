"""What connections may use of a process's file descriptors."""

from __future__ import annotations

import resource

import pytest

from kafkalite.broker.server.descriptors import DescriptorLimits, limits_of, raise_limit


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


@pytest.mark.parametrize("hard", [64, 1_024, resource.RLIM_INFINITY])
def test_a_low_limit_is_named_with_its_remedy(
    hard: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (hard, hard))
    raise_limit()
    is_low = hard == 64
    assert ("limit of open files is low limit=64" in caplog.text) is is_low
    assert ("LimitNOFILE" in caplog.text) is is_low
